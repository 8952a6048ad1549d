"""Recipes beside each other: their scores, and the verdicts on the declared contrasts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from lab.results import Results
from lab.stats import Interval, mean_interval
from lab.tables.scores import arms, judged, progress, reference, scores
from lab.tables.table import NOTHING, Table, count, each, interval_text, lean, number, p_value
from lab.verdict import Judged, difference_text

#: Below this many runs there are dots and no interval.
FEW = 3
SCORE = "final score [95 % interval]"
GAIN = "final - start [95 % interval]"
CONTRAST = (
    *("a", "b", "condition", "n", "difference", "low", "high", "level", "p", "p_adjusted"),
    *("tost_p", "tost_adjusted", "rho", "d_z", "improvement", "shift", "verdict", "note"),
    "seeds_needed",
)
#: What a verdict says of its first recipe; and of its second.
STANDS = ("better than", "worse than", "equivalent to", "undecided against")
SAID = dict(zip(("better", "worse", "equivalent", "inconclusive"), STANDS, strict=True))
MIRRORED = {**SAID, "better": SAID["worse"], "worse": SAID["better"]}
Arm = tuple[str, str]


def standing(
    declared: Sequence[Mapping[str, str]], verdicts: Sequence[Judged]
) -> dict[Arm, tuple[str, bool]]:
    """What the verdicts say of each arm in words, and whether it is among the best by them.

    Among the best: no verdict says that another is better, and it is better than some other, or
    ties (equivalent, inconclusive) with one of which the same is true. A mean decides nothing.
    """
    told: dict[str, dict[Arm, list[str]]] = {text: {} for text in STANDS}
    for contrast, judge in zip(declared, verdicts, strict=False):
        a, b, condition = contrast["a"], contrast["b"], contrast["condition"]
        for one, other, text in ((a, b, SAID.get(judge.word)), (b, a, MIRRORED.get(judge.word))):
            if text:
                told[text].setdefault((one, condition), []).append(other)
    wins, losses = told[STANDS[0]], told[STANDS[1]]
    out = {}
    for arm in {arm for of in told.values() for arm in of}:
        words = [f"{text} {', '.join(of[arm])}" for text, of in told.items() if arm in of]
        ties = [other for text in STANDS[2:] for other in told[text].get(arm, [])]
        level = any((other, arm[1]) not in losses for other in ties)
        out[arm] = "; ".join(words), arm not in losses and (arm in wins or level)
    return out


def comparison(results: Results) -> Table:
    """Recipe by condition: final held-out score, a row an arm."""
    scored = scores(results)
    declared = results.study["contrasts"]
    stands = standing(declared, judged(results))
    asked = {(c[side], c["condition"]) for c in declared for side in ("a", "b")}
    rows = []
    for arm in arms(results):
        found = scored[(scored["recipe"] == arm[0]) & (scored["condition"] == arm[1])]
        words, best = stands.get(arm, ("no verdict" if arm in asked else "not compared", False))
        told = {"verdicts": words, "best_by_verdict": best}
        rows.append({"recipe": arm[0], "condition": arm[1], **_numbers(found), **told})
    data = pd.DataFrame(rows)
    text = pd.DataFrame(
        {
            "recipe": data["recipe"],
            "condition": data["condition"],
            SCORE: each(data, interval_text, "mean", "low", "high"),
            "by verdict": data["verdicts"],
            GAIN: each(data, gain_text, "gain", "gain_low", "gain_high"),
            "runs": data["n"].astype(str),
            "failed": data["failures"].astype(str),
            "tokens a run": [count(x) for x in data["generated_tokens"]],
        }
    )
    note = (
        "Final score: mean over the last tenth of a run's evaluations, then over runs, with the "
        "t-interval over runs. Final - start: within each run. A failed run counts, with the floor "
        f"{results.study['floor']:g} at every evaluation that it did not reach. The starting "
        f"policy scores {number(reference(scored), 0.01)}, mean over seeds. Bold: among the "
        "best of its condition by verdict; a larger mean alone says nothing."
    )
    strong = ("recipe", SCORE)
    title = "Final held-out score"
    return Table("comparison", title, data, lean(text), note, list(data["best_by_verdict"]), strong)


def _numbers(found: pd.DataFrame) -> dict[str, Any]:
    final, gain = (_described(found[name]) for name in ("final", "gain"))
    return {
        "mean": final.mean,
        "low": final.low,
        "high": final.high,
        "sd": final.sd,
        "start": float(found["start"].mean()),
        "gain": gain.mean,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "n": len(found),
        "failures": int((found["status"] != "ok").sum()),
        "generated_tokens": float(found["generated_tokens"].mean()),
    }


def _described(values: pd.Series[float]) -> Interval:
    """Mean and t-interval of what is known; no interval of few runs, nothing of none."""
    known = [float(x) for x in values.dropna()]
    if not known:
        return Interval(math.nan, math.nan, math.nan, math.nan, 0)
    shown = mean_interval(known)
    return replace(shown, low=math.nan, high=math.nan) if len(known) < FEW else shown


def gain_text(mean: float, low: float, high: float) -> str:
    """``+.087 [.061, .113]``."""
    if math.isnan(mean):
        return NOTHING
    return difference_text(Interval(mean, low, high, math.nan, 0))


def told_warnings(judge: Judged) -> list[str]:
    """Its warnings but those whose share has decided the verdict, and stands in its note."""
    decided = {"G4": "truncated", "G5": "zero-variance"}
    said = tuple(word for rail, word in decided.items() if rail in judge.rails)
    return [text for text in judge.warnings if not (said and text.startswith(said))]


def contrasts(results: Results) -> Table:
    """The declared contrasts with every number behind the verdict."""
    declared, verdicts = results.study["contrasts"], judged(results)
    rows = [_row(c, j) for c, j in zip(declared, verdicts, strict=False)]
    if not verdicts:
        note = f"{progress(results)}: no verdict"
        rows = [{**c, "verdict": "", "note": note} for c in declared]
    data = pd.DataFrame(rows, columns=list(CONTRAST))
    alpha = results.study["alpha"]

    def both(raw: float, adjusted: float) -> str:
        first, second = p_value(raw, alpha), p_value(adjusted, alpha)
        return first if first == second == NOTHING else f"{first} ({second})"

    text = pd.DataFrame(
        {
            "contrast": [f"{c['a']} - {c['b']}" for c in declared],
            "condition": [c["condition"] for c in declared],
            "difference": [difference_text(j.difference) for j in verdicts]
            or [NOTHING] * len(declared),
            "verdict": [v or "no verdict" for v in data["verdict"]],
            "p (adjusted)": each(data, both, "p", "p_adjusted"),
            "TOST p (adjusted)": each(data, both, "tost_p", "tost_adjusted"),
            "improvement": [number(x, 0.1) for x in data["improvement"]],
            # two points always lie on a line
            "rho": [number(x, 0.1) for x in data["rho"].where(data["n"] >= FEW)],
            "d_z": [number(x, 0.1) for x in data["d_z"]],
            "pairs": [count(x) for x in data["n"]],
            "seeds needed": [count(x) for x in data["seeds_needed"]],
            "note": data["note"],
        }
    )
    if not data["note"].any():
        text = text.drop(columns="note")
    note = (
        "Difference: normalised score of the first recipe minus that of the second, mean over "
        f"seeds, with the {100 * (1 - alpha):g} % t-interval, not adjusted. p: sign-flip test of "
        "no difference. TOST p: t-tests of a difference of at least "
        f"{results.study['margin']:g} either way. Adjusted: by Holm's method over the declared "
        f"contrasts ({len(declared)}). Improvement: probability that a run of the first beats one "
        "of the second."
    )
    return Table("contrasts", "Declared contrasts", data, lean(text), note)


def _row(declared: Mapping[str, str], judge: Judged) -> dict[str, Any]:
    shown = judge.difference
    same = ("n", "p", "p_adjusted", "tost_p", "tost_adjusted", "rho", "d_z", "improvement")
    return {
        **declared,
        **{name: getattr(judge, name) for name in (*same, "shift")},
        "difference": shown.mean,
        "low": shown.low,
        "high": shown.high,
        "level": shown.level,
        "verdict": judge.word,
        "note": "; ".join(filter(None, [judge.note, *told_warnings(judge)])),
        "seeds_needed": math.nan if judge.seeds_needed is None else judge.seeds_needed,
    }
