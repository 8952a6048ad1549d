"""The staged path from a bandit to CISPO: six properties, each small enough to do by hand.

Each stage runs alone, through the shelf's own components, and shows what it computes. They are
checks of formulas, not evidence of training performance. pi = (.5, .3, .2) throughout, rewards
f = (1, 0, .5); gradients are with respect to the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.bench import Bench
from lab.errors import LabError, nearest
from lab.loss import Evaluation, evaluate, observed
from lab.recipe import Recipe, Use
from lab.shelf import Shelf
from lab.step import Step

PI = (0.5, 0.3, 0.2)
F = (1.0, 0.0, 0.5)
SCORE: dict[str, Any] = {"advantage": "reinforce", "ratio": "none", "surrogate": "reinforce"}


@dataclass
class Stage:
    """One stage's protocol: what it computed and what did not hold."""

    name: str
    title: str
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def expect(self, what: str, got: Any, want: Sequence[float], tolerance: float = 1e-12) -> None:
        """Write a number down, and a failure where it is not the one that is due."""
        numbers = torch.as_tensor(got, dtype=torch.float64).detach().reshape(-1).tolist()
        near = len(numbers) == len(want) and all(
            math.isclose(g, w, rel_tol=0, abs_tol=tolerance)
            for g, w in zip(numbers, want, strict=True)
        )
        self.lines.append(f"{what:<44} {_show(numbers)}")
        if not near:
            self.failures.append(f"{what}: got {_show(numbers)}, want {_show(want)}")


def expectation(logits: Tensor) -> Tensor:
    """What weighs an enumerated answer in an expectation: its probability, a constant."""
    return logits.softmax(0).detach()


def bandit(stage: Stage, shelf: Shelf) -> None:
    """The enumerated gradient of J is the expected score-function estimator."""
    for p in (0.5, 0.3, 0.1):
        gradient = _expected_gradient(shelf, (p, 1 - p), (1.0, 0.0))
        stage.expect(f"P(good) = {p:g}: dJ/dz = +-p(1-p)", gradient, (p * (1 - p), -p * (1 - p)))
    logits = _logits(PI)
    objective = (logits.softmax(0) * torch.tensor(F, dtype=torch.float64)).sum()
    stage.expect("three: J = .5 * 1 + .3 * 0 + .2 * .5", objective, (0.6,))
    (enumerated,) = torch.autograd.grad(objective, logits)
    stage.expect("enumerated gradient pi (f - J)", enumerated, (0.2, -0.18, -0.02))
    stage.expect("E[grad log pi] = 0", _expected_gradient(shelf, PI, (1.0, 1.0, 1.0)), (0, 0, 0))
    stage.expect("expected estimator", _expected_gradient(shelf, PI, F), (0.2, -0.18, -0.02))


def baseline(stage: Stage, shelf: Shelf) -> None:
    """An action-independent baseline leaves the expected gradient, and moves the variance."""
    pi = torch.tensor(PI, dtype=torch.float64)
    scores = torch.eye(3, dtype=torch.float64) - pi  # grad log pi_a = onehot_a - pi
    square = (scores**2).sum(1)
    reward = torch.tensor(F, dtype=torch.float64)
    norm = 0.2**2 + 0.18**2 + 0.02**2
    best = float((pi * square * reward).sum() / (pi * square).sum())
    for b in (-3.0, 0.0, 0.6, 10.0, best):
        shifted = tuple(f - b for f in F)
        stage.expect(
            f"baseline {b:g}: expected gradient",
            _expected_gradient(shelf, PI, shifted),
            (0.2, -0.18, -0.02),
        )
        samples = torch.stack([_sample_gradient(shelf, a, shifted[a]) for a in range(3)])
        trace = (pi * (samples**2).sum(1)).sum() - norm
        # by hand: sum pi |s|^2 (f - b)^2 - |g|^2
        want = float((pi * square * (reward - b) ** 2).sum()) - norm
        stage.expect("    trace of the one-sample covariance", trace, (want,))
    stage.lines.append(f"the variance is least at {best:.6f} = E[|s|^2 f]/E[|s|^2], not at V = .6")


