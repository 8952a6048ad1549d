"""A rollout: what is sampled, what it scored, which rows leave, and what is counted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from small import SIGNAL, SILENT, Parts, go, nudge, series
from torch import Tensor

from lab import Example, Task, keep
from lab.collect import Scored, scored_by
from lab.errors import LabError
from lab.hookspecs import StopReason
from lab.recipe import Use
from lab.samples import Samples
from lab.task.small import Chain

DENSE = Chain(dense=True, symbols=4, length=3)


def test_rows_stand_by_group_with_what_the_verifier_said() -> None:
    """Wrong: prompts tiled (p q p q) beside responses repeated (p p q q): scores of others."""
    parts = Parts.of(prompts=3, group_size=4)
    rollout, step = parts.rollout()
    rows = rollout.scored
    assert rows.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    prompts = [e.prompt for e in rows.examples]
    assert prompts == [prompts[4 * (i // 4)] for i in range(12)]
    assert [parts.task.score(e, t) for e, t in zip(rows.examples, rows.texts, strict=True)] == (
        pytest.approx(step["rewards"].tolist())
    )
    decode, samples = parts.roles.policy.tokenizer.decode, rows.samples
    both = zip(samples.prompt_ids, samples.prompt_mask, strict=True)
    read = [decode(ids[on > 0].tolist()) for ids, on in both]
    assert read == prompts
    assert len(set(rows.texts)) > 4  # a group's answers are drawn one by one
    assert rollout.generated_tokens == int(samples.mask.sum())
    assert (rollout.batches, rollout.unscored) == (1, 0)


def test_three_log_probs_of_one_float32_sampler_are_one() -> None:
    """Without a precision gap old and rollout are the same bits, and no second pass is made."""
    _, step = Parts.of(observers=("weights",)).rollout()
    assert torch.equal(step["old_logp"], step["rollout_logp"])


def _given(parts: Parts, *responses: list[int]) -> Samples:
    """Rows of these ids, padded; an end token (0) closes a row, 1 is padding."""
    pad, end = 1, 0
    width = DENSE.budget
    ids = torch.tensor([[*r, *[pad] * (width - len(r))] for r in responses])
    mask = torch.tensor([[1.0] * len(r) + [0.0] * (width - len(r)) for r in responses])
    cut = [StopReason.EOS if r[-1] == end else StopReason.LENGTH for r in responses]
    prompt = torch.tensor([parts.roles.policy.tokenizer.encode("1>a")] * len(responses))
    return Samples(
        prompt, torch.ones_like(prompt), ids, mask, torch.zeros_like(mask), torch.tensor(cut)
    )


def test_dense_rewards_land_on_the_tokens_that_earned_them() -> None:
    """`1>a` asks for b c d, a third each; the ids are e = end, p = padding, then characters.

    A padding token that the policy chose is a letter like any other, and a wrong one: in
    (b, p, c, e) nothing is right after it. Wrong: read as "bc", which earns two thirds.
    """
    parts = Parts.of(task=DENSE)
    encode = parts.roles.policy.tokenizer.encode
    b, c, d = (encode(x)[0] for x in "bcd")
    samples = _given(parts, [b, c, d, 0], [b, 1, c, 0], [d, d, 0], [0], [b, c, d, d])
    rows = [Example("1>a", "bcd")] * 5
    scored = scored_by(DENSE, parts.roles.policy, rows, samples, torch.zeros(5, dtype=torch.long))
    assert scored.texts == ["bcd", "b□c", "dd", "", "bcdd"]
    third = 1 / 3
    want = [
        [third, third, third, 0],
        [third, 0, 0, 0],
        [0, 0, 0, 0],  # d is not right after a, nor after d
        [0, 0, 0, 0],
        [third, third, third, -1],  # one letter too many takes all of it back, there
    ]
    assert scored.token_rewards is not None
    assert torch.allclose(scored.token_rewards, torch.tensor(want))
    assert torch.allclose(scored.token_rewards.sum(1), scored.rewards, atol=1e-6)


def test_a_terminal_score_lands_on_the_last_token() -> None:
    _, step = Parts.of(task=SILENT).rollout()
    last = step["mask"].sum(1).long() - 1
    assert torch.equal(step["token_rewards"].gather(1, last[:, None])[:, 0], step["rewards"])
    assert torch.equal(step["token_rewards"].sum(1), step["rewards"])


# -- rows without a score


@dataclass(frozen=True, kw_only=True)
class Picky(Task):
    """A verifier that has no score for anything."""

    name: ClassVar[str] = "picky"
    shared_prompts: ClassVar[bool] = True

    def example(self, rng: random.Random) -> Example:
        return Example(prompt=f"{rng.randrange(10)}>", answer="1")

    @property
    def characters(self) -> str:
        return "0123456789>"

    @property
    def budget(self) -> int:
        return 2

    def score(self, example: Example, response: str) -> float | None:
        return None


@pytest.fixture
def verdicts(monkeypatch: Any) -> Any:
    """Parts whose verifier gives these scores, row by row."""

    def parts(recipe: str, scores: list[float | None]) -> Parts:
        left = iter(scores)
        monkeypatch.setattr(Picky, "score", lambda self, example, response: next(left))
        return Parts.of(recipe, task=Picky())

    return parts


def test_rows_without_a_score_leave_with_groups_that_are_too_small(verdicts: Any) -> None:
    """G7: groups of 2, 1, 0 and 4 scored rows; a group baseline needs 2: 2 and 4 stay.

    Unscored rows are counted, 16 - 6 = 10, and take no place as 0 in a mean or a std. All that
    was sampled was generated.
    """
    scores = [1, None, 0, None, None, None, 1, None, *[None] * 4, 1, 1, 0, 0]
    rollout, step = verdicts("dr_grpo", scores).rollout()
    assert rollout.scored.group.tolist() == [0, 0, 3, 3, 3, 3]
    assert step["rewards"].tolist() == [1, 0, 1, 1, 0, 0]
    assert rollout.unscored == 10
    row = (step["advantages"] * step["mask"]).sum(1) / step["mask"].sum(1)
    assert row.tolist() == pytest.approx([0.5, -0.5, 0.5, 0.5, -0.5, -0.5])
    every, _ = verdicts("dr_grpo", [1.0] * 16).rollout()
    assert rollout.generated_tokens == every.generated_tokens


def test_a_single_scored_row_stays_where_no_group_is_needed(verdicts: Any) -> None:
    rollout, step = verdicts("reinforce", [None] * 3 + [1.0] + [None] * 12).rollout()
    assert (step["rewards"].tolist(), rollout.unscored) == ([1.0], 15)


def test_a_rollout_without_any_score_is_an_error() -> None:
    with pytest.raises(LabError, match="rollout 0: none of the 16 rows has a score"):
        Parts.of(task=Picky()).rollout()


# -- dynamic sampling


def _every(*refused: int) -> Any:
    @keep(name="some")
    def some(group: Tensor) -> Tensor:
        """Keeps the groups whose place in the batch of four is none of these."""
        return ~torch.isin(group % 4, torch.tensor(refused))

    return some


def _refilling(refused: tuple[int, ...], cap: float = 3.0) -> Parts:
    filters = [{"name": "some", "refill": True, "refill_cap": cap}]
    return Parts.of({"filter": filters}, plugins=[_every(*refused)])


@pytest.mark.parametrize(
    ("refused", "cap", "batches", "groups"),
    [
        ((), 3.0, 1, [0, 1, 2, 3]),
        ((1, 3), 3.0, 2, [0, 2, 4, 6]),
        ((0,), 3.0, 2, [1, 2, 3, 5]),  # 6 and 7 would count too: the batch is full before
        ((0, 1, 2), 3.0, 3, [3, 7, 11]),  # the cap: 3 of 4
        ((0, 1, 2), 1.0, 1, [0, 1, 2, 3]),  # no refill: refused rows stay, without a share
        ((0, 1, 2), 2.9, 2, [3, 7]),  # whole batches
    ],
)
def test_a_filter_refills_until_the_batch_is_full(
    refused: tuple[int, ...], cap: float, batches: int, groups: list[int]
) -> None:
    """DAPO's dynamic sampling. Each batch has prompts and samples of its own.

    Wrong: stopping at the cap with an error, a batch above its size, refilling with the same
    prompts again, generated tokens of the kept groups only.
    """
    parts = _refilling(refused, cap)
    rollout, _ = parts.rollout()
    assert rollout.batches == batches
    assert torch.unique(rollout.scored.group).tolist() == groups
    assert len(rollout.scored.samples) == 4 * len(groups)
    assert len(rollout.sampled.samples) == 16 * batches
    assert rollout.generated_tokens == int(rollout.sampled.samples.mask.sum())
    of_batch = [rollout.sampled.rows(torch.arange(16) + 16 * i) for i in range(batches)]
    assert len({tuple(_prompts(b)) for b in of_batch}) == batches
    assert len({tuple(b.texts) for b in of_batch}) == batches


def test_a_refill_draws_answers_of_its_own() -> None:
    """A bandit has one prompt: with the first batch's stream its second would repeat the first."""
    filters = [{"name": "some", "refill": True}]
    parts = Parts.of({"filter": filters}, plugins=[_every(1)], task=Use(name="bandit"))
    texts = parts.rollout()[0].sampled.texts
    assert len(texts) == 32
    assert texts[:16] != texts[16:]


