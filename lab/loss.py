"""The one objective path: tensors through the hooks to a scalar, its shares and its pulls.

`lab.rollout.prepare` is the rollout's side. Here is the update's: `optimisation_batch` once per
optimiser step, `objective` once per micro-batch, and `evaluate`, which does all of it for a batch
at hand. All that is built on the lab goes through here: there is no second objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab import recipe as recipes
from lab import shelf as shelves
from lab.bench import Bench
from lab.errors import LabError, nearest
from lab.rollout import prepare, with_rollout_values
from lab.shelf import Plugin, Shelf
from lab.step import Step, complete

#: The terms of the loss with their signs: the surrogate is maximised. Each has its shares.
TERMS: Mapping[str, float] = {"surrogate": -1.0, "kl": 1.0, "extra": 1.0}
#: What an observer may see of an evaluation.
OBSERVED = ("advantages", "returns", "ratio", "surrogate", "share", "kl", "extra", "pull")


@dataclass(frozen=True)
class Evaluation:
    """What a recipe makes of a batch. Tensors are [B,T] and 0 off the mask unless said.

    Attributes:
        loss: scalar, to be minimised: sum(share * -surrogate) + sum(share * kl) + sum(share *
            extra), each with its term's shares. There is no critic term in it.
        advantages: as the surrogate saw them.
        returns: the critic's targets; None without a critic.
        critic_loss: the critic's loss of each token; None without a critic. Its scalar is
            (share * critic_loss).sum(), which a loop adds with the weight ``loop.critic_coef``.
        ratio: the recipe's ratio, 1 off the mask; None where no component reads one.
        surrogate: the objective of each token, maximised.
        share: the recipe's share of each token.
        kl: the penalty of each token, beta included; None where the loss has none.
        extra: the sum of the further losses; None where there is none.
        pull: the derivative of the summed surrogate by each logp.
        shares: term -> its shares: ``surrogate`` (which is `share`), ``kl``, ``extra``.
        metrics: what the observers recorded.
    """

    loss: Tensor
    advantages: Tensor
    returns: Tensor | None
    critic_loss: Tensor | None
    ratio: Tensor | None
    surrogate: Tensor
    share: Tensor
    kl: Tensor | None
    extra: Tensor | None
    pull: Tensor
    shares: Mapping[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def detached(self) -> Evaluation:
        """The same numbers without their graph."""
        tensors: Any = {n: x.detach() for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def evaluate(
    recipe: str | Path | Mapping[str, Any] | recipes.Recipe | Bench,
    *,
    plugins: Plugin | Iterable[Plugin] = (),
    observers: Iterable[str] = (),
    shares: Tensor | Mapping[str, Tensor] | None = None,
    **tensors: Any,
) -> Evaluation:
    """What a recipe makes of a batch: loss, advantages, shares, pulls.

    Args:
        recipe: a name, a TOML file, a table, a Recipe, or a Bench (built once, quicker in a loop).
        plugins: files, modules or component functions beside the installed ones.
        observers: names of observers whose numbers come back as `metrics` (a Bench brings its own).
        shares: replaces the recipe's shares, for one micro-batch of a larger one: a tensor [B,T]
            for all terms, or a mapping from term (surrogate, kl, extra) to tensor.
        tensors: inputs of the hooks by name, [B,T] or [B], in float32 or float64 throughout;
            `logp` and `mask` always. Given `advantages` are final: the rollout's hooks are skipped,
            but for a critic's targets, which take them as raw; given `returns` replace those.
            `values` (the live critic's) and `old_values` (the rollout's): one alone serves as both.

    Returns:
        The evaluation in the precision of `logp`. `loss` is differentiable in `logp` (and in a
        live `entropy`), `critic_loss` in `values`.

    Raises:
        LabError: for a recipe or a tensor that is not valid, and for an input that a component
            names and nobody gave.
    """
    bench = (
        recipe if isinstance(recipe, Bench) else load(recipe, plugins=plugins, observers=observers)
    )
    step = complete(tensors)
    if "advantages" not in step:
        step, table = optimisation_batch(bench, prepare(bench, step), shares)
    else:
        if bench.has_critic and "returns" not in step and {"values", "old_values"} & step.keys():
            step["returns"] = bench.critic_target(with_rollout_values(step))
        table = shares_of(bench, step, shares)
    out = objective(bench, step, table)
    return replace(out, metrics=bench.observe("update", observed(bench, step, out)))


def load(
    recipe: str | Path | Mapping[str, Any] | recipes.Recipe,
    *,
    plugins: Plugin | Iterable[Plugin] = (),
    observers: Iterable[str] = (),
) -> Bench:
    """A recipe wired to its components: what `evaluate` builds, to be built once and used often.

    Args:
        recipe: a name, a TOML file (``FILE.toml`` or ``FILE.toml:NAME``), a table, or a Recipe.
        plugins: files, modules or component functions beside the installed ones.
        observers: names of the observers that record.

    Raises:
        LabError: for anything that is wrong with the recipe or one of its components.
    """
    if not isinstance(recipe, str | Path | Mapping | recipes.Recipe):
        raise LabError(
            f"recipe {recipe!r}: a name, a TOML file, a table, a Recipe or a Bench was due"
        )
    given: list[Plugin] = [plugins]
    if isinstance(plugins, Iterable) and not isinstance(plugins, str | Path):
        given = list(plugins)
    shelf = Shelf.installed(given) if given else shelves.installed()
    uses = [recipes.Use(name=name) for name in observers]
    return Bench(recipes.load(recipe, shelf), shelf, uses)


def optimisation_batch(
    bench: Bench, step: Step, shares: Tensor | Mapping[str, Tensor] | None = None
) -> tuple[Step, dict[str, Tensor]]:
    """The rows of one optimiser step with their shares, before any slicing into micro-batches.

    Normalises the advantages where the slot says ``per = "minibatch"``.
    """
    if bench.option("normalize", "per") == "minibatch":
        seen: Step = {**step}
        if "shaped_rewards" in step:
            seen["rewards"] = step["shaped_rewards"]
        step = {**step, "advantages": bench.normalize(seen)}
    return step, shares_of(bench, step, shares)


def shares_of(
    bench: Bench, step: Step, given: Tensor | Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Term -> the share of each token [B,T]: the recipe's, unless a slot names its own aggregate.

    Raises:
        LabError: for given shares of an unknown term or another shape, and for given shares where a
            component reads statistics of the whole optimisation batch.
    """
    if given is not None:
        _refuse_slices(bench)
    present = [n for n in TERMS if n == "surrogate" or bench.get(f"{n}_loss")]
    if isinstance(given, Mapping):
        for name in given:
            if name not in TERMS:
                raise LabError(
                    f"shares: no term {name!r}.{nearest(name, TERMS)} They are {', '.join(TERMS)}"
                )
        table = {
            n: given[n] if n in given else _default_share(bench, step, n, given) for n in present
        }
    elif given is not None:
        table = dict.fromkeys(present, given)
    else:
        counted: Step = {**step, "mask": step.get("counted", step["mask"])}
        table = {
            n: bench.aggregate(counted, n)
            for n in present
            if n == "surrogate" or bench.own_share(n)
        }
        table = {n: table.get(n, table["surrogate"]) for n in present}
    on = step["mask"].bool()
    return {n: _share(n, s, on, step["logp"]) for n, s in table.items()}


