"""P2-P6, P14, P15, P19, P20: what must not change a result. One function a property.

Each takes a subject and a batch and raises AssertionError where the property does not hold. Numbers
of the comparison: float64, 1e-10 of the largest number at hand (1 at least), unless bit-identical.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from subjects import (
    Batch,
    Outcome,
    Subject,
    final,
    full,
    gradients,
    interleaved,
    junked,
    outcome,
    padded,
    picked,
    raw,
)
from torch import Tensor

from lab.errors import LabError
from lab.hookspecs import LIVE, RETURNS
from lab.loss import evaluate
from lab.step import complete

#: What may stand off the mask without changing anything.
JUNK = (0.0, 1.0, 200.0, -200.0, 1e30, torch.inf, -torch.inf, torch.nan)
EXACT = 0.0
CLOSE = 1e-10


def agree(got: Outcome, want: Outcome, tolerance: float, what: str) -> None:
    """Two outcomes are the same: bit for bit at tolerance 0, else by the largest number at hand.

    Raises:
        AssertionError: naming the first result that differs.
    """
    assert got.keys() == want.keys(), f"{what}: {sorted(got.keys() ^ want.keys())} only once"
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, f"{what}: {name} is {list(x.shape)}, was {list(y.shape)}"
        scale = max(1.0, float(y.double().abs().max())) if y.numel() else 1.0
        same = torch.equal(x, y) if tolerance == EXACT else _near(x, y, tolerance * scale)
        assert same, f"{what}: {name} is {x.tolist()}, was {y.tolist()}"


def _near(x: Tensor, y: Tensor, distance: float) -> bool:
    return bool(((x - y).abs() <= distance).all())


def at_tokens(found: Outcome, mask: Tensor) -> Outcome:
    """The per-token results at their tokens, in order, whatever stands between."""
    return {n: x[mask.bool()] if x.ndim == 2 else x for n, x in found.items()}


# --- P2 ------------------------------------------------------------------------------------------


def p2_detached(s: Subject, batch: Batch) -> None:
    """No gradient reaches old, rollout or reference log-probs, advantages, values or rewards.

    Only `logp`, and `entropy` where an extra loss names it, are trained by the loss; only the live
    critic's `values` by the critic's loss; nothing by advantages, targets or shares.
    """
    extra = [b for b in s.bench.bound if b.component.hook == "extra_loss"]
    trained = {"logp"} | {"entropy" for b in extra if "entropy" in b.component.inputs}
    for given in (dict(batch), final(s, batch)[0]):
        live = {
            n: x.detach().clone().requires_grad_()
            for n, x in given.items()
            if isinstance(x, Tensor) and x.is_floating_point() and n != "mask"
        }
        out = evaluate(s.bench, **{**given, **live})
        for name in {"advantages", "returns", "share"} - given.keys():
            fixed = getattr(out, name)
            assert fixed is None or not fixed.requires_grad, f"{s.label}: {name} has a gradient"
        reached = gradients(out.loss, live).keys()
        assert reached <= trained, f"{s.label}: the loss trains {sorted(reached - trained)}"
        if out.critic_loss is not None:
            reached = gradients(out.critic_loss.sum(), live).keys()
            assert reached <= {"values"}, f"{s.label}: the critic's loss trains {sorted(reached)}"


# --- P3 ------------------------------------------------------------------------------------------


def p3_junk(s: Subject, batch: Batch, junk: Iterable[float] = JUNK) -> None:
    """Junk off the mask in every input: loss, gradients, shares and metrics are bit-identical.

    Also for given advantages and targets. The raw function is held to the same at mask tokens, so a
    reduction that multiplies by the mask is found although the core hands it zeros.
    """
    for start, values in ((dict(batch), junk), (final(s, batch)[0], (torch.nan,))):
        want = outcome(s.bench, start)
        for x in values:
            agree(outcome(s.bench, junked(start, x)), want, EXACT, f"{s.label} with {x}")
    if s.component is not None and s.hook != "observe":
        step = full(batch)
        clean = raw_at_tokens(s, step)
        for x in junk:
            got = raw_at_tokens(s, junked(step, x))
            agree(got, clean, EXACT, f"the function of {s.label} with {x}")


def raw_at_tokens(s: Subject, step: dict[str, Any]) -> Outcome:
    """The raw function's values and gradients at mask tokens."""
    on = step["mask"].bool()
    live = {
        n: step[n].detach().clone().requires_grad_()
        for n in LIVE.get(s.hook, ())
        if n in s.bound.component.inputs
    }
    result = raw(s, {**step, **live})
    kept = result[on] if RETURNS[s.hook] == "PerToken" else result
    found = {"result": kept.detach()}
    if live:
        found |= {f"d / d {n}": g[on] for n, g in gradients(kept.sum(), live).items()}
    return found


