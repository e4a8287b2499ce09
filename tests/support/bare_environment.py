"""Environments without optional libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIBRARIES = ("torch", "matplotlib", "jinja2", "starlette", "uvicorn", "cryptography", "amqtt", "onnx", "PIL")

HOOK = f"""
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LIBRARIES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nowhere())
"""


def bare(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as it is where none of the optional libraries is installed."""
    (cwd / "hook").mkdir(exist_ok=True)
    (cwd / "hook" / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(cwd / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-m", "cbdsl", *words], cwd=cwd, capture_output=True, text=True, check=False, env=environment
    )