def _default_share(bench: Bench, step: Step, term: str, given: Mapping[str, Tensor]) -> Tensor:
    if term == "surrogate" or bench.own_share(term) or "surrogate" not in given:
        raise LabError(
            f"shares: the recipe has a term {term!r} with shares of its own; give them too"
        )
    return given["surrogate"]


def _share(term: str, share: Any, on: Tensor, logp: Tensor) -> Tensor:
    if not isinstance(share, Tensor) or share.shape != on.shape or share.dtype != logp.dtype:
        what = f"{share.dtype} {list(share.shape)}" if isinstance(share, Tensor) else repr(share)
        raise LabError(f"shares of {term} are {what}; {logp.dtype} {list(on.shape)} was due")
    # a share is a constant of the batch: it weighs the loss and must not be trained
    return torch.where(on, share, torch.zeros_like(share)).detach()


def _refuse_slices(bench: Bench) -> None:
    for b in bench.bound:
        if b.declares("whole_batch"):
            raise LabError(
                f"{b.component} reads statistics of the whole optimisation batch; it cannot be "
                "evaluated on a slice with given shares"
            )


def objective(bench: Bench, step: Step, shares: Mapping[str, Tensor]) -> Evaluation:
    """Ratio, surrogate, KL and extra losses of the step's rows, summed with their shares.

    Args:
        step: the rows with the current `logp` (and `values`, `entropy` where somebody names them).
        shares: term -> [B,T], for a micro-batch its rows of the whole optimisation batch's.
    """
    if torch.is_inference_mode_enabled():  # it forbids the derivative that the pull is
        with torch.inference_mode(False), torch.no_grad():
            return objective(bench, _cloned(step), _cloned(shares))
    keeps_graph = torch.is_grad_enabled() and any(
        n in step and step[n].requires_grad for n in ("logp", "entropy", "values")
    )
    with torch.enable_grad():  # the pull is a derivative, also of a batch without a graph
        seen = _as_update_sees(bench, step)
        terms = _terms(bench, seen, shares)
        ratio = seen.get("ratio")
        loss = sum(
            (TERMS[n] * (shares[n] * x).sum() for n, x in terms.items()), step["logp"].new_zeros(())
        )
        pull = _pull(terms["surrogate"], seen["logp"])
        critic = (
            bench.critic_loss(_critic_view(step))
            if "returns" in step and bench.has_critic
            else None
        )
    out = Evaluation(
        loss=loss,
        advantages=seen["advantages"],
        returns=seen.get("returns"),
        critic_loss=critic,
        ratio=ratio,
        surrogate=terms["surrogate"],
        share=shares["surrogate"],
        kl=terms.get("kl"),
        extra=terms.get("extra"),
        pull=pull,
        shares=shares,
    )
    return out if keeps_graph else out.detached()