def _prompts(scored: Scored) -> list[str]:
    return [e.prompt for e in scored.examples]


def test_the_first_batch_is_that_of_a_run_without_a_filter() -> None:
    """R1: what a filter sends away, it sends away from the same rollout."""
    plain, _ = Parts.of().rollout()
    filtered, _ = _refilling((1, 3)).rollout()
    first = filtered.sampled.rows(torch.arange(16))
    assert first.texts == plain.scored.texts
    assert torch.equal(first.samples.logp, plain.scored.samples.logp)


def test_nothing_to_learn_from_is_no_error() -> None:
    """M4: every answer is wrong, no group counts: the loss is 0, no weight moves, all is finite.

    Wrong: a run that ends because the task is too hard, or solved.
    """
    parts = Parts.of("dapo", task=SILENT, observers=("clipping", "kl_old", "weights"))
    before = parts.weights()
    rollout, step = parts.rollout()
    assert (rollout.batches, len(rollout.scored.samples)) == (3, 16)
    assert step["mask"].sum() == 0
    seen = parts.update(rollout, step)
    assert (seen.metrics["loss"], seen.metrics["grad_norm"], seen.tokens) == (0, 0, 0)
    assert all(torch.isfinite(torch.tensor(x)) for x in seen.metrics.values())
    assert torch.equal(parts.weights(), before)


