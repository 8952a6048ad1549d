"""From records to one score a run, and from scores to verdicts.

A failed run is a result: at every planned evaluation that it did not live to see it scores the
study's floor, and no run is left out. An unfinished study has scores and no verdict.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from lab.errors import LabError
from lab.records import COUNTERS
from lab.results import PLACE, Results
from lab.stats import mean_interval
from lab.verdict import Contrast, Judged, judge

#: Statuses of a run that has ended; the others run again.
ENDED = ("ok", "diverged", "crashed")
#: The condition of a study that names none.
PLAIN = "as given"
#: A budget's names, and the counters that they limit.
LIMITS = {
    "rollouts": "rollout",
    "updates": "update",
    "generated_tokens": "generated_tokens",
    "trained_tokens": "trained_tokens",
}
#: The share of a run's evaluations, from its end, whose mean is its final score.
LAST = 10


def label(recipe: str, condition: str) -> str:
    """An arm's name in study.json."""
    return f"{recipe}|{condition}"


def arms(results: Results) -> list[tuple[str, str]]:
    """Recipe and condition of each arm, conditions one after another, as the study has them."""
    study = results.study
    rows = [(r, c) for c in study["conditions"] for r in study["recipes"]]
    planned = {(p["recipe"], p["condition"]) for p in study["plan"]}
    order = list(dict.fromkeys(p["recipe"] for p in study["plan"]))
    rows.sort(key=lambda a: (study["conditions"].index(a[1]), order.index(a[0])))
    return [a for a in rows if a in planned]


def ended(results: Results) -> pd.DataFrame:
    """The rows of `results.runs` that have ended."""
    return results.runs[results.runs["status"].isin(ENDED)]


def progress(results: Results) -> str:
    """How far the study is: ``30 of 96 runs``."""
    return f"{len(ended(results))} of {len(results.runs)} runs"


def complete(results: Results) -> bool:
    """Whether every planned run has ended, so that verdicts may be read."""
    return len(ended(results)) == len(results.runs)


@functools.lru_cache(maxsize=2)  # asked by every table, figure and sentence
def evaluations(results: Results) -> pd.DataFrame:
    """A row a run and planned evaluation: place, status, number, counters, score, reached.

    `reached` is False where a failed run scores the floor. The grid of a failed run is that of
    the plan: every `eval_every` rollouts up to the budget, and at its end.
    """
    metric, floor = results.study["metric"], float(results.study["floor"])
    seen = results.metric(metric, "eval").sort_values("rollout", kind="stable")
    groups: dict[Any, pd.DataFrame] = dict(iter(seen.groupby(list(PLACE), sort=False)))
    spent = _ends(results)
    rows: list[dict[str, Any]] = []
    for run in ended(results).to_dict("records"):
        place = tuple(run[n] for n in PLACE)
        found = groups.get(place, seen.iloc[:0])
        if found.empty and run["status"] == "ok":
            raise LabError(f"run {run['run_key'][:8]} has no held-out number {metric!r}")
        points = [
            {**{c: float(row[c]) for c in COUNTERS}, "score": row["value"], "reached": True}
            for row in found.to_dict("records")
        ]
        if run["status"] != "ok":
            last = int(points[-1]["rollout"]) if points else -1
            missed = _later(results, place, last, spent)
            points += [{**moment, "score": floor, "reached": False} for moment in missed]
        head = {n: run[n] for n in ("run_key", *PLACE, "status")}
        rows += [{**head, "number": i, **point} for i, point in enumerate(points)]
    names = ["run_key", *PLACE, "status", "number", *COUNTERS, "score", "reached"]
    return pd.DataFrame(rows, columns=names)


def _ends(results: Results) -> dict[tuple[Any, ...], dict[str, float]]:
    """Place -> the counters at the end of a run's last whole rollout."""
    table = results.table
    groups = table.groupby(list(PLACE), sort=False)
    ends = {}
    for place, rows in groups:
        last = rows[rows["rollout"] == rows["rollout"].max()]
        ends[place] = {c: float(last[c].min()) for c in COUNTERS}
    return ends


def _later(
    results: Results,
    place: tuple[Any, ...],
    last: int,
    spent: Mapping[tuple[Any, ...], Mapping[str, float]],
) -> Iterator[dict[str, float]]:
    """The counters of the planned evaluations after the one at rollout `last`."""
    rate = _rate(results, place, spent)
    budget = {LIMITS[n]: limit for n, limit in results.study["budget"].items()}
    known = {c: limit for c, limit in budget.items() if rate[c] > 0}
    end = min((math.ceil(limit / rate[c] - 1e-9) for c, limit in known.items()), default=0)
    every = int(results.study["eval_every"])
    for rollout in sorted({*range(0, end, every), end}):
        if rollout > last:
            yield {c: rollout * rate[c] for c in COUNTERS}


def _rate(
    results: Results,
    place: tuple[Any, ...],
    spent: Mapping[tuple[Any, ...], Mapping[str, float]],
) -> dict[str, float]:
    """What a rollout of this run adds to each counter: its own, else the mean of the study's.

    Updates are those of the recipe's loop, unless it stops a rollout early by its KL.
    """
    own = [spent[place]] if spent.get(place, {}).get("rollout") else list(spent.values())
    begun = [s for s in own if s["rollout"]]
    rate = {c: _mean([s[c] / s["rollout"] for s in begun]) for c in COUNTERS} | {"rollout": 1.0}
    loop = results.study["loops"].get(label(str(place[0]), str(place[1])), {})
    if loop and not loop.get("kl_stop"):
        rate["update"] = float(loop["epochs"] * loop["minibatches"])
    return rate


