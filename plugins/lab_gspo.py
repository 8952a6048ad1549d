"""Sequence-level ratios: GSPO's geometric mean, its token form, and the plain product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lab import masked_mean, masked_sum, ratio, recipes


@ratio(sequence_level=True)
def sequence(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """exp(mean_t log r_t), one number a row: the geometric mean (GSPO 2507.18071 eq. 7)."""
    return masked_mean(logp - old_logp, mask, 1, keepdim=True).exp().expand_as(logp)


@ratio(sequence_level=True)
def sequence_token(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """The row's geometric mean, each token's own gradient (GSPO-token, 2507.18071 eq. 14)."""
    row = masked_mean(logp - old_logp, mask, 1, keepdim=True).exp()
    # value 1 with slope 1 in the token's own logp: the row's number is held, the token's moves it
    return row.detach() * (logp - logp.detach()).exp()


@ratio(
    sequence_level=True,
    exempt={"P8": "the pull at ratio 1 is n_i A: every token of the row carries the whole product"},
)
def sequence_product(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """prod_t r_t, one number a row: the exact importance ratio of the response (TRL's RLOO)."""
    return masked_sum(logp - old_logp, mask, 1, keepdim=True).exp().expand_as(logp)


@recipes
def named() -> Mapping[str, Mapping[str, Any]]:
    return {
        "gspo": {
            "doc": "Group advantage, one ratio a row (geometric mean), a very narrow PPO-Clip.",
            "advantage": {
                "name": "group",
                "baseline": "mean",
                "scale": "std",
                "ddof": 1,
                "eps": 1e-6,
            },
            "ratio": "sequence",
            "surrogate": {"name": "ppo_clip", "eps_low": 3e-4, "eps_high": 4e-4},
            "aggregate": "sequence_mean",
            "source": {
                "recipe": "2507.18071 eqs. 5-7",
                "advantage.baseline": "2507.18071 eq. 6",
                "advantage.scale": "2507.18071 eq. 6",
                "advantage.ddof": "verl's default; 2507.18071 gives none",
                "advantage.eps": "verl's default; 2507.18071 gives none",
                "surrogate.eps_low": "2507.18071 section 5.1",
                "surrogate.eps_high": "2507.18071 section 5.1",
            },
        },
    }