# --- P4, P5, P6 ----------------------------------------------------------------------------------


def p4_pad_columns(s: Subject, batch: Batch) -> None:
    """Three more pad columns change nothing, and carry 0 themselves (a ratio: 1)."""
    width, want = batch["mask"].shape[1], outcome(s.bench, batch)
    found = outcome(s.bench, padded(batch, 3))
    for name, x in found.items():
        empty = 1.0 if name == "ratio" else 0.0
        assert x.ndim < 2 or bool((x[:, width:] == empty).all()), f"{s.label}: {name} on pads"
    cut = {n: x[:, :width] if x.ndim == 2 else x for n, x in found.items()}
    agree(cut, want, CLOSE, f"{s.label} with pad columns")


def p5_rows_and_ids(s: Subject, batch: Batch) -> None:
    """Rows permuted: results permute (but with `rng`). Ids relabelled: nothing changes."""
    want = outcome(s.bench, batch)
    rows = batch["mask"].shape[0]
    if not any("rng" in b.component.reserved for b in s.bench.bound):
        shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
        for order in (torch.arange(rows).flip(0), shuffled):
            due = {n: x[order] if x.ndim else x for n, x in want.items()}
            agree(outcome(s.bench, picked(batch, order)), due, CLOSE, f"{s.label}, rows permuted")
    for ids in (-batch["group"], (batch["group"] * 7 + 3) % 11 - 10**12):
        got = outcome(s.bench, {**batch, "group": ids})
        agree(got, want, CLOSE, f"{s.label}, ids relabelled")


