"""What a person sees of a run in a terminal while it is played; `tables` has what is shown at its end.

Progress goes to standard error, so that standard output holds the result alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

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


class Display(Callback):
    """Shows the rounds of one run as they are played."""

    def __init__(self) -> None:
        self._console = plain_console(stderr=True)
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[state]}"),
            _TimeLeft(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._uploads = self._uplink = self._played = 0
        self._spent, self._logged = 0.0, time.monotonic()

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, spec: Spec, folder: Path | None, note: str = "", bar: bool = True) -> None:
        """Say what is about to be run."""
        self._rounds = spec.rounds
        self._console.print(headline(spec), highlight=False, soft_wrap=True)
        if folder is not None:
            self._console.print(f"folder: {folder}", highlight=False, soft_wrap=True)
        if note:
            self._console.print(note, style="yellow", highlight=False, soft_wrap=True)
        self._task = self._bar.add_task("", total=spec.rounds, state="first round", left=None)
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
        self._uploads += line.uploads
        self._uplink += line.uplink_bytes
        self._spent += line.seconds
        self._played += 1
        left = (self._rounds - line.round) * self._spent / self._played
        score = "" if line.global_score is None else f"  F^g {line.global_score:.4f}"
        state = (
            f"accuracy {line.test_accuracy:6.2%}{score}  uploads {self._uploads:,}  bans {len(line.banned)}  "
            f"uplink {size(self._uplink)}{self.state()}"
        )
        self._bar.update(self._task, completed=line.round, state=state, left=left)
        now, last = time.monotonic(), line.round == self._rounds
        if not self._console.is_terminal and (last or now - self._logged > _LOG_SECONDS):
            self._logged = now
            self._console.print(
                f"round {line.round}/{self._rounds}  {state}  {clock(left)} left", highlight=False, soft_wrap=True
            )


class SweepDisplay:
    """Shows how far a grid of runs is."""

    def __init__(self, runs: int, out: Path) -> None:
        self._console = plain_console(stderr=True)
        self._console.print(f"{runs} runs, folder: {out}", highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("rounds"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f} %"),
            _TimeLeft(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, left=None)
        self._started = self._logged = time.monotonic()
        self._before: float | None = None  # the share of the work that earlier processes had done

    def __enter__(self) -> SweepDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, played: int, total: int, share: float) -> None:
        """Show how many rounds are done of how many, and by the share of the work how long it will take."""
        if self._before is None:
            self._before = share
        now = time.monotonic()
        here = share - self._before
        left = (1 - share) * (now - self._started) / here if here > 0 else None
        self._bar.update(self._task, completed=played, total=total, left=left)
        if not self._console.is_terminal and now - self._logged > 3 * _LOG_SECONDS:
            self._logged = now
            remaining = f"  {clock(left)} left" if left is not None else ""
            self._console.print(f"rounds {played}/{total}{remaining}", highlight=False)


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
