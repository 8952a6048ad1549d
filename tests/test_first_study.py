"""What a person does first: the shipped study at its smallest scale, its report in a browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import sync_playwright

from lab.results import load

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
FIGURES = ("learning_curves", "final_scores", "clipping", "kl", "length", "entropy", "pulls")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `lab run first --scale smoke` has been typed; runs once for all tests."""
    folder = tmp_path_factory.mktemp("first")
    env = {**os.environ, "LAB_CACHE": str(folder / "cache")}
    command = [str(Path(sys.executable).with_name("lab")), "run", "first", "--scale", "smoke"]
    run = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    (folder / "err").write_text(run.stderr, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "results/first/report.html\n"
    return folder


def test_make_study_types_the_same() -> None:
    """The target that the README names, without its installation."""
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "study", "SCALE=smoke"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "lab run first --scale smoke" in shown.splitlines()[-1]


def test_it_says_what_it_will_take_and_how_far_it_is(room: Path) -> None:
    """Plain lines where there is no terminal, no bar's control characters."""
    said = (room / "err").read_text(encoding="utf-8")
    assert "24 runs, 0 finished; measuring how long they take" in said
    assert "for 24 runs on" in said
    assert "24 of 24 runs" in said
    assert "\x1b" not in said


def test_every_planned_run_is_there_and_every_table(room: Path) -> None:
    """6 recipes x 2 conditions x 2 seeds = 24."""
    results = load(room / "results" / "first")
    assert results.counts == {"ok": 24}
    assert len(list((results.folder / "runs").iterdir())) == 24
    assert {p.suffix for p in (results.folder / "tables").iterdir()} == {".csv", ".md"}
    for name in FIGURES:
        assert {f.suffix for f in (results.folder / "figures").glob(f"{name}.*")} == {
            *(".svg", ".png", ".csv", ".json")
        }


def test_pairs_share_the_start_and_the_first_rollout(room: Path) -> None:
    """Bit for bit, whatever the recipe and the condition: kills weights made before seeding."""
    results = load(room / "results" / "first")
    table = results.table
    first = table[(table["rollout"] <= 1) & table["metric"].isin(["reward", "response_length"])]
    start = table[(table["rollout"] == 0) & (table["metric"] == "score")]
    for rows, each in ((first, ["seed", "metric"]), (start, ["seed"])):
        spread = rows.groupby(each)["value"].nunique()
        assert len(spread) == 2 * len(each)
        assert (spread == 1).all()
    answers = {
        row.run_key: (results.folder / "runs" / row.run_key / "answers.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()[:8]
        for row in results.runs.itertuples()
        if row.seed == 9000
    }
    assert len({json.dumps(a) for a in answers.values()}) == 1


def test_two_seeds_say_nothing_about_an_order(room: Path) -> None:
    """A page that named a winner here would name one from two coin flips."""
    words = pd.read_csv(room / "results" / "first" / "tables" / "contrasts.csv")["verdict"]
    assert len(words) == 6
    assert words.isna().all()


def test_the_report_opens_in_a_browser(room: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium here: apt-get install chromium")
    said: list[str] = []
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = made.new_page(viewport={"width": 1280, "height": 800})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((room / "results" / "first" / "report.html").as_uri())
        sizes = page.evaluate(
            "() => [...document.images].map(i => [i.complete, i.naturalWidth, i.clientHeight])"
        )
        heading = page.inner_text("h1")
        made.close()
    assert said == []
    assert len(sizes) >= len(FIGURES)
    assert all(complete and wide > 0 and high > 0 for complete, wide, high in sizes)
    assert heading.startswith("With many updates per rollout")


def test_a_second_call_runs_nothing_again(room: Path) -> None:
    """And leaves the same bytes: the report is a function of the run folders."""
    folder = room / "results" / "first"
    before = {p: p.stat().st_mtime_ns for p in (folder / "runs").glob("*/result.json")}
    page = (folder / "report.html").read_bytes()
    command = [str(Path(sys.executable).with_name("lab")), "run", "first", "--scale", "smoke"]
    run = subprocess.run(command, cwd=room, capture_output=True, text=True, check=True)
    assert "all 24 runs are finished" in run.stderr
    assert {p: p.stat().st_mtime_ns for p in (folder / "runs").glob("*/result.json")} == before
    assert (folder / "report.html").read_bytes() == page
