"""What the properties are checked on: each component and recipe of a shelf, where it can act.

A component stands in the plainest recipe in which what it does shows. `outcome` is all that such a
recipe makes of a batch, gradients included, so that "nothing changes" means nothing at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

import torch
from torch import Tensor

from lab.bench import Bench
from lab.binding import Bound, resolve
from lab.component import REQUIRED, Component, Param
from lab.errors import LabError
from lab.hookspecs import KINDS, OPTIONS, RETURNS, SLOTS
from lab.loss import Evaluation, evaluate, observed
from lab.recipe import Recipe, Use
from lab.shelf import Shelf
from lab.step import complete

Batch: TypeAlias = Mapping[str, Any]
Outcome: TypeAlias = dict[str, Tensor]

PLAINEST: dict[str, Any] = {
    "advantage": "reinforce",
    "ratio": "token",
    "surrogate": "ppo_unclipped",
    "aggregate": "sequence_sum",
    "length_weighted": True,
}
#: hook -> what a component needs around it in order to act.
AROUND: dict[str, dict[str, Any]] = {
    "keep": {"advantage": {"name": "group", "scale": "batch", "singleton": "zero"}},
    "critic_target": {"advantage": "gae"},
    "critic_loss": {"advantage": "gae"},
    "normalize": {"filter": [{"name": "overlong", "stats": "all"}]},
    "observe": {"advantage": "gae", "kl": "in_loss", "extra": ["entropy"]},
}
#: hook -> what a wrapper of it surrounds, where the plainest recipe has nothing there.
SURROUNDED: dict[str, dict[str, Any]] = {
    "keep": {"filter": ["overlong"]},
    "shape_reward": {"shape": ["soft_overlong"]},
    "kl_reward": {"kl": "in_reward"},
    "kl_loss": {"kl": "in_loss"},
    "normalize": {"normalize": "whiten"},
    "extra_loss": {"extra": ["entropy"]},
}
#: Values of a type that are tried beside a search space.
TRIED: dict[Any, tuple[Any, ...]] = {
    int: (1, 2, 3, 7),
    float: (0.0, 0.3, 0.5, 0.8, 1.5, 2.0),
    bool: (True, False),
    type(None): ("none",),
}


@dataclass(frozen=True, eq=False)
class Subject:
    """A component at some settings, or a whole recipe.

    Attributes:
        label: how tests call it.
        spec: the recipe's table that it is tried in.
        component: None for a recipe.
        settings: the component's parameters and slot options, where they are not the defaults.
    """

    label: str
    spec: Mapping[str, Any]
    shelf: Shelf
    component: Component | None = None
    settings: Mapping[str, Any] | None = None

    @functools.cached_property
    def bench(self) -> Bench:
        """The recipe with the component in its slot; LabError where the settings are illegal."""
        spec, observers, c = dict(self.spec), [], self.component
        if c is not None and c.hook == "observe":
            observers = [Use(name=c.name, settings={**required(c), **(self.settings or {})})]
        elif c is not None:
            use = {"name": c.name, **required(c), **(self.settings or {})}
            spec[c.slot] = [use] if SLOTS[c.slot].many else use
        return Bench(Recipe.of(spec, "test", self.shelf), self.shelf, observers)

    @functools.cached_property
    def bound(self) -> Bound:
        """The component with its settings, as the bench has it."""
        c = self.component
        assert c is not None, f"{self.label} is a whole recipe"
        use = Use(name=c.name, settings={**required(c), **(self.settings or {})})
        return next(b for b in resolve(c.slot, use, self.shelf) if b.component is c)

    @property
    def hook(self) -> str:
        """The component's hook; ``recipe`` for a recipe."""
        return self.component.hook if self.component else "recipe"

    @property
    def knobs(self) -> dict[str, Param]:
        """Every parameter and slot option, but those that only the loop reads."""
        c = self.component
        if c is None:
            return {}
        options = () if c.declared.wrapper else OPTIONS.get(c.hook, ())
        read = {o.name: Param(o.type, o.default, None) for o in options if "the loop" not in o.doc}
        return {**c.params, **read}

    def at(self, **settings: Any) -> Subject:
        """The same subject with some settings changed."""
        changed = {**(self.settings or {}), **settings}
        shown = ", ".join(f"{n}={x}" for n, x in changed.items())
        return replace(self, label=f"{self.label.split('(')[0]}({shown})", settings=changed)

    def exempt(self, item: str) -> bool:
        """Whether one of its components declares that a property does not hold for it."""
        declared = [self.component] if self.component else [b.component for b in self.bench.bound]
        return any(item in c.declared.exempt for c in declared)


