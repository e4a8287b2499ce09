"""What a person sees of a swarm on this machine: every worker while it works, the bytes on the wire at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cbdsl.cli.console import plain_console
from cbdsl.cli.progress import Display
from cbdsl.cli.tables import print_summary
from cbdsl.deploy.meter import Counts, Direction, total_bytes
from cbdsl.deploy.swarm import Crew, Outcome
from cbdsl.runs.records import RoundRecord
from cbdsl.spec import Spec
from cbdsl.text import one_line, size

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
    """A table of workers that lives while the run is played; without a terminal a line a round."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._console = plain_console(stderr=True)
        self._lines = Display()
        self._crew: Crew | None = None
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

    def ready(self, crew: Crew) -> None:
        """The processes run."""
        self._crew = crew
        self._console.print(
            f"broker: {crew.broker.kind} at {crew.broker.host}:{crew.broker.port}, {len(crew.names)} worker processes",
            highlight=False,
        )

    def show(self, line: RoundRecord) -> None:
        """A round was played."""
        self._last = line
        self._lines.show(line)

    def _picture(self) -> RenderableType:
        crew = self._crew
        if crew is None:
            return Text("starting a broker and the workers ...")
        open_round, online = crew.network.inbox.open_round, set(crew.network.inbox.online())
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
        open_round = self._crew.network.inbox.open_round if self._crew else None
        if self._last is not None and number in self._last.banned:
            return "banned"
        if name not in online or open_round is None:
            return "done" if self._last is not None and self._last.round == self._spec.rounds else "disconnected"
        if number in open_round.invited:
            return "uploading" if open_round.task == "swarm" else "training"
        return "claimed" if number in open_round.claims else "training"


def print_outcome(outcome: Outcome) -> None:
    """The summary of a run, and what it took on the wire."""
    print_summary(outcome.served.result)
    print_wire(outcome.workers_wire, "workers")
    print_refused(outcome.served.refused)


def print_refused(refused: Mapping[str, int]) -> None:
    """What was refused and how often, each on a line of its own; the most frequent first."""
    if refused:
        console = plain_console()
        console.print(f"refused: {sum(refused.values()):,} messages", highlight=False)
        for reason, count in sorted(refused.items(), key=lambda one: -one[1]):
            console.print(f"  {count:,} {one_line(reason)}", highlight=False, soft_wrap=True)


def print_wire(counts: Counts, whose: str) -> None:
    """Bytes on the wire by kind, whole MQTT packets, on standard output."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"on the wire of the {whose}")
    directions: tuple[Direction, Direction] = ("sent", "received")
    for direction in directions:
        table.add_column(direction, justify="right")
        table.add_column("messages", justify="right")
    for kind in sorted(set(counts["sent"]) | set(counts["received"])):
        cells = [counts[direction].get(kind, [0, 0]) for direction in directions]
        table.add_row(kind, *(text for count, total in cells for text in (size(total), f"{count:,}")))
    table.add_row("all", *(text for direction in directions for text in (size(total_bytes(counts, direction)), "")))
    console = plain_console()
    console.print()
    console.print(table, highlight=False)
