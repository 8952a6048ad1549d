"""The held-out evaluation: which prompts, which samples, and what is averaged over what."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small import SIGNAL, Parts, go, moments, nudge

from lab import Example, Task, collect, heldout, observe
from lab.policy import Policy
from lab.recipe import Use
from lab.records import ANSWERS
from lab.task import Bandit, Chain, Reverse

BANDIT = Use(name="bandit", settings={"arms": 4})


def found(parts: Parts, prompts: int = 16, number: int = 0) -> heldout.HeldOut:
    return heldout.evaluate(parts.bench, parts.task, parts.roles, parts.streams, prompts, number)


@dataclass(frozen=True, kw_only=True)
class Told(Task):
    """The score stands in the prompt, whatever the answer: .3 for `30>`, none for 0 to 9."""

    name: ClassVar[str] = "told"

    def example(self, rng: random.Random) -> Example:
        return Example(prompt=f"{rng.randrange(100)}>", answer="1")

    @property
    def characters(self) -> str:
        return "0123456789>"

    @property
    def budget(self) -> int:
        return 3

    def score(self, example: Example, response: str) -> float | None:
        number = int(example.prompt[:-1])
        return None if number < 10 else number / 100


@pytest.mark.parametrize("chunk", [512, 7, 4])
def test_the_score_is_the_mean_over_the_prompts_asked(monkeypatch: Any, chunk: int) -> None:
    """D3: 18 prompts, each once, whatever fits into a forward pass.

    Wrong: a mean of the chunks' means (7, 7 and 4 prompts), one prompt answered several times,
    unscored rows left out of the denominator, so that a verifier that fails makes runs better.
    """
    monkeypatch.setattr(heldout, "CHUNK", chunk)
    parts = Parts.of(task=Told())
    metrics = found(parts, prompts=18).metrics
    examples = parts.task.draw("held_out", parts.streams.python("held_out"), 18)
    scores = [parts.task.score(e, "") for e in examples]
    assert any(s is None for s in scores)
    assert metrics["score"] == pytest.approx(sum(s or 0.0 for s in scores) / 18, rel=1e-6)
    assert metrics["unscored"] == pytest.approx(sum(s is None for s in scores) / 18)


def test_what_is_counted_of_a_row(monkeypatch: Any) -> None:
    """Length with its end token, the share of cut rows, -log p of the whole answer."""
    parts = Parts.of()
    rows: list[collect.Scored] = []
    honest = heldout.scored_by

    def kept(*given: Any) -> collect.Scored:
        rows.append(honest(*given))
        return rows[-1]

    monkeypatch.setattr(heldout, "scored_by", kept)
    metrics = found(parts, prompts=64).metrics
    (scored,) = rows
    samples = scored.samples
    assert len(samples) == 64
    assert metrics["length"] == pytest.approx(float(samples.mask.sum(1).mean()))
    assert metrics["truncated"] == pytest.approx(float((samples.stop_reason == 2).float().mean()))
    assert metrics["sampled_nll"] == pytest.approx(float(-samples.logp.sum(1).mean()), rel=1e-5)
    assert 0 < metrics["truncated"] < 1


def test_prompts_are_one_set_and_samples_are_fresh(tmp_path: Path, monkeypatch: Any) -> None:
    """R1, L1: the same held-out prompts at each evaluation and for each recipe of a seed, never a
    training prompt; each evaluation draws answers of its own.

    Wrong: prompts from the evaluation's number (a score then moves with the prompts), prompts of
    the training split, one generator for sampling and evaluation.
    """
    asked: list[tuple[str, list[str]]] = []
    honest = collect.scored_by
    for module, kind in ((heldout, "held_out"), (collect, "train")):

        def kept(task: Any, policy: Any, examples: Any, *rest: Any, kind: str = kind) -> Any:
            asked.append((kind, [e.prompt for e in examples]))
            return honest(task, policy, examples, *rest)

        monkeypatch.setattr(module, "scored_by", kept)
    task = Use(name="reverse", settings={"digits": 3})
    for recipe in ("dr_grpo", "ppo"):
        go(tmp_path / recipe, recipe, task=task, rollouts=2, eval_every=1)
    tests = [tuple(p) for kind, p in asked if kind == "held_out"]
    assert len(tests) == 2 * 3  # at the start and after each rollout
    assert len(set(tests)) == 1
    assert len(tests[0]) == 16
    trained = {p for kind, prompts in asked if kind == "train" for p in prompts}
    assert trained
    assert not trained & set(tests[0])
    split = Reverse(digits=3).split_of
    assert {split(p) for p in tests[0]} == {"held_out"}
    assert {split(p) for p in trained} == {"train"}


def test_another_seed_has_other_prompts() -> None:
    one, two = (
        [e.prompt for e in p.task.draw("held_out", p.streams.python("held_out"), 16)]
        for p in (Parts.of(task=Use(name="reverse"), seed=s) for s in (1, 2))
    )
    assert one != two


def test_an_evaluation_is_its_number() -> None:
    """The same answers however often it is asked, others at the next; no generator moves."""
    parts = Parts.of()
    state = torch.get_rng_state()
    first = found(parts)
    assert found(parts) == first
    assert found(parts, number=2).answers != first.answers
    assert torch.equal(torch.get_rng_state(), state)


def test_answers_are_sampled_at_temperature_one(tmp_path: Path) -> None:
    """Every recipe is measured alike. Wrong: at the recipe's own temperature or support."""
    plain = found(Parts.of())
    cold = found(Parts.of(temperature=0.1, top_k=1))
    assert cold.metrics == plain.metrics
    assert cold.answers == plain.answers


