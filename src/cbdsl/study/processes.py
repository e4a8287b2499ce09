"""Child processes that leave Ctrl-C to the process that started them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started meanwhile do not hear Ctrl-C, from their first moment on: it is for us, and we end them."""
    resource_tracker.ensure_running()  # starting it later would let the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