def sequence(stage: Stage, shelf: Shelf) -> None:
    """GAE on one complete episode: rewards (0, 0, 1), values (.2, .4, .5), the end worth 0."""
    stage.lines.append("residuals (.4-.2, .5-.4, 1-.5) = (.2, .1, .5), gamma 1")
    for lam in (0.9, 0.0, 0.5, 0.95, 1.0):
        # by hand, from the end: .5, .1 + lambda .5, .2 + lambda (.1 + lambda .5)
        want = (0.2 + lam * (0.1 + lam * 0.5), 0.1 + lam * 0.5, 0.5)
        out = _episode(shelf, lam, "none")
        stage.expect(f"lambda {lam:g}: advantages", out.advantages, want)
        targets = [a + v for a, v in zip(want, (0.2, 0.4, 0.5), strict=True)]
        stage.expect("    targets = raw advantage + value", _given(out.returns), targets)
    mean = (0.695 + 0.55 + 0.5) / 3
    square = (0.695 - mean) ** 2 + (0.55 - mean) ** 2 + (0.5 - mean) ** 2
    for ddof in (1, 0):
        out = _episode(shelf, 0.9, {"name": "whiten", "ddof": ddof, "eps": 0.0})
        std = math.sqrt(square / (3 - ddof))
        want = ((0.695 - mean) / std, (0.55 - mean) / std, (0.5 - mean) / std)
        stage.expect(f"lambda .9, whitened, ddof {ddof}", out.advantages, want)
        stage.expect("    targets stay", _given(out.returns), (0.895, 0.95, 1.0))


def frozen_batch(stage: Stage, shelf: Shelf) -> None:
    """A ratio of 1 has a slope, and several updates on one batch leave it."""
    bench = _bench(shelf, {**SCORE, "ratio": "token", "surrogate": "ppo_unclipped"})
    logits = _logits(PI)
    old = logits.log_softmax(0).detach()
    out = _one(bench, logits.log_softmax(0)[0], old[0], 1.0)
    stage.expect("at the behaviour policy: ratio", _given(out.ratio), (1.0,))
    (slope,) = torch.autograd.grad(-out.loss, logits)
    stage.expect("    its slope is that of log pi: onehot - pi", slope, (0.5, -0.3, -0.2))
    moved = _one(bench, _number(0.13).log(), _number(0.10).log(), 1.0)
    stage.expect("from .10 to .13", _given(moved.ratio), (1.3,))
    clip = {
        **SCORE,
        "ratio": "token",
        "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
    }
    ratios = _updates(_bench(shelf, clip), steps=60, lr=0.05)
    left = next((k + 1 for k, r in enumerate(ratios) if abs(r - 1) > 1e-9), 0)
    stage.expect("ratio at updates 1, 2, 3", ratios[:3], _by_hand(3))
    stage.expect("first update at which a ratio has left 1", left, (2,))
    stage.expect("60 updates: the ratio crosses 1.2 and stays", ratios[-1], _by_hand(60)[-1:])


def clipping(stage: Stage, shelf: Shelf) -> None:
    """The clip is directional: it stops gains, and keeps the pull of a move the wrong way."""
    bench = _bench(
        shelf,
        {
            **SCORE,
            "ratio": "token",
            "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
        },
        [Use(name="clipping")],
    )
    advantages, ratios = (2.0, 2.0, -2.0, -2.0), (1.3, 0.7, 0.7, 1.3)
    # min(r A, clip(r) A): min(2.6, 2.4), min(1.4, 1.6), min(-1.4, -1.6), min(-2.6, -2.4)
    objective, pulls = (2.4, 1.4, -1.6, -2.6), (0.0, 1.4, 0.0, -2.6)
    for a, r, o, p in zip(advantages, ratios, objective, pulls, strict=True):
        out = _one(
            bench,
            _number(r).log(),
            _number(0.0),
            a,
        )
        stage.expect(f"A = {a:+g}, r = {r:g}: objective", out.surrogate, (o,))
        stage.expect("    pull", out.pull, (p,))
    for more, what in (((), "the four"), ((0.0,), "and a fifth, A = 0")):
        rates = _rates(bench, (*advantages, *more), (*ratios, *(1.3 for _ in more)))
        stage.expect(
            f"{what}: shares outside [.8, 1.2], flat", [rates["outside"], rates["flat"]], (1.0, 0.5)
        )


