"""Estimates how much memory this process may still use."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

from cbdsl.errors import UserError
from cbdsl.util.formatting import format_bytes

_MEMORY = Path("/proc/meminfo")
_GROUP_LIMIT, _GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
_UNKNOWN = 2**62


def free_memory() -> int:
    """Bytes that this process can still have: of the machine, swap included, of its group, of its own limit."""
    return max(0, min(_of_machine(), _of_group(), _of_limit()))


def demand_memory(needed: int, what: str, advice: str) -> None:
    """Refuse what does not fit; what: the subject of the sentence."""
    free = free_memory()
    if needed > free:
        raise UserError(
            f"{what} about {format_bytes(needed)} of memory, and {format_bytes(free)} are left here. {advice}"
        )


def _of_machine() -> int:
    with contextlib.suppress(OSError):
        lines = dict(re.findall(r"^(\w+): +(\d+) kB$", _MEMORY.read_text(encoding="ascii"), re.MULTILINE))
        if "MemAvailable" in lines:
            return 1024 * (int(lines["MemAvailable"]) + int(lines.get("SwapFree", 0)))
    return _UNKNOWN


def _of_group() -> int:
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        return int(_GROUP_LIMIT.read_text(encoding="ascii")) - int(_GROUP_USE.read_text(encoding="ascii"))
    return _UNKNOWN


def _of_limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _UNKNOWN if limit == resource.RLIM_INFINITY else limit
