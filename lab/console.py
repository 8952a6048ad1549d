"""How far something is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console as Rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

#: Seconds between two plain lines.
QUIET = 10.0


class Console:
    """Says lines on stderr and shows progress; stdout is for results.

    Use as a context manager: the bar is taken away at the end.
    """

    def __init__(self, what: str = "runs") -> None:
        self._rich = Rich(stderr=True, highlight=False, markup=False, emoji=False)
        self._what = what
        self._bar: Progress | None = None
        self._task = None
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line."""
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, of: int, text: str) -> None:
        """How much has been done, and what else there is to say."""
        if self._rich.is_terminal:
            self._show(done, of, text)
            return
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = done, now
        if done < of and now - self._said < QUIET:
            return
        self._said = now
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = f", about {(of - done) / rate:.0f} s left" if rate > 0 and done < of else ""
        more = f" ({text})" if text else ""
        print(f"{done} of {of} {self._what}{more}{left}", file=sys.stderr, flush=True)

    def _show(self, done: int, of: int, text: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                BarColumn(30),
                MofNCompleteColumn(),
                TextColumn(self._what),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}"),
                console=self._rich,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(text, total=of, completed=done)
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=done, total=of, description=text)
