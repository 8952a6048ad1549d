"""P1, P7, P8, P12, P13, P16-P18: what a component must do. One function a property.

Each takes a subject and a batch and raises AssertionError where the property does not hold (a bench
that refuses the component raises LabError).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_origin

import torch
from invariances import agree, p2_detached, p3_junk, p4_pad_columns, refusal
from subjects import (
    Batch,
    Outcome,
    Subject,
    alternatives,
    cast,
    corners,
    final,
    full,
    gradients,
    legal,
    off_edges,
    outcome,
    raw,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lab import probe
from lab.errors import LabError
from lab.hookspecs import LIVE, RETURNS
from lab.loss import evaluate
from lab.step import GIVEN, complete

Check: TypeAlias = Callable[[Subject, Batch], None]
#: Where what an update sees has a gradient.
DIFFERENTIABLE = ("loss", "surrogate", "kl", "extra", "critic_loss", "ratio")

# --- P1 ------------------------------------------------------------------------------------------


def p1_form(s: Subject, batch: Batch) -> None:
    """Shape, dtype, finiteness; a gradient where the hook says, nowhere else.

    Of everything that `evaluate` returns, and of the raw function, which the core would broadcast.
    """
    if s.component is not None and s.hook != "observe":
        _raw_form(s, full(batch))
    mask = batch["mask"]
    live = {n: batch[n].detach().clone().requires_grad_() for n in ("logp", "entropy", "values")}
    out = evaluate(s.bench, **{**batch, **live})
    for name, x in vars(out).items():
        if isinstance(x, Tensor):
            assert x.shape == (() if name == "loss" else mask.shape), f"{s.label}: {name}"
            assert x.dtype == mask.dtype, f"{s.label}: {name} is {x.dtype}"
            assert bool(x.isfinite().all()), f"{s.label}: {name} is not finite"
            fixed = name not in DIFFERENTIABLE
            assert not (fixed and x.requires_grad), f"{s.label}: {name} has a gradient"
    every = gradients(out.loss, live)
    assert all(bool(g.isfinite().all()) for g in every.values()), f"{s.label}: its gradient"


def _raw_form(s: Subject, step: dict[str, Any]) -> None:
    live = {n: step[n].detach().clone().requires_grad_() for n in LIVE.get(s.hook, ())}
    result = raw(s, {**step, **live})
    assert isinstance(result, Tensor), f"{s.label} returned {type(result).__name__}"
    kind, mask = RETURNS[s.hook], step["mask"]
    due = mask.shape if kind == "PerToken" else mask.shape[:1]
    assert result.shape == due, f"{s.label} returned {list(result.shape)}, not {list(due)}"
    dtype = torch.bool if kind == "RowFlag" else mask.dtype
    assert result.dtype == dtype, f"{s.label} returned {result.dtype}, not {dtype}"
    named = live.keys() & set(s.bound.component.inputs)
    if s.hook in LIVE and named:
        reached = gradients(result.sum(), live).keys()
        assert reached & named, f"{s.label}: no gradient in {sorted(named)}"
    elif not s.bound.component.declared.wrapper:
        assert not result.requires_grad, f"{s.label} returned a tensor with a gradient"


# --- P7 ------------------------------------------------------------------------------------------


def p7_knob(s: Subject, name: str) -> None:
    """A declared parameter or slot option changes an output, loss or gradient somewhere.

    Tried with all else at its defaults, then with one other setting moved at a time; on a batch
    with a short budget and a far reference, and on one with a group of one.
    """
    if s.exempt(f"P7.{name}"):
        return
    names = [c.name for c in s.shelf if c.hook == "aggregate"]
    tried = 0
    for around in _contexts(s, name, names):
        if not legal(around):
            continue
        wants = [_all_it_does(around, b) for b in acting()]
        for value in alternatives(s.knobs[name], names):
            other = around.at(**{name: value})
            if not legal(other):
                continue
            tried += 1
            for batch, want in zip(acting(), wants, strict=True):
                if _differ(_all_it_does(other, batch), want):
                    return
    raise AssertionError(f"{s.label}: {name} changes nothing ({tried} values tried)")


def _contexts(s: Subject, name: str, names: list[str]) -> Iterator[Subject]:
    yield s
    others = {n: alternatives(p, names) for n, p in s.knobs.items() if n != name}
    for other in sorted(others, key=lambda n: len(others[n])):
        few = others[other] if get_origin(s.knobs[other].type) is Literal else others[other][:3]
        yield from (s.at(**{other: value}) for value in few)


@functools.cache
def acting() -> list[dict[str, Any]]:
    """Batches on which whatever a component has would show."""
    made = ("advantages", "returns", "token_rewards", "lengths")
    step = cast(probe.batch(4, torch.float64), torch.float64)
    first = {n: x for n, x in step.items() if n in GIVEN and n not in made}
    first |= {"budget": 4, "ref_logp": first["ref_logp"] - 2}
    alone = {**first, "group": torch.where(torch.arange(8) == 0, 99, first["group"])}
    return [first, alone]


def _all_it_does(s: Subject, batch: Batch) -> Outcome | str:
    """Its outcome, once more after its controller has seen the rollout; or why it is refused."""
    s.bench.now.memory.clear()
    try:
        found = outcome(s.bench, batch)
        s.bench.remember(complete(batch))
        later = outcome(s.bench, batch) if s.bench.now.memory else {}
        return found | {f"{n}, later": x for n, x in later.items()}
    except LabError as e:
        return str(e)


def _differ(a: Outcome | str, b: Outcome | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) != isinstance(b, str)
    return a.keys() != b.keys() or any(not torch.equal(a[n], b[n]) for n in a)


# --- P8 ------------------------------------------------------------------------------------------


def p8_fresh(s: Subject, batch: Batch) -> None:
    """At logp = old (and the sampler the same) a ratio is exactly 1 and the pull is A.

    With advantages of both signs, one a row: a sequence's ratio mixes those of its tokens.
    """
    if s.exempt("P8"):
        return
    mask = batch["mask"]
    row = torch.linspace(-2.0, 1.5, mask.shape[0], dtype=mask.dtype)[:, None]
    advantages = torch.where(mask.bool(), row, torch.zeros_like(mask))
    fresh = {"logp": batch["old_logp"], "rollout_logp": batch["old_logp"]}
    out = evaluate(s.bench, **{**batch, **fresh, "advantages": advantages})
    if out.ratio is not None:
        assert bool((out.ratio == 1).all()), f"{s.label}: ratio {out.ratio.tolist()}"
    tolerance = 1e-5 if mask.dtype == torch.float32 else 1e-12
    agree({"pull": out.pull}, {"pull": advantages}, tolerance, f"{s.label} at ratio 1")


# --- P12, P13 ------------------------------------------------------------------------------------


def p12_constant_groups(s: Subject) -> None:
    """Equal rewards in a group: advantages of exactly 0, in float32."""
    if s.exempt("P12"):
        return
    for reward in (0.1, 0.3, 0.7):
        for size in range(3, 17):
            ones = torch.ones(2 * size, 2)
            rewards = torch.full((2 * size,), reward)
            given = dict.fromkeys(("logp", "old_logp", "rollout_logp", "ref_logp"), -ones)
            given |= {"values": 0 * ones, "mask": ones, "rewards": rewards}
            cut = torch.zeros(2 * size, dtype=torch.bool)
            group = torch.arange(2 * size) % 2
            out = evaluate(s.bench, **given, group=group, truncated=cut, budget=4)
            worst = float(out.advantages.abs().max())
            assert worst == 0, f"{s.label}: {size} rewards of {reward} give {worst}"


def p13_singleton(s: Subject, batch: Batch) -> None:
    """A group of one is refused by name, or has the declared advantage of 0; never a raw reward."""
    if s.exempt("P13"):
        return
    group = batch["group"].clone()
    group[0] = 99
    given = {**batch, "group": group, "rewards": batch["rewards"] + 1.5, "token_rewards": None}
    words = refusal(lambda: evaluate(s.bench, **given))
    if words:
        assert "needs groups of at least" in words, f"{s.label} refuses with other words: {words}"
        return
    alone = evaluate(s.bench, **given).advantages[0]
    assert bool(alone.isfinite().all()), f"{s.label}: a group of one has {alone.tolist()}"
    if s.hook == "advantage":
        assert bool((alone == 0).all()), f"{s.label}: a group of one has {alone.tolist()}"


# --- P16 -----------------------------------------------------------------------------------------


#: What reading `x.data` calls.
DATA = vars(torch._C.TensorBase)["data"].__get__


class Held(TorchFunctionMode):
    """Records what a component holds constant (`detach`, `no_grad`), or replays it.

    The frozen form of a loss: with what was detached at one point held at its value there, the loss
    has the derivative that autograd says it has.
    """

    def __init__(self, held: list[Tensor] | None = None) -> None:
        super().__init__()
        self.held = [] if held is None else held
        self.replay = None if held is None else iter(held)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        stops = func in (torch.Tensor.detach, DATA)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        if (not stops and torch.is_grad_enabled()) or (args and out is args[0]):
            return out
        if self.replay is None:
            self.held.append(out.clone())
            return out
        return next(self.replay).clone()


def p16_derivative(s: Subject, batch: Batch) -> None:
    """Central differences of the frozen form = autograd, 1e-6 relative, for each term alone.

    Along four random directions of logp, of a live entropy and of the live critic's values.
    """
    given, _ = final(s, off_edges(batch))
    live = {n: given[n].detach().clone() for n in ("logp", "entropy", "values")}
    on = given["mask"].bool()
    generator = torch.Generator().manual_seed(int(on.sum()))
    with Held() as base:
        terms, slopes = _terms(s, given, live)
    for _ in range(4):
        shape = (len(live), *on.shape)
        random = torch.randn(shape, generator=generator, dtype=torch.float64) * on
        moves = dict(zip(live, random, strict=True))
        ends = []
        for h in (1e-6, -1e-6):
            with Held(base.held):
                moved, _ = _terms(s, given, {n: x + h * moves[n] for n, x in live.items()})
            ends.append(moved)
        for name in terms:
            due = sum(float((g * moves[n]).sum()) for n, g in slopes[name].items())
            got = float((ends[0][name] - ends[1][name]).detach()) / 2e-6
            scale = max([float(g.norm()) for g in slopes[name].values()], default=0.0)
            # the difference of two sums of this size is rounded to 1e-16 / 1e-6 of it
            noise = 1e-9 * max(1.0, abs(float(terms[name].detach())))
            assert abs(got - due) <= 1e-6 * max(scale, abs(due)) + noise, (
                f"{s.label}: the derivative of {name} is {got}, autograd says {due}"
            )


def _terms(
    s: Subject, given: Batch, at: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Each term's sum, and its gradients."""
    live = {n: x.requires_grad_() for n, x in at.items()}
    out = evaluate(s.bench, **{**given, **live})
    named = {"surrogate": out.surrogate, "kl": out.kl, "extra": out.extra}
    named |= {"critic_loss": out.critic_loss, "loss": out.loss}
    sums = {n: x.sum() for n, x in named.items() if x is not None}
    slopes = {n: gradients(x, live) for n, x in sums.items()}
    return sums, slopes