def _mean(values: list[float]) -> float:
    return mean_interval(values).mean if values else 0.0


@functools.lru_cache(maxsize=2)  # asked by every table, figure and sentence
def scores(results: Results) -> pd.DataFrame:
    """A row a run that has ended: place, status, start, final, normalised, and what it took.

    - start: the score at its first evaluation; NaN for a run that crashed before it.
    - final: the mean of the last 10 % of its planned evaluations, at least one, never the best.
    - gain: final - the start of its seed (all runs of a seed start alike).
    - normalised: (final - s_ref) / (s_opt - s_ref), not clipped.
    """
    table = evaluations(results)
    spent = results.table.groupby(list(PLACE), sort=False)[["update", "generated_tokens"]].max()
    rows = []
    for place, found in table.groupby(list(PLACE), sort=False):
        last = max(1, len(found) // LAST)
        first = found[found["reached"] & (found["rollout"] == 0)]["score"]
        first_row: Any = found.iloc[0].to_dict()
        head = {n: first_row[n] for n in ("run_key", *PLACE, "status")}
        head["start"] = float(first.iloc[0]) if len(first) else math.nan
        head["final"] = _mean(list(found["score"].iloc[-last:]))
        head["evaluations"], head["at_floor"] = len(found), int((~found["reached"]).sum())
        used: Any = place
        head["updates"] = int(spent["update"][used])
        head["generated_tokens"] = int(spent["generated_tokens"][used])
        rows.append(head)
    names = ["run_key", *PLACE, "status", "start", "final", "evaluations", "at_floor"]
    out = pd.DataFrame(rows, columns=[*names, "updates", "generated_tokens"])
    low, high = reference(out), float(results.study["optimum"])
    if high <= low:
        raise LabError(
            f"the starting policy scores {low:g} and the best possible is {high:g}: nothing is "
            "left to learn, and no score can be normalised"
        )
    out.insert(7, "gain", out["final"] - out.groupby("seed")["start"].transform("mean"))
    out.insert(8, "normalised", (out["final"] - low) / (high - low))
    return out


def reference(scored: pd.DataFrame) -> float:
    """s_ref: the starting policy's score, the mean over seeds of `start`; 0 where none is known."""
    known = scored.dropna(subset=["start"])
    by_seed = known.groupby("seed")["start"].mean()
    return _mean([float(x) for x in by_seed])


def contrast_name(contrast: Mapping[str, str]) -> str:
    """As tables print it: ``ppo - grpo, lr 1e-4``."""
    where = "" if contrast["condition"] == PLAIN else f", {contrast['condition']}"
    return f"{contrast['a']} - {contrast['b']}{where}"


@functools.lru_cache(maxsize=2)  # asked by every table, figure and sentence
def judged(results: Results) -> list[Judged]:
    """The verdict on each declared contrast, in order; none at all while the study is unfinished.

    Normalised final scores, paired by seed. A share of truncated rows or of groups without reward
    variance is the mean over an arm's rollouts, then runs; the larger of the two arms counts.
    """
    study = results.study
    if not complete(results) or not study["contrasts"]:
        return []
    scored = scores(results)
    by_arm: dict[Any, pd.DataFrame] = dict(iter(scored.groupby(list(PLACE[:2]), sort=False)))
    truncated = _shares(results, "response_truncated")
    zero_variance = _shares(results, "zero_variance")
    outside = _ever(results, "outside")
    made = []
    for declared in study["contrasts"]:
        both = [(declared[side], declared["condition"]) for side in ("a", "b")]
        x, y = (_by_seed(by_arm[arm]) for arm in both)
        contrast = Contrast(
            name=contrast_name(declared),
            x=x,
            y=y,
            truncated=max(truncated.get(arm, 0.0) for arm in both),
            zero_variance=max(zero_variance.get(arm, 0.0) for arm in both),
            outside=any(outside.get(arm, True) for arm in both),
        )
        made.append(contrast)
    return judge(made, study["margin"], study["alpha"], planned=len(study["seeds"]))


def _by_seed(scored: pd.DataFrame) -> dict[int, float]:
    return dict(zip(scored["seed"].astype(int), scored["normalised"].astype(float), strict=True))


def _shares(results: Results, metric: str) -> dict[Any, float]:
    """Arm -> the mean over rollouts, then runs; an arm that has not recorded it is not there."""
    rows = results.metric(metric, "train").dropna(subset=["value"])
    by_run = rows.groupby(list(PLACE))["value"].mean()
    groups = by_run.groupby(level=[0, 1])
    return {arm: min(1.0, _mean([float(x) for x in runs])) for arm, runs in groups}


def _ever(results: Results, metric: str) -> dict[Any, bool]:
    """Arm -> whether it was ever above 0; an arm in which nobody looked is not there."""
    rows = results.metric(metric, "train")
    return {arm: bool((x > 0).any()) for arm, x in rows.groupby(list(PLACE[:2]))["value"]}
