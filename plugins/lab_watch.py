"""Observers: numbers of an update, each defined where it is recorded.

Rates are masked means over tokens with a non-zero advantage unless said: a token without an
advantage has nothing to be flat about, and is counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lab import masked_mean, masked_var, observe


@observe
def clipping(
    ratio: Tensor,
    advantages: Tensor,
    pull: Tensor,
    mask: Tensor,
    interval: tuple[float | None, float | None],
    bounds: tuple[float | None, float | None],
) -> Mapping[str, float]:
    """Shares of tokens outside the ratio interval, flat, and capped, in all and by sign of A.

    - ``outside``: the ratio (the token's where the recipe has none) below or above the interval,
      strictly.
    - ``flat``: the pull is exactly 0.
    - ``capped``: beyond a bound that the surrogate declares, not flat, the pull held at bound
      times advantage.
    - ``no_advantage``: tokens with A = 0, as a share of all tokens.

    ``_positive`` and ``_negative`` are the same rates over tokens of that sign of A.
    """
    on = mask.bool()
    below, above = _beyond(ratio, interval)
    flat = pull == 0
    sides_held = zip(_beyond(ratio, bounds), bounds, strict=True)
    held = torch.zeros_like(on)
    for beyond, bound in sides_held:
        at = torch.isclose(
            pull, (0.0 if bound is None else bound) * advantages, rtol=1e-5, atol=0.0
        )
        held |= beyond & at & ~flat
    what = {"outside": below | above, "flat": flat, "capped": held}
    sides = {"": advantages != 0, "_positive": advantages > 0, "_negative": advantages < 0}
    numbers = {
        f"{name}{side}": _rate(hit, on & chosen)
        for name, hit in what.items()
        for side, chosen in sides.items()
    }
    return numbers | {"no_advantage": _rate(advantages == 0, on)}


@observe
def kl_old(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Mean per token of three estimates of KL(old || pi), from samples of the old policy.

    With d = old_logp - logp: ``kl_old_k1`` d, ``kl_old_k2`` d^2/2, ``kl_old_k3`` e^-d - 1 + d.
    """
    d = old_logp - logp
    return {
        "kl_old_k1": float(masked_mean(d, mask)),
        "kl_old_k2": float(masked_mean(0.5 * d**2, mask)),
        "kl_old_k3": float(masked_mean((-d).expm1() + d, mask)),
    }


@observe
def kl_ref(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Mean per token of two estimates of KL(pi || ref), from the rollout's samples.

    With d = logp - ref_logp: ``kl_ref_k1`` d, ``kl_ref_k3`` e^-d - 1 + d. The samples are the old
    policy's: exact in expectation for a fresh rollout only.
    """
    d = logp - ref_logp
    return {
        "kl_ref_k1": float(masked_mean(d, mask)),
        "kl_ref_k3": float(masked_mean((-d).expm1() + d, mask)),
    }


@observe
def entropy(entropy: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Mean per token of the policy's entropy in nats, over the whole vocabulary: ``entropy``."""
    return {"entropy": float(masked_mean(entropy, mask))}


@observe
def weights(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Mapping[str, float]:
    """The raw token ratios: mean, extremes, effective sample size as a share of the tokens.

    ``ratio_ess`` is (sum r)^2 / (N sum r^2), before any clip or cap.
    """
    on = mask.bool()
    if not bool(on.any()):
        return {}
    r = (logp[on] - old_logp[on]).exp()
    return {
        "ratio_mean": float(r.mean()),
        "ratio_min": float(r.min()),
        "ratio_max": float(r.max()),
        "ratio_ess": float(r.sum() ** 2 / (r.numel() * (r**2).sum())),
    }


@observe
def critic(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, c: float = 0.2
) -> Mapping[str, float]:
    """How well the critic predicts, and how often its move is clipped.

    - ``value_clipped``: share of tokens with |V - V_old| > c, from the move before any clip.
    - ``explained_variance``: 1 - Var(R - V)/Var(R) with the rollout's values; NaN where Var(R) = 0.
    - ``return_mean``, ``return_std``, ``value_mean``: beside it, since a shifted critic can explain
      all of the variance.
    """
    if not bool(mask.any()):
        return {}
    spread_of_returns = masked_var(returns, mask, 0)
    unexplained = masked_var(returns - old_values, mask, 0)
    flat = float(spread_of_returns) == 0
    return {
        "value_clipped": _rate((values - old_values).abs() > c, mask.bool()),
        "explained_variance": math.nan if flat else float(1 - unexplained / spread_of_returns),
        "return_mean": float(masked_mean(returns, mask)),
        "return_std": float(spread_of_returns.sqrt()),
        "value_mean": float(masked_mean(old_values, mask)),
    }


def _beyond(ratio: Tensor, interval: tuple[float | None, float | None]) -> tuple[Tensor, Tensor]:
    """Strictly below and strictly above; nothing is beyond an inactive side."""
    low, high = interval
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return nothing if low is None else ratio < low, nothing if high is None else ratio > high


def _rate(hit: Tensor, among: Tensor) -> float:
    return float((hit & among).sum()) / max(1, int(among.sum()))
