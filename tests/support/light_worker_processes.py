"""Processes that hold many light workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SWARM = "many"


@contextmanager
def light_workers(port: int, names: list[str], keys: Path | None, log: Path, swarm: str = SWARM) -> Iterator[Path]:
    """The crowd in a process of its own; what it says is in `log`."""
    program = Path(__file__).with_name("light_workers.py")
    command = [sys.executable, str(program), "--port", str(port), "--swarm", swarm]
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*command, *(["--keys", str(keys)] if keys else [])], stdin=subprocess.PIPE, stdout=said, stderr=said
        )
    assert process.stdin is not None
    process.stdin.write("\n".join(names).encode())
    process.stdin.close()
    try:
        yield log
    finally:
        process.kill()
        process.wait()


def last_said(log: Path) -> dict[str, int]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {"up": 0}
