"""What workers do in tests of the pool alone: they import nothing heavy, so they start at once."""

from __future__ import annotations

import os
import signal
import time

from lab.execute import Job, Outcome


def prepare(gigabytes: float) -> None:
    """Takes the place of what a worker does when it starts."""


def act(job: Job) -> Outcome:
    """What the job's spec says, after a folder was begun; of a study's run, a folder on paper."""
    what = job.spec.get("do", "run")
    beside = job.folder / f".{job.key}.{os.getppid()}.{os.getpid()}"
    if what != "answer":
        beside.mkdir(parents=True)
        (beside / "result.json").write_text("{}\n", encoding="utf-8")
    if what == "exit":
        os._exit(3)
    if what == "hang":
        time.sleep(600)
    if what == "run":
        first = job.folder.parent / "first"
        if not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        beside.rename(job.folder / job.key)
    return Outcome(job.key, "ok", str(os.getpid()), attempt=job.attempt)
