"""A pool of spawned processes of this machine, one thread each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as LateError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from lab.errors import ComponentError, LabError
from lab.execute import Job, Limits, Outcome

#: Every maths library that a worker may load runs on one thread.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

#: Why every open job ends at once.
NO_POOL = "a worker ended before it had a job"


class Local:
    """Runs jobs in processes of this machine.

    Models and warm starts stay in a worker from run to run; a run's numbers do not depend on what
    its worker did before.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._done: queue.Queue[Outcome] = queue.Queue()
        self._open: dict[Future[Outcome], Job] = {}
        self._places: set[Path] = set()
        # read by the children when they start: before torch is imported is the only time for it
        os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
        # started here: where it starts beside a worker, it lets Ctrl-C through to that worker
        resource_tracker.ensure_running()
        self._pool = self._fresh()

    def _fresh(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._limits.workers,
            max_tasks=self._limits.recycle,
            context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(self._limits.gigabytes,),
        )

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._places.add(job.folder)
        with _no_interrupt():
            try:
                future = self._schedule(job)
            except RuntimeError:  # a worker ended before it had a job: pebble gives its pool up
                self._stop()
                self._pool = self._fresh()
                future = self._schedule(job)
        self._open[future] = job
        future.add_done_callback(self._ended)

    def _schedule(self, job: Job) -> Future[Outcome]:
        future: Future[Outcome] = self._pool.schedule(
            run_one, args=(job,), timeout=self._limits.seconds
        )
        return future

    def _ended(self, future: Future[Outcome]) -> None:
        if job := self._open.pop(future, None):
            self._done.put(_outcome(job, future))

    def poll(self, seconds: float) -> Iterator[Outcome]:
        """The outcomes that have arrived; waits for the first one at most that long."""
        try:
            yield self._done.get(timeout=seconds)
            while True:
                yield self._done.get_nowait()
        except queue.Empty:
            if self._open and not self._pool.active:  # nobody is left who would deliver anything
                for job in [self._open.pop(f) for f in list(self._open)]:
                    self._done.put(_killed(job, NO_POOL))

    def cancel(self) -> None:
        """Drop what is queued, end what runs, and leave no process behind."""
        self._stop()
        for place in self._places:
            for left in place.glob(f".*.{os.getpid()}.*"):
                shutil.rmtree(left, ignore_errors=True)

    def _stop(self) -> None:
        pool: Any = self._pool
        pool.stop()
        pool.join()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Workers that start in here never see Ctrl-C: the driver ends them, without a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outcome(job: Job, future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except LateError:
        _clean(job)
        return _killed(job, "it passed the time limit of a run")
    except CancelledError:
        return _killed(job, "cancelled")
    except ProcessExpired as e:
        _clean(job)
        return _killed(job, f"its worker ended (exit code {e.exitcode})")
    except BrokenProcessPool:
        return _killed(job, NO_POOL)
    except Exception as e:  # what pebble itself could not deliver
        return Outcome(job.key, "failed", _line(e), attempt=job.attempt)


def _killed(job: Job, why: str) -> Outcome:
    return Outcome(job.key, "killed", why, attempt=job.attempt)


def _prepare(gigabytes: float) -> None:
    import torch

    torch.set_num_threads(1)
    if gigabytes:
        import resource

        most = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def run_one(job: Job) -> Outcome:
    """One run in this process, into its folder, written under another name and renamed."""
    from lab import records, train
    from lab.settings import Spec
    from lab.shelf import Shelf

    began = time.perf_counter()

    def ended(status: str, error: str = "", mistake: bool = False) -> Outcome:
        seconds = time.perf_counter() - began
        return Outcome(job.key, status, error, seconds, mistake, job.attempt)

    final = job.folder / job.key
    if records.finished(final):
        return ended(records.read_json(final / records.RESULT)["status"])
    beside = job.folder / f".{job.key}.{os.getppid()}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        spec = Spec.of(job.spec, Shelf.installed(job.plugins))
        result = train.run(spec, beside, job.plugins)
        if result.key != job.key:  # a plugin file or the lab itself changed under the study
            shutil.rmtree(beside, ignore_errors=True)
            return ended("killed", "the code has changed since the study was planned")
        records.finish(beside, final)
    except BaseException as e:  # also SystemExit, which pebble would raise in the driver
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(e, KeyboardInterrupt):
            raise
        return ended("failed", _line(e), _mistake(e))
    return ended(result.status)


def _clean(job: Job) -> None:
    """Remove what a killed worker of this process left; another driver's are its own."""
    for left in job.folder.glob(f".{job.key}.{os.getpid()}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _mistake(e: BaseException) -> bool:
    """What is wrong with a component is its arm's failure; with a model or a task, everybody's."""
    return isinstance(e, LabError) and not isinstance(e, ComponentError)


def _line(e: BaseException) -> str:
    kind = "" if isinstance(e, LabError) else f"{type(e).__name__}: "
    return f"{kind}{' '.join(str(e).split())}"
