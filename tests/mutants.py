"""Wrong components, one planted mistake each, and the property that must find it.

`KILLED` is the table: property -> components. Beside them a few unusual components that are right,
which no property may refuse.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from itertools import count
from typing import Annotated, Any

import mutants_rollout as rollout
import torch
from torch import Tensor

import lab
from lab import Choice, Float, masked_mean, masked_sum

CALLS = count(1)

# --- P1: form ------------------------------------------------------------------------------------


@lab.surrogate
def row_sum(ratio: Tensor, advantages: Tensor) -> Tensor:
    """[B] for [B,T]."""
    return (ratio * advantages).sum(1)


@lab.surrogate
def no_return(ratio: Tensor, advantages: Tensor) -> None:
    """Nothing."""
    _ = ratio * advantages


@lab.surrogate
def log_of_zero(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Not finite where an advantage is 0."""
    return ratio * advantages.abs().log()


@lab.surrogate
def no_gradient(ratio: Tensor, advantages: Tensor) -> Tensor:
    """All of it detached."""
    return ratio.detach() * advantages


# --- P3: junk ------------------------------------------------------------------------------------


@lab.ratio
def times_mask(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """The mean by multiplication: 0 x inf is NaN."""
    log_ratio = ((logp - old_logp) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return log_ratio.exp().expand_as(logp)


@lab.surrogate
def sentinel(ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """Counts tokens by a sentinel in logp."""
    return ratio * advantages / (logp > -100).sum(1, keepdim=True)


# --- P4: pad columns -----------------------------------------------------------------------------


@lab.aggregate
def padded_width(mask: Tensor) -> Tensor:
    """1/(B T), T the width at hand."""
    return mask / mask.numel()


@lab.surrogate
def mean_over_columns(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The row's mean over the width."""
    return (ratio * advantages).mean(1, keepdim=True).expand_as(ratio)


@lab.observe
def mean_of_all(logp: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Pads in the average."""
    return {"mean_of_all": float(torch.where(mask.bool(), logp, 0.0).mean())}


# --- P6: slices ----------------------------------------------------------------------------------


@lab.surrogate
def slice_mean(ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Centres the advantages of whatever rows are at hand."""
    return ratio * (advantages - masked_mean(advantages, mask))


@lab.kl_loss
def divided_again(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """A mean in the component, and the shares on top."""
    return (logp - ref_logp) ** 2 / mask.sum().clamp(min=1)


@lab.extra_loss
def multiplied_by_rows(entropy: Tensor) -> Tensor:
    """A sum over the rows at hand in each of them."""
    return -0.01 * entropy * entropy.shape[0]


# --- P7: knobs -----------------------------------------------------------------------------------


@lab.surrogate
def dead(
    ratio: Tensor, advantages: Tensor, *, knob: Annotated[float, Float(0.1, 1)] = 0.5
) -> Tensor:
    """A parameter that nothing reads."""
    return ratio * advantages


@lab.surrogate
def overwritten(ratio: Tensor, advantages: Tensor, *, knob: float = 0.2) -> Tensor:
    """A parameter that is lost on the way."""
    knob = 0.2
    return torch.minimum(ratio * advantages, ratio.clamp(1 - knob, 1 + knob) * advantages)


@lab.kl_loss
def dead_branch(logp: Tensor, ref_logp: Tensor, *, knob: bool = False) -> Tensor:
    """Two names for one estimator."""
    d = logp - ref_logp
    return 0.5 * d**2 if knob else d**2 / 2


# --- P8: at ratio 1 ------------------------------------------------------------------------------


@lab.surrogate
def cap_is_eps(ratio: Tensor, logp: Tensor, advantages: Tensor, *, cap: float = 0.2) -> Tensor:
    """A cap below 1."""
    return ratio.clamp(max=cap).detach() * advantages * logp


@lab.surrogate
def no_log_prob(ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """The factor log p forgotten."""
    return ratio.detach() * advantages + 0 * logp


@lab.surrogate
def attached(ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """The weight is trained."""
    return ratio.clamp(max=5) * advantages * logp


@lab.surrogate
def sign_slip(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The loss in place of the objective."""
    return -ratio * advantages


@lab.ratio
def both_attached(logp: Tensor) -> Tensor:
    """Value 1, slope 0."""
    return (logp - logp).exp()


@lab.ratio
def inverted(logp: Tensor, old_logp: Tensor) -> Tensor:
    """old / pi."""
    return (old_logp - logp).exp()


@lab.surrogate(wrapper=True)
def doubled() -> Generator[None, Tensor, Tensor]:
    """Twice the objective."""
    gain = yield
    return 2 * gain


# --- P16, P17: derivatives and precision ---------------------------------------------------------


@lab.surrogate
def by_item(ratio: Tensor, advantages: Tensor) -> Tensor:
    """A number that left the graph without a word."""
    return ratio * advantages / (1 + ratio.max().item())


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # torch: *grads
        return grad * ctx.saved_tensors[0]  # 2 x is due


@lab.kl_loss
def backward_by_hand(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """A factor 2 lost in a backward pass."""
    return _Wrong.apply(logp - ref_logp)  # type: ignore[no-any-return]  # untyped in torch


@lab.ratio
def quotient_of_products(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """exp of each sum, then the quotient: underflow."""
    now, then = (masked_sum(x, mask, 1, keepdim=True).exp() for x in (logp, old_logp))
    return (now / then.clamp(min=1e-300 if then.dtype == torch.float64 else 1e-37)).expand_as(logp)


# --- P18, P19, P20 -------------------------------------------------------------------------------


@lab.surrogate
def divides_at_an_end(
    ratio: Tensor, advantages: Tensor, *, tau: Annotated[float, Float(0.0, 1.0)] = 0.5
) -> Tensor:
    """1/0 at the low end."""
    return ratio * advantages / tau


@lab.ratio
def wrong_at_one_choice(
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    *,
    over: Annotated[str, Choice("mask", "width")] = "mask",
) -> Tensor:
    """A mean over the width, where that is chosen."""
    count_of = mask.sum(1, keepdim=True) if over == "mask" else mask.shape[1]
    return (masked_sum(logp - old_logp, mask, 1, keepdim=True) / count_of).exp().expand_as(logp)


@lab.aggregate
def nan_without_tokens(mask: Tensor) -> Tensor:
    """0/0 in an empty row."""
    return mask / mask.sum(1, keepdim=True)


@lab.aggregate
def half_a_mean(mask: Tensor) -> Tensor:
    """Shares that sum to 1/2."""
    return mask / mask.sum().clamp(min=1) / 2


@lab.aggregate
def no_rows(mask: Tensor, budget: int, *, length: int | None = None) -> Tensor:
    """1/L without 1/B."""
    return mask / (length or budget)


@lab.surrogate
def in_place(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Its own copy edited, in a bench; the caller's tensor, where it is called alone."""
    return ratio * advantages.mul_(2)


@lab.surrogate
def draws(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Python's global generator."""
    return ratio * advantages * (0.5 + random.random())


@lab.surrogate
def remembers(ratio: Tensor, advantages: Tensor) -> Tensor:
    """A state between calls."""
    return ratio * advantages * next(CALLS)


KILLED: dict[str, tuple[Any, ...]] = {
    "P1": (
        row_sum,
        no_return,
        rollout.one_column,
        rollout.upcast,
        rollout.upcast_lengths,
        rollout.with_grad,
        log_of_zero,
        no_gradient,
    ),
    "P3": (times_mask, sentinel, rollout.unmasked_mean),
    "P4": (padded_width, mean_over_columns, mean_of_all, rollout.unmasked_mean),
    "P5": (
        rollout.by_position,
        rollout.consecutive,
        rollout.first_id,
        rollout.against_the_row_before,
    ),
    "P6": (slice_mean, divided_again, multiplied_by_rows),
    "P7": (dead, overwritten, dead_branch),
    "P8": (
        *(cap_is_eps, no_log_prob, attached, sign_slip, both_attached, inverted, doubled),
        slice_mean,
    ),
    "P12": (rollout.residue,),
    "P13": (rollout.nan_alone, rollout.raw_alone),
    "P14": (
        rollout.decays_on_gaps,
        rollout.first_column_pays,
        mean_over_columns,
        mean_of_all,
        padded_width,
    ),
    "P15": (
        rollout.never_bootstraps,
        rollout.guesses_from_the_width,
        rollout.one_bootstrap_for_all,
    ),
    "P16": (by_item, backward_by_hand),
    "P17": (rollout.one_pass_variance, quotient_of_products),
    "P18": (divides_at_an_end, wrong_at_one_choice),
    "P19": (nan_without_tokens, half_a_mean, no_rows),
    "P20": (in_place, rollout.rewards_in_place, draws, remembers),
}

# --- right, however unusual ----------------------------------------------------------------------


@lab.surrogate
def held_without_grad(ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """A weight held by no_grad in place of detach."""
    with torch.no_grad():
        weight = ratio.clamp(max=5)
    return weight * advantages * logp


@lab.surrogate
def held_as_data(ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """A weight held by .data."""
    return ratio.data * advantages * logp


@lab.surrogate(whole_batch=True, exempt={"P8": "centred on the batch"})
def centred_on_the_batch(ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Statistics of the whole optimisation batch, and it says so."""
    return ratio * (advantages - masked_mean(advantages, mask))


@lab.surrogate(wrapper=True, exempt={"P8": "scaled at random"})
def noisy(*, rng: torch.Generator) -> Generator[None, Tensor, Tensor]:
    """Times a random number, from a stream of its own."""
    gain = yield
    return gain * (0.5 + torch.rand((), generator=rng))


@lab.extra_loss
def straight_through(logp: Tensor, entropy: Tensor, *, coef: float = 0.01) -> Tensor:
    """The value of one term, the slope of another."""
    return coef * (logp**2 + (entropy - logp**2).detach())


@lab.observe(at="rollout")
def mean_reward(rewards: Tensor) -> Mapping[str, float]:
    """The mean reward."""
    return {"mean_reward": float(rewards.mean())}


RIGHT = (
    held_without_grad,
    held_as_data,
    centred_on_the_batch,
    noisy,
    straight_through,
    mean_reward,
)
