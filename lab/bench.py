"""The bench: the few components that one run uses, wired to the hooks, and nothing else.

A fresh plugin manager per bench holds exactly one implementation of each hook that the recipe
fills: nothing installed changes a run unless the recipe names it. Building a bench calls each
component once on a tiny probe, so what is wrong with it is found before any training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab import checks, probe, wiring
from lab.binding import Bound, Moment, resolve, single
from lab.errors import LabError
from lab.hookspecs import KINDS, LIVE, OPTIONS, RETURNS, inputs
from lab.recipe import Recipe, Use
from lab.shelf import Shelf
from lab.step import Step

#: What counts as inside where the surrogate declares no interval of its own.
COMPARISON_INTERVAL = (0.8, 1.2)
#: What else would do where an input is missing.
HINTS = {
    "bootstrap": " (truncated or stop_reason would do where no row was cut)",
    "truncated": " (stop_reason would do)",
    "rewards": " (token_rewards would do)",
    "token_rewards": " (rewards would do)",
    "advantages": " (rewards would do, and what the advantage needs)",
}


@dataclass(frozen=True)
class Kept:
    """What the filters say of each row, [B] bool each.

    Attributes:
        rows: it stays; the others carry no gradient.
        stats: `advantage` and `normalize` see it.
        shares: the shares count it.
    """

    rows: Tensor
    stats: Tensor
    shares: Tensor


class Bench:
    """A recipe's components behind one method per hook.

    Each method takes the step's tensors by name, sets per-token inputs to 0 off the mask, detaches
    all through which no gradient may flow, calls the hook, and sets the result to 0 off the mask
    (a ratio to 1).

    Args:
        recipe: what to wire.
        shelf: where its components are.
        observers: numbers to record, by name (with parameters as a recipe's entry).
        interval: the comparison interval for surrogates that declare none.

    Attributes:
        needs: the inputs that the components name, ``ref_logp`` for example.
        now: memory, progress and random key; the loop moves it on.
        watch: told what each hook returned, while a loop sets it.
        bounds: the surrogate's declared ratio interval; None: that side is inactive, or undeclared.
        interval: the ratio interval that counts as inside: the declared one, or the comparison's.

    Raises:
        LabError: for anything that is wrong with the recipe or one of its components.
    """

    def __init__(
        self,
        recipe: Recipe,
        shelf: Shelf,
        observers: Iterable[Use] = (),
        interval: tuple[float, float] = COMPARISON_INTERVAL,
    ) -> None:
        self.recipe = recipe
        self.now = Moment()
        self.watch: Callable[[str, Tensor], None] | None = None
        self.bound = wiring.components(recipe, shelf)
        self.observers = [b for use in observers for b in resolve("observe", use, shelf)]
        self._own = own = wiring.own_aggregates(self.bound, shelf)
        self.needs = wiring.needs([*self.bound, *own.values()], recipe.loop.anchor)
        around = [b for b in self.bound if b.slot == "wrap" and b.component.hook == "aggregate"]
        self._on_hook = wiring.by_hook([*self.bound, *own.values()])
        self._hooks = wiring.wire(self.bound, self.now)
        self._own_hooks = {s: wiring.wire([b, *around], self.now) for s, b in own.items()}
        checks.check_declarations(recipe, self.bound)
        with torch.inference_mode(False), torch.enable_grad():  # the probe looks for gradients
            probe.run(self.bound, own.values(), self._call, self.now)
            probe.run_observers(self.observers, self.now)
            checks.check_aggregation(recipe, self.bound, self._call)
        (surrogate,) = self.get("surrogate")  # after the probe, which finds illegal parameters
        declared = surrogate.declares("bounds")
        self.bounds: tuple[float | None, float | None] = declared or (None, None)
        self.interval: tuple[float | None, float | None] = declared or interval

    @property
    def everything(self) -> list[Bound]:
        """Every component of the run: the recipe's, aggregates of single slots, observers."""
        return [*self.bound, *self._own.values(), *self.observers]

    @property
    def named(self) -> frozenset[str]:
        """Every input that a component or an observer names: what there is to compute."""
        return self.needs | {n for b in self.observers for n in b.component.inputs}

    @property
    def has_critic(self) -> bool:
        """A critic exists exactly when a component names ``values``."""
        return "values" in self.needs

    @property
    def has_reference(self) -> bool:
        """A reference model exists when a component or a chosen observer names ``ref_logp``."""
        return "ref_logp" in self.named

    def get(self, hook: str) -> list[Bound]:
        """What the recipe puts on a hook, without the wrappers."""
        return [b for b in self.bound if b.component.hook == hook and b.slot != "wrap"]

    def option(self, hook: str, name: str) -> Any:
        """A slot option of the component on a hook; its default where the slot is empty."""
        found = self.get(hook)
        return found[0].options[name] if found else {o.name: o.default for o in OPTIONS[hook]}[name]

    def own_share(self, slot: str) -> bool:
        """Whether a slot (kl, extra) names an aggregate of its own."""
        return slot in self._own_hooks

    def record(self) -> dict[str, Any]:
        """Every choice with every parameter, for a run's record."""
        rows = [b.record() for b in self.bound]
        shares = {slot: b.record() for slot, b in self._own.items()}
        loop = self.recipe.loop.model_dump()
        return {"recipe": self.recipe.name, "components": rows, "own_shares": shares, "loop": loop}

    def remember(self, step: Mapping[str, Any]) -> None:
        """Call each component's controller with the rollout's statistics, once per rollout."""
        for b in self.bound:
            b.remember(self.now, step)

    def keep(self, step: Step) -> Kept:
        """Which rows stay, and what a refused one still counts for, by its filter's options."""
        rows = torch.ones(step["mask"].shape[0], dtype=torch.bool, device=step["mask"].device)
        entries = self.get("keep")
        if not entries:
            return Kept(rows, rows, rows)
        rows = self._call("keep", step)
        given = self._selected("keep", step)
        refused, hidden, uncounted = (torch.zeros_like(rows) for _ in range(3))
        for b in entries:
            out = ~single(b, self.now)(*(given[n] for n in b.component.inputs))
            refused |= out
            hidden |= out & (b.options["stats"] == "kept")
            uncounted |= out & (b.options["mode"] == "renormalise")
        left = ~rows & refused  # a row that only a wrapper refused is gone for every purpose
        return Kept(rows, rows | (left & ~hidden), rows | (left & ~uncounted))

    def shape_reward(self, step: Step) -> Tensor:
        """The shaped rewards [B]; the rewards themselves where the slot is empty."""
        return self._call("shape_reward", step) if self.get("shape_reward") else step["rewards"]

    def kl_reward(self, step: Step) -> Tensor:
        """The cost of each token [B,T], beta included."""
        return self._call("kl_reward", step)

    def advantage(self, step: Step) -> Tensor:
        """The raw advantages [B,T]."""
        return self._call("advantage", step)

    def critic_target(self, step: Step) -> Tensor:
        """The critic's targets [B,T]; the step's advantages are the raw ones."""
        return self._call("critic_target", step)

    def normalize(self, step: Step) -> Tensor:
        """The normalised advantages [B,T]; the advantages themselves where the slot is empty."""
        return self._call("normalize", step) if self.get("normalize") else step["advantages"]

    def ratio(self, step: Step) -> Tensor:
        """The importance ratios [B,T], 1 off the mask."""
        return self._call("ratio", step)

    def surrogate(self, step: Step) -> Tensor:
        """The objective of each token [B,T], to be maximised."""
        return self._call("surrogate", step)

    def kl_loss(self, step: Step) -> Tensor:
        """The penalty of each token [B,T], beta included."""
        return self._call("kl_loss", step)

    def extra_loss(self, step: Step) -> Tensor:
        """The sum of the further losses of each token [B,T]."""
        return self._call("extra_loss", step)

    def critic_loss(self, step: Step) -> Tensor:
        """The critic's loss of each token [B,T]."""
        return self._call("critic_loss", step)

    def aggregate(self, step: Step, slot: str = "surrogate") -> Tensor:
        """The share of each token [B,T] in the loss of a slot: surrogate, kl or extra."""
        return self._call("aggregate", step, self._own_hooks.get(slot))

    def observe(self, at: str, step: Mapping[str, Any]) -> dict[str, float]:
        """What the observers of this moment record of a step's tensors.

        Raises:
            LabError: if two observers record one name, or one records what is no number.
        """
        out: dict[str, float] = {}
        on = step["mask"].bool()
        for b in self.observers:
            given = [step.get(name) for name in b.component.inputs]
            if b.component.declared.at != at or any(x is None for x in given):
                continue
            names = zip(b.component.inputs, given, strict=True)
            numbers = single(b, self.now)(*(_at_mask(n, x, on, live=False) for n, x in names))
            if twice := out.keys() & numbers.keys():
                raise LabError(
                    f"{b.component}: another observer records {sorted(twice)[0]!r} already"
                )
            out |= numbers
        return out

    def _call(self, hook: str, step: Step, hooks: Any = None) -> Tensor:
        if not self.get(hook):
            raise LabError(f"recipe {self.recipe.name!r} has no component on {hook}")
        given = self._selected(hook, step)
        _check_groups(self._on_hook[hook], given.get("group"))
        with torch.set_grad_enabled(torch.is_grad_enabled() and hook in LIVE):
            result: Tensor = getattr(hooks or self._hooks, hook)(**given)
        _check_result(result, hook, step["mask"], self.get(hook)[0])
        if RETURNS[hook] == "PerToken":
            fill = torch.ones_like(result) if hook == "ratio" else torch.zeros_like(result)
            result = torch.where(step["mask"].bool(), result, fill)
        if self.watch is not None:
            self.watch(hook, result)
        return result

    def _selected(self, hook: str, step: Step) -> dict[str, Any]:
        """The hook's inputs that a component names, at the mask and detached; else None."""
        on = step["mask"].bool()
        given: dict[str, Any] = {}
        for name in inputs(hook):
            asker = next((b for b in self._on_hook[hook] if name in b.component.inputs), None)
            x = step.get(name)
            if asker is not None and x is None:
                raise LabError(
                    f"{asker.component} needs {name}, which was not given{HINTS.get(name, '')}"
                )
            live = name in LIVE.get(hook, ())
            given[name] = None if asker is None else _at_mask(name, x, on, live)
        return given


def _check_result(result: Tensor, hook: str, mask: Tensor, b: Bound) -> None:
    """Shape and precision once more, for components none of whose inputs could tell them."""
    kind = RETURNS[hook]
    shape, letters = (mask.shape, "[B,T]") if kind == "PerToken" else (mask.shape[:1], "[B]")
    dtype = torch.bool if kind == "RowFlag" else mask.dtype
    if result.shape != shape:
        named = {mask.shape[0]: "B", mask.shape[1]: "T"} if mask.shape[0] != mask.shape[1] else {}
        got = ",".join(named.get(n, str(n)) for n in result.shape)
        hint = "; lab.spread(x, mask) makes [B,T] of [B]" if result.ndim == 1 else ""
        raise LabError(f"{b.component} returned [{got}] where {letters} was due{hint}")
    if result.dtype != dtype:
        raise LabError(f"{b.component} returned {result.dtype} where {dtype} was due")


def _at_mask(name: str, x: Any, on: Tensor, live: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    if KINDS[name] == "PerToken":
        # selected, never multiplied: 0 * inf is NaN, in the forward and in the backward pass
        x = torch.where(on, x, torch.zeros_like(x))
    return x if live else x.detach()


def _check_groups(bound: Iterable[Bound], group: Tensor | None) -> None:
    for b in bound:
        needed = b.declares("needs_group")
        if needed < 2 or group is None or not group.numel():
            continue
        ids, counts = torch.unique(group, return_counts=True)
        smallest = int(counts.argmin())
        if int(counts[smallest]) < needed:
            raise LabError(
                f"{b.component} needs groups of at least {needed} rows; "
                f"group {int(ids[smallest])} has {int(counts[smallest])}"
            )
