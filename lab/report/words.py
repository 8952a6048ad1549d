"""The answer in plain sentences, made from the verdicts and from nothing else.

A larger mean never makes a sentence. Where the verdicts leave the question open, it says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.power import least_seeds
from lab.results import Results
from lab.stats import fmt
from lab.tables.compared import MIRRORED, SAID, comparison, told_warnings
from lab.tables.scores import PLAIN, arms, complete, ended, judged, progress, reference, scores
from lab.tables.table import plain
from lab.verdict import Judged, sentence

#: Below this many seeds no verdict is said, whatever the number of contrasts.
LEAST = 6


@dataclass(frozen=True)
class Place:
    """A difference on a line of its own: everything in per cent of the line's length."""

    zero: float
    margin: tuple[float, float]
    mean: float
    ends: tuple[float, float] | None


@dataclass(frozen=True)
class Line:
    """A verdict: its word, its sentence, what qualifies it, and its difference to be drawn."""

    word: str
    text: str
    warnings: tuple[str, ...]
    place: Place


@dataclass(frozen=True)
class Change:
    """What differs between conditions: a title, a sentence a pair, and what follows."""

    title: str
    pairs: Sequence[str]
    closing: str


@dataclass(frozen=True)
class Answer:
    """What the first screen says.

    Attributes:
        headline: what can be said, and how much of it.
        groups: condition -> its verdicts; a study without named conditions has one, "".
        change: how the verdict on a pair differs between conditions; None: nowhere.
        read: how to read the sentences.
        failures: how many runs failed, and whose.
        losses: which recipes end below where they started.
    """

    headline: str
    groups: Mapping[str, Sequence[Line]]
    change: Change | None
    read: str
    failures: str
    losses: str


def answer(results: Results) -> Answer:
    """The answer to the study's question."""
    declared, verdicts = results.study["contrasts"], judged(results)
    groups: dict[str, list[Line]] = {}
    places = _places(verdicts, float(results.study["margin"]))
    for contrast, judge, place in zip(declared, verdicts, places, strict=False):
        where = "" if contrast["condition"] == PLAIN else str(contrast["condition"])
        text = sentence(judge, contrast["a"], contrast["b"])
        warnings = tuple(told_warnings(judge))
        groups.setdefault(where, []).append(Line(judge.word, text, warnings, place))
    order = [c for c in ("", *results.study["conditions"]) if c in groups]
    return Answer(
        headline=headline(results, verdicts),
        groups={c: groups[c] for c in order},
        change=change(declared, verdicts),
        read=_read(results, bool(verdicts)),
        failures=failures(results),
        losses=losses(results) if any(j.word for j in verdicts) else "",
    )


def headline(results: Results, verdicts: Sequence[Judged]) -> str:
    """How much the verdicts say, in one or two sentences."""
    if not complete(results):
        return f"No answer yet: {progress(results)} have ended, and a verdict needs all of them."
    if not verdicts:
        return (
            "No verdict: this study declared no comparison before its runs. What follows "
            "describes each recipe by itself."
        )
    n, seeds = len(verdicts), max(j.n for j in verdicts)
    words = [j.word for j in verdicts]
    if not any(words):
        least = max(LEAST, least_seeds(n, float(results.study["alpha"])))
        return (
            f"Nothing can be said about which recipe is better: each has {_count(seeds, 'seed')}, "
            f"and a verdict on {_count(n, 'comparison')} needs at least {least}."
        )
    return _counted(words, float(results.study["margin"]))


def _counted(words: Sequence[str], margin: float) -> str:
    n = len(words)
    differ = sum(w in ("better", "worse") for w in words)
    same = words.count("equivalent")
    open_ = n - differ - same
    within = f"{margin:g}".replace("0.", ".", 1)
    if not differ and not same:
        unsaid = "Nothing can be said about which recipe is better:"
        if n == 1:
            told = "the one comparison declared before the runs is inconclusive, which is no tie"
        else:
            told = f"none of the {n} comparisons declared before the runs found a difference, "
            told += "and none found a tie"
        return f"{unsaid} {told}."
    if n == 1:
        told = "a difference" if differ else f"a tie: they differ by less than {within}"
        return f"The one comparison declared before the runs found {told}."
    found = [f"{differ or 'none'} found a difference"]
    found += [f"{same} found a tie (a difference of less than {within})"] if same else []
    found += [f"{open_} {'is' if open_ == 1 else 'are'} inconclusive"] if open_ else []
    return f"Of the {n} comparisons declared before the runs, {_listed(found)}."


def change(declared: Sequence[Mapping[str, str]], verdicts: Sequence[Judged]) -> Change | None:
    """What is said of the pairs whose verdict is not the same under every condition."""
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for contrast, judge in zip(declared, verdicts, strict=False):
        a, b = contrast["a"], contrast["b"]
        if judge.word not in SAID:
            continue
        turned = (b, a) in pairs
        word = _turned(judge.word) if turned else judge.word
        pairs.setdefault((b, a) if turned else (a, b), {})[contrast["condition"]] = word
    mixed = {pair: words for pair, words in pairs.items() if len(set(words.values())) > 1}
    if not mixed:
        return None
    turns = any({"better", "worse"} <= set(words.values()) for words in mixed.values())
    title = "The verdict is not the same under every condition."
    closing = (
        "So a comparison under one shared setting, such as one learning rate, would have shown one "
        "of these answers only, and would mislead."
    )
    if any("inconclusive" in words.values() for words in mixed.values()):
        closing += (
            " (Inconclusive is no tie: that one word differs from another does not by itself show "
            "that the setting matters.)"
        )
    return Change(
        title="The order changes with the condition." if turns else title,
        pairs=[_change(a, b, words) for (a, b), words in mixed.items()],
        closing=closing,
    )


