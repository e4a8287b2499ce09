from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.fixture(scope="session")
def mnist() -> Dataset:
    return load("mnist")