def test_what_is_recorded_of_a_rollout_is_of_all_that_was_sampled(tmp_path: Any) -> None:
    """L1, G5: under a filter that keeps mixed groups only, their mean reward says nothing.

    Wrong: `reward`, `zero_variance` and lengths of the kept groups: .5 or so whatever the policy,
    and no group ever without variance.
    """
    result = go(tmp_path, "dapo", task=SILENT, rollouts=1)
    assert result.status == "ok"
    assert series(tmp_path, "rollout", "zero_variance") == [1.0]
    assert series(tmp_path, "rollout", "reward") == [0.0]
    assert series(tmp_path, "rollout", "kept") == [0.0]
    length = result.counters["generated_tokens"] / 48  # 3 batches of 16 rows
    assert series(tmp_path, "rollout", "response_length") == [pytest.approx(length)]


# -- who samples


def test_the_check_is_against_the_weights_that_sampled() -> None:
    """F1 with lag: scored by the policy that trains, the difference is no error of the sampler."""
    parts = Parts.of(lag=1)
    parts.roles.behaviour()
    nudge(parts.roles.policy)
    rollout = parts.collector.collect(1, check=True)
    assert rollout.rescored is not None
    assert rollout.rescored < 1e-5
    samples = rollout.scored.samples
    with torch.no_grad():
        now = parts.roles.policy.score(samples, 1.0).logp
    assert float((now - samples.logp).abs().max()) > 1e-2


def test_a_sampler_that_is_off_is_found_before_any_update(monkeypatch: Any) -> None:
    """F2: log-probabilities that are .01 off on one token: the mean ratio would not show it."""
    parts = Parts.of()
    policy = parts.roles.policy
    honest = policy.sample

    def off(*given: Any) -> Samples:
        samples = honest(*given)
        samples.logp[3, 0] += 0.01
        return samples

    monkeypatch.setattr(policy, "sample", off)
    with pytest.raises(LabError, match=r"re-scored rollout differs: max \|log ratio\| 0.01"):
        parts.collector.collect(0, check=True)
    assert parts.collector.collect(0, check=False).rescored is None


def test_a_cut_row_has_the_critics_value_after_its_last_token() -> None:
    """C6, C12, C14: and a row that ended has 0, whatever the critic says of the place behind it.

    The value is that of the whole row run alone, without padding. Wrong: the value before the last
    token, a bootstrap from the width, a terminated row with a future.
    """
    parts = Parts.of("ppo", task=SIGNAL)
    critic = parts.roles.critic
    assert critic is not None
    torch.nn.init.normal_(critic.head.weight)
    rollout, step = parts.rollout()
    samples, cut = rollout.scored.samples, step["truncated"]
    assert 0 < int(cut.sum()) < 16
    assert torch.equal(cut, samples.stop_reason == int(StopReason.LENGTH))
    for row in range(16):
        n = int(samples.mask[row].sum())
        ids = torch.cat([samples.prompt_ids[row], samples.ids[row, :n]])[None]
        with torch.no_grad():
            hidden = critic.backbone(input_ids=ids, use_cache=False).last_hidden_state
            values = critic.head(hidden)[0, -n - 1 :, 0]
        assert torch.allclose(step["old_values"][row, :n], values[:-1], atol=1e-5)
        want = float(values[-1]) if cut[row] else 0.0
        assert float(step["bootstrap"][row]) == pytest.approx(want, abs=1e-5)
        assert abs(float(values[-1])) > 1e-3
