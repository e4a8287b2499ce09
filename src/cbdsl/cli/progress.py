"""What a person sees of a run in a terminal while it is played; `tables` has what is shown at its end.

Progress goes to standard error, so that standard output holds the result alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from cbdsl.callbacks import Callback, Start
from cbdsl.cli.console import plain_console
from cbdsl.runs.defence import method_of
from cbdsl.runs.records import RoundRecord, describe
from cbdsl.spec import Spec
from cbdsl.text import clock, size

_LOG_SECONDS = 10.0  # without a terminal, a line at most this often


class _TimeLeft(ProgressColumn):
    """Rounds left times the mean duration of the rounds played here."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        seconds = task.fields["left"]
        return Text("" if seconds is None else f"{clock(seconds)} left", style="cyan")


class _Bar:
    """A bar in a terminal; elsewhere a line from time to time."""

    def __init__(self, unit: str, width: int, every: float = _LOG_SECONDS) -> None:
        """Unit: of what is counted. every: seconds between lines."""
        self._console = plain_console(stderr=True)
        self._bar = Progress(
            TextColumn(unit),
            MofNCompleteColumn(),
            BarColumn(bar_width=width),
            TextColumn("{task.fields[state]}"),
            _TimeLeft(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._unit, self._every, self._started = unit, every, time.monotonic()
        self._task, self._logged = self._bar.add_task("", total=None, state="", left=None), self._started

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _tell(self, line: str | Text, style: str = "") -> None:
        self._console.print(line, style=style, highlight=False, soft_wrap=True)

    def _advance(self, done: int, total: int, state: str, left: float | None) -> None:
        """Show how far it is. left: seconds, if they can be told."""
        self._bar.update(self._task, completed=done, total=total, state=state, left=left)
        now = time.monotonic()
        if not self._console.is_terminal and (done == total or now - self._logged > self._every):
            self._logged = now
            self._tell(f"{self._unit} {done}/{total}  {state}{'' if left is None else f'  {clock(left)} left'}")


class Display(_Bar, Callback):
    """Shows the rounds of one run as they are played."""

    def __init__(self) -> None:
        super().__init__("round", 16)
        self._uploads = self._uplink = self._played = 0
        self._spent = 0.0

    def __enter__(self) -> Self:  # the bar comes with `begin`
        return self

    def begin(self, spec: Spec, folder: Path | None, note: str = "", bar: bool = True) -> None:
        """Say what is about to be run."""
        self._rounds = spec.rounds
        self._tell(headline(spec))
        if folder is not None:
            self._tell(f"folder: {folder}")
        if note:
            self._tell(note, "yellow")
        self._bar.update(self._task, total=spec.rounds, state="first round")
        if bar:
            self._bar.start()

    def start(self, run: Start) -> None:
        """See `Callback.start`."""
        self.count(run.before)
        self.begin(run.spec, run.folder, run.note)

    def count(self, earlier: Iterable[RoundRecord]) -> None:
        """Count in what was sent in rounds that were played before this process was started."""
        for line in earlier:
            self._uploads += line.uploads
            self._uplink += line.uplink_bytes

    def state(self) -> str:
        """What else there is to say of a round."""
        return ""

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        self.show(record)

    def show(self, line: RoundRecord) -> None:
        """Show a round that was just played."""
        self.count([line])
        self._spent += line.seconds
        self._played += 1
        score = "" if line.global_score is None else f"  F^g {line.global_score:.4f}"
        state = (
            f"accuracy {line.test_accuracy:6.2%}{score}  uploads {self._uploads:,}  bans {len(line.banned)}  "
            f"uplink {size(self._uplink)}{self.state()}"
        )
        self._advance(line.round, self._rounds, state, (self._rounds - line.round) * self._spent / self._played)


class SweepDisplay(_Bar):
    """Shows how far a grid of runs is."""

    def __init__(self, runs: int, out: Path) -> None:
        super().__init__("rounds", 24, 3 * _LOG_SECONDS)
        self._tell(f"{runs} runs, folder: {out}")
        self._before: float | None = None  # the share of the work that earlier processes had done

    def show(self, played: int, total: int, share: float) -> None:
        """Show how many rounds are done of how many, and by the share of the work how long it will take."""
        if self._before is None:
            self._before = share
        here = share - self._before
        left = (1 - share) * (time.monotonic() - self._started) / here if here > 0 else None
        self._advance(played, total, f"{100 * played // max(1, total)} %", left)


class PassDisplay(_Bar):
    """Shows how far a generator has learned."""

    def __init__(self, out: Path) -> None:
        super().__init__("pass", 24)
        self._tell(f"folder: {out}")
        self._played = 0

    def show(self, number: int, total: int, loss: float) -> None:
        """Show a pass that was just made."""
        self._played += 1
        left = (total - number) * (time.monotonic() - self._started) / self._played
        self._advance(number, total, f"loss {loss:.2f}", left)


def headline(spec: Spec) -> Text:
    """One line that says what is run."""
    shared = {"none": "no shared data", "score": "D_sc shared", "train": "D_tr shared", "both": "D_sc and D_tr shared"}
    attack = f", {spec.attack.byzantine} Byzantine ({spec.attack.name})" if spec.attack.byzantine else ""
    defence = f" with {describe(spec)}" if describe(spec) else ""
    return Text.assemble(
        (method_of(spec).title, "bold"),
        f"{defence}, {shared[spec.shared]}: {spec.workers} workers{attack}, "
        f"{spec.data.source} {spec.data.partition}, model {spec.model}, seed {spec.seed}",
    )
