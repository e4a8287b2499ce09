"""Ctrl-C: one sentence that says how to go on, exit code 130, and never a traceback."""

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
    """The command as it was given."""
    import shlex  # noqa: PLC0415

    return shlex.join(["cbdsl", *sys.argv[1:]])


class Interrupts:
    """What Ctrl-C does in this process: the first one stops the command in good order, a second one at once."""

    def __init__(self) -> None:
        self.happened = self._holding = self._waiting = False
        self._main_thread = 0
        self._advice: Callable[[], str] = lambda: f"Start again with: {command_line()}"

    def __enter__(self) -> None:
        """From now on, remember that Ctrl-C was pressed."""
        self._before = signal.getsignal(signal.SIGINT), sys.unraisablehook
        self._main_thread = _thread.get_ident()
        atexit.register(self._leave)  # before anything else is registered, so it is called last
        if self._before[0] is signal.default_int_handler:  # else somebody ignores it for us, as nohup does
            signal.signal(signal.SIGINT, self._hear)
            sys.unraisablehook = self._swallowed

    def __exit__(self, *_: object) -> None:
        """Leave things as they were, for a program that called the command line; not after Ctrl-C: we are leaving."""
        if not self.happened:
            signal.signal(signal.SIGINT, self._before[0])
            sys.unraisablehook = self._before[1]

    def advise(self, advice: str | Callable[[], str]) -> None:
        """Set what to say if the command is interrupted from now on."""
        self._advice = advice if callable(advice) else lambda: advice

    def conclude(self) -> None:
        """Say how to go on, and end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left to do takes no time
        print(f"\ncbdsl: interrupted. {self._advice()}", file=sys.stderr)
        sys.exit(EXIT_CODE)

    def _leave(self) -> None:
        """End with our exit code: Python would end by the signal itself where Ctrl-C had met it within an exec()."""
        if self.happened:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_CODE)

    def hold(self) -> None:
        """Let an interrupt wait: one that meets a library of C++ while it is loaded ends the process without a word."""
        self._holding = True

    def release(self) -> None:
        """Let it come, if there was one."""
        self._holding = False
        if self._waiting:
            self._hear(signal.SIGINT, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
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

    def _swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        """An interrupt that came where Python has to drop exceptions, such as in a destructor, comes again."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(self._press_again, ())
        elif not self.happened:
            sys.__unraisablehook__(unraisable)

    def _press_again(self) -> None:
        time.sleep(0.02)  # by then Python is out of the place where it dropped the first one
        self.happened = False
        signal.pthread_kill(self._main_thread, signal.SIGINT)


INTERRUPTS = Interrupts()


def go_on_with(command: str) -> None:
    """If interrupted, say that this command goes on."""
    INTERRUPTS.advise(f"Go on with: {command}")


def go_on_in(folder: Path, on: str | None = None) -> None:
    """If interrupted, say how a run in a folder goes on, or that it has not begun. on: the place of its workers."""
    import shlex  # noqa: PLC0415

    def advice() -> str:
        if (folder / "spec.toml").exists():
            return f"Go on with: cbdsl resume {shlex.quote(str(folder))}{f' --on {shlex.quote(on)}' if on else ''}"
        return f"Nothing was played yet. Start again with: {command_line()}"

    INTERRUPTS.advise(advice)


def start_again() -> None:
    """If interrupted, say that nothing was kept."""
    INTERRUPTS.advise(f"Nothing was kept of it. Start again with: {command_line()}")
