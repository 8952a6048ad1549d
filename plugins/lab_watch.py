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
    r, a, p = torch.stack([ratio, advantages, pull])[:, on]
    below, above = _beyond(r, interval)
    flat = p == 0
    under, over = _beyond(r, bounds)
    edge = torch.where(under, bounds[0] or 0.0, bounds[1] or 0.0) * a
    held = (under | over) & ((p - edge).abs() <= 1e-5 * edge.abs()) & ~flat
    # all rates of an update in one product: counted in float64, which is exact
    what = torch.stack([below | above, flat, held]).double()
    sides = torch.stack([a != 0, a > 0, a < 0]).double()
    hits, tokens = (what @ sides.T).tolist(), sides.sum(1).tolist()
    numbers = {
        f"{name}{side}": hit / max(1.0, count)
        for name, row in zip(("outside", "flat", "capped"), hits, strict=True)
        for side, hit, count in zip(("", "_positive", "_negative"), row, tokens, strict=True)
    }
    return numbers | {"no_advantage": (a.numel() - tokens[0]) / max(1, a.numel())}


@observe
def kl_old(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Mean per token of three estimates of KL(old || pi), from samples of the old policy.

    With d = old_logp - logp: ``kl_old_k1`` d, ``kl_old_k2`` d^2/2, ``kl_old_k3`` e^-d - 1 + d.
    """
    d = old_logp - logp
    return _means(mask, kl_old_k1=d, kl_old_k2=0.5 * d**2, kl_old_k3=(-d).expm1() + d)


@observe
def kl_ref(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Mean per token of two estimates of KL(pi || ref), from the rollout's samples.

    With d = logp - ref_logp: ``kl_ref_k1`` d, ``kl_ref_k3`` e^-d - 1 + d. The samples are the old
    policy's: exact in expectation for a fresh rollout only.
    """
    d = logp - ref_logp
    return _means(mask, kl_ref_k1=d, kl_ref_k3=(-d).expm1() + d)


@observe
def entropy(entropy: Tensor, mask: Tensor) -> Mapping[str, float]:
    """Mean per token of the policy's entropy in nats, over the whole vocabulary: ``entropy``."""
    return _means(mask, entropy=entropy)


@observe
def weights(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Mapping[str, float]:
    """The raw token ratios: mean, extremes, effective sample size as a share of the tokens.

    ``ratio_ess`` is (sum r)^2 / (N sum r^2), before any clip or cap.
    """
    on = mask.bool()
    if not bool(on.any()):
        return {}
    r = (logp[on] - old_logp[on]).exp()
    low, high = r.aminmax()
    found = torch.stack([r.mean(), low, high, r.sum() ** 2 / (r.numel() * (r**2).sum())])
    names = ("ratio_mean", "ratio_min", "ratio_max", "ratio_ess")
    return dict(zip(names, found.tolist(), strict=True))


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


def _means(mask: Tensor, **per_token: Tensor) -> dict[str, float]:
    """The mean of each over mask-1 tokens; 0 where there is none."""
    on = mask.bool()
    found = torch.stack([x[on] for x in per_token.values()]).sum(1) / max(1, int(on.sum()))
    return dict(zip(per_token, found.tolist(), strict=True))


def _beyond(ratio: Tensor, interval: tuple[float | None, float | None]) -> tuple[Tensor, Tensor]:
    """Strictly below and strictly above; nothing is beyond an inactive side."""
    low, high = interval
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return nothing if low is None else ratio < low, nothing if high is None else ratio > high


def _rate(hit: Tensor, among: Tensor) -> float:
    return float((hit & among).sum()) / max(1, int(among.sum()))
