"""Results folders without a model: a frozen study and the folders of its runs, in the real format.

The numbers of a run are made from its place in the study, never measured. What a test is about,
its final scores and how runs end, is given; the rest is plausible.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab import records, results

#: Recipe -> the interval in which its surrogate has a gradient on both sides; None: no bound.
KINDS: Mapping[str, tuple[float, float] | None] = {
    "ppo": (0.8, 1.2),
    "grpo": (0.8, 1.2),
    "cispo": (0.0, 5.0),
    "reinforce": None,
    "grpo_kl_reward": (0.8, 1.2),
    "grpo_kl_loss": (0.8, 1.2),
    "dapo": (0.8, 1.28),
    "gspo": (0.95, 1.05),
}
START = 0.16
RATIOS = [10 ** (i / 40) for i in range(-40, 41)]
Arm = tuple[str, str]
Run = tuple[str, str, int]


@dataclass
class Made:
    """What a made study is: change what the test is about.

    Attributes:
        finals: arm -> the final score of each seed; an arm that is not named learns a little.
        diverged: run -> the rollout within which it ends.
        crashed: runs that raised before their first evaluation.
        missing: runs that have not ended.
        omitted: metrics that were not recorded.
        numbers: metric -> its value in every update, evaluation or rollout of every run.
    """

    recipes: Sequence[str] = ("ppo", "grpo")
    conditions: Sequence[str] = ("as given",)
    seeds: int = 8
    rollouts: int = 4
    eval_every: int = 2
    contrasts: Sequence[tuple[str, str, str]] = (("ppo", "grpo", "as given"),)
    finals: Mapping[Arm, Sequence[float]] = field(default_factory=dict)
    starts: Sequence[float] = ()
    diverged: Mapping[Run, int] = field(default_factory=dict)
    crashed: Collection[Run] = ()
    missing: Collection[Run] = ()
    omitted: Collection[str] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    answer: str = "123456"
    question: str = "Which of the two learns more from the same rollouts?"
    budget: Mapping[str, int] = field(default_factory=dict)
    updates: int = 2  # a rollout: 2 epochs of so many minibatches
    tokens: int = 100  # generated a rollout

    def write(self, folder: Path) -> Path:
        """The results folder."""
        folder.mkdir(parents=True, exist_ok=True)
        records.write_json(folder / results.STUDY, self.study())
        for planned in self.plan():
            if _place(planned) not in self.missing:
                _Run(self, planned, folder / results.RUNS / planned["run_key"]).write()
        return folder

    def study(self) -> dict[str, Any]:
        """What study.json says."""
        arms = [(r, c) for c in self.conditions for r in self.recipes]
        return {
            "name": "made",
            "question": self.question,
            "hash": "0123456789abcdef",
            "scale": "small",
            "metric": "score",
            "margin": 0.02,
            "alpha": 0.05,
            "floor": 0.0,
            "optimum": 1.0,
            "task": {"name": "sort", "version": 1, "settings": {"digits": 6}},
            "model": "nano",
            "recipes": {r: f"{r} as its paper has it" for r in self.recipes},
            "conditions": list(self.conditions),
            "contrasts": [{"a": a, "b": b, "condition": c} for a, b, c in self.contrasts],
            "seeds": [9000 + i for i in range(self.seeds)],
            "budget": dict(self.budget or {"rollouts": self.rollouts}),
            "eval_every": self.eval_every,
            "eval_prompts": 256,
            "loops": {f"{r}|{c}": self.loop(c) for r, c in arms},
            "choices": {r: f"group · token · {r} · token_mean" for r in self.recipes},
            "bounds": {f"{r}|{c}": list(KINDS.get(r) or (None, None)) for r, c in arms},
            "environment": {
                "core": "88a2e8f94b4fa552",
                "device": "cpu",
                "libraries": {"torch": "2.13.0", "transformers": "5.24.0"},
                "threads": 1,
                "lab": "0.1.0",
            },
            "plan": self.plan(),
        }

    def loop(self, condition: str) -> dict[str, Any]:
        """A recipe's loop settings."""
        lr = float(condition.removeprefix("lr ")) if condition.startswith("lr ") else 1e-4
        shape = {"group_size": 8, "prompts": 16, "epochs": 2, "minibatches": self.updates // 2}
        rest = {"optimizer": "adamw", "max_grad_norm": 1.0, "temperature": 1.0}
        return shape | rest | {"lr": lr, "lag": 0, "kl_stop": 0.0}

    def plan(self) -> list[dict[str, Any]]:
        """Every run."""
        return [
            {
                "run_key": f"{zlib.crc32(f'{r}|{c}|{9000 + i}'.encode()):08x}" * 8,
                "recipe": r,
                "condition": c,
                "config_hash": f"{zlib.crc32(f'{r}|{c}'.encode()):08x}",
                "seed": 9000 + i,
            }
            for c in self.conditions
            for r in self.recipes
            for i in range(self.seeds)
        ]


def _place(planned: Mapping[str, Any]) -> Run:
    return planned["recipe"], planned["condition"], planned["seed"]


class _Run:
    """One run's folder."""

    def __init__(self, made: Made, planned: Mapping[str, Any], folder: Path) -> None:
        self.made, self.planned = made, planned
        self.recipe, self.condition, self.seed = _place(planned)
        self.writer = records.Writer(folder)
        self.rng = np.random.default_rng(zlib.crc32(planned["run_key"].encode()))
        self.shared = np.random.default_rng(self.seed)
        self.counters = dict.fromkeys(records.COUNTERS, 0)
        starts = made.starts or [START + 0.005 * (i % 3) for i in range(made.seeds)]
        index = self.seed - 9000
        self.start = starts[index]
        given = made.finals.get((self.recipe, self.condition))
        order = list(made.recipes).index(self.recipe)
        default = self.start + 0.2 - 0.02 * order + 0.03 * self.shared.normal()
        self.final = given[index] if given is not None else float(default)

    def write(self) -> None:
        place = _place(self.planned)
        self.writer.data(records.RUN, {"key": self.planned["run_key"]})
        if place in self.made.crashed:
            self.writer.moment("start", self.counters, {"crashed": 1.0})
            failure = {"update": None, "hook": "", "component": "", "statistic": "no memory left"}
            self._end("crashed", failure)
            return
        self.writer.data(records.PULLS, self._pulls())
        self.writer.moment("start", self.counters, {"steps": 30.0, "accuracy": self.start})
        self._evaluation()
        last = self.made.diverged.get(place)
        for number in range(1, self.made.rollouts + 1):
            if number == last:
                self._update()
                update = self.counters["update"]
                what = {"hook": "surrogate", "component": self.recipe}
                statistic = "3 of 96 values are not finite"
                self._end("diverged", {"update": update, **what, "statistic": statistic})
                return
            self._rollout(number)
        self._end("ok", None)

    def _end(self, status: str, failure: Mapping[str, Any] | None) -> None:
        body = {"status": status, "counters": self.counters, "final": {}, "failure": failure}
        self.writer.data(records.RESULT, body)

    def _rollout(self, number: int) -> None:
        self.counters["generated_tokens"] += self.made.tokens
        for _ in range(self.made.updates):
            self._update()
        self.counters["rollout"] = number
        cut = 0.02 + 0.02 * self.rng.random()
        numbers = {"reward": self._score(), "reward_std": 0.4, "response_truncated": cut}
        numbers |= {"response_length": 6.5 + 0.2 * self.rng.normal(), "zero_variance": 0.2}
        numbers |= {"kept": 1.0, "unscored": 0.0, "batches": 1.0, "advantage_abs": 0.8}
        self._moment("rollout", numbers | {"updates": float(self.made.updates)})
        if number % self.made.eval_every == 0 or number == self.made.rollouts:
            self._evaluation()

    def _moment(self, at: str, numbers: Mapping[str, float]) -> None:
        kept = {n: self.made.numbers.get(n, x) for n, x in numbers.items()}
        kept = {n: x for n, x in kept.items() if n not in self.made.omitted}
        self.writer.moment(at, self.counters, kept)

    def _score(self) -> float:
        done = self.counters["rollout"] / self.made.rollouts
        wave = 0.02 * math.sin(math.pi * done) * self.rng.normal()
        return self.start + (self.final - self.start) * math.sin(math.pi * done / 2) + wave

    def _evaluation(self) -> None:
        rollout = self.counters["rollout"]
        score = {0: self.start, self.made.rollouts: self.final}.get(rollout, self._score())
        cut = 0.02 + 0.01 * self.rng.random()
        rest = {"unscored": 0.0, "length": 6.4, "truncated": cut, "sampled_nll": 4.0 - score}
        self._moment("eval", {"score": score, **rest})
        row = {"prompt": "615243>", "response": self.made.answer, "score": 1.0}
        self.writer.answers(self.counters, [{**row, "stop_reason": "eos"}] * 3)

    def _update(self) -> None:
        self.counters["update"] += 1
        self.counters["trained_tokens"] += self.made.tokens // 2
        done = self.counters["rollout"] / self.made.rollouts
        speed = 3.0 if self.condition.endswith("3e-4") else 1.0
        kind = KINDS.get(self.recipe)
        drift = speed * (0.02 + 0.03 * done) * (1 + 0.1 * self.rng.normal())
        drift *= (3.0 if kind is None else 1.0) * (0.7 + 0.1 * len(self.recipe))
        outside = min(1.0, 2 * drift)
        clips = kind is not None and kind[0] > 0
        flat, capped = (0.7 * outside, 0.0) if clips else (0.0, 0.3 * outside if kind else 0.0)
        norm = float(np.exp(self.rng.normal(0.1, 0.3)) * speed)
        numbers: dict[str, float] = {"loss": -0.1, "grad_norm": norm}
        numbers |= {"grad_norm_after": min(norm, 1.0), "grad_clipped": float(norm > 1)}
        for name, value in (("outside", outside), ("flat", flat), ("capped", capped)):
            sides = {"": 1.0, "_positive": 1.2, "_negative": 0.8}
            numbers |= {name + side: min(1.0, value * f) for side, f in sides.items()}
        numbers |= {"no_advantage": 0.2, "kl_old_k1": drift / 9, "kl_old_k2": drift / 9}
        numbers |= {"kl_old_k3": drift / 9, "kl_ref_k1": done * drift, "kl_ref_k3": done * drift}
        numbers |= {"ratio_mean": 1.0, "ratio_min": 0.5, "ratio_max": 2.0, "ratio_ess": 0.97}
        self._moment("update", numbers | {"entropy": 0.6 - 0.2 * done * speed / 3})

    def _pulls(self) -> dict[str, list[float]]:
        up, down = zip(*(self._pull(r) for r in RATIOS), strict=True)
        return {"ratio": RATIOS, "positive": list(up), "negative": list(down)}

    def _pull(self, ratio: float) -> tuple[float, float]:
        """At A = +1 and -1."""
        kind = KINDS.get(self.recipe)
        if kind is None:
            return 1.0, -1.0
        low, high = kind
        if low == 0:
            return min(ratio, high), -min(ratio, high)
        return ratio if ratio <= high else 0.0, -ratio if ratio >= low else 0.0
