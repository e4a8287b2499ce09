"""Progress displays of the commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from cbdsl.cli.tables import plain_console, print_summary
from cbdsl.network.local_swarm import LocalSwarmOutcome, WorkerProcesses
from cbdsl.network.mqtt import Counts, Direction, total_bytes
from cbdsl.runs.build import build_method
from cbdsl.runs.callbacks import Callback, RunStart
from cbdsl.runs.records import RoundRecord, RunTotals, describe
from cbdsl.spec import Spec
from cbdsl.util.formatting import format_bytes, format_duration, single_line

_LOG_SECONDS = 10.0  # without a terminal, a line at most this often


class _TimeLeft(ProgressColumn):
    """The estimated time left."""

    def render(self, task: Task) -> Text:
        """Return the column's text."""
        seconds = task.fields["left"]
        return Text("" if seconds is None else f"{format_duration(seconds)} left", style="cyan")


class _ProgressLine:
    """A progress bar in a terminal; elsewhere a line from time to time."""

    def __init__(self, unit: str, width: int, every: float = _LOG_SECONDS) -> None:
        """unit: what is counted. every: seconds between lines."""
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

    def _print(self, line: str | Text, style: str = "") -> None:
        self._console.print(line, style=style, highlight=False, soft_wrap=True)

    def _advance(self, done: int, total: int, state: str, left: float | None) -> None:
        """Show the progress. left: estimated seconds, if known."""
        self._bar.update(self._task, completed=done, total=total, state=state, left=left)
        now = time.monotonic()
        if not self._console.is_terminal and (done == total or now - self._logged > self._every):
            self._logged = now
            self._print(
                f"{self._unit} {done}/{total}  {state}{'' if left is None else f'  {format_duration(left)} left'}"
            )


class Display(_ProgressLine, Callback):
    """The progress of one run, round by round."""

    def __init__(self) -> None:
        super().__init__("round", 16)
        self._totals, self._here = RunTotals(), RunTotals()  # of all rounds, and of those played by this process

    def __enter__(self) -> Self:  # the bar comes with `begin`
        return self

    def begin(self, spec: Spec, folder: Path | None, note: str = "", bar: bool = True) -> None:
        """Print what is about to be run."""
        self._rounds = spec.rounds
        self._print(headline(spec))
        if folder is not None:
            self._print(f"folder: {folder}")
        if note:
            self._print(note, "yellow")
        self._bar.update(self._task, total=spec.rounds, state="first round")
        if bar:
            self._bar.start()

    def start(self, run: RunStart) -> None:
        """See `Callback.start`."""
        self.count(run.before)
        self.begin(run.spec, run.folder, run.note)

    def count(self, earlier: Iterable[RoundRecord]) -> None:
        """Count the rounds that were played before this process started."""
        self._totals = RunTotals.of(earlier)

    def state(self) -> str:
        """Return text to add to the line of a round."""
        return ""

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        self.show(record)

    def show(self, line: RoundRecord) -> None:
        """Show a round that was just completed."""
        self._totals.add(line)
        self._here.add(line)
        score = "" if line.global_score is None else f"  F^g {line.global_score:.4f}"
        state = (
            f"accuracy {line.test_accuracy:6.2%}{score}  uploads {self._totals.uploads:,}  bans {len(line.banned)}  "
            f"uplink {format_bytes(self._totals.uplink_bytes)}{self.state()}"
        )
        left = (self._rounds - line.round) * self._here.seconds / self._here.rounds
        self._advance(line.round, self._rounds, state, left)


class SweepDisplay(_ProgressLine):
    """The progress of a grid of runs."""

    def __init__(self, runs: int, out: Path) -> None:
        super().__init__("rounds", 24, 3 * _LOG_SECONDS)
        self._print(f"{runs} runs, folder: {out}")
        self._before: float | None = None  # the share of the work that earlier processes did

    def show(self, played: int, total: int, share: float) -> None:
        """Show how many rounds are completed; share: of the work, for the time left."""
        if self._before is None:
            self._before = share
        here = share - self._before
        left = (1 - share) * (time.monotonic() - self._started) / here if here > 0 else None
        self._advance(played, total, f"{100 * played // max(1, total)} %", left)


