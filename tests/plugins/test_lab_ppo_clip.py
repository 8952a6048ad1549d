"""PPO's update side: the clip and the dual clip (ACCEPTANCE D, ALGORITHMS section 4).

Four cases (A, r) decide what a surrogate is: (2, 1.3), (2, .7), (-2, .7), (-2, 1.3). Every wrong
implementation that a number is there to kill stands in `MUTANTS` or `DUALS` and is run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import PI, bench, f64, ragged, tokens
from hypothesis import given, settings
from lab_ppo import dual_clip, ppo_clip
from torch import Tensor

from lab import ratio, surrogate
from lab.errors import LabError
from lab.loss import evaluate, load, pull_curve
from lab.shelf import Shelf, installed

near = functools.partial(pytest.approx, rel=0, abs=1e-12)
CLIP28 = {"surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}}
DUAL28 = {**CLIP28, "wrap": [{"name": "dual_clip", "c": 3.0}]}
NO_RATIO = {"surrogate": "reinforce", "ratio": "none"}


@surrogate
def clamp_alone(ratio, advantages):
    """Clips without min: a move the wrong way loses its pull."""
    return ratio.clamp(0.8, 1.2) * advantages


@surrogate
def max_for_min(ratio, advantages):
    """Takes the optimistic of the two: an inverted branch."""
    return torch.maximum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@surrogate
def sign_lost(ratio, advantages):
    """Hands over the loss as the objective."""
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@surrogate
def upper_eps_ignored(ratio, advantages, *, eps_low=0.2, eps_high=0.2):
    """Uses eps_low on both sides."""
    return ppo_clip(ratio, advantages, eps_low=eps_low, eps_high=eps_low)


@surrogate(wrapper=True)
def dual_for_both_signs(advantages, *, c=3.0):
    """Bounds good tokens too."""
    gain = yield
    return torch.maximum(gain, c * advantages)


@surrogate(wrapper=True)
def dual_min(advantages, *, c=3.0):
    """Min for max: deepens the loss below c."""
    gain = yield
    return torch.where(advantages < 0, torch.minimum(gain, c * advantages), gain)


@surrogate(wrapper=True)
def dual_open(advantages, *, c=3.0):
    """Halves the pull on the edge."""
    gain = yield
    return torch.where(advantages < 0, torch.maximum(gain, c * advantages), gain)


@ratio
def difference(logp, old_logp):
    """No mutant: logp - old as the ratio, so that a test can put it on an edge exactly."""
    return logp - old_logp


MUTANTS = (clamp_alone, max_for_min, sign_lost, upper_eps_ignored)
DUALS = (dual_for_both_signs, dual_min, dual_open)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed((*MUTANTS, *DUALS, difference))


def column(x: Tensor) -> list[float]:
    return x[:, 0].tolist()


def four_cases(shelf: Shelf, surrogate: Any) -> tuple[list[float], list[float]]:
    out = evaluate(
        bench(shelf, surrogate=surrogate), **tokens((1.3, 0.7, 0.7, 1.3), (2, 2, -2, -2))
    )
    assert float(out.loss.detach()) == near(
        -sum(column(out.surrogate)) / 4
    )  # the loss is the negative
    return column(out.surrogate), column(out.pull)


#: D1: min(1.3 * 2, 1.2 * 2), min(.7 * 2, .8 * 2), min(-.7 * 2, -.8 * 2), min(-1.3 * 2, -1.2 * 2).
D1 = (1.2 * 2, 0.7 * 2, -0.8 * 2, -1.3 * 2), (0, 0.7 * 2, 0, -1.3 * 2)


def test_the_clip_is_directional(shelf: Shelf) -> None:
    objective, pulls = four_cases(shelf, "ppo_clip")
    assert objective == near(D1[0])
    assert pulls == near(D1[1])
    assert pulls[0] == 0.0 == pulls[2]  # exactly: no residue for Adam to amplify


@pytest.mark.parametrize(
    ("mutant", "objective", "pulls"),
    [
        ("clamp_alone", (2.4, 1.6, -1.6, -2.4), (0, 0, 0, 0)),
        ("max_for_min", (2.6, 1.6, -1.4, -2.4), (2.6, 0, -1.4, 0)),
        ("sign_lost", (-2.4, -1.4, 1.6, 2.6), (0, -1.4, 0, 2.6)),
        ("ppo_unclipped", (2.6, 1.4, -1.4, -2.6), (2.6, 1.4, -1.4, -2.6)),
    ],
)
def test_four_cases_kill(wrong: Shelf, mutant: str, objective: Any, pulls: Any) -> None:
    got = four_cases(wrong, mutant)
    assert got[0] == near(objective)
    assert got[1] == near(pulls)
    assert got[0] != near(D1[0])
    assert got[1] != near(D1[1])


def test_each_epsilon_moves_its_side(wrong: Shelf) -> None:
    """D7, S7: A = 1 at 1.25 and 1.3, A = -1 at .75; `upper_eps_ignored` is flat at 1.25."""
    batch = tokens((1.25, 1.3, 0.75), ([1], [1], [-1]))

    def pulls(name: str, low: float, high: float) -> list[float]:
        slot = {"name": name, "eps_low": low, "eps_high": high}
        return column(evaluate(bench(wrong, surrogate=slot), **batch).pull)

    assert pulls("ppo_clip", 0.2, 0.28) == near((1.25, 0, 0))
    assert pulls("ppo_clip", 0.3, 0.28) == near((1.25, 0, -0.75))
    assert pulls("ppo_clip", 0.2, 0.5) == near((1.25, 1.3, 0))
    assert pulls("ppo_clip", 0.2, 0.05) == near((0, 0, 0))
    assert pulls("upper_eps_ignored", 0.2, 0.28) == near((0, 0, 0))


#: (A, r) -> objective, pull under clip .2 and dual clip 3 (D7): the last two lie beyond c.
D7 = {(-1, 2): (-2, -2), (-1, 2.9): (-2.9, -2.9), (-1, 6): (-3, 0), (1, 6): (1.2, 0)}
D7 |= {(1, 0.5): (0.5, 0.5), (-1, 0.5): (-0.8, 0), (-2, 3.1): (-6, 0)}


def dual(shelf: Shelf, name: str) -> list[tuple[float, float]]:
    b = bench(shelf, surrogate="ppo_clip", wrap=[{"name": name, "c": 3.0}])
    out = evaluate(b, **tokens([r for _, r in D7], [[a] for a, _ in D7]))
    return list(zip(column(out.surrogate), column(out.pull), strict=True))


def test_dual_clip(shelf: Shelf) -> None:
    assert dual(shelf, "dual_clip") == [near(want) for want in D7.values()]


@pytest.mark.parametrize("mutant", ["dual_for_both_signs", "dual_min"])
def test_dual_clip_kills(wrong: Shelf, mutant: str) -> None:
    assert dual(wrong, mutant) != [near(want) for want in D7.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_an_edge_a_token_is_inside(wrong: Shelf, dtype: torch.dtype) -> None:
    """C4, with r exactly on it. `difference` has slope 1, so inside means pull A, outside 0."""
    edges = [(1.2, 1.0), (1.2, -1.0), (0.8, 1.0), (0.8, -1.0), (3.0, -1.0)]
    beyond = [(1.2, 1.0, 1.0), (0.8, -1.0, -1.0), (3.0, -1.0, 1.0)]
    up = torch.tensor(torch.inf, dtype=dtype)
    r = [torch.tensor(x, dtype=dtype) for x, _ in edges]
    r += [torch.nextafter(torch.tensor(x, dtype=dtype), way * up) for x, _, way in beyond]
    a = [x for _, x in edges] + [x for _, x, _ in beyond]
    logp = torch.stack(r)[:, None]
    batch = {"logp": logp, "old_logp": 0 * logp, "mask": 0 * logp + 1}
    batch["advantages"] = torch.tensor(a, dtype=dtype)[:, None]

    def pulls(wrap: str) -> list[float]:
        b = bench(wrong, ratio="difference", surrogate="ppo_clip", wrap=wrap)
        return column(evaluate(b, **batch).pull)

    assert pulls("dual_clip") == [*[x for _, x in edges], 0, 0, 0]
    assert pulls("dual_open")[4] == -0.5


#: ALGORITHMS section 4, as printed; columns are `RATIO_COLUMNS`.
RATIO_COLUMNS = (0.5, 0.8, 1, 1.1, 1.28, 1.5, 2, 6, 10, 30)
TABLE: dict[str, tuple[Any, int, tuple[float, ...]]] = {
    "ppo_clip +": (CLIP28, 1, (0.5, 0.8, 1, 1.1, 1.28, 0, 0, 0, 0, 0)),
    "ppo_clip -": (CLIP28, -1, (0, 0.8, 1, 1.1, 1.28, 1.5, 2, 6, 10, 30)),
    "dual 3 +": (DUAL28, 1, (0.5, 0.8, 1, 1.1, 1.28, 0, 0, 0, 0, 0)),
    "dual 3 -": (DUAL28, -1, (0, 0.8, 1, 1.1, 1.28, 1.5, 2, 0, 0, 0)),
    "unclipped +": ({}, 1, RATIO_COLUMNS),
    "unclipped -": ({}, -1, RATIO_COLUMNS),
    "reinforce +": (NO_RATIO, 1, (1,) * 10),
    "reinforce -": (NO_RATIO, -1, (1,) * 10),
}


@pytest.mark.parametrize("row", TABLE)
def test_pull_table(shelf: Shelf, row: str) -> None:
    spec, sign, want = TABLE[row]
    # .8 and 1.28 are edges: exp(log r) may lie to either side, so they stand in the test above
    columns = [k for k in range(10) if k not in (1, 4)]
    for a in (sign, 2.5 * sign):
        got = pull_curve(bench(shelf, spec), [RATIO_COLUMNS[k] for k in columns], a)
        assert got == [pytest.approx(a * want[k], rel=1e-13, abs=0) for k in columns]


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce"])
def test_no_recipe_got_anothers_loss(name: str) -> None:
    """S3, on the acceptance list's columns r = .5, 1, 2, 10: (.5, 1, 0, 0) and (0, 1, 2, 10)."""
    curves = [pull_curve(load(name), (0.5, 1, 2, 10), a) for a in (1, -1)]
    score = name in ("rloo", "reinforce")
    assert curves[0] == near((1,) * 4 if score else (0.5, 1, 0, 0))
    assert curves[1] == near((-1,) * 4 if score else (0, -1, -2, -10))