def subjects(shelf: Shelf) -> list[Subject]:
    """Every component and every recipe of a shelf."""
    components = [subject(c, shelf) for c in shelf]
    recipes = [Subject(f"recipe {n}", {"base": n}, shelf) for n in shelf.names("recipes")]
    return components + recipes


def subject(c: Component, shelf: Shelf) -> Subject:
    """A component in the plainest recipe in which it can act."""
    around = SURROUNDED if c.declared.wrapper else AROUND
    return Subject(f"{c.hook} {c.name}", {**PLAINEST, **around.get(c.hook, {})}, shelf, c)


def required(c: Component) -> dict[str, Any]:
    """A value for each parameter without a default."""
    return {n: alternatives(p)[0] for n, p in c.params.items() if p.default is REQUIRED}


def alternatives(p: Param, names: Iterable[str] = ()) -> list[Any]:
    """Values to try for a parameter: its space (the middle first), its options, its type's numbers.

    Args:
        names: what to try for a slot option that takes a component's name.
    """
    kinds = get_args(p.type) if get_origin(p.type) in (Union, UnionType) else (p.type,)
    probes = list(p.space.probes()) if p.space else []
    found = probes[len(probes) // 2 :] + probes[: len(probes) // 2]
    for kind in kinds:
        found += get_args(kind) if get_origin(kind) is Literal else TRIED.get(kind, ())
    return [*found, *(names if object in kinds else ())]


@functools.cache
def variants(s: Subject) -> tuple[Subject, ...]:
    """The subject, and at each option of each parameter of few options, where that is legal."""
    few = {n: p for n, p in s.knobs.items() if get_origin(p.type) is Literal or p.type is bool}
    tried = [s.at(**{n: x}) for n, p in few.items() for x in alternatives(p) if x != p.default]
    return (s, *(t for t in tried if legal(t)))


@functools.cache
def corners(s: Subject) -> tuple[Subject, ...]:
    """The subject at both ends and the middle of each search space."""
    spaces = {n: p.space for n, p in s.knobs.items() if p.space}
    return tuple(s.at(**{n: x}) for n, space in spaces.items() for x in space.probes())


def legal(s: Subject) -> bool:
    """Whether its bench can be built."""
    try:
        return bool(s.bench)
    except LabError:
        return False


# --- what comes out ------------------------------------------------------------------------------


def outcome(bench: Bench, batch: Batch) -> Outcome:
    """All that a recipe makes of a batch: every result, every gradient, every metric."""
    live = {n: batch[n].detach().clone().requires_grad_() for n in ("logp", "entropy", "values")}
    out = evaluate(bench, **{**batch, **live})
    found = {n: x for n, x in vars(out).items() if isinstance(x, Tensor)}
    found |= {f"share of {n}": x for n, x in out.shares.items()}
    found |= {f"d loss / d {n}": g for n, g in gradients(out.loss, live).items()}
    if out.critic_loss is not None:
        slopes = gradients(out.critic_loss.sum(), live)
        found |= {f"d critic / d {n}": g for n, g in slopes.items()}
    if bench.observers:
        found |= metrics(bench, observed(bench, complete({**batch, **live}), out))
    return {n: x.detach() for n, x in found.items()}


def gradients(y: Tensor, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a scalar by each tensor that it depends on."""
    if not y.requires_grad:
        return {}
    found = torch.autograd.grad(y, list(live.values()), allow_unused=True, retain_graph=True)
    return {n: g for n, g in zip(live, found, strict=True) if g is not None}


def metrics(bench: Bench, step: Mapping[str, Any]) -> Outcome:
    """What the bench's observers record, at whichever moment."""
    every = [bench.observe(at, step) for at in ("update", "rollout", "eval")]
    return {
        f"metric {n}": torch.tensor(x, dtype=torch.float64) for m in every for n, x in m.items()
    }


def raw(s: Subject, step: Mapping[str, Any]) -> Any:
    """The component's own function on a step, without the core around it; None for an observer."""
    bound, c = s.bound, s.bound.component
    if c.hook == "observe":
        return None
    given = [step[n] for n in c.inputs]
    result = c.function(*given, **bound.values, **bound.reserved(s.bench.now))
    if not c.declared.wrapper:
        return result
    next(result)
    try:
        result.send(inner(c.hook, step))
    except StopIteration as end:
        return end.value
    raise AssertionError(f"{s.label} yields more than once")


def inner(hook: str, step: Mapping[str, Any]) -> Tensor:
    """What a wrapper of a hook is given to surround."""
    like: Tensor = step["logp"] if RETURNS[hook] == "PerToken" else step["rewards"]
    return like > like.mean() if RETURNS[hook] == "RowFlag" else 1.5 * like


def full(batch: Batch, seed: int = 0) -> dict[str, Any]:
    """A step with every input that a hook may name, those the core makes included."""
    step: dict[str, Any] = dict(complete(batch))
    mask, generator = step["mask"], torch.Generator().manual_seed(seed)
    ratio = (step["logp"] - step["old_logp"]).exp()

    def normal() -> Tensor:
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64).to(mask.dtype)

    made = {"ratio": ratio, "surrogate": ratio, "pull": normal(), "share": mask / mask.sum()}
    made |= {"kl": normal(), "extra": normal(), "advantages": normal(), "returns": normal()}
    return {**made, **step, "interval": (0.8, 1.2)}


def final(s: Subject, batch: Batch) -> tuple[dict[str, Any], Evaluation]:
    """The batch with the rollout's results given, so that only the update's hooks run.

    Its mask is 0 on the rows that a filter refused, as an update sees it.
    """
    out = evaluate(s.bench, **batch).detached()
    step = complete(batch)
    mask = out.share.ne(0).to(step["mask"].dtype)
    given: dict[str, Any] = {"advantages": out.advantages, "returns": out.returns, "mask": mask}
    given |= {n: step[n] for n in ("rewards", "lengths") if n in step}
    # token rewards would contradict the rewards of a row that lost its tokens
    return {**batch, **given, "token_rewards": None}, out


# --- other batches of the same content -----------------------------------------------------------


def per_token(batch: Batch) -> list[str]:
    """The names of a batch's [B,T] tensors, without the mask."""
    return [n for n, x in batch.items() if KINDS[n] == "PerToken" and n != "mask" and x is not None]


def junked(batch: Batch, junk: float) -> dict[str, Any]:
    """Junk in every per-token tensor off the mask."""
    on = batch["mask"].bool()
    swept = {
        n: torch.where(on, batch[n], torch.full_like(batch[n], junk)) for n in per_token(batch)
    }
    return {**batch, **swept}


def padded(batch: Batch, columns: int, junk: float = 9.0) -> dict[str, Any]:
    """More pad columns at the right, junk in them."""
    wider = {n: _wider(batch[n], columns, junk) for n in per_token(batch)}
    return {**batch, **wider, "mask": _wider(batch["mask"], columns, 0.0)}


def _wider(x: Tensor, columns: int, value: float) -> Tensor:
    return torch.cat([x, x.new_full((x.shape[0], columns), value)], 1)


def picked(batch: Batch, rows: Tensor) -> dict[str, Any]:
    """Some rows, in some order."""
    return {n: x[rows] if isinstance(x, Tensor) else x for n, x in batch.items()}


def interleaved(batch: Batch, seed: int) -> dict[str, Any]:
    """Each row's tokens in their order, with as many mask-0 columns of junk between them."""
    rows, width = batch["mask"].shape
    generator = torch.Generator().manual_seed(seed)
    place = torch.rand(rows, 2 * width, generator=generator).argsort(1)[:, :width].sort(1).values
    spaced = {
        n: torch.full((rows, 2 * width), 7.0, dtype=batch[n].dtype).scatter(1, place, batch[n])
        for n in per_token(batch)
    }
    mask = batch["mask"].new_zeros(rows, 2 * width).scatter(1, place, batch["mask"])
    return {**batch, **spaced, "mask": mask}


def cast(batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """The same numbers in another precision."""
    return {
        n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in batch.items()
    }


def off_edges(batch: Batch) -> dict[str, Any]:
    """Ratios a hundredth nearer to 1 in their logarithm: none on a clip's, cap's or gate's edge."""
    old = batch["old_logp"]
    return {**batch, "logp": old + 0.99 * (batch["logp"] - old)}
