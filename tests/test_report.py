"""The report: what its first screen says of made studies whose answer is known."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from studies_made import Made

from lab import report, results
from lab.errors import LabError
from lab.report.words import answer, change, headline
from lab.tables.scores import judged

ONE = "as given"
TWO = ("lr 1e-4", "lr 3e-4")
UP = [0.50, 0.52, 0.49, 0.55, 0.51, 0.53, 0.50, 0.54]
DOWN = [0.30, 0.33, 0.28, 0.31, 0.35, 0.30, 0.29, 0.32]
#: The same seeds in another order: a larger mean, and differences of both signs.
MIXED = [0.58, 0.49, 0.57, 0.48, 0.60, 0.47, 0.56, 0.49]
SAME = [x + d for x, d in zip(UP, [0.001, -0.001] * 4, strict=True)]
#: Words of a sentence that names a winner or a loser.
WINNER = re.compile(r"(better|worse) (than|with)|\b(win|won|beat|outperform|leads?)\b", re.I)
VOID = {"meta", "img", "br"}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Page]:
    """The page of a made study, without figures unless they are asked for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def make(figures: bool = False, **what: Any) -> Page:
        folder = Made(**what).write(tmp_path / str(len(list(tmp_path.iterdir()))))
        if figures:
            return Page(report.rebuild(folder))
        return Page(report.write(results.load(folder)))

    return make


