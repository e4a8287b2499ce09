"""Ctrl-C: one sentence that says how to continue, exit code 130, and no traceback. A second one ends at once."""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time

TYPE_CHECKING = False  # not from `typing`: little may be loaded before Ctrl-C is handled
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

EXIT_CODE = 130
_SHOW_CURSOR = "\x1b[?25h"


def command_line() -> str:
    """Return the command as it was given."""
    import shlex  # noqa: PLC0415

    return shlex.join(["cbdsl", *sys.argv[1:]])


class Interrupts:
    """Handles Ctrl-C in this process."""

    def __init__(self) -> None:
        self.happened = self._holding = self._waiting = False
        self._main_thread = 0
        self._advice: Callable[[], str] = lambda: f"Start again with: {command_line()}"

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT), sys.unraisablehook
        self._main_thread = _thread.get_ident()
        atexit.register(self._exit)  # before anything else is registered, so it is called last
        if self._before[0] is signal.default_int_handler:  # else the signal is ignored, as under nohup
            signal.signal(signal.SIGINT, self._handle)
            sys.unraisablehook = self._handle_unraisable

    def __exit__(self, *_: object) -> None:
        if not self.happened:  # else the process ends, and Ctrl-C must not become an exception again
            signal.signal(signal.SIGINT, self._before[0])
            sys.unraisablehook = self._before[1]

    def advise(self, advice: str | Callable[[], str]) -> None:
        """Set what to print if the command is interrupted from now on."""
        self._advice = advice if callable(advice) else lambda: advice

    def conclude(self) -> None:
        """Print how to continue and exit."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rest takes no time
        print(f"\ncbdsl: interrupted. {self._advice()}", file=sys.stderr)
        sys.exit(EXIT_CODE)

    def hold(self) -> None:
        """Delay an interrupt: one that meets a C++ library while it is loaded ends the process without a message."""
        self._holding = True

    def release(self) -> None:
        """Deliver a delayed interrupt, if there was one."""
        self._holding = False
        if self._waiting:
            self._handle(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._holding and not self._waiting:
            self._waiting = True
            return
        if self.happened:  # pressed again: do not wait for anything
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
                sys.stderr.flush()
            os._exit(EXIT_CODE)
        self.happened = True
        raise KeyboardInterrupt

    def _handle_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt that came where Python drops exceptions, such as in a destructor."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(self._repeat, ())
        elif not self.happened:
            sys.__unraisablehook__(unraisable)

    def _repeat(self) -> None:
        time.sleep(0.02)  # by then Python has left the place where it dropped the first one
        self.happened = False
        signal.pthread_kill(self._main_thread, signal.SIGINT)

    def _exit(self) -> None:
        """Exit with our code: after an interrupt within an exec() Python would end by the signal itself."""
        if self.happened:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_CODE)


INTERRUPTS = Interrupts()


def go_on_with(command: str) -> None:
    """If interrupted, print that this command continues."""
    INTERRUPTS.advise(f"Go on with: {command}")


def go_on_in(folder: Path, on: str | None = None) -> None:
    """If interrupted, print how a run in a folder continues, or that it has not begun. on: where its workers are."""
    import shlex  # noqa: PLC0415

    def advice() -> str:
        if (folder / "spec.toml").exists():
            return f"Go on with: cbdsl resume {shlex.quote(str(folder))}{f' --on {shlex.quote(on)}' if on else ''}"
        return f"Nothing was played yet. Start again with: {command_line()}"

    INTERRUPTS.advise(advice)


def start_again() -> None:
    """If interrupted, print that nothing was kept."""
    INTERRUPTS.advise(f"Nothing was kept of it. Start again with: {command_line()}")
