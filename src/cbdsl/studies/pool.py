"""Runs tasks in parallel: in processes of this machine, or on a Ray cluster.

A cluster starts a task again if its process or machine dies. Where the machines share the folder of the results, a task
works in it and continues what was stopped. Elsewhere it works in a temporary folder, which begins with the task's files
so far, and its files are sent back at the end.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from cbdsl import register
from cbdsl.engines.native_engine import default_threads
from cbdsl.errors import UserError
from cbdsl.spec import Spec
from cbdsl.swarms.ray_swarm import connect_ray, cpus_per_shard, describe_nodes, explain_import_error, list_nodes
from cbdsl.swarms.shard import code_digest
from cbdsl.util.files import write_atomically

if TYPE_CHECKING:
    from cbdsl.studies.sweep import Task

TaskFunction = Callable[[Spec, Path, int, Callable[[object], None]], None]
"""Called with a spec, its folder, a number of threads, and a function to call after every round."""

_POLL_SECONDS = 0.2
ERROR_FILE = "error.txt"
_RETRIES = 3  # how often a cluster starts a task again


@dataclass(frozen=True)
class PoolProgress:
    """What happened since the last report."""

    rounds: tuple[float, ...]  # the work of each round that was finished
    failed: tuple[str, ...]  # errors of tasks; the other tasks continue


def divide_cores(tasks: int, jobs: int | None) -> tuple[int, int]:
    """Return the number of processes for some tasks, and the threads of each."""
    cores = default_threads()
    count = max(1, min(jobs or cores, tasks))
    return count, max(1, cores // count)


def run_pool(tasks: Sequence[Task], out: Path, jobs: int | None, on: str | None) -> Generator[PoolProgress]:
    """Run tasks, at most `jobs` at a time, with their results in `out`: here, or on the cluster `on`."""
    return _run_in_processes(tasks, out, jobs) if on is None else _run_on_ray(tasks, out, jobs, on)


def run_task(task: Task, folder: Path, threads: int, report: Callable[[object], None]) -> str:
    """Run one task and return the message of its error, or "".

    folder: for its results, named by the spec's key. Its file error.txt gets the traceback of an error that is not a
    UserError, such as one in a faulty plugin.
    """
    if folder.name != task.spec.key():
        raise UserError(_explain_changed_key(task.spec), code="conflict")
    register.load(task.spec.plugins)  # this may be a new process
    module, _, name = task.kind.function.partition(":")
    function: TaskFunction = getattr(import_module(module), name)
    (folder / ERROR_FILE).unlink(missing_ok=True)
    try:
        function(task.spec, folder, threads, report)
    except UserError as error:
        return f"{folder}: {error}"
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / ERROR_FILE, traceback.format_exc().encode())
        return f"{folder / ERROR_FILE}: {type(error).__name__}: {error}."
    return ""


def _explain_changed_key(spec: Spec) -> str:
    files = [spec.data.shared_source, spec.init, *(name for name in spec.plugins if name.endswith(".py"))]
    missing = [name for name in files if name and not Path(name).exists()]
    if missing:
        return f"{missing[0]} is not on {platform.node()}. Give its whole path, and put it there on every machine."
    return (
        "A plugin, the initial model or the shared samples were edited while the study was running. Start it again: "
        "finished runs are kept."
    )


# In processes of this machine.

_finished_rounds: Any = None
_threads = 1
_parent = 0


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes that ignore Ctrl-C from their first moment on: the parent ends them.

    The parent handles Ctrl-C after they have started: a child whose parent stops half-way through starting it ends with
    a traceback. Blocking the signal in this thread is not enough, because another thread may receive it.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    pending: list[FrameType | None] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda _, frame: pending.append(frame)) if in_main_thread else None
    try:
        yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pending and callable(handler):
            handler(signal.SIGINT, pending[-1])


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep new processes from importing the main program again; tasks need only this package.

    So a script needs no `if __name__ == "__main__"` around a study.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run_in_processes(tasks: Sequence[Task], out: Path, jobs: int | None) -> Generator[PoolProgress]:
    count, threads = divide_cores(len(tasks), jobs)
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks of threads that it does not have
    rounds: multiprocessing.queues.Queue[float] = context.Queue()
    with ProcessPoolExecutor(count, context, _start_process, (rounds, threads, os.getpid())) as pool:
        try:
            with deaf_children(), _without_main():
                pending = {pool.submit(_run_in_process, task, task.folder(out)) for task in tasks}
            while pending:
                done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
                failed = tuple(message for future in done if (message := future.result()))
                yield PoolProgress(tuple(_drain(rounds)), failed)
        except BaseException:  # not cancelled first: the pool does not expect cancelled futures
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise


def _start_process(rounds: Any, threads: int, parent: int) -> None:  # noqa: ANN401 - a queue of the spawn context
    global _finished_rounds, _threads, _parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    _finished_rounds, _threads, _parent = rounds, threads, parent


def _run_in_process(task: Task, folder: Path) -> str:
    def report(_: object) -> None:
        if os.getppid() != _parent:  # the parent has died: stop, so that a new sweep can lock the folder
            os._exit(1)
        _finished_rounds.put(task.round_work)

    return run_task(task, folder, _threads, report)


def _drain(rounds: Any) -> Iterator[float]:  # noqa: ANN401 - a queue of the spawn context
    while True:
        try:
            yield rounds.get_nowait()
        except Empty:
            return


# On a Ray cluster.


def _run_on_ray(tasks: Sequence[Task], out: Path, jobs: int | None, on: str) -> Generator[PoolProgress]:
    with connect_ray(on) as ray:
        nodes = list_nodes(ray)
        most = sum(int(node.cpus) for node in nodes)
        count = max(1, min(jobs or most, len(tasks)))
        cpus = cpus_per_shard([node.cpus for node in nodes], count)
        if not cpus:
            raise UserError(
                f"The cluster has no processor to run on: it has {describe_nodes(nodes)}.", code="not-supported"
            )
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob(".mark-*"):  # of studies that were killed
            old.unlink(missing_ok=True)
        mark = out / f".mark-{uuid.uuid4().hex}"
        mark.touch()
        counter = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_RoundCounter).remote()
        start = ray.remote(num_cpus=cpus, max_retries=_RETRIES, scheduling_strategy="SPREAD")(run_on_node)
        waiting = list(tasks)
        running: dict[Any, Task] = {}
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    task = waiting.pop(0)
                    files = _read_files(task.folder(out))
                    call = start.remote(code_digest(), task, mark.resolve(), files, max(1, int(cpus)), counter)
                    running[call] = task
                done, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
                failed = [_collect(ray, call, running.pop(call), out) for call in done]
                yield PoolProgress(tuple(ray.get(counter.take.remote())), tuple(filter(None, failed)))
        finally:
            for call in running:
                ray.cancel(call, force=True)
            ray.kill(counter)
            mark.unlink(missing_ok=True)


class _RoundCounter:
    """An actor to which tasks report their finished rounds."""

    def __init__(self) -> None:
        self._rounds: list[float] = []

    def add(self, work: float) -> None:
        self._rounds.append(work)

    def take(self) -> list[float]:
        rounds, self._rounds = self._rounds, []
        return rounds


def run_on_node(
    code: str,
    task: Task,
    mark: Path,
    files: Mapping[str, bytes],
    threads: int,
    counter: Any,  # noqa: ANN401 - an actor
) -> tuple[str, dict[str, bytes]]:
    """Run a task on a machine of the cluster; return its error, or "", and its files if the folder is not shared.

    mark: a file in the folder of all results, by which a shared folder is recognised. files: the task's files so far.
    """
    host = platform.node()
    if code != code_digest():
        return f"{host} has another cbdsl than the machine that asks; install the same one there.", {}

    def report(_: object) -> None:
        counter.add.remote(task.round_work)

    try:
        if mark.exists():
            return run_task(task, task.folder(mark.parent), threads, report), {}
        with tempfile.TemporaryDirectory(prefix="cbdsl-") as place:
            folder = task.folder(Path(place))
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            failed = run_task(task, folder, threads, report)
            return (f"on {host}: {failed}", {}) if failed else ("", _read_files(Path(place)))
    except UserError as error:
        return f"on {host}: {error}", {}


def _collect(ray: Any, call: Any, task: Task, out: Path) -> str:  # noqa: ANN401 - a module and one of its objects
    """Write the files of a finished task into `out` and return its error, or ""."""
    try:
        failed, files = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise explain_import_error(error, "study") or error from None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        return f"{task.folder(out)}: its process died {_RETRIES + 1} times, probably out of memory ({reason})."
    for name, content in sorted(files.items(), key=lambda item: Path(item[0]).name == task.kind.done_file):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out / name, content)  # the file that marks the task as done comes last
    return str(failed)


def _read_files(folder: Path) -> dict[str, bytes]:
    found = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}