class PassDisplay(_ProgressLine):
    """The progress of a generator's training."""

    def __init__(self, out: Path) -> None:
        super().__init__("pass", 24)
        self._print(f"folder: {out}")
        self._played = 0

    def show(self, number: int, total: int, loss: float) -> None:
        """Show a pass that was just completed."""
        self._played += 1
        left = (total - number) * (time.monotonic() - self._started) / self._played
        self._advance(number, total, f"loss {loss:.2f}", left)


def headline(spec: Spec) -> Text:
    """Return one line that describes a run."""
    shared = {"none": "no shared data", "score": "D_sc shared", "train": "D_tr shared", "both": "D_sc and D_tr shared"}
    attack = f", {spec.attack.byzantine} Byzantine ({spec.attack.name})" if spec.attack.byzantine else ""
    defence = f" with {describe(spec)}" if describe(spec) else ""
    return Text.assemble(
        (build_method(spec).title, "bold"),
        f"{defence}, {shared[spec.shared]}: {spec.workers} workers{attack}, "
        f"{spec.data.source} {spec.data.partition}, model {spec.model}, seed {spec.seed}",
    )


_GATHER_SECONDS = 0.5  # many workers come and go at once: one line names them all
_MOST_NAMES = 5


class ConnectionNews:
    """The connected workers, from the events of a run, and those not reported yet that came or left."""

    def __init__(self, places: int) -> None:
        self._places, self._here, self._over = places, set(), False  # type: tuple[int, set[str], bool]
        self._came: list[str] = []
        self._left: list[str] = []
        self._joined: list[str] = []  # the swarm, whether or not they are there
        self._gone: list[str] = []

    def take(self, event: str, details: Mapping[str, Any]) -> bool:
        """Take an event and return whether there is something to report."""
        name = str(details.get("worker", ""))
        if event == "over":
            self._over = True  # workers that leave now are done
        elif event == "connected" and name not in self._here:
            self._here.add(name)
            self._came.append(name)
        elif event == "disconnected" and name in self._here:
            self._here.discard(name)
            self._left.append(name)
        elif event == "started":
            self._places = int(details.get("members", self._places))
        elif event in {"enrolled", "left"}:
            self._places = int(details.get("members", self._places))
            self._here -= {name} if event == "left" else set()
            (self._joined if event == "enrolled" else self._gone).append(name)
        return not self._over and bool(self._came or self._left or self._joined or self._gone)

    def count(self) -> str:
        """Return how many workers are connected."""
        return f"{len(self._here):,} of {self._places:,} here"

    def line(self) -> str:
        """Return a line with the workers that came or left since the last one."""
        news = {
            "came:": self._came, "left:": self._left, "new in the swarm:": self._joined,
            "no longer in the swarm:": self._gone,
        }  # fmt: skip
        self._came, self._left, self._joined, self._gone = [], [], [], []
        return "; ".join([self.count(), *(f"{verb} {_names(names)}" for verb, names in news.items() if names)])


