"""The report as a browser shows it: every figure drawn, nothing cut off, no error."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error, sync_playwright
from studies_made import Made

from lab import report

pytestmark = pytest.mark.slow

TWO = ("lr 1e-4", "lr 3e-4")
UP = [0.50, 0.52, 0.49, 0.55, 0.51, 0.53, 0.50]
DOWN = [0.30, 0.33, 0.28, 0.31, 0.35, 0.30, 0.29]


@functools.cache
def browser_file() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all that one can hold: conditions, a turn, failures, long names."""
    if browser_file() is None:
        pytest.skip("no chromium here: apt-get install chromium")
    long = "a_recipe_with_a_rather_long_name"
    made = Made(
        recipes=("ppo", "grpo", long),
        conditions=TWO,
        seeds=7,
        contrasts=[("ppo", "grpo", TWO[0]), ("ppo", "grpo", TWO[1]), (long, "grpo", TWO[0])],
        finals={
            ("ppo", TWO[0]): UP,
            ("grpo", TWO[0]): DOWN,
            ("ppo", TWO[1]): DOWN,
            ("grpo", TWO[1]): UP,
        },
        diverged={("ppo", TWO[1], 9000): 2},
        answer="<script>document.title = 'gone'</script> " + "6" * 300,
    )
    return report.rebuild(made.write(tmp_path_factory.mktemp("study")))


@pytest.fixture(scope="module")
def browser(page_file: Path) -> Iterator[Any]:
    with sync_playwright() as play:
        try:
            made = play.chromium.launch(executable_path=browser_file(), args=["--no-sandbox"])
        except Error as e:
            pytest.skip(f"chromium does not start here: {str(e).splitlines()[0]}")
        yield made
        made.close()


@pytest.fixture(params=[1280, 400])
def page(request: Any, browser: Any, page_file: Path) -> Iterator[Any]:
    """The report at a width; what the console says is kept in `page.said`."""
    made = browser.new_page(viewport={"width": request.param, "height": 800})
    made.said = []
    made.on("console", lambda message: made.said.append(message.text))
    made.on("pageerror", lambda error: made.said.append(str(error)))
    made.on("request", lambda asked: made.said.append(asked.url[:60]))
    made.goto(page_file.as_uri())
    made.wait_for_load_state("load")
    yield made
    made.close()


def test_it_opens_without_a_word_and_asks_for_nothing(page: Any, page_file: Path) -> None:
    """A blocked style, a script of an answer, a font from a network."""
    assert [s for s in page.said if not s.startswith(("data:image", page_file.as_uri()[:60]))] == []
    assert page.title().startswith("made: ")


def test_every_figure_is_drawn(page: Any) -> None:
    """A picture that fails to decode leaves an empty box."""
    found = page.evaluate(
        """() => [...document.images].map(
            i => [i.complete, i.naturalWidth, i.clientWidth, i.clientHeight])"""
    )
    assert len(found) == 10
    for complete, natural, width, height in found:
        assert complete
        assert min(natural, width, height) > 100
    drawings = page.evaluate(
        """() => [...document.querySelectorAll('svg.place')].map(
            s => [s.clientWidth || s.getBoundingClientRect().width,
                  s.getBoundingClientRect().height])"""
    )
    assert len(drawings) == 3
    assert all(width > 100 and height > 10 for width, height in drawings)


def test_the_page_does_not_scroll_sideways(page: Any) -> None:
    """Wide tables and figures scroll in their own frames."""
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"]
    over = page.evaluate(
        """() => [...document.querySelectorAll('header *')].filter(
            e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"""
    )
    assert over == []


def test_the_first_screen_holds_the_answer(browser: Any, page_file: Path) -> None:
    """1280 x 800 without scrolling: question, answer, what changes, every verdict, failures."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(page_file.as_uri())
    for part in ("h1", ".headline", ".callout", ".verdicts >> nth=1", "p.failures", ".facts"):
        box = page.locator(part).first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800, part
    page.close()


def test_it_can_be_printed(browser: Any, page_file: Path) -> None:
    """What scrolls on a screen must not be cut on paper."""
    page = browser.new_page(viewport={"width": 720, "height": 1000})  # A4 within its margins
    page.goto(page_file.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert page.pdf(format="A4")[:4] == b"%PDF"
    page.close()