class Page(HTMLParser):
    """A report, taken apart: its tags, the text of its first screen and all of its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.source = file.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.first, self.text = "", ""
        self.feed(self.source)
        self.first, self.text = (" ".join(t.split()) for t in (self.first, self.text))
        assert self.open == [], "a tag is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
            self.first += data if "header" in self.open else ""

    def words(self) -> list[str]:
        found = re.findall(r'class="word [a-z]+">([a-z ]+)<', self.source)
        return [w.strip() for w in found]


def test_a_tie_has_no_winner(write: Any) -> None:
    """From the larger mean (.530 against .518) the first would be called better."""
    page = write(finals={("ppo", ONE): MIXED, ("grpo", ONE): UP})
    assert page.words() == ["inconclusive"]
    assert not WINNER.search(page.first), page.first
    assert "Nothing can be said about which recipe is better" in page.source
    assert "ppo against grpo is inconclusive: +.01" in page.first
    assert "seeds would" in page.first
    assert "bold" not in page.source.split("</style>")[1].split("<section")[0]
    # both stand as the best by verdict
    assert len(re.findall(r'<th scope="row"><strong>', page.source)) == 2


def test_an_equivalence_is_a_result_and_no_winner(write: Any) -> None:
    """A tie that was shown is more than nothing, and less than a winner."""
    page = write(finals={("ppo", ONE): UP, ("grpo", ONE): SAME})
    assert page.words() == ["equivalent"]
    assert not WINNER.search(page.first)
    assert "The one comparison declared before the runs found a tie" in page.first
    assert "ppo and grpo are equivalent within ±.02" in page.first


def test_a_clear_difference_is_said_with_its_uncertainty(write: Any) -> None:
    page = write(finals={("ppo", ONE): DOWN, ("grpo", ONE): UP})
    assert page.words() == ["worse"]
    assert "The one comparison declared before the runs found a difference." in page.first
    # mean of DOWN - UP is -.2075; / (1 - .164375) = -.2483
    assert re.search(r"ppo is worse than grpo: -\.248 \[-\.\d+, -\.\d+\] \(8 seeds", page.first)
    assert "95 % t-interval over seeds" in page.first
    assert "would mislead" not in page.first


def test_an_order_that_turns_round_is_said(write: Any) -> None:
    """Averaged over conditions, or of the first alone, it would be a tie or a winner."""
    page = write(
        conditions=TWO,
        contrasts=[("ppo", "grpo", TWO[0]), ("grpo", "ppo", TWO[1])],
        finals={
            ("ppo", TWO[0]): UP,
            ("grpo", TWO[0]): DOWN,
            ("ppo", TWO[1]): DOWN,
            ("grpo", TWO[1]): UP,
        },
    )
    # the second contrast is written the other way round: both say `better`
    assert page.words() == ["better", "better"]
    assert "The order changes with the condition." in page.first
    assert "ppo against grpo: better with lr 1e-4 and worse with lr 3e-4." in page.first
    assert "one shared setting, such as one learning rate" in page.first
    assert "would mislead" in page.first
    assert page.first.index("With lr 1e-4") < page.first.index("With lr 3e-4")


def said(*words: str) -> tuple[list[dict[str, str]], list[Any]]:
    declared = [{"a": "a", "b": "b", "condition": f"c{i}"} for i in range(len(words))]
    return declared, [SimpleNamespace(word=w) for w in words]


@pytest.mark.parametrize(
    ("words", "title", "tie"),
    [
        (("better", "equivalent"), "The verdict is not the same", False),
        (("better", "inconclusive"), "The verdict is not the same", True),
        (("worse", "better", "inconclusive"), "The order changes", True),
    ],
)
def test_words_that_differ_are_told_and_no_more(words: Any, title: str, tie: bool) -> None:
    """Significant here and not there is no evidence of a difference between here and there."""
    found = change(*said(*words))
    assert found is not None
    assert found.title.startswith(title)
    assert ("Inconclusive is no tie" in found.closing) == tie
    told = " and ".join(f"{w} with c{i}" for i, w in enumerate(words[-2:], len(words) - 2))
    assert found.pairs[0].endswith(f"{told}.")


@pytest.mark.parametrize("words", [("better", "better"), ("better", ""), ("", ""), ("worse",)])
def test_words_that_agree_or_are_missing_are_no_change(words: Any) -> None:
    assert change(*said(*words)) is None


def test_failed_runs_are_counted_on_the_first_screen(write: Any) -> None:
    """A reader who does not scroll must not take the mean for that of runs that learned."""
    page = write(seeds=3, diverged={("ppo", ONE, 9000): 3, ("ppo", ONE, 9001): 2})
    assert "2 of 6 runs failed: ppo (2 of 3)." in page.first
    assert "with the score 0 from the end on" in page.first
    assert "3 of 96 values are not finite" in page.text
    assert "None of the 4 runs failed." in write(seeds=2).first


def test_better_than_another_may_be_worse_than_the_start(write: Any) -> None:
    """`better` alone would sell a recipe that has only lost less."""
    low = [x - 0.45 for x in UP]  # .04 to .10, from .16 on
    page = write(finals={("ppo", ONE): low, ("grpo", ONE): [0.0] * 8})
    assert page.words() == ["better"]
    assert "minus start: ppo and grpo. Among these, better means having lost less." in page.first
    assert "minus start" not in write(finals={("ppo", ONE): UP, ("grpo", ONE): DOWN}).first


def test_an_unfinished_study_says_so_and_nothing_else(write: Any) -> None:
    """A verdict on 15 of 16 runs is a peek."""
    finals = {("ppo", ONE): UP, ("grpo", ONE): DOWN}
    page = write(finals=finals, missing={("ppo", ONE, 9003)})
    assert "No answer yet: 15 of 16 runs have ended" in page.first
    assert page.words() == []
    assert not WINNER.search(page.first)
    assert "15 of 16 runs: no verdict" in page.text
    nothing = write(missing={(r, ONE, 9000 + i) for r in ("ppo", "grpo") for i in range(8)})
    assert "No answer yet: 0 of 16 runs have ended" in nothing.first
    assert "There are no figures yet" in nothing.text


def test_one_seed_answers_nothing(write: Any) -> None:
    """One run each, .9 against .3, would be the clearest winner of all."""
    page = write(seeds=1, finals={("ppo", ONE): [0.9], ("grpo", ONE): [0.3]})
    assert page.words() == ["no verdict"]
    expected = "each has 1 seed, and a verdict on 1 comparison needs at least 6"
    assert expected in page.first
    assert not WINNER.search(page.first)
    assert "(1 seed: dots only, a verdict needs 6)" in page.first


def test_a_study_without_contrasts_has_no_verdict(write: Any) -> None:
    page = write(seeds=2, contrasts=())
    assert "No verdict: this study declared no comparison" in page.first
    assert page.words() == []


def test_a_guard_rail_is_said_in_its_sentence(write: Any) -> None:
    """Seven contrasts of six seeds cannot reach alpha: 2/2^6 = .031 > .05/3."""
    page = write(
        seeds=6,
        recipes=("ppo", "grpo", "cispo"),
        contrasts=[("ppo", "grpo", ONE), ("ppo", "cispo", ONE), ("grpo", "cispo", ONE)],
        finals={("ppo", ONE): UP[:6], ("grpo", ONE): DOWN[:6]},
        numbers={"response_truncated": 0.6},
    )
    assert page.words() == ["inconclusive"] * 3
    assert "cannot reach alpha by construction" in page.first
    assert "Warning: truncated share .60" in page.first
    assert not WINNER.search(page.first)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["better", "worse", "equivalent", "inconclusive"], "2 found a difference, 1 found a tie"),
        (["inconclusive", "equivalent"], "none found a difference, 1 found a tie"),
        (["better", "inconclusive"], "1 found a difference and 1 is inconclusive"),
        (["inconclusive"] * 3, "none of the 3 comparisons declared before the runs found a"),
        (["inconclusive"], "the one comparison declared before the runs is inconclusive"),
    ],
)
def test_the_headline_counts_verdicts(tmp_path: Path, words: list[str], text: str) -> None:
    """Inconclusive counted as a tie would turn ignorance into a result."""
    study = results.load(Made(seeds=1).write(tmp_path))
    verdicts: Any = [SimpleNamespace(word=w, n=8) for w in words]
    assert text in headline(study, verdicts)


def test_sentences_are_those_of_the_verdicts(write: Any, tmp_path: Path) -> None:
    """Said twice in two wordings, they would differ one day."""
    study = results.load(Made(finals={("ppo", ONE): UP}).write(tmp_path / "s"))
    (judge,) = judged(study)
    (lines,) = answer(study).groups.values()
    assert lines[0].text.startswith(f"ppo is {judge.word} than grpo: ")
    place = lines[0].place
    assert place.ends is not None
    assert 0 < place.zero < place.ends[0] < place.mean < place.ends[1] < 100


def test_an_answer_of_a_model_is_text_and_nothing_more(write: Any) -> None:
    """A sampled string is not markup; nor is a question, nor a name."""
    bad = "<script>alert(1)</script>"
    page = write(seeds=1, answer=bad, question=f"What is {bad}?", recipes=("ppo", "<b>x"),
                 contrasts=[("ppo", "<b>x", ONE)])  # fmt: skip
    assert "script" not in [tag for tag, _ in page.tags]
    assert html.escape(bad) in page.source
    assert bad in page.text
    assert "<b>x" in page.text
    assert "<b>x" not in page.source


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_can_be_read_by_everyone(write: Any) -> None:
    """A link to a network, a picture without words, a table without headers."""
    page = write(figures=True, conditions=TWO, seeds=3, contrasts=[("ppo", "grpo", TWO[0])],
                 diverged={("ppo", TWO[0], 9000): 2})  # fmt: skip
    assert not re.search(r"https?://|//[a-z]", page.source.replace("data:image/svg+xml;base64", ""))
    assert [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "object")] == []
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    targets = {a.get("id") for _, a in page.tags}
    assert links
    assert all(str(link).startswith("#") and str(link)[1:] in targets for link in links)
    pictures = [a for tag, a in page.tags if tag == "img"]
    assert len(pictures) == 10
    for picture in pictures:
        assert str(picture["src"]).startswith("data:image/svg+xml;base64,")
        assert len(str(picture["alt"])) > 60
    assert ("html", {"lang": "en"}) in page.tags
    headers = [a for tag, a in page.tags if tag == "th"]
    assert headers
    assert all(a.get("scope") in ("col", "row", "rowgroup") for a in headers)
    tables = [tag for tag, _ in page.tags].count("table")
    assert [tag for tag, _ in page.tags].count("caption") == tables >= 6
    assert page.file.stat().st_size < 5_000_000
    assert str(page.file.parent) not in page.source
    for part in ("lab report DIR", "0123456789abcdef", "What each number is", "kl_old_k3"):
        assert part in page.text


@pytest.mark.slow
def test_a_report_made_again_is_the_same(write: Any) -> None:
    """From the run folders, and from the files that stand for them."""
    page = write(figures=True, seeds=2, crashed={("ppo", ONE, 9000)})
    assert Page(report.rebuild(page.file.parent)).source == page.source
    for run in (page.file.parent / results.RUNS).iterdir():
        for file in run.iterdir():
            file.unlink()
        run.rmdir()
    assert Page(report.rebuild(page.file.parent)).source == page.source


def test_a_figure_of_another_study_is_not_shown(write: Any) -> None:
    """A folder that was copied over would show last week's curves beside today's numbers."""
    page = write(figures=False, seeds=1)
    folder = page.file.parent / "figures"
    folder.mkdir()
    said = '{"study": {"hash": "another"}, "inches": [1, 1]}'
    (folder / "kl.json").write_text(said, encoding="utf-8")
    (folder / "kl.svg").write_text("<svg/>", encoding="utf-8")
    assert "data:image" not in report.write(results.load(page.file.parent)).read_text()


def test_a_folder_without_results_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"is no results folder: there is no study\.json"):
        report.rebuild(tmp_path)