class ServeDisplay(Display):
    """The progress of a served run, and its connected workers."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self._connections, self._lock = ConnectionNews(places), threading.Lock()
        self._timer: threading.Timer | None = None

    def heard(self, event: str, details: Mapping[str, Any]) -> None:
        """Take an event of the server, from any thread."""
        with self._lock:
            if self._connections.take(event, details) and self._timer is None:
                self._timer = threading.Timer(_GATHER_SECONDS, self._report)
                self._timer.daemon = True
                self._timer.start()

    def state(self) -> str:
        """See `Display.state`: the number of connected workers."""
        with self._lock:
            return f"  {self._connections.count()}"

    def _report(self) -> None:
        with self._lock:
            self._timer, line = None, self._connections.line()
        self._print(line)


def _names(names: list[str]) -> str:
    shown = ", ".join(single_line(name, 64) for name in names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else "")


_ROWS = 20  # workers shown one by one; of more only the number is shown
_COLOURS = {
    "training": "cyan",
    "claimed": "green",
    "uploading": "magenta",
    "banned": "red",
    "disconnected": "yellow",
    "done": "green",
}


class SwarmDisplay:
    """A live table of the workers of a local swarm; without a terminal one line per round."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._console = plain_console(stderr=True)
        self._lines = Display()
        self._crew: WorkerProcesses | None = None
        self._last: RoundRecord | None = None
        self._live = Live(
            get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True
        )  # fmt: skip

    def __enter__(self) -> SwarmDisplay:
        self._lines.__enter__()
        self._lines.begin(self._spec, self._folder, bar=not self._console.is_terminal)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._lines.__exit__(kind, value, trace)

    def ready(self, crew: WorkerProcesses) -> None:
        """Take the processes once they run."""
        self._crew = crew
        self._console.print(
            f"broker: {crew.broker.kind} at {crew.broker.host}:{crew.broker.port}, {len(crew.names)} worker processes",
            highlight=False,
        )

    def show(self, line: RoundRecord) -> None:
        """Show a round that was just completed."""
        self._last = line
        self._lines.show(line)

    def _picture(self) -> RenderableType:
        crew = self._crew
        if crew is None:
            return Text("starting a broker and the workers ...")
        open_round, online = crew.network.open_round, set(crew.network.online())
        states = [self._state(number, name, online) for number, name in enumerate(crew.names)]
        title = f"round {open_round.round}/{self._spec.rounds}"
        if self._last is not None:
            title += f"   accuracy {self._last.test_accuracy:.2%}   banned {len(self._last.banned)}"
        if len(states) > _ROWS:
            counted = ", ".join(f"{states.count(state)} {state}" for state in _COLOURS if state in states)
            return Group(Text(title, style="bold"), Text(f"{len(states)} workers: {counted}"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("worker", "process", "state", "claim"):
            table.add_column(heading)
        for number, (name, process, state) in enumerate(zip(crew.names, crew.processes, states, strict=True)):
            claim = open_round.claims.get(number)
            shown = "" if claim is None else f"{claim.score:.4f}"
            table.add_row(name, str(process.pid), Text(state, style=_COLOURS[state]), shown)
        return Group(Text(title, style="bold"), table)

    def _state(self, number: int, name: str, online: set[str]) -> str:
        open_round = self._crew.network.open_round if self._crew else None
        if self._last is not None and number in self._last.banned:
            return "banned"
        if name not in online or open_round is None:
            return "done" if self._last is not None and self._last.round == self._spec.rounds else "disconnected"
        if number in open_round.invited:
            return "uploading" if open_round.task == "swarm" else "training"
        return "claimed" if number in open_round.claims else "training"


def print_outcome(outcome: LocalSwarmOutcome) -> None:
    """Print the summary of a run and its bytes on the wire."""
    print_summary(outcome.served.result)
    print_wire(outcome.workers_wire, "workers")
    print_refused(outcome.served.refused)


def print_refused(refused: Mapping[str, int]) -> None:
    """Print why messages were refused, and how often, the most frequent reason first."""
    if refused:
        console = plain_console()
        console.print(f"refused: {sum(refused.values()):,} messages", highlight=False)
        for reason, count in sorted(refused.items(), key=lambda one: -one[1]):
            console.print(f"  {count:,} {single_line(reason)}", highlight=False, soft_wrap=True)


def print_wire(counts: Counts, whose: str) -> None:
    """Print the bytes on the wire, whole MQTT packets, by kind."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"on the wire of the {whose}")
    directions: tuple[Direction, Direction] = ("sent", "received")
    for direction in directions:
        table.add_column(direction, justify="right")
        table.add_column("messages", justify="right")
    for kind in sorted(set(counts["sent"]) | set(counts["received"])):
        cells = [counts[direction].get(kind, [0, 0]) for direction in directions]
        table.add_row(kind, *(text for count, total in cells for text in (format_bytes(total), f"{count:,}")))
    table.add_row(
        "all", *(text for direction in directions for text in (format_bytes(total_bytes(counts, direction)), ""))
    )
    console = plain_console()
    console.print()
    console.print(table, highlight=False)
