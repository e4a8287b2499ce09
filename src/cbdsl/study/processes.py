"""Child processes that leave Ctrl-C to the process that started them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started meanwhile do not hear Ctrl-C, from their first moment on: it is for us, and we end them.

    Nor do we hear it before they are started: a child whose parent stops half-way through starting it ends with a
    traceback. Blocking the signal in this thread is not enough, for another thread may be given it.
    """
    resource_tracker.ensure_running()  # starting it later would let the signal through again
    held: list[FrameType | None] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda _, frame: held.append(frame)) if in_main_thread else None
    try:
        yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held and callable(handler):
            handler(signal.SIGINT, held[-1])
