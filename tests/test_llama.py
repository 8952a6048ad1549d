"""The lean forward pass against transformers' own, over the same weights: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab import llama, policy, tokens
from lab.policy import Critic, Policy, Samples, value_head
from lab.tokens import Sampling

EVEN = ["123>"] * 4
RAGGED = ["123>", "4567890>", "1>", "22>"]  # left-padded by 4, 0, 6, 5


def made(double: bool = True) -> Policy:
    """A nano policy with weights far from the small initial ones, which would hide a mistake."""
    p = policy.build("nano", "0123456789>", seed=3)
    with torch.no_grad():
        for name, x in p.model.named_parameters():
            x.mul_(1.5 if "norm" in name else 3.0)
    p.model.get_input_embeddings().weight.data[p.tokenizer.pad_id] = 0.0
    p.model.to(torch.float64 if double else torch.float32)
    return p


def sampled(p: Policy, prompts: list[str]) -> Samples:
    p.model.float()
    out = p.sample(prompts, 4, 6, Sampling(), torch.Generator().manual_seed(1))
    p.model.double()
    return out


def by_transformers(p: Policy) -> Policy:
    other = policy.Policy(p.model, p.tokenizer, preset=False)
    assert not other.preset
    return other


@pytest.mark.parametrize("prompts", [EVEN, RAGGED], ids=["even", "ragged"])
def test_log_probabilities_and_gradients_are_transformers(prompts: list[str]) -> None:
    """Kills a rotation by the wrong sign, a mask that lets padding in, an off-by-one in `keep`.

    transformers computes norm and rotation in float32 whatever the weights: that is the rounding
    allowed for, and each mistake is of order 1.
    """
    p = made()
    samples = sampled(p, prompts)
    weights = torch.randn(samples.mask.shape, dtype=torch.float64)
    names = [n for n, _ in p.model.named_parameters()]
    got = p.score(samples, 0.7, entropy=True)
    want = by_transformers(p).score(samples, 0.7, entropy=True)
    torch.testing.assert_close(got.logp, want.logp, rtol=0, atol=5e-5)
    assert got.entropy is not None
    torch.testing.assert_close(got.entropy, want.entropy, rtol=0, atol=5e-5)
    pairs = [
        torch.autograd.grad((s.logp * weights).sum(), list(p.model.parameters()))
        for s in (got, want)
    ]
    for name, a, b in zip(names, *pairs, strict=True):
        assert float((a - b).abs().max()) < 1e-4 * float(b.abs().max()), name


@pytest.mark.parametrize("prompts", [EVEN, RAGGED], ids=["even", "ragged"])
def test_a_critic_reads_the_same_states(prompts: list[str]) -> None:
    """After the last token too: kills a `keep` that is one short where values are asked for."""
    p = made()
    samples = sampled(p, prompts)
    on = torch.cat([torch.ones(len(samples), 1), samples.mask], 1).bool()
    critic, head = Critic(p), value_head(p)
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.normal_(head.weight)
    critic.double()
    head.double()
    lean = critic(samples)
    critic.preset = False
    torch.testing.assert_close(lean[on], critic(samples)[on], rtol=0, atol=2e-4)
    shared = p.score(samples, 1.0, head=head).values
    other = by_transformers(p).score(samples, 1.0, head=head).values
    assert shared is not None
    assert other is not None
    torch.testing.assert_close(shared[on], other[on], rtol=0, atol=2e-4)


def test_padding_on_the_left_changes_nothing_and_gives_no_nan() -> None:
    """A padding position that sees nothing would be NaN, and 0 * NaN is NaN for all."""
    p = made()
    ids = torch.tensor([[2, 3, 4, 5]])
    wide = torch.tensor([[1, 1, 1, 2, 3, 4, 5]])

    def states(x: Tensor, attention: Tensor) -> Tensor:
        return llama.hidden(p.model.base_model, x, attention, tokens.positions(attention), 2)

    alone = states(ids, torch.ones_like(ids))
    padded = states(wide, (wide > 1).long())
    assert bool(padded.isfinite().all())
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-10)


def test_the_padding_row_is_never_trained() -> None:
    """Its embedding is 0, where the norm is steepest: a gradient there would drown all others."""
    p = made()
    samples = sampled(p, EVEN)
    drawn = samples.ids.clone()
    drawn[:, 0] = p.tokenizer.pad_id  # an id like any other to the sampler
    rows = Samples(
        samples.prompt_ids,
        samples.prompt_mask,
        drawn,
        samples.mask,
        samples.logp,
        samples.stop_reason,
    )
    (grad,) = torch.autograd.grad(
        p.score(rows, 1.0).logp.sum(), p.model.get_input_embeddings().weight
    )
    assert float(grad[p.tokenizer.pad_id].abs().max()) == 0
    assert float(grad.abs().max()) < 1e4


@pytest.mark.parametrize("prompts", [EVEN, RAGGED], ids=["even", "ragged"])
def test_sampling_draws_what_transformers_draws(prompts: list[str]) -> None:
    """With one generator, token for token: kills a cache that forgets, repeats in another order, or
    lets a new token see the padding on the left.
    """
    p = made(double=False)
    draws = [
        policy_.sample(prompts, 4, 6, Sampling(0.8), torch.Generator().manual_seed(2))
        for policy_ in (p, by_transformers(p))
    ]
    assert torch.equal(draws[0].ids, draws[1].ids)
    assert torch.equal(draws[0].mask, draws[1].mask)
    assert len({tuple(row) for row in draws[0].ids.tolist()}) > 8
    torch.testing.assert_close(draws[0].logp, draws[1].logp, rtol=0, atol=5e-5)


def test_what_is_sampled_is_scored_the_same() -> None:
    """Decoder and training forward are two routes: the check that each run makes first."""
    p = made(double=False)
    for prompts in (EVEN, RAGGED):
        samples = p.sample(prompts, 8, 6, Sampling(), torch.Generator().manual_seed(3))
        difference = (p.score(samples, 1.0).logp - samples.logp) * samples.mask
        assert float(difference.detach().abs().max()) < 1e-5
