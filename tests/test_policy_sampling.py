"""lab.policy.Policy.sample: what is drawn, how often, and as what it is recorded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from small_models import (
    absolute,
    by_hand,
    nano,
    rollout,
    row_logits,
    sampler,
    worst,
)
from torch import Tensor

from lab.errors import LabError
from lab.hookspecs import StopReason
from lab.policy import Policy, Samples
from lab.tokens import Sampling, check_rescored

EOS, STOP, LENGTH = (int(s) for s in StopReason)
TRUNCATED = [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.8}]


@pytest.fixture(scope="module", params=["rotary", "absolute"])
def policy(request: Any, tmp_path_factory: Any) -> Policy:
    return nano() if request.param == "rotary" else absolute(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def rotary() -> Policy:
    return nano()


@pytest.fixture(scope="module")
def two() -> Policy:
    """A vocabulary of four: end, padding, a, b."""
    return nano("ab")


def rescored(policy: Policy, samples: Samples, temperature: float) -> float:
    with torch.no_grad():
        again = policy.score(samples, temperature).logp
    return check_rescored(samples.logp, again, samples.mask, 1e-5, policy.causes())


# recorded as drawn


@pytest.mark.parametrize("truncation", [{}, *TRUNCATED], ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_fresh_rollout_scored_again_differs_by_rounding(
    policy: Policy, temperature: float, truncation: dict[str, Any]
) -> None:
    """F1, N2: by the training forward, and each row alone through the raw model."""
    samples = rollout(policy, Sampling(temperature, **truncation))
    assert rescored(policy, samples, temperature) < 1e-5
    assert worst(samples.logp, by_hand(policy.model, samples, temperature)) < 1e-5
    assert float(samples.mask.sum()) > 40
    assert float(samples.logp.min()) < -1
    assert not samples.logp.requires_grad


@pytest.mark.parametrize("scored_at", [0.6, 1.7])
def test_another_temperature_is_found_out(policy: Policy, scored_at: float) -> None:
    """R3: on the sampler's side only, or on the scorer's."""
    samples = rollout(policy, Sampling(1.0))
    with pytest.raises(LabError, match="Likely: a temperature applied on one side only"):
        rescored(policy, samples, scored_at)


@pytest.mark.parametrize("truncation", TRUNCATED, ids=str)
def test_a_forgotten_support_is_found_out(policy: Policy, truncation: dict[str, Any]) -> None:
    """R4: each ratio carries the kept mass, which is below 1."""
    samples = rollout(policy, Sampling(0.6, **truncation))
    with pytest.raises(LabError, match=r"re-scored rollout differs.*Likely: the support \(top-k"):
        rescored(policy, replace(samples, kept=None), 0.6)


def test_the_support_is_stored_for_each_place(rotary: Policy) -> None:
    """Top-k 3: three tokens wherever one was drawn, the three likeliest of that prefix."""
    samples = rollout(rotary, Sampling(1.7, top_k=3))
    assert samples.kept is not None
    assert samples.kept.shape == (*samples.ids.shape, 13)
    for row, t, logits in row_logits(rotary.model, samples):
        likeliest = logits.topk(3).indices.sort().values
        assert torch.equal(samples.kept[row, t].nonzero().squeeze(1), likeliest)
        assert int(samples.ids[row, t]) in likeliest
    assert len(set(samples.ids[samples.mask.bool()].tolist())) > 3  # not one support for all
    assert rollout(rotary, Sampling(0.6)).kept is None


def test_the_mass_of_top_p_is_just_enough(rotary: Policy) -> None:
    samples = rollout(rotary, Sampling(1.7, top_p=0.8))
    assert samples.kept is not None
    for row, t, logits in row_logits(rotary.model, samples):
        p = (logits / 1.7).softmax(-1)[samples.kept[row, t]]
        assert float(p.sum()) >= 0.8
        assert float(p.sum() - p.min()) < 0.8


def test_gradients_through_a_support_are_finite(rotary: Policy) -> None:
    """NaN in one weight is NaN everywhere after one step."""
    samples = rollout(rotary, Sampling(0.6, top_k=3, top_p=0.8))
    logp = rotary.score(samples, 0.6).logp
    grads = torch.autograd.grad(logp.sum(), list(rotary.model.parameters()))
    assert all(bool(g.isfinite().all()) for g in grads)
    assert max(float(g.abs().max()) for g in grads) > 0.1


# how often


def frequencies(policy: Policy, n: int, budget: int, sampling: Sampling) -> dict[Any, int]:
    """How often each response was drawn in answer to one prompt."""
    samples = policy.sample(["ab"], n, budget, sampling, sampler(11))
    rows = zip(samples.ids.tolist(), samples.mask.sum(1).int().tolist(), strict=True)
    counts: dict[Any, int] = {}
    for ids, length in rows:
        key = tuple(ids[:length])
        counts[key] = counts.get(key, 0) + 1
    return counts


def chances(policy: Policy, sampling: Sampling) -> dict[Any, float]:
    """The exact probability of each response of at most two tokens, from the raw model.

    Of the vocabulary of four, the end (0) closes a response: 1 + 3 * 4 = 13 of them.
    """

    def after(prefix: list[int]) -> list[float]:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prefix])).logits[0, -1].double()
        p = (logits / sampling.temperature).softmax(-1)
        if sampling.top_k:
            p = torch.where(p >= p.topk(sampling.top_k).values[-1], p, torch.zeros_like(p))
        return [float(x) for x in p / p.sum()]

    prompt = policy.tokenizer.encode("ab")
    first = after(prompt)
    pairs = itertools.product((1, 2, 3), range(4))
    found = {(0,): first[0]}
    for a, b in pairs:
        found[a, b] = first[a] * after([*prompt, a])[b]
    return {response: p for response, p in found.items() if p > 0}


def unlikely(counts: dict[Any, int], chance: dict[Any, float]) -> float:
    """The p-value of these counts under these chances."""
    n = sum(counts.values())
    got = [counts.get(r, 0) for r in chance]
    return float(chisquare(got, [n * p for p in chance.values()], sum_check=False).pvalue)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.6), Sampling(1.7), Sampling(1.7, top_k=3)], ids=str
)
def test_responses_are_as_frequent_as_the_model_says(two: Policy, sampling: Sampling) -> None:
    """F1, N2: 8000 pairs of tokens against the enumerated product of the raw model's chances.

    Kills a temperature that divides probabilities, a support that is recorded and not drawn from,
    and one set of draws for a whole group; the second factor kills a cache of another row.
    """
    chance = chances(two, sampling)
    assert sum(chance.values()) == pytest.approx(1)
    counts = frequencies(two, 8000, 2, sampling)
    assert set(counts) <= set(chance)
    assert unlikely(counts, chance) > 0.001
    for other in (Sampling(0.8), Sampling(1.3)):  # and it would see this
        wrong = chances(two, other)
        assert unlikely(counts, wrong) < 1e-6


# rows and groups


def tiled(cache: Any, repeats: int) -> None:
    """a b a b where a a b b was due."""
    rows = cache.layers[0].keys.shape[0]
    cache.batch_select_indices(torch.arange(rows).repeat(repeats))


def test_the_repeated_cache_belongs_to_its_own_row(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run once and are repeated for their group: as if each row had run alone.

    The mistake, made once, is a repeated cache in another order than the repeated prompts.
    """
    from transformers import DynamicCache

    samples = rollout(policy, Sampling())
    encoded = [policy.tokenizer.encode(p) for p in ("12>", "31415>", "271828182>")]
    for row in range(12):  # rows by prompt
        real = samples.prompt_ids[row][samples.prompt_mask[row].bool()]
        assert real.tolist() == encoded[row // 4]
    assert worst(samples.logp, by_hand(policy.model, samples)) < 1e-5
    monkeypatch.setattr(policy, "preset", False)  # transformers' route; test_llama.py has the other
    assert worst(rollout(policy, Sampling()).logp, samples.logp) < 1e-5
    monkeypatch.setattr(DynamicCache, "batch_repeat_interleave", tiled)
    wrong = rollout(policy, Sampling())
    assert worst(wrong.logp, by_hand(policy.model, wrong)) > 0.01


def test_the_rows_of_a_group_are_drawn_apart(rotary: Policy) -> None:
    samples = rotary.sample(["12>"], 40, 6, Sampling(), sampler())
    assert len({tuple(ids) for ids in samples.ids.tolist()}) > 30


def test_every_rollout_is_as_wide_as_the_budget(two: Policy) -> None:
    """Sampling ends with the last row; padded: id pad, mask 0, logp 0, nothing in the support.

    Nothing may be left of what a finished row went on drawing.
    """
    sampling = Sampling(1.0, top_k=3)
    samples = two.sample(["a", "ab"], 16, 40, sampling, sampler(2))
    on = samples.mask.bool()
    lengths = samples.mask.sum(1)
    assert samples.ids.shape == samples.mask.shape == samples.logp.shape == (32, 40)
    assert samples.kept is not None
    assert samples.kept.shape == (32, 40, 4)
    assert float(lengths.max()) < 40  # all ended before the budget
    assert int(lengths.min()) < int(lengths.max())
    assert torch.equal(on, torch.arange(40) < lengths[:, None])
    assert set(samples.ids[~on].tolist()) == {1}
    assert float(samples.logp[~on].abs().max()) == 0
    assert rescored(two, samples, 1.0) < 1e-5


def test_sampling_ends_with_the_last_row(two: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token closes a row, as a bandit's arms do: one forward pass, not one a column."""
    passes: list[int] = []
    forward = Policy._forward

    def counted(self: Policy, ids: Tensor, *given: Any, **options: Any) -> Any:
        passes.append(ids.shape[0])
        return forward(self, ids, *given, **options)

    monkeypatch.setattr(two, "preset", False)
    monkeypatch.setattr(Policy, "_forward", counted)
    samples = two.sample(["ab", "b"], 4, 40, Sampling(), sampler(), stops=(1, 2, 3))
    assert samples.mask.sum(1).tolist() == [1] * 8
    assert passes == [2]  # each prompt once, whatever the size of its group
    two.sample(["ab", "b"], 4, 3, Sampling(1.7), sampler())
    assert passes == [2, 2, 8, 8]


def test_why_rows_end(two: Policy) -> None:
    """N8: by the end, by a stop, or cut; the reason stands in the last token."""
    a, b = two.stop_ids("ab")
    samples = two.sample(["ab"], 200, 3, Sampling(1.7), sampler(), stops=(b,))
    last = samples.mask.sum(1).long() - 1
    final = samples.ids.gather(1, last[:, None]).squeeze(1)
    reason = samples.stop_reason
    assert set(reason.tolist()) == {EOS, STOP, LENGTH}
    assert bool(((final == 0) == (reason == EOS)).all())
    assert bool(((final == b) == (reason == STOP)).all())
    assert set(last[reason == LENGTH].tolist()) == {2}
    inside = samples.ids[torch.arange(3) < last[:, None]].tolist()
    assert set(inside) <= {1, a}  # neither an end nor a stop before the last token
    texts = two.texts(samples)
    assert {t[-1:] for t, r in zip(texts, reason.tolist(), strict=True) if r == STOP} == {"b"}
    assert all("b" not in t for t, r in zip(texts, reason.tolist(), strict=True) if r == EOS)


# random numbers


def test_one_generator_one_rollout(policy: Policy) -> None:
    first, again = rollout(policy, Sampling(), seed=3), rollout(policy, Sampling(), seed=3)
    assert all(torch.equal(x, getattr(again, n)) for n, x in vars(first).items() if x is not None)
    other = rollout(policy, Sampling(), seed=4)
    assert not torch.equal(first.ids, other.ids)


def test_the_global_generator_is_neither_read_nor_moved(policy: Policy) -> None:
    """N24: an extra evaluation would change every later rollout."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = rollout(policy, Sampling(0.6, top_p=0.8))
    policy.score(first, 0.6, entropy=True)
    policy.copy()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(rollout(policy, Sampling(0.6, top_p=0.8)).ids, first.ids)


def test_scoring_does_not_draw(rotary: Policy) -> None:
    """N24: the next rollout of one generator is the same, whatever was scored in between."""

    def second(score: bool) -> Tensor:
        generator = sampler()
        first = rotary.sample(["12>"], 4, 6, Sampling(), generator)
        if score:
            rotary.score(first, 1.0, entropy=True)
        return rotary.sample(["12>"], 4, 6, Sampling(), generator).ids

    assert torch.equal(second(False), second(True))


def test_sampling_leaves_no_graph_and_changes_no_weight(rotary: Policy) -> None:
    before = {n: x.clone() for n, x in rotary.model.state_dict().items()}
    samples = rollout(rotary, Sampling(0.6, top_k=3))
    assert not any(x.requires_grad for x in vars(samples).values() if x is not None)
    assert all(torch.equal(x, before[n]) for n, x in rotary.model.state_dict().items())
    assert all(p.grad is None for p in rotary.model.parameters())
