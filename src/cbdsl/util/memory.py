"""Estimates how much memory this process may still use."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

from cbdsl.errors import UserError
from cbdsl.util.formatting import format_bytes

_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_MAPPED = Path("/proc/self/statm")
_UNLIMITED = 2**62


def free_memory() -> int:
    """Return the bytes that this process can still use: the least of machine with swap, control group and rlimit."""
    return max(0, min(_left_on_machine(), _left_in_group(), _left_of_rlimit()))


def require_memory(needed: int, what: str, advice: str) -> None:
    """Raise UserError if `needed` bytes are not free. what: the subject of the message, with its verb."""
    free = free_memory()
    if needed > free:
        raise UserError(
            f"{what} about {format_bytes(needed)} of memory, and {format_bytes(free)} are left here. {advice}",
            code="too-large",
        )


def _left_on_machine() -> int:
    with contextlib.suppress(OSError):
        lines = dict(re.findall(r"^(\w+): +(\d+) kB$", _MACHINE.read_text(encoding="ascii"), re.MULTILINE))
        if "MemAvailable" in lines:
            return 1024 * (int(lines["MemAvailable"]) + int(lines.get("SwapFree", 0)))
    return _UNLIMITED


def _left_in_group() -> int:
    with contextlib.suppress(OSError, ValueError):  # memory.max is "max" without a limit
        limit, used = (int((_GROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        return limit - used + _page_cache_of_group()
    return _UNLIMITED


def _page_cache_of_group() -> int:
    """Return the bytes of cached files, which count as used although the kernel frees them when memory is needed."""
    with contextlib.suppress(OSError):
        lines = (_GROUP / "memory.stat").read_text(encoding="ascii")
        return sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", lines, re.MULTILINE)))
    return 0


def _left_of_rlimit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    with contextlib.suppress(OSError, ValueError):
        return limit - int(_MAPPED.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    return limit