def clip_weight(r: float, a: float) -> float:
    return (r if r <= 1.28 else 0.0) if a > 0 else (r if r >= 0.8 else 0.0)


WEIGHTS: dict[str, tuple[Any, Callable[[float, float], float]]] = {
    "reinforce": (NO_RATIO, lambda r, a: 1.0),
    "ppo_unclipped": ({}, lambda r, a: r),
    "ppo_clip": (CLIP28, clip_weight),
    "dual_clip": (
        {**CLIP28, "wrap": [{"name": "dual_clip", "c": 2.0}]},
        lambda r, a: 0.0 if a < 0 and r > 2 else clip_weight(r, a),
    ),
}


@settings(max_examples=40, deadline=None)
@given(ragged(), st.sampled_from(sorted(WEIGHTS)))
def test_pull_is_its_formula(batch: dict[str, Any], name: str) -> None:
    spec, weight = WEIGHTS[name]
    a = batch["values"].round()  # 0, +-1, +-2 ..
    out = evaluate(bench(installed(), spec), **{**batch, "advantages": a})
    log_ratio = batch["logp"].double() - batch["old_logp"].double()
    rows = zip(log_ratio.tolist(), a.tolist(), batch["mask"].tolist(), strict=True)
    want = f64(
        *[[weight(math.exp(x), s) * s * m for x, s, m in zip(*r, strict=True)] for r in rows]
    )
    rtol = 1e-12 if a.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.pull.double(), want, rtol=rtol, atol=0)