def p6_splits(s: Subject, batch: Batch) -> None:
    """Any split of the rows, with the whole batch's shares sliced, adds up to the whole.

    A component that declares `whole_batch` is refused on a slice instead.
    """
    given, out = final(s, batch)
    rows = batch["mask"].shape[0]
    if any(b.declares("whole_batch") for b in s.bench.bound):
        words = refusal(lambda: evaluate(s.bench, **given, shares=out.shares))
        assert "whole optimisation batch" in words, f"{s.label} is evaluated on a slice"
        return
    want = _losses(s, given, dict(out.shares))
    for cuts in ([0, rows // 2, rows], [0, 1, rows], list(range(rows + 1))):
        parts = []
        for a, b in pairwise(cuts):
            here = torch.arange(a, b)
            parts.append(
                _losses(s, picked(given, here), {n: x[here] for n, x in out.shares.items()})
            )
        whole = {
            n: torch.cat([p[n] for p in parts]) if want[n].ndim else sum(p[n] for p in parts)
            for n in want
        }
        agree(whole, want, CLOSE, f"{s.label} in {len(parts)} slices")  # type: ignore[arg-type]  # sum() may be int 0


def _losses(s: Subject, given: Batch, shares: dict[str, Tensor]) -> Outcome:
    live = {n: given[n].detach().clone().requires_grad_() for n in ("logp", "entropy", "values")}
    out = evaluate(s.bench, **{**given, **live}, shares=shares)
    found = {"loss": out.loss.detach(), "pull": out.pull}
    found |= {f"d loss / d {n}": g for n, g in gradients(out.loss, live).items()}
    if out.critic_loss is not None:
        found["critic loss"] = out.critic_loss.detach()
        total = (shares["surrogate"] * out.critic_loss).sum()
        found |= {f"d critic / d {n}": g for n, g in gradients(total, live).items()}
    return found


def refusal(call: Callable[[], Any]) -> str:
    """The words with which a call is refused; nothing where it is not."""
    try:
        call()
    except LabError as e:
        return str(e)
    return ""


# --- P14, P15 ------------------------------------------------------------------------------------


def p14_observations(s: Subject, batch: Batch, seed: int = 0) -> None:
    """Mask-0 tokens between a row's tokens: the row equals the compacted one."""
    spaced = interleaved(batch, seed)
    got = at_tokens(outcome(s.bench, spaced), spaced["mask"])
    want = at_tokens(outcome(s.bench, batch), batch["mask"])
    agree(got, want, CLOSE, f"{s.label} with observations")


def p15_truncation(s: Subject, batch: Batch) -> None:
    """A flipped `truncated` acts through what names it, and through `bootstrap`; on that row alone.

    A terminated row's bootstrap is void; an advantage that reads values must take up a cut row's.
    """
    named = s.bench.needs & {"truncated", "stop_reason", "bootstrap"}
    none = torch.zeros_like(batch["truncated"])
    first = torch.arange(len(none)) == 0
    ended, cut = ({"truncated": x, "stop_reason": 2 * x.long()} for x in (none, first))
    far = {"bootstrap": batch["bootstrap"] + 5}
    before = outcome(s.bench, {**batch, **ended})
    void = outcome(s.bench, {**batch, **ended, **far})
    agree(void, before, EXACT, f"{s.label}: the bootstrap of a terminated row")
    after = outcome(s.bench, {**batch, **cut, **far})
    if not named:
        agree(after, before, EXACT, f"{s.label}: truncated, which it does not name")
    if s.hook not in ("advantage", "critic_target"):
        return
    for name in ("advantages", "returns"):
        if name in before:
            got, want = ({str(name): x[name][1:]} for x in (after, before))
            agree(got, want, EXACT, f"{s.label}: the other rows")
    reads = s.hook == "advantage" and "values" in s.bound.component.inputs
    if reads and not s.exempt("P15"):
        moved = not torch.equal(after["advantages"][0], before["advantages"][0])
        assert moved, (
            f"{s.label}: a cut row's bootstrap of {float(far['bootstrap'][0])} does nothing"
        )


# --- P19, P20 ------------------------------------------------------------------------------------


def p19_shares(s: Subject, batch: Batch) -> None:
    """Shares: finite with empty rows and without any token, 0 off the mask, not negative.

    A mean's sum to 1; an aggregate with a length L to N/(B L); all to something.
    """
    mask = batch["mask"].clone()
    for left in (mask, mask * (torch.arange(mask.shape[0]) % 2)[:, None], 0 * mask):
        step = complete({**batch, "mask": left, "rewards": None})
        share = s.bench.aggregate(step)
        assert bool(raw(s, step).isfinite().all()), f"{s.label}: shares are not finite"
        assert bool((share >= 0).all()), f"{s.label}: a share is negative"
        assert bool((share[left == 0] == 0).all()), f"{s.label}: a share off the mask"
        tokens, rows = float(left.sum()), float((left.sum(1) > 0).sum())
        total = float(share.double().sum())
        assert (total > 0) == (tokens > 0), f"{s.label}: the shares sum to {total}"
        length = s.bound.values.get("length", 0)
        if s.bound.component.name.endswith("mean") and tokens:
            assert abs(total - 1) < 1e-5, f"{s.label}: a mean's shares sum to {total}"
        elif length != 0 and tokens:
            due = tokens / (rows * (length or batch["budget"]))
            assert abs(total - due) < 1e-5 * due, f"{s.label}: shares sum to {total}, not {due}"


def p20_repeatable(s: Subject, batch: Batch) -> None:
    """The same call gives the same result; inputs and global random streams stay as they were."""
    copy = {n: x.clone() if isinstance(x, Tensor) else x for n, x in batch.items()}
    streams = _streams()
    first = outcome(s.bench, batch)
    for name, now, was in zip(("torch", "random", "numpy"), _streams(), streams, strict=True):
        assert now == was, f"{s.label} draws from the global generator of {name}"
    agree(outcome(s.bench, batch), first, EXACT, f"{s.label}, called again")
    _untouched(s, batch, copy)
    if s.component is not None and s.hook != "observe":
        step = full(batch)
        was = {n: x.clone() if isinstance(x, Tensor) else x for n, x in step.items()}
        raw(s, step)
        _untouched(s, step, was)


def _untouched(s: Subject, now: Batch, was: Batch) -> None:
    for name, x in now.items():
        same = torch.equal(x, was[name]) if isinstance(x, Tensor) else x == was[name]
        assert same, f"{s.label} changes its input {name}"


def _streams() -> tuple[Any, ...]:
    keys = np.random.get_state(legacy=False)["state"]["key"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), keys.tobytes()
