"""The progress of a deployment in the terminal: connected workers, a live table of a local swarm, bytes on the wire."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from cbdsl.cli.display import Display, new_table, print_summary
from cbdsl.network.local_swarm import LocalSwarmOutcome, WorkerProcesses
from cbdsl.network.mqtt import Counts, Direction, total_bytes
from cbdsl.runs.callbacks import RunStart
from cbdsl.runs.metrics import find_metric
from cbdsl.runs.records import RoundRecord
from cbdsl.spec import Spec
from cbdsl.util.console import plain_console
from cbdsl.util.formatting import format_bytes, single_line

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

    def take_event(self, event: str, details: Mapping[str, Any]) -> None:
        """Take an event of the server, from any thread."""
        with self._lock:
            if self._connections.take(event, details) and self._timer is None:
                self._timer = threading.Timer(_GATHER_SECONDS, self._report)
                self._timer.daemon = True
                self._timer.start()

    def _describe(self, record: RoundRecord) -> str:
        with self._lock:
            return f"{super()._describe(record)}  {self._connections.count()}"

    def _report(self) -> None:
        with self._lock:
            self._timer, line = None, self._connections.line()
        self.line.print(line)


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
    """A live table of the workers of a local swarm; without a terminal a line from time to time."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._console = plain_console(stderr=True)
        self._lines = Display()
        self._crew: WorkerProcesses | None = None
        self._last: RoundRecord | None = None
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._lines.announce(self._spec, self._folder)
            self._live.start()
        else:
            self._lines.start(RunStart(self._spec, self._folder, "", 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._lines.close()

    def ready(self, crew: WorkerProcesses) -> None:
        """Take the processes once they run."""
        self._crew = crew
        broker = crew.broker
        self._console.print(
            f"broker: {broker.kind} at {broker.host}:{broker.port}, {len(crew.names)} worker processes", soft_wrap=True
        )

    def show(self, record: RoundRecord) -> None:
        """Show a round that was just completed."""
        self._last = record
        self._lines.round(record)

    def _picture(self) -> RenderableType:
        crew = self._crew
        if crew is None:
            return Text("starting a broker and the workers ...")
        open_round, online = crew.network.open_round, set(crew.network.online())
        states = [self._state(number, name, online) for number, name in enumerate(crew.names)]
        title = f"round {open_round.round}/{self._spec.rounds}"
        if self._last is not None:
            metric = find_metric(self._last.metric)
            title += f"   {metric.title} {metric.text(self._last.value)}   banned {len(self._last.banned)}"
        if len(states) > _ROWS:
            counted = ", ".join(f"{states.count(state)} {state}" for state in _COLOURS if state in states)
            return Group(Text(title, style="bold"), Text(f"{len(states)} workers: {counted}"))
        table = new_table("worker", "process", "state", "claim")
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
    table = new_table()
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