def step_by_hand(rule: str, lr: float, steps: int = 60) -> list[float]:
    """Ratios of answer 1 before each update and after the last, by plain Python (D8)."""
    z, v, s, seen = [math.log(p) for p in PI], [0.0] * 3, [0.0] * 3, []
    for k in range(1, steps + 2):
        total = sum(map(math.exp, z))
        p = [math.exp(x) / total for x in z]
        r = p[1] / PI[1]
        seen.append(r)
        # A = 1: gradient of -r, which is r (p - onehot), and exactly 0 beyond 1.2
        g = [r * (q - (i == 1)) if r <= 1.2 else 0.0 for i, q in enumerate(p)]
        if rule == "adam":
            v = [0.9 * a + 0.1 * b for a, b in zip(v, g, strict=True)]
            s = [0.999 * a + 0.001 * b * b for a, b in zip(s, g, strict=True)]
            move = [a / (1 - 0.9**k) / (math.sqrt(b / (1 - 0.999**k)) + 1e-8) for a, b in
                    zip(v, s, strict=True)]  # fmt: skip
        else:
            v = [(0.9 if rule == "momentum" else 0.0) * a + b for a, b in zip(v, g, strict=True)]
            move = v
        z = [x - lr * m for x, m in zip(z, move, strict=True)]
    return seen


