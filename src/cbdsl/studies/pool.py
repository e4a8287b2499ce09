"""Runs tasks in processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty
from types import FrameType
from typing import TYPE_CHECKING, Any

from cbdsl.engines.native_engine import default_threads
from cbdsl.errors import UserError
from cbdsl.spec import Spec

if TYPE_CHECKING:
    from cbdsl.studies.sweep import Task


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started meanwhile do not hear Ctrl-C, from their first moment on: it is for us, and we end them.

    Nor do we hear it before they are started: a child whose parent stops half-way through starting it ends with a
    traceback. Blocking the signal in this thread is not enough, for another thread may be given it.
    """
    resource_tracker.ensure_running()  # starting it later would let the signal through again
    held: list[FrameType | None] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda _, frame: held.append(frame)) if in_main_thread else None
    try:
        yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held and callable(handler):
            handler(signal.SIGINT, held[-1])


Performer = Callable[[Spec, Path, int, Callable[[object], None]], None]
"""Takes a spec, its folder, the threads it may use, and what to call after every round."""

PATIENCE = 0.2  # seconds between looks at the tasks


@dataclass(frozen=True)
class PoolProgress:
    """What happened since the last news."""

    rounds: tuple[float, ...]  # the work of every round that was played
    failed: tuple[str, ...]  # what a user has to mend about tasks; the others go on


def sharing(tasks: int, jobs: int | None) -> tuple[int, int]:
    """How many processes do so many tasks, and how many threads each of them has."""
    cores = default_threads()
    count = max(1, min(jobs or cores, tasks))
    return count, max(1, cores // count)


def do_all(tasks: Sequence[Task], out: Path, jobs: int | None, on: str | None) -> Generator[PoolProgress]:
    """Do tasks, with the results in a folder: here, or on a cluster. jobs: so many at a time."""
    if on is None:
        return _here(tasks, out, jobs)
    from cbdsl.studies.ray_pool import on_ray  # noqa: PLC0415

    return on_ray(tasks, out, jobs, on)


def do_one(task: Task, folder: Path, threads: int, report: Callable[[object], None]) -> str:
    """Do one task; what a user has to mend about it, if anything: the others go on.

    folder: for its results; its name is the spec's key as it was when the task was given.
    """
    if folder.name != task.spec.key():
        raise UserError(_changed(task.spec))
    module, _, function = task.kind.performer.partition(":")
    perform_task: Performer = getattr(import_module(module), function)
    try:
        perform_task(task.spec, folder, threads, report)
    except UserError as error:
        return f"{folder}: {error}"
    return ""


def _changed(spec: Spec) -> str:
    """Why a spec has another key than when its task was given."""
    files = [spec.data.shared_source, spec.init, *(name for name in spec.plugins if name.endswith(".py"))]
    gone = [name for name in files if name and not Path(name).exists()]
    if gone:
        return f"{gone[0]} is not on {platform.node()}. Give its whole path, and put it there on every machine."
    return (
        "A plugin, the initial model or the shared samples were edited while the study was running. Start it again: "
        "finished runs are kept."
    )


# In processes of this machine.

_news: Any = None
_threads = 1
_parent = 0


def _here(tasks: Sequence[Task], out: Path, jobs: int | None) -> Generator[PoolProgress]:
    count, threads = sharing(len(tasks), jobs)
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads that are not there
    news: multiprocessing.queues.Queue[float] = context.Queue()
    with ProcessPoolExecutor(count, context, _start_process, (news, threads, os.getpid())) as pool:
        try:
            with deaf_children():
                pending = {pool.submit(_do, task, task.folder(out)) for task in tasks}
            while pending:
                done, pending = wait(pending, PATIENCE, FIRST_EXCEPTION)
                failed = tuple(words for future in done if (words := future.result()))
                yield PoolProgress(tuple(_drain(news)), failed)
        except BaseException:  # not cancelled first: the pool would trip over futures that are cancelled
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise


def _start_process(news: Any, threads: int, parent: int) -> None:  # noqa: ANN401 - a queue of the spawn context
    global _news, _threads, _parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    _news, _threads, _parent = news, threads, parent


def _do(task: Task, folder: Path) -> str:
    """See `do_one`, in a process of its own."""

    def report(_: object) -> None:
        if os.getppid() != _parent:  # whoever asked is gone: stop, so that a new sweep finds the folder free
            os._exit(1)
        _news.put(task.round_work)

    return do_one(task, folder, _threads, report)


def _drain(news: Any) -> Iterator[float]:  # noqa: ANN401
    """The work of every round that was played since."""
    while True:
        try:
            yield news.get_nowait()
        except Empty:
            return