# --- P17, P18 ------------------------------------------------------------------------------------


def p17_single_precision(s: Subject, batch: Batch) -> None:
    """float32 = float64 on inputs rounded to float32 first: gradients 1e-5 of their largest.

    With log-probs down to -50, and rewards 30 away from 0 where the rollout's side is tried.
    """
    moved = off_edges(cast(batch, torch.float64))
    down = torch.linspace(0, -49, moved["logp"].numel(), dtype=torch.float64)
    names = [n for n in moved if n.endswith("logp")]
    far = {n: moved[n] + down.reshape(moved[n].shape) for n in names}
    if s.hook == "advantage":
        far |= {"rewards": moved["rewards"] + 30, "token_rewards": None}
    single = cast({**moved, **far}, torch.float32)
    got, want = outcome(s.bench, single), outcome(s.bench, cast(single, torch.float64))
    for name, x in want.items():
        if name.startswith(("d ", "pull", "advantages", "returns")):
            error = float((got[name].double() - x).abs().max())
            bound = 1e-5 * float(x.abs().max())
            assert error <= bound, f"{s.label}: {name} is off by {error} of {float(x.abs().max())}"


def p18_search_space(s: Subject, batch: Batch) -> None:
    """P1-P4 at both ends and the middle of each search space, each of which is legal."""
    wide = {**batch, "budget": 2**14}
    for here in corners(s):
        p1_form(here, wide)
        p2_detached(here, wide)
        p3_junk(here, wide, junk=(torch.nan,))
        p4_pad_columns(here, wide)
