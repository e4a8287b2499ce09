from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from cbdsl.data.sources import Dataset, load

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "deploy"), str(HERE / "export")]  # helpers of more than one folder

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, so that a change is judged by what it changed. `make explore` draws fresh ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fresh", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("CBDSL_EXAMPLES", "same"))


@pytest.fixture(scope="session")
def mnist() -> Dataset:
    return load("mnist")
