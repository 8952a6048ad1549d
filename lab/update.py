"""One optimiser step: ratio -> surrogate -> (KL, extra) -> share-weighted sum; critic; step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab import loss
from lab.bench import Bench
from lab.loss import Evaluation
from lab.roles import Roles, Steps
from lab.samples import Samples
from lab.step import Step
from lab.tools import masked_mean


class DivergedError(Exception):
    """What is not finite, in a loss, a gradient, a rollout; no parameter is touched by that step.

    Attributes:
        hook: where it came from: a hook, "gradient", or "sampling".
        component: which component, where one can be named.
        statistic: what was not finite.
    """

    def __init__(self, hook: str, component: str, statistic: str) -> None:
        super().__init__(f"{component or hook}: {statistic}")
        self.hook, self.component, self.statistic = hook, component, statistic


class KLStop(Exception):  # no error: the rollout is left early, as the recipe says
    """KL(old) has reached loop.kl_stop before this step."""


@dataclass(frozen=True)
class Updated:
    """What a step leaves.

    Attributes:
        metrics: its numbers.
        tokens: response tokens of the minibatch.
    """

    metrics: dict[str, float]
    tokens: int


def update(
    bench: Bench,
    roles: Roles,
    samples: Samples,
    step: Step,
    index: Tensor,
    warming: bool = False,
    look: bool = True,
) -> Updated:
    """One optimiser step on some rows of a rollout.

    Args:
        bench: the recipe.
        roles: whose policy and critic learn.
        samples: the rollout's tokens.
        step: the rollout's tensors, as `lab.rollout.prepare` left them.
        index: [b] the rows.
        warming: whether only the critic learns.
        look: whether the observers record.

    Raises:
        DivergedError: for a loss or gradient that is not finite.
        KLStop: where KL(old) of these rows has reached loop.kl_stop: the step is not made.
    """
    named = bench.named if look else bench.needs
    part = _now(bench, roles, samples.rows(index), _rows(step, index), "entropy" in named)
    loop = bench.recipe.loop
    if loop.kl_stop and not warming and kl_old(part) > loop.kl_stop:
        raise KLStop
    part, shares = loss.optimisation_batch(bench, part)
    out = loss.objective(bench, part, shares)
    total = out.loss
    metrics = {"loss": float(out.loss.detach())}
    if out.critic_loss is not None:
        critic = (out.share * out.critic_loss).sum()
        metrics["critic_loss"] = float(critic.detach())
        weighed = loop.critic_coef * critic
        total = weighed if warming else total + weighed
    _refuse_infinite_loss(bench, out, total)
    trained = [roles.policy_steps] if not warming or roles.head is not None else []
    trained += [roles.critic_steps] if roles.critic_steps is not None else []
    for steps in trained:
        steps.forget()
    torch.autograd.backward(total)
    if warming:  # a shared backbone is the policy: a step of its critic would move it
        roles.policy.model.zero_grad()
    metrics |= _stepped(bench, out, roles, trained)
    if look:
        metrics |= bench.observe("update", loss.observed(bench, _detached(part), out.detached()))
    return Updated(metrics, int(part["mask"].sum()))


def kl_old(step: Step) -> float:
    """Mean per token of e^-d - 1 + d, d = old_logp - logp: the estimate that kl_stop watches."""
    d = step["old_logp"] - step["logp"].detach()
    return float(masked_mean((-d).expm1() + d, step["mask"]))


def _rows(step: Step, index: Tensor) -> Step:
    out: Any = {n: x[index] if isinstance(x, Tensor) else x for n, x in step.items()}
    part: Step = out
    return part


def _now(bench: Bench, roles: Roles, samples: Samples, part: Step, entropy: bool) -> Step:
    """The rows with what the current weights say of them."""
    scored = roles.policy.score(samples, bench.recipe.loop.temperature, entropy, roles.head)
    part = {**part, "logp": scored.logp}
    if scored.entropy is not None:
        part["entropy"] = scored.entropy
    if scored.values is not None:
        part["values"] = scored.values[:, :-1]
    elif roles.critic is not None:
        part["values"] = roles.critic(samples)[:, :-1]
    return part


def _detached(step: Step) -> Step:
    out: Any = {n: x.detach() if isinstance(x, Tensor) else x for n, x in step.items()}
    seen: Step = out
    return seen


def _stepped(bench: Bench, out: Evaluation, roles: Roles, trained: list[Steps]) -> dict[str, float]:
    """Clip and step; nothing is touched unless every gradient is finite.

    ``grad_norm`` is the policy's global gradient norm before clipping, ``grad_norm_after`` after,
    ``grad_clipped`` 1 where it was scaled down; ``critic_grad_norm`` is that of a critic with a
    backbone of its own.
    """
    most = bench.recipe.loop.max_grad_norm
    norms = [steps.clip(most) for steps in trained]
    if not all(math.isfinite(n) for n in norms):
        raise _gradient_cause(bench, out)
    for steps in trained:
        steps.optimiser.step()
    metrics: dict[str, float] = {}
    for steps, norm in zip(trained, norms, strict=True):
        if steps is roles.policy_steps:
            after = min(norm, most) if most > 0 else norm
            metrics |= {"grad_norm": norm, "grad_norm_after": after}
            metrics["grad_clipped"] = float(after < norm)
        else:
            metrics["critic_grad_norm"] = norm
    return metrics


def _refuse_infinite_loss(bench: Bench, out: Evaluation, total: Tensor) -> None:
    if bool(torch.isfinite(total)):
        return
    raise _cause(bench, out) or DivergedError("loss", "", f"loss = {float(total.detach())}")


def _gradient_cause(bench: Bench, out: Evaluation) -> DivergedError:
    found = _cause(bench, out)
    return found or DivergedError("gradient", "", "the gradient norm is not finite")


def _cause(bench: Bench, out: Evaluation) -> DivergedError | None:
    """The first hook, in the order of a run, whose numbers are not finite."""
    # a rollout's advantages have been found finite: what is not was made for this minibatch
    late = bench.option("normalize", "per") == "minibatch"
    seen = {
        "normalize" if late else "advantage": out.advantages,
        "ratio": out.ratio,
        "surrogate": out.surrogate,
        "kl_loss": out.kl,
        "extra_loss": out.extra,
        "critic_target": out.returns,
        "critic_loss": out.critic_loss,
    }
    for hook, x in [*seen.items(), ("surrogate", out.pull)]:
        if x is not None and not bool(torch.isfinite(x).all()):
            return not_finite(bench, hook, x, "pulls" if x is out.pull else "values")
    return None


def not_finite(bench: Bench, hook: str, x: Tensor, what: str = "values") -> DivergedError:
    """That a hook's numbers are not finite, with its components and the wrappers around them."""
    names = " + ".join(str(b.component) for b in bench.bound if b.component.hook == hook)
    bad = int((~torch.isfinite(x)).sum())
    return DivergedError(hook, names, f"{bad} of {x.numel()} {what} are not finite")