def stop_gradient(stage: Stage, shelf: Shelf) -> None:
    """sg(r) A log pi has the slope of r A, not its value; CISPO caps the weight it detaches."""
    r, a, logp = 1.3, 2.0, math.log(0.13)
    forms: dict[str, tuple[Any, tuple[float, float, float]]] = {
        # value r A = 2.6; every derivative of r in log pi is r
        "r A": ("ppo_unclipped", (r * a, r * a, r * a)),
        # value r A log p; the weight is held, so slope r A and no curvature
        "sg(r) A log pi": ({"name": "cispo", "cap": "none"}, (r * a * logp, r * a, 0.0)),
    }
    for form, (surrogate, want) in forms.items():
        bench = _bench(shelf, {**SCORE, "ratio": "token", "surrogate": surrogate})
        stage.expect(
            f"{form}: value, slope, curvature", _derivatives(bench, logp, math.log(0.10), a), want
        )
    # product rule: r A (1 + log p), then r A (2 + log p)
    x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    attached = (x - math.log(0.10)).exp() * a * x
    (first,) = torch.autograd.grad(attached, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    want2 = (r * a * (1 + logp), r * a * (2 + logp))
    stage.expect("r A log pi, attached: slope, curvature", torch.stack([first, second]), want2)
    rows = ((2.0, 1.3), (2.0, 0.7), (-2.0, 0.7), (-2.0, 1.3))
    for floor, want4 in (("none", (2.4, 1.4, -1.4, -2.4)), (0.8, (2.4, 1.6, -1.6, -2.4))):
        spec = {"name": "cispo", "cap": 1.2, "floor": floor}
        bench = _bench(shelf, {**SCORE, "ratio": "token", "surrogate": spec})
        pulls = [float(_one(bench, _number(q).log(), _number(0.0), s).pull) for s, q in rows]
        stage.expect(f"CISPO [{floor}, 1.2] on the four: pull", pulls, want4)


#: In the order of the article's path; the titles are what a failure names.
STAGES: dict[str, tuple[str, Callable[[Stage, Shelf], None]]] = {
    "bandit": ("gradient identity", bandit),
    "baseline": ("baseline invariance", baseline),
    "sequence": ("GAE on one complete episode", sequence),
    "frozen-batch": ("a ratio of 1 has a slope", frozen_batch),
    "clipping": ("directional clipping", clipping),
    "stop-gradient": ("stop-gradient and CISPO", stop_gradient),
}


def run(shelf: Shelf, names: Iterable[str] = ()) -> Iterator[Stage]:
    """The stages, all six or those named, each with what it computed and what failed.

    Raises:
        LabError: for an unknown stage.
    """
    names = list(names) or list(STAGES)
    for name in names:
        if name not in STAGES:
            raise LabError(
                f"no stage {name!r}.{nearest(name, STAGES)} They are {', '.join(STAGES)}"
            )
    for name in names:
        title, check = STAGES[name]
        stage = Stage(name, title)
        try:
            check(stage, shelf)
        except LabError as e:  # a component that the bench refuses has failed the check
            stage.failures.append(str(e))
        yield stage


def _show(numbers: Iterable[float]) -> str:
    shown = (f"{x:.6f}".rstrip("0").rstrip(".") for x in numbers)
    return " ".join("0" if x == "-0" else x for x in shown)


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise LabError("the recipe made no such tensor")
    return x


def _number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def _logits(pi: Sequence[float]) -> Tensor:
    return torch.tensor(pi, dtype=torch.float64).log().requires_grad_()


def _bench(shelf: Shelf, spec: dict[str, Any], observers: Sequence[Use] = ()) -> Bench:
    return Bench(
        Recipe.of({"aggregate": "sequence_sum", **spec}, "sanity", shelf), shelf, observers
    )


def _one(bench: Bench, logp: Tensor, old: Tensor, advantage: float) -> Evaluation:
    """One token: its log-probability now and then, and its advantage."""
    cell = torch.ones(1, 1, dtype=torch.float64)
    return evaluate(
        bench,
        logp=logp.reshape(1, 1),
        old_logp=old.reshape(1, 1),
        advantages=advantage * cell,
        mask=cell,
    )


def _expected_gradient(shelf: Shelf, pi: Sequence[float], rewards: Sequence[float]) -> Tensor:
    """The estimator's expectation: every answer once, weighed by its probability."""
    logits = _logits(pi)
    logp = logits.log_softmax(0)[:, None]
    out = evaluate(
        _bench(shelf, SCORE),
        logp=logp,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        mask=torch.ones_like(logp),
        shares=expectation(logits)[:, None],
    )
    return torch.autograd.grad(-out.loss, logits)[0]


def _sample_gradient(shelf: Shelf, action: int, reward: float) -> Tensor:
    logits = _logits(PI)
    logp = logits.log_softmax(0)[action].reshape(1, 1)
    rewards = torch.tensor([reward], dtype=torch.float64)
    out = evaluate(_bench(shelf, SCORE), logp=logp, rewards=rewards, mask=torch.ones_like(logp))
    return torch.autograd.grad(-out.loss, logits)[0]


def _episode(shelf: Shelf, lam: float, normalize: str | dict[str, Any]) -> Evaluation:
    spec = {**SCORE, "advantage": {"name": "gae", "gamma": 1.0, "lam": lam}, "normalize": normalize}
    row = torch.zeros(1, 3, dtype=torch.float64)
    return evaluate(
        _bench(shelf, spec),
        logp=row,
        mask=row + 1,
        token_rewards=torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64),
        values=torch.tensor([[0.2, 0.4, 0.5]], dtype=torch.float64),
        truncated=torch.tensor([False]),
    )