def _cloned(tensors: Any) -> Any:
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in tensors.items()}


def observed(bench: Bench, step: Step, out: Evaluation) -> dict[str, Any]:
    """What observers see of an update: the step's tensors and all that was made of them.

    `ratio` is the recipe's, or the token's exp(logp - old_logp) where it has none.
    """
    made = {n: x for n, x in vars(out).items() if n in OBSERVED and x is not None}
    seen: dict[str, Any] = {**step, **made, "interval": bench.interval, "bounds": bench.bounds}
    if {"values", "old_values"} & step.keys():
        seen |= {n: x for n, x in _critic_view(step).items() if n in ("values", "old_values")}
    anchor = "rollout_logp" if bench.recipe.loop.anchor == "rollout" else "old_logp"
    if "ratio" not in seen and anchor in step:
        on = step["mask"].bool()
        log_ratio = step["logp"].detach() - seen[anchor]
        seen["ratio"] = torch.where(on, log_ratio, torch.zeros_like(log_ratio)).exp()
    return seen


def _as_update_sees(bench: Bench, step: Step) -> Step:
    """The step with a differentiable logp, the anchor that the loop names, no junk off the mask."""
    logp = step["logp"] if step["logp"].requires_grad else step["logp"].detach().requires_grad_()
    seen: Step = {**step, "logp": logp}
    for name in ("advantages", "returns"):
        if name in step:
            x = step[name]
            # fixed for the batch: nothing trains its own weight or its own target
            seen[name] = torch.where(step["mask"].bool(), x, torch.zeros_like(x)).detach()
    if bench.recipe.loop.anchor == "rollout":
        if "rollout_logp" not in step:
            raise LabError("loop.anchor = 'rollout' needs rollout_logp, which was not given")
        seen["old_logp"] = step["rollout_logp"]
    if bench.get("ratio"):
        seen["ratio"] = bench.ratio(seen)
    return seen


def _terms(bench: Bench, seen: Step, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
    terms = {"surrogate": bench.surrogate(seen)}
    if "kl" in shares:
        terms["kl"] = bench.kl_loss({**seen, "share": shares["kl"]})
    if "extra" in shares:
        terms["extra"] = bench.extra_loss({**seen, "share": shares["extra"]})
    return terms


def _pull(surrogate: Tensor, logp: Tensor) -> Tensor:
    if not surrogate.requires_grad:
        return torch.zeros_like(logp)
    (pull,) = torch.autograd.grad(surrogate.sum(), logp, retain_graph=True, allow_unused=True)
    return torch.zeros_like(logp) if pull is None else pull.detach()


def _critic_view(step: Step) -> Step:
    """One of values and old_values alone serves as both."""
    live = step["values"] if "values" in step else step["old_values"]
    return {**step, "values": live, "old_values": step.get("old_values", live)}


def pull_curve(bench: Bench, ratios: Iterable[float], advantage: float) -> list[float]:
    """The pull of one token at each ratio, old and rollout alike: the objective's weight curve.

    Always derived by autograd, whatever a component declares of itself.
    """
    on_surrogate = [b for b in bench.bound if b.component.hook == "surrogate"]
    rows = max(b.declares("needs_group") for b in on_surrogate)
    ratio = torch.tensor(list(ratios), dtype=torch.float64)
    column = ratio.repeat_interleave(rows)[:, None]  # each ratio as a group of its own
    # low enough that no logp is above 0: a surrogate may read logp itself
    old = torch.full_like(column, -1.0 - max(0.0, float(ratio.log().max())))
    step = complete(
        {
            "logp": old + column.log(),
            "old_logp": old,
            "rollout_logp": old,
            "advantages": torch.full_like(column, advantage),
            "rewards": torch.full_like(column[:, 0], advantage),
            "entropy": torch.ones_like(column),
            "group": torch.arange(len(ratio)).repeat_interleave(rows),
            "mask": torch.ones_like(column),
        }
    )
    shares = {"surrogate": torch.ones_like(column)}
    return objective(bench, step, shares).pull[::rows, 0].tolist()