@pytest.mark.parametrize(
    ("rule", "lr", "crosses", "ends"),
    [
        ("sgd", 0.05, 1.213392, 1.213392),
        ("momentum", 0.05, 1.235063, 2.330231),
        ("adam", 0.02, 1.206675, 1.497988),
    ],
)
def test_a_flat_ratio_moves_on(shelf: Shelf, rule: str, lr: float, crosses: float, ends: float):
    """D4, D8: no hard bound; the gradient is exactly 0 and the optimiser's memory goes on."""
    b, logits = bench(shelf, surrogate="ppo_clip"), f64(*PI).log().requires_grad_()
    if rule == "adam":
        optimizer: Any = torch.optim.Adam([logits], lr=lr)
    else:
        optimizer = torch.optim.SGD([logits], lr=lr, momentum=0.9 if rule == "momentum" else 0)
    seen: list[float] = []
    for step in range(61):
        logp = logits.log_softmax(0)[1].reshape(1, 1)
        cell = torch.ones_like(logp)
        out = evaluate(b, logp=logp, old_logp=cell * math.log(0.3), advantages=cell, mask=cell)
        seen.append(float(out.ratio.detach()))
        optimizer.zero_grad()
        out.loss.backward()
        assert bool((logits.grad == 0).all()) == (max(seen) > 1.2)
        if step < 60:
            optimizer.step()
    assert seen == pytest.approx(step_by_hand(rule, lr), rel=0, abs=1e-9)  # Adam's root magnifies
    first = next(r for r in seen if r > 1.2)
    assert (first, seen[-1]) == pytest.approx((crosses, ends), rel=0, abs=5e-7)  # as printed


def test_another_sample_carries_a_flat_ratio_on(shelf: Shelf) -> None:
    """D9: the first is flat; the second, A = -1 at r = .9, pulls -.9 by (e_1 - p)."""
    now = (0.65, 0.27, 0.08)
    logits = f64(*now).log().requires_grad_()
    logp = logits.log_softmax(0)[:2, None]
    given = {"old_logp": f64([0.5], [0.3]).log(), "advantages": f64([1], [-1])}
    b = bench(shelf, surrogate="ppo_clip")
    out = evaluate(b, logp=logp, mask=f64([1], [1]), shares=f64([1], [1]), **given)
    assert column(out.pull) == near((0, -0.27 / 0.3))
    logits = logits - 0.5 * torch.autograd.grad(out.loss, logits)[0]
    z = [p * math.exp(-0.5 * 0.9 * ((k == 1) - p)) for k, p in enumerate(now)]
    moved = float(logits.softmax(0)[0].detach()) / 0.5
    assert moved == near(z[0] / sum(z) / 0.5)
    assert moved == pytest.approx(1.516919, rel=0, abs=5e-7)


@pytest.mark.parametrize(
    "slots",
    [{"surrogate": {"name": "ppo_clip", "eps_low": x}} for x in (0.0, -0.1, 1.1, math.nan)]
    + [{"surrogate": {"name": "ppo_clip", "eps_high": x}} for x in (0.0, -0.1, math.nan)]
    + [{"wrap": {"name": "dual_clip", "c": x}} for x in (1.0, 0.5, -3.0, math.nan)],
    ids=str,
)
def test_illegal_parameters(shelf: Shelf, slots: dict[str, Any]) -> None:
    with pytest.raises(LabError):
        bench(shelf, slots)


def test_the_wrapper_is_a_plain_generator() -> None:
    surround = dual_clip(f64([-1, -1, 1]), c=3.0)
    next(surround)
    with pytest.raises(StopIteration) as end:
        surround.send(f64([-2, -6, -6]))
    assert end.value.value.tolist() == [[-2, -3, -6]]
