"""What a monitor reads: the run's numbers as Prometheus takes them (text format 0.0.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbdsl.watch.run_state import RunView
from cbdsl.watch.sweep_state import SweepView

Sample = tuple[dict[str, str], float]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HELP = {
    "cbdsl_round": ("gauge", "The last round that was played."),
    "cbdsl_rounds": ("gauge", "Rounds that the run is to have."),
    "cbdsl_running": ("gauge", "1 while a process plays the run, else 0."),
    "cbdsl_finished": ("gauge", "1 once the run has come to its end, else 0."),
    "cbdsl_accuracy": ("gauge", "Test accuracy of the global model, from 0 to 1."),
    "cbdsl_global_score": ("gauge", "F^g, the score of the global model."),
    "cbdsl_payload_bytes_total": ("counter", "Payload bytes of the rounds, by direction."),
    "cbdsl_fedavg_bytes_total": ("counter", "What FedAvg would have uploaded in as many rounds."),
    "cbdsl_wire_bytes_total": ("counter", "Bytes of MQTT packets on the server's connection, by direction."),
    "cbdsl_uploads_total": ("counter", "Models that were uploaded."),
    "cbdsl_round_seconds": ("gauge", "What the last round took."),
    "cbdsl_round_phase_seconds": ("gauge", "What the last round's seconds went to (served runs)."),
    "cbdsl_workers": ("gauge", "Workers by state."),
    "cbdsl_bans_total": ("counter", "Workers that were banned."),
    "cbdsl_refused_messages_total": ("counter", "Messages that the server refused."),
}


def of_run(view: RunView) -> str:
    """The metrics of one run."""
    view.refresh()
    facts, tally = view.facts, view.tally
    status, nothing = facts.status(tally.round), {}  # type: tuple[str, dict[str, str]]
    split = tally.last.phases if tally.last else {}
    samples: dict[str, Sequence[tuple[dict[str, str], Any]]] = {
        "cbdsl_round": [(nothing, tally.round)],
        "cbdsl_rounds": [(nothing, facts.spec.rounds if facts.spec else None)],
        "cbdsl_running": [(nothing, int(status == "running"))],
        "cbdsl_finished": [(nothing, int(status == "finished"))],
        "cbdsl_accuracy": [(nothing, tally.accuracy)],
        "cbdsl_global_score": [(nothing, tally.score)],
        "cbdsl_payload_bytes_total": [({"direction": "up"}, tally.up), ({"direction": "down"}, tally.down)],
        "cbdsl_fedavg_bytes_total": [(nothing, facts.fedavg_bytes() * tally.round or None)],
        "cbdsl_wire_bytes_total": [({"direction": way}, count) for way, count in facts.wire.items()],
        "cbdsl_uploads_total": [(nothing, tally.uploads)],
        "cbdsl_round_seconds": [(nothing, tally.point()[5])],
        "cbdsl_round_phase_seconds": [({"phase": name}, spent) for name, spent in split.items()],
        "cbdsl_workers": [({"state": state}, count) for state, count in view.states().items()],
        "cbdsl_bans_total": [(nothing, len(tally.banned))],
        "cbdsl_refused_messages_total": [(nothing, facts.refused if view.presence.seen else None)],
    }
    return _text(samples)


def of_sweep(view: SweepView) -> str:
    """The metrics of a folder of runs: of each how far it is."""
    rows = view.rows()
    return _text(
        {
            "cbdsl_round": [({"run": name}, row["round"]) for name, row in rows.items()],
            "cbdsl_rounds": [({"run": name}, row["rounds"]) for name, row in rows.items()],
            "cbdsl_finished": [({"run": name}, int(row["done"])) for name, row in rows.items()],
            "cbdsl_accuracy": [({"run": name}, row["accuracy"]) for name, row in rows.items()],
            "cbdsl_bans_total": [({"run": name}, row["banned"]) for name, row in rows.items()],
        }
    )


def _text(samples: dict[str, Any]) -> str:
    """What is not known has no line."""
    lines = []
    for name, found in samples.items():
        known = [(labels, value) for labels, value in found if value is not None]
        if known:
            kind, help_text = _HELP[name]
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {value}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_quoted(value)}"' for key, value in labels.items()) + "}"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
