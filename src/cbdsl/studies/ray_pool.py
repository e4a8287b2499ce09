"""Many tasks on a Ray cluster, each with processors of its own; a task whose process or machine dies is begun again.

Where the machines share the folder of the results, a task works in it, and goes on where one was stopped. Where they do
not, it works in a folder of its machine, given what was there of it, and its files come back when it is done.
"""

from __future__ import annotations

import platform
import tempfile
import uuid
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbdsl.errors import UserError
from cbdsl.studies.pool import PATIENCE, PoolProgress, do_one
from cbdsl.swarms.ray_swarm import cannot_import, connected, described, machines, share_of
from cbdsl.swarms.shard import code_digest
from cbdsl.util.files import write_atomically

if TYPE_CHECKING:
    from cbdsl.studies.sweep import Task

_RETRIES = 3  # times that a task is begun again


def on_ray(tasks: Sequence[Task], out: Path, jobs: int | None, on: str) -> Generator[PoolProgress]:
    """See `pools.do_all`."""
    with connected(on) as ray:
        have = machines(ray)
        most = sum(int(one.cpus) for one in have)
        count = max(1, min(jobs or most, len(tasks)))
        cpus = share_of([one.cpus for one in have], count)
        if not cpus:
            raise UserError(f"The cluster has no processor to run on: it has {described(have)}.")
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob(".mark-*"):  # of studies that were killed
            old.unlink(missing_ok=True)
        mark = out / f".mark-{uuid.uuid4().hex}"
        mark.touch()
        told = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Told).remote()
        do = ray.remote(num_cpus=cpus, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_do)
        left = list(tasks)
        open_calls: dict[Any, Task] = {}
        try:
            while left or open_calls:
                while left and len(open_calls) < count:
                    task = left.pop(0)
                    there = _files(task.folder(out))
                    call = do.remote(code_digest(), task, mark.resolve(), there, max(1, int(cpus)), told)
                    open_calls[call] = task
                done, _ = ray.wait(list(open_calls), timeout=PATIENCE)
                failed = [_ended(ray, call, open_calls.pop(call), out) for call in done]
                yield PoolProgress(tuple(ray.get(told.taken.remote())), tuple(filter(None, failed)))
        finally:
            for call in open_calls:
                ray.cancel(call, force=True)
            ray.kill(told)
            mark.unlink(missing_ok=True)


class _Told:
    """Where tasks say that they have played a round."""

    def __init__(self) -> None:
        self._rounds: list[float] = []

    def add(self, work: float) -> None:
        """A round was played."""
        self._rounds.append(work)

    def taken(self) -> list[float]:
        """Those since the last time."""
        rounds, self._rounds = self._rounds, []
        return rounds


def _do(
    code: str, task: Task, mark: Path, there: Mapping[str, bytes], threads: int, told: Any  # noqa: ANN401 - an actor
) -> tuple[str, dict[str, bytes]]:  # fmt: skip
    """A task, on its machine; what is wrong with it, and its files if they are not where they belong.

    mark: a file in the folder of all results; there: what was in the task's own.
    """
    host = platform.node()
    if code != code_digest():
        return f"{host} has another cbdsl than the machine that asks; install the same one there.", {}

    def report(_: object) -> None:
        told.add.remote(task.round_work)

    try:
        if mark.exists():
            return do_one(task, task.folder(mark.parent), threads, report), {}
        with tempfile.TemporaryDirectory(prefix="cbdsl-") as place:
            folder = task.folder(Path(place))
            for name, content in there.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            words = do_one(task, folder, threads, report)
            return (f"on {host}: {words}" if words else ""), {} if words else _files(Path(place))
    except UserError as error:
        return f"on {host}: {error}", {}


def _ended(ray: Any, call: Any, task: Task, out: Path) -> str:  # noqa: ANN401
    """Put a task's files where they belong; what a user has to mend."""
    try:
        words, files = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise cannot_import(error, "study") or error from None
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[0]
        return f"{task.folder(out)}: its process ended {_RETRIES + 1} times, most likely for want of memory ({last})."
    for name, content in sorted(files.items(), key=lambda item: Path(item[0]).name == task.kind.shows):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out / name, content)  # what shows that it is done comes last
    return str(words)


def _files(folder: Path) -> dict[str, bytes]:
    """All files of a folder by their place in it."""
    found = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}
