"""How far something is: a bar on a terminal, plain lines elsewhere, and stdout is for results."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console as Rich

from lab import console
from lab.console import Console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Time as the test says it is."""
    now = {"at": 100.0}
    monkeypatch.setattr(console.time, "monotonic", lambda: now["at"])
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 60 columns, as a console finds it."""
    screen = io.StringIO()
    monkeypatch.setattr(
        console,
        "Rich",
        lambda **more: Rich(file=screen, force_terminal=True, width=60, **_but_stderr(more)),
    )
    return screen


def _but_stderr(more: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in more.items() if name != "stderr"}


def test_a_line_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout is what another program reads."""
    with Console() as told:
        told.say("measuring [bold]it[/bold] :smile:")
        told.progress(3, 3, "")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "measuring [bold]it[/bold] :smile:\n3 of 3 runs\n"


def test_plain_lines_come_every_ten_seconds(
    clock: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run a second for 25 s: lines at 10 s, 20 s and the last. Wrong: 25 lines of a log."""
    told = Console()
    for done in range(1, 26):
        clock["at"] = 100.0 + done
        told.progress(done, 25, "")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["10", "20", "25"]


def test_the_time_left_is_that_of_this_call(
    clock: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """30 of 48 were there before; from the first that ended on, 6 in 60 s: 12 left take 120 s.

    Wrong: 36 runs in 80 s, as if the earlier calls' had been made in this one.
    """
    told = Console()
    clock["at"] = 120.0
    told.progress(30, 48, "")
    clock["at"] = 180.0
    told.progress(36, 48, "1 crashed")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "30 of 48 runs"
    assert second == "36 of 48 runs (1 crashed), about 120 s left"


def test_nothing_is_left_at_the_end(
    clock: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    told = Console("of the budget")
    told.progress(50, 100, "")
    clock["at"] = 101.0
    told.progress(100, 100, "")
    assert capsys.readouterr().err == "100 of 100 of the budget\n"


def test_a_bar_on_a_terminal(terminal: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how many of how many, keeps lines above it, and is taken away at the end."""
    with Console("runs") as told:
        told.progress(3, 10, "")
        told.say("run [red] killed :skull:")
        told.progress(7, 10, "1 crashed")
        told._bar.refresh()  # type: ignore[union-attr]
    shown = terminal.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    for said in ("3/10 runs", "7/10 runs", "1 crashed", "run [red] killed :skull:"):
        assert said in plain
    assert shown.rstrip("\n").endswith("\x1b[2K")  # the line of the bar is wiped
    assert "\x1b[?25h" in shown  # and the cursor is there again
    assert capsys.readouterr() == ("", "")


def test_the_bar_is_taken_away_after_an_error(terminal: io.StringIO) -> None:
    """Wrong: a terminal without a cursor."""

    def interrupted() -> None:
        with Console() as told:
            told.progress(1, 2, "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