def _turned(word: str) -> str:
    """The word for b against a."""
    back = {text: w for w, text in SAID.items()}
    return back[MIRRORED[word]]


def _change(a: str, b: str, words: Mapping[str, str]) -> str:
    where = {w: _listed([c for c in words if words[c] == w]) for w in dict.fromkeys(words.values())}
    told = _listed([f"{w} with {c}" for w, c in where.items()])
    return f"{a} against {b}: {told}."


def failures(results: Results) -> str:
    """How many runs failed, by arm, and what they count."""
    runs = ended(results)
    failed = runs[runs["status"] != "ok"]
    if runs.empty:
        return ""
    if failed.empty:
        which = "that have ended " if not complete(results) else ""
        return f"None of the {_count(len(runs), 'run')} {which}failed."
    parts = []
    for recipe, condition in arms(results):
        own = runs[(runs["recipe"] == recipe) & (runs["condition"] == condition)]
        bad = int((own["status"] != "ok").sum())
        where = "" if condition == PLAIN else f" with {condition}"
        parts += [f"{recipe}{where} ({bad} of {len(own)})"] if bad else []
    floor = f"{results.study['floor']:g}"
    verb = "They count" if len(failed) > 1 else "It counts"
    return (
        f"{len(failed)} of {_count(len(runs), 'run')} failed: {_listed(parts)}. {verb} in every "
        f"number here, with the score {floor} from the end on."
    )


def losses(results: Results) -> str:
    """Which recipes end below the starting policy, by their intervals: better may be less bad."""
    rows = comparison(results).data
    lost = rows[rows["gain_high"] < 0]
    parts = []
    for condition in results.study["conditions"]:
        names = list(lost[lost["condition"] == condition]["recipe"])
        where = "" if condition == PLAIN else f" with {condition}"
        parts += [f"{_listed(names)}{where}"] if names else []
    if not parts:
        return ""
    return (
        f"Below the starting policy at the end, by the 95 % interval of final minus start: "
        f"{'; '.join(parts)}. Among these, better means having lost less."
    )


def _read(results: Results, verdicts: bool) -> str:
    study = results.study
    if not complete(results):
        return (
            "Looking early, and stopping when it looks good, finds differences that are not there. "
            "What follows describes the runs that have ended."
        )
    if not verdicts:
        return ""
    start = fmt(reference(scores(results)), 0.01)
    level = f"{100 * (1 - study['alpha']):g} %"
    margin = f"{study['margin']:g}".replace("0.", ".", 1)
    return (
        "Numbers are mean differences of the final held-out score, normalised: 0 is the starting "
        f"policy (which scores {start}), 1 the best possible ({study['optimum']:g}). In brackets: "
        f"{level} t-interval over seeds, unadjusted; the p-values are adjusted for "
        f"{_count(len(study['contrasts']), 'comparison')}. Better and worse need both. Equivalent: "
        f"shown to differ by less than {margin}, the smallest difference that matters here. "
        "Inconclusive: neither, so nothing is known about the order. The drawings at the right "
        "show the same differences on one scale: a bar is the interval, the line is 0, the shade "
        "what is too small to matter."
    )


def facts(results: Results) -> list[tuple[str, str]]:
    """What was compared, in a line."""
    study = results.study
    task = study["task"]
    settings = f", {plain(task['settings'])}" if task.get("settings") else ""
    budget = ", ".join(f"{v:,} {k.replace('_', ' ')}" for k, v in study["budget"].items())
    return [
        ("Task", f"{task['name']} (version {task['version']}{settings})"),
        ("Model", str(study["model"])),
        ("Budget of a run", budget),
        ("Seeds", str(len(study["seeds"]))),
        ("Runs", progress(results)),
    ]


def _places(verdicts: Sequence[Judged], margin: float) -> list[Place]:
    """The differences on one common scale."""
    points = [-margin, margin, 0.0]
    for judge in verdicts:
        shown = judge.difference
        points += [x for x in (shown.low, shown.mean, shown.high) if not math.isnan(x)]
    low, high = min(points), max(points)
    pad = 0.04 * (high - low)

    def at(x: float) -> float:
        return round(100 * (x - low + pad) / (high - low + 2 * pad), 2)

    return [
        Place(
            zero=at(0.0),
            margin=(at(-margin), at(margin)),
            mean=at(j.difference.mean),
            ends=None
            if math.isnan(j.difference.low)
            else (at(j.difference.low), at(j.difference.high)),
        )
        for j in verdicts
    ]


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _listed(parts: Sequence[Any]) -> str:
    if len(parts) < 2:
        return "".join(map(str, parts))
    return f"{', '.join(map(str, parts[:-1]))} and {parts[-1]}"
