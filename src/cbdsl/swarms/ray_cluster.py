"""Ray, started on this machine or found: connects, says what there is, and leaves nothing running that it started.

Ray is imported here and where an actor lives, and only when a cluster is asked for. Knows no swarm and no run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cbdsl.engines.native import default_threads
from cbdsl.errors import UserError, missing, shown
from cbdsl.text import size

HERE, FOUND, CLIENT = "ray", "auto", "ray://"
_STORE = 500_000_000  # bytes of the object store of a cluster that is started here
_REACH = 5.0  # seconds to reach an address


@dataclass(frozen=True)
class Machine:
    """One node of a cluster, as Ray sees it."""

    name: str
    node: str  # Ray's own name for it
    cpus: float
    memory: float  # bytes that Ray may give away


@contextlib.contextmanager
def connected(on: str, threads: int | None = None) -> Iterator[Any]:
    """Ray's module, connected to the cluster that a user names; afterwards everything is as it was before.

    threads: processors of a cluster that is started here, all that there are if not given.
    """
    check_place(on)
    ray = _module()
    if on not in (HERE, FOUND):
        _reach(on)
    if ray.is_initialized():  # by the user's own program, who will also end it
        yield ray
        return
    place = tempfile.mkdtemp(prefix="ray-") if on == HERE else None
    try:
        _start(ray, on, threads, place)
        yield ray
    finally:
        ray.shutdown()
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def machines(ray: Any) -> list[Machine]:  # noqa: ANN401 - Ray's module
    """The nodes that are alive."""
    return [
        Machine(
            each["NodeManagerHostname"], each["NodeID"], each["Resources"].get("CPU", 0.0),
            each["Resources"].get("memory", 0.0),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]  # fmt: skip


def share_of(cpus: Sequence[float], shards: int) -> float:
    """Processors for each of so many shards on machines with so many: as many as all can have, whole or a fraction."""
    for each in range(int(max(cpus, default=0)), 0, -1):
        if sum(int(have // each) for have in cpus) >= shards:
            return float(each)
    whole = sum(map(int, cpus))
    return int(1e4 / -(-shards // whole)) / 1e4 if whole else 0.0


def room_for(have: Sequence[Machine], cpus: float, memory: float) -> int:
    """How many shards of so many processors and bytes each have room on some machines."""
    return sum(int(min(one.cpus / cpus, one.memory / memory) + 1e-6) for one in have) if cpus else 0


def described(have: Sequence[Machine]) -> str:
    """Machines in words."""
    each = [f"{one.name} ({one.cpus:g} processors, {size(int(one.memory))})" for one in have]
    return f"{len(have)} machine{'s' * (len(have) != 1)}: {', '.join(each[:8])}" if have else "no machine"


def cannot_import(error: Any, what: str) -> UserError | None:  # noqa: ANN401 - Ray's
    """The sentence for a task's error that is a machine's lack of some module; none for other errors."""
    words = str(error.cause).strip()
    last = (words.splitlines() or [type(error.cause).__name__])[-1].strip()
    lacks = "failed to import" in words or last.startswith(("ImportError:", "ModuleNotFoundError:"))
    if not (lacks or isinstance(error.cause, ImportError)):
        return None
    return UserError(
        f"A machine of the cluster cannot import what this {what} needs ({last}). Every machine needs the same cbdsl "
        "and what your own parts import: see `cbdsl doctor --on ...`."
    )


def _module() -> Any:  # noqa: ANN401
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray would otherwise warn of
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        if error.name != "ray":
            raise
        raise missing("ray", "ray", "--on names a Ray cluster") from error
    return ray


def _start(ray: Any, on: str, threads: int | None, place: str | None) -> None:  # noqa: ANN401
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if on == HERE:
            ray.init(  # local: whatever RAY_ADDRESS names
                address="local", num_cpus=threads or default_threads(), include_dashboard=False,
                object_store_memory=_STORE, _node_ip_address="127.0.0.1", _temp_dir=place, **quiet,
            )  # fmt: skip
        else:
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "2")  # attempts; Ray's usual twenty take minutes
            ray.init(address=on, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        words = " ".join(str(error).split())
        raise UserError(
            f"Ray cannot be {'started here' if on == HERE else f'had at {shown(on)}'} ({words}). {_ADVICE[on == HERE]}"
        ) from error


_ADVICE = {
    True: "See `cbdsl doctor --on ray`, or play the run without --on.",
    False: "Start a cluster on its first machine with `ray start --head`, with the same Ray and Python everywhere; "
    "--on auto finds one that this machine belongs to, --on ray://HOST:10001 one elsewhere, and --on ray starts one "
    "here.",
}


def check_place(on: str) -> tuple[str, int]:
    """Refuse what names no place; the host and the port, if it is an address."""
    host, colon, port = on.removeprefix(CLIENT).rpartition(":")
    if on in (HERE, FOUND):
        return "", 0
    if not (colon and host and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise UserError(
            f"--on is {shown(on)}; give ray (start a cluster here), auto (the one this machine belongs to), HOST:PORT "
            "or ray://HOST:PORT."
        )
    return host.strip("[]"), int(port)


def _reach(on: str) -> None:
    """Refuse an address that nobody answers at: Ray itself would try for minutes."""
    try:
        socket.create_connection(check_place(on), _REACH).close()
    except OSError as error:
        raise UserError(f"Nobody answers at {on} ({error}). {_ADVICE[False]}") from error
