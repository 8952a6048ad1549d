"""Ways to run many runs. The built-in one is `local`: processes of this machine.

An executor may deliver an outcome twice, late, in any order: a run's folder is named by its key
and appears whole or not at all, so none of that changes a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lab.hooks import executors


@dataclass(frozen=True)
class Job:
    """A run to be made.

    Attributes:
        key: its run key: the name of its folder.
        spec: the run as plain data.
        folder: where run folders are.
        plugins: plugin files beside the installed plugins.
        attempt: the first, the second, ...: its outcome repeats it, so that a failure which is
            delivered twice counts once.
    """

    key: str
    spec: Mapping[str, Any]
    folder: Path
    plugins: tuple[str, ...] = ()
    attempt: int = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        key: the job's.
        status: ok, diverged, failed (an exception: it may be submitted again) or killed.
        error: what happened, in one line; empty for ok.
        seconds: how long it took.
        mistake: whether it failed for what a person can mend.
        attempt: the job's.
    """

    key: str
    status: str
    error: str = ""
    seconds: float = 0.0
    mistake: bool = False
    attempt: int = 1


@dataclass(frozen=True)
class Limits:
    """What a worker may use.

    Attributes:
        workers: processes, of one thread each.
        seconds: of one run; beyond, its worker is killed and replaced.
        gigabytes: of memory of one worker; 0: no limit.
        recycle: runs after which a worker is replaced; 0: never.
    """

    workers: int
    seconds: float = 3600.0
    gigabytes: float = 0.0
    recycle: int = 64


class Executor(Protocol):
    """Runs jobs somewhere."""

    def submit(self, job: Job) -> None:
        """Queue a job."""
        ...

    def poll(self, seconds: float) -> Iterator[Outcome]:
        """The outcomes that arrive within that time, as soon as there is one."""
        ...

    def cancel(self) -> None:
        """Drop what is queued, end what runs, and leave no process behind."""
        ...


@executors
def named() -> dict[str, Any]:
    """The executors that come with the lab."""
    from lab.execute.local import Local

    return {"local": Local}
