"""Ctrl-C: one sentence that says how to continue, exit code 130, and no traceback. A second one ends at once."""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # not from `typing`: little may be loaded before Ctrl-C is handled
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import FrameType

EXIT_CODE = 130
_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Handles Ctrl-C while the context is open."""

    def __init__(self) -> None:
        self.happened = False
        self._delayed: bool | None = None  # None: interrupts are not delayed; else whether one waits
        self._advice: Callable[[], str] = lambda: f"Start again with: {command_line()}"

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT), sys.unraisablehook
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
        self._delayed = False

    def release(self) -> None:
        """Deliver a delayed interrupt, if there was one."""
        waiting, self._delayed = self._delayed, None
        if waiting:
            self._handle()

    def _handle(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        if self._delayed is False:
            self._delayed = True
        elif self.happened or self._delayed:  # pressed again: do not wait for anything
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
                sys.stderr.flush()
            os._exit(EXIT_CODE)
        else:
            self._interrupt(number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.happened = True
        raise KeyboardInterrupt

    def _handle_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt that came where Python drops exceptions, such as in a destructor."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.signal(signal.SIGALRM, self._interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # by then Python has left that place
        elif not self.happened:
            sys.__unraisablehook__(unraisable)

    def _exit(self) -> None:
        """Exit with our code: after an interrupt within an exec() Python would end by the signal itself."""
        if self.happened:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_CODE)


INTERRUPTS = Interrupts()


def command_line(*more: str, words: Sequence[str] = ()) -> str:
    """Return the command as it was given, or these words instead, with more words."""
    import shlex  # noqa: PLC0415 - see above

    return shlex.join(["cbdsl", *(words or sys.argv[1:]), *more])


def advise_same_command(*more: str) -> None:
    """If interrupted, print that the same command continues, with more words."""
    INTERRUPTS.advise(f"Go on with: {command_line(*more)}")


def advise_resume(folder: Path, on: str | None = None) -> None:
    """If interrupted, print how a run in a folder continues, or that it has not begun. on: where its workers are."""

    def advice() -> str:
        if (folder / "spec.toml").exists():
            return f"Go on with: {command_line(*(['--on', on] if on else []), words=['resume', str(folder)])}"
        return f"No round is finished yet. Start again with: {command_line()}"

    INTERRUPTS.advise(advice)


def advise_start_again() -> None:
    """If interrupted, print that nothing was kept."""
    INTERRUPTS.advise(f"Nothing was kept of it. Start again with: {command_line()}")