def _rates(bench: Bench, advantages: Sequence[float], ratios: Sequence[float]) -> dict[str, float]:
    logp = torch.tensor(ratios, dtype=torch.float64).log()[None]
    column = torch.tensor(advantages, dtype=torch.float64)[None]
    ones = torch.ones_like(logp)
    step = Step(logp=logp, old_logp=0 * ones, advantages=column, mask=ones)
    return bench.observe("update", observed(bench, step, evaluate(bench, **step)))


def _updates(bench: Bench, steps: int, lr: float) -> list[float]:
    """Ratios seen by each update: SGD on the logits, one frozen sample a = 1 with A = +1."""
    logits = _logits(PI)
    old = logits.log_softmax(0).detach()[1]
    seen = []
    for _ in range(steps):
        out = _one(bench, logits.log_softmax(0)[1], old, 1.0)
        seen.append(float(_given(out.ratio).detach()))
        (gradient,) = torch.autograd.grad(out.loss, logits)
        logits = (logits - lr * gradient).detach().requires_grad_()
    return seen


def _by_hand(steps: int) -> list[float]:
    """The same updates in plain arithmetic: z += lr r (onehot - p) until r passes 1.2."""
    z, seen = [math.log(p) for p in PI], []
    for _ in range(steps):
        total = sum(math.exp(x) for x in z)
        p = [math.exp(x) / total for x in z]
        seen.append(p[1] / PI[1])
        if seen[-1] <= 1.2:
            z = [
                x + 0.05 * seen[-1] * ((k == 1) - q)
                for k, (x, q) in enumerate(zip(z, p, strict=True))
            ]
    return seen


def _derivatives(bench: Bench, logp: float, old: float, advantage: float) -> list[float]:
    x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    value = _one(bench, x, torch.tensor(old, dtype=torch.float64), advantage).surrogate.sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    if not first.requires_grad:
        return [float(value.detach()), float(first), 0.0]
    (second,) = torch.autograd.grad(first, x, allow_unused=True)
    return [float(value.detach()), float(first.detach()), 0.0 if second is None else float(second)]