def test_the_first_answers_can_be_read(tmp_path: Path) -> None:
    go(tmp_path, rollouts=1, eval_every=1)
    lines = (tmp_path / ANSWERS).read_text().splitlines()
    assert len(lines) == 2 * heldout.SHOWN
    assert '"rollout": 1' in lines[-1]
    for row in found(Parts.of()).answers:
        assert row.keys() == {"prompt", "response", "score", "stop_reason"}
        assert row["stop_reason"] in ("eos", "length")
    unscored = found(Parts.of(task=Told()), prompts=64).answers
    assert {type(row["score"]) for row in unscored} == {float, type(None)}


def test_observers_of_an_evaluation_see_its_rows() -> None:
    @observe(at="eval")
    def seen(logp: Any, rewards: Any, group: Any, mask: Any) -> dict[str, float]:
        """Rows, groups, the mean log p."""
        return {"rows": float(len(rewards)), "groups": float(len(group.unique()))}

    parts = Parts.of(plugins=[seen], observers=("seen",))
    metrics = found(parts).metrics
    assert (metrics["rows"], metrics["groups"]) == (16, 16)


# -- exact scores


def _arms(policy: Policy, task: Bandit) -> list[float]:
    """p of each arm, from the logits behind the prompt."""
    ids = torch.tensor([policy.tokenizer.encode(">")])
    with torch.no_grad():
        p = policy.model(input_ids=ids).logits[0, -1].double().softmax(0)
    return [float(p[policy.tokenizer.encode(a)[0]]) for a in task.stops]


def test_the_exact_score_of_a_bandit() -> None:
    """J = p_a 1 + p_b 0 + p_c 1/3 + p_d 2/3, end and padding tokens earn nothing.

    Wrong: p renormalised over the arms, an end token behind the arm, the mean of the rewards.
    """
    parts = Parts.of(task=BANDIT)
    nudge(parts.roles.policy, by=0.3)
    task = parts.task
    assert isinstance(task, Bandit)
    p = _arms(parts.roles.policy, task)
    assert sum(p) < 0.99
    exact = found(parts).metrics["exact_score"]
    assert exact == pytest.approx(p[0] + p[2] / 3 + p[3] * 2 / 3, rel=1e-5)


def test_the_exact_score_is_what_samples_estimate() -> None:
    """By a second route: 4,000 fresh answers, within z = 4 of their mean."""
    parts = Parts.of(task=BANDIT)
    nudge(parts.roles.policy, by=0.3)
    task, n = parts.task, 4000
    assert isinstance(task, Bandit)
    metrics = found(parts, prompts=n).metrics
    p, pays = _arms(parts.roles.policy, task), list(task.rewards.values())
    j = metrics["exact_score"]
    variance = sum(q * r * r for q, r in zip(p, pays, strict=True)) - j * j
    assert abs(metrics["score"] - j) < 4 * math.sqrt(variance / n)
    assert math.sqrt(variance / n) < 0.01  # so that four of them say something


def test_only_what_can_be_listed_is_exact() -> None:
    for task in (SIGNAL, Use(name="reverse")):
        assert "exact_score" not in found(Parts.of(task=task)).metrics
    assert Chain(length=1, symbols=3).responses() is None
    no_gradient = Parts.of(task=BANDIT)
    assert isinstance(heldout.exact_score(no_gradient.roles.policy, no_gradient.task), float)


def test_a_run_is_evaluated_at_its_start_now_and_then_and_at_its_end(tmp_path: Path) -> None:
    """Of 5 rollouts with eval_every 2: at 0, 2, 4 and 5; the last stands in the result."""
    result = go(tmp_path, rollouts=5, eval_every=2)
    lines = moments(tmp_path, "eval")
    assert [m.counters["rollout"] for m in lines] == [0, 2, 4, 5]
    assert result.final == lines[-1].metrics
    scores = [m.metrics["sampled_nll"] for m in lines]
    assert all(a != b for a, b in itertools.pairwise(scores))
