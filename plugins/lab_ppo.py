"""PPO: a critic with GAE, the token ratio, the clipped surrogate, the value loss."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lab import (
    Float,
    advantage,
    critic_loss,
    critic_target,
    masked_mean,
    masked_var,
    normalize,
    ratio,
    recipes,
    surrogate,
    to_go,
)

Epsilon = Annotated[float, Float(0.05, 0.5)]
Lambda = Annotated[float, Float(0.9, 1.0)]


def _check_discounts(gamma: float, lam: float = 1.0) -> None:
    if not 0 <= gamma <= 1 or not 0 <= lam <= 1:
        raise ValueError(f"gamma={gamma}, lam={lam}; both lie in [0, 1]")


@advantage
def gae(
    token_rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: Lambda = 0.95,
) -> Tensor:
    """Discounted sum of TD residuals (GAE).

    delta_t = R_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, where t+1 is the next
    mask token and V after the last one is `bootstrap`: 0 where the row terminated, so a true end
    gates value and trace, a cut the trace alone. Schulman et al. 1506.02438 eqs. 11, 16.
    """
    _check_discounts(gamma, lam)
    on = mask.bool()
    next_value, trace = bootstrap, torch.zeros_like(bootstrap)
    columns = []
    for t in reversed(range(mask.shape[1])):
        here = token_rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * trace
        # a gap is no step: value and trace pass through it undecayed
        trace = torch.where(on[:, t], here, trace)
        next_value = torch.where(on[:, t], values[:, t], next_value)
        columns.append(trace)
    return torch.stack(columns[::-1], 1)


@normalize
def whiten(
    advantages: Tensor,
    mask: Tensor,
    *,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-8,
    shift_mean: bool = True,
) -> Tensor:
    """(A - mean) / sqrt(var + eps) over the mask tokens; `shift_mean=False` adds the mean back.

    As in TRL's and verl's PPO: ddof 1, eps under the root. The code of Huang et al. (N
    implementation details of RLHF with PPO) has ddof 0.
    """
    if not eps >= 0:
        raise ValueError(f"eps={eps}; it is at least 0")
    mean = masked_mean(advantages, mask)
    scale = (masked_var(advantages, mask, ddof) + eps).sqrt()
    centred = advantages - mean
    whitened = torch.where(scale == 0, torch.zeros_like(centred), centred / scale)
    return whitened if shift_mean else whitened + mean


@critic_target
def raw_plus_values(values: Tensor, advantages: Tensor) -> Tensor:
    """Raw advantage plus rollout value: with gae the lambda-return (1506.02438, footnote 2)."""
    return advantages + values


@critic_target
def lambda_return(
    token_rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: Lambda = 1.0,
) -> Tensor:
    """A lambda-return with a lambda of its own, not the advantage's (VAPO 2504.05118)."""
    return gae(token_rewards, values, bootstrap, mask, gamma=gamma, lam=lam) + values


@critic_target
def monte_carlo(
    token_rewards: Tensor, bootstrap: Tensor, mask: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """The discounted reward to go; a truncated row's future is its bootstrap value."""
    _check_discounts(gamma)
    left = to_go(mask, mask)  # tokens from here to the row's end
    return to_go(token_rewards, mask, gamma) + bootstrap[:, None] * gamma**left


@critic_loss
def squared(values: Tensor, returns: Tensor) -> Tensor:
    """1/2 (V - R)^2."""
    return 0.5 * (values - returns) ** 2


@critic_loss
def clipped(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    c: Annotated[float, Float(0.05, 0.5)] = 0.2,
) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    The value clipping of OpenAI's baselines; c .2 in TRL 1.12, SkyRL and slime.
    """
    if not c > 0:
        raise ValueError(f"c={c}; the value moves within a positive range")
    near = values.clamp(old_values - c, old_values + c)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


@ratio
def token(logp: Tensor, old_logp: Tensor) -> Tensor:
    """exp(logp - old_logp), one ratio a token (1707.06347 section 3)."""
    # old_logp arrives detached: with both attached the value would stay right and the slope be lost
    return (logp - old_logp).exp()


@surrogate
def ppo_unclipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """r A: pull r A, the conservative-policy-iteration objective (1707.06347 eq. 6)."""
    return ratio * advantages


@surrogate(bounds=lambda eps_low, eps_high: (1 - eps_low, 1 + eps_high))
def ppo_clip(
    ratio: Tensor,
    advantages: Tensor,
    *,
    eps_low: Epsilon = 0.2,
    eps_high: Annotated[float, Float(0.05, 0.6)] = 0.2,
) -> Tensor:
    """min(r A, clip(r) A): no further credit past the favourable edge (PPO, 1707.06347 eq. 7).

    Pull r A, and 0 for A > 0 above 1 + eps_high or A < 0 below 1 - eps_low. The minimum is what
    keeps the pull of a move in the wrong direction; on an edge the token counts as inside.
    """
    if not 0 < eps_low <= 1 or not eps_high > 0:
        raise ValueError(
            f"eps_low={eps_low}, eps_high={eps_high}; 0 < eps_low <= 1 and 0 < eps_high"
        )
    return torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)


@surrogate(wrapper=True)
def dual_clip(
    advantages: Tensor, *, c: Annotated[float, Float(1.5, 10.0)] = 3.0
) -> Generator[None, Tensor, Tensor]:
    """For A < 0: max(objective, c A), so a large ratio stops pulling (1912.09729 eq. 5).

    For objectives of the form w(r) A. Around A log p (cispo, reinforce) it never acts: with A < 0
    and log p <= 0 the objective lies above c A.
    """
    if not c > 1:
        raise ValueError(f"c={c}; it bounds the ratio from above, so it lies above 1")
    gain = yield
    floor = c * advantages
    # selected, not torch.maximum: on the edge that would halve the pull, and edges are inside
    return torch.where((advantages < 0) & (gain < floor), floor, gain)


@recipes
def named() -> Mapping[str, Mapping[str, Any]]:
    trl = "TRL 1.12, PPOConfig"
    return {
        "ppo": {
            "doc": "GAE and a critic, whitened advantages, PPO-Clip, k1 in the reward.",
            "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95},
            "normalize": {"name": "whiten", "ddof": 1, "eps": 1e-8},
            "critic_loss": {"name": "clipped", "c": 0.2},
            "ratio": "token",
            "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
            "aggregate": "token_mean",
            "kl": {
                "name": "in_reward",
                "estimator": "k1",
                "beta": 0.05,
                "credit": "to_go",
                "when": "before",
            },
            "loop": {"epochs": 4, "critic_coef": 0.1},
            "source": {
                "recipe": "1707.06347 eq. 7, in the form of TRL 1.12's PPOTrainer",
                "advantage.gamma": trl,
                "advantage.lam": trl,
                "normalize.ddof": "TRL 1.12, masked_whiten",
                "normalize.eps": "TRL 1.12, masked_whiten",
                "critic_loss.c": trl,
                "surrogate.eps_low": "1707.06347 section 6.1, table 1; TRL 1.12",
                "surrogate.eps_high": "1707.06347 section 6.1, table 1; TRL 1.12",
                "kl.estimator": trl,
                "kl.beta": trl,
                "kl.credit": "TRL 1.12: the cost of each token, summed by GAE",
                "kl.when": "TRL 1.12: part of the rewards that GAE sees",
                "loop.epochs": trl,
                "loop.critic_coef": trl,
            },
        },
    }
