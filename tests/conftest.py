from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One thread per process for BLAS and torch: several processes test at once, and threads that wait for a core spin.
for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(library, "1")

from cbdsl.data.dataset import Dataset, load  # noqa: E402 - numpy reads these when it is imported

# Flower cannot be installed beside Ray's and typer's newest: `make flower-test` has an environment for its tests.
collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["flower/test_*.py"]

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, so that a change is judged by what it changed. `make explore` draws fresh ones.
settings.register_profile("always", deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("same", settings.get_profile("always"), derandomize=True, max_examples=50)
settings.register_profile("fresh", settings.get_profile("always"), max_examples=1000)
settings.load_profile(os.environ.get("CBDSL_EXAMPLES", "same"))

_KINDS = ("slow", "hostile", "arm", "package", "cluster")
_MARK_OF_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file if -m deselects all of its tests: to import it takes longer than to read it."""
    wanted = str(config.option.markexpr)
    if " or " in wanted or not collection_path.match("test_*.py"):
        return None
    text, kind = collection_path.read_text(), wanted.partition(" ")[0]
    deselected = any(f"not {mark}" in wanted for mark in _MARK_OF_FILE.findall(text))
    return True if deselected or (kind in _KINDS and f"mark.{kind}" not in text) else None


@pytest.fixture
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages write their figures as SVG alone; PNG and PDF take three quarters of the time."""
    import matplotlib as mpl  # noqa: PLC0415 - few tests draw

    def save(figure: Figure, stem: Path) -> None:
        with mpl.rc_context({"svg.hashsalt": "cbdsl", "svg.fonttype": "none"}):
            figure.savefig(stem.with_suffix(".svg"))

    monkeypatch.setattr("cbdsl.report.pages.save", save)


@pytest.fixture(scope="session")
def mnist() -> Dataset:
    return load("mnist")
