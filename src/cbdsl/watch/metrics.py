"""Metrics of a run or a sweep for Prometheus (text format 0.0.4)."""

from __future__ import annotations

from collections.abc import Sequence

from cbdsl.runs.records import finite
from cbdsl.watch.run_state import RunView
from cbdsl.watch.sweep_state import SweepView

Sample = tuple[dict[str, str], float | None]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HELP = {
    "cbdsl_round": ("gauge", "The last finished round."),
    "cbdsl_rounds": ("gauge", "Number of rounds of the run."),
    "cbdsl_running": ("gauge", "1 while the run is running, else 0."),
    "cbdsl_finished": ("gauge", "1 if the run is finished, else 0."),
    "cbdsl_accuracy": ("gauge", "Test accuracy of the global model, from 0 to 1."),
    "cbdsl_metric": ("gauge", "Metrics of the global model on the test set, by name; accuracy has a line of its own."),
    "cbdsl_global_score": ("gauge", "F^g, the score of the global model."),
    "cbdsl_payload_bytes_total": ("counter", "Payload bytes of the rounds, by direction."),
    "cbdsl_fedavg_bytes_total": ("counter", "Bytes that FedAvg would have uploaded in as many rounds."),
    "cbdsl_wire_bytes_total": ("counter", "Bytes of MQTT packets on the server's connection, by direction."),
    "cbdsl_uploads_total": ("counter", "Models that were uploaded."),
    "cbdsl_round_seconds": ("gauge", "Seconds of the last round."),
    "cbdsl_round_phase_seconds": ("gauge", "Seconds of the last round by phase (served runs)."),
    "cbdsl_workers": ("gauge", "Workers by state."),
    "cbdsl_bans_total": ("counter", "Workers that were banned."),
    "cbdsl_refused_messages_total": ("counter", "Messages that the server refused."),
}


def describe_run(view: RunView) -> str:
    """Return the metrics of one run."""
    view.refresh()
    facts, progress, status = view.facts, view.progress, view.status()
    _, _, score, up, down, seconds, *_ = progress.make_point()
    last = progress.last
    phases = last.phases if last else {}
    return _format(
        {
            "cbdsl_round": [({}, progress.round)],
            "cbdsl_rounds": [({}, facts.spec.rounds if facts.spec else None)],
            "cbdsl_running": [({}, int(status == "running"))],
            "cbdsl_finished": [({}, int(status == "finished"))],
            "cbdsl_accuracy": [({}, finite(last.test_accuracy) if last else None)],
            "cbdsl_metric": [({"name": name}, value) for name, value in (last.metrics if last else {}).items()],
            "cbdsl_global_score": [({}, score)],
            "cbdsl_payload_bytes_total": [({"direction": "up"}, up), ({"direction": "down"}, down)],
            "cbdsl_fedavg_bytes_total": [({}, round(facts.fedavg_bytes(progress.totals) * progress.round) or None)],
            "cbdsl_wire_bytes_total": [({"direction": way}, count) for way, count in facts.wire.items()],
            "cbdsl_uploads_total": [({}, progress.totals.uploads)],
            "cbdsl_round_seconds": [({}, seconds)],
            "cbdsl_round_phase_seconds": [({"phase": name}, spent) for name, spent in phases.items()],
            "cbdsl_workers": [({"state": state}, count) for state, count in view.count_states().items()],
            "cbdsl_bans_total": [({}, progress.bans)],
            "cbdsl_refused_messages_total": [({}, facts.refused if view.connections.seen else None)],
        }
    )


def describe_sweep(view: SweepView) -> str:
    """Return the metrics of a folder of runs: how far each of them is."""
    rows = view.read_rows()
    return _format(
        {
            "cbdsl_round": [({"run": name}, row["round"]) for name, row in rows.items()],
            "cbdsl_rounds": [({"run": name}, row["rounds"]) for name, row in rows.items()],
            "cbdsl_finished": [({"run": name}, int(row["done"])) for name, row in rows.items()],
            "cbdsl_accuracy": [
                ({"run": name}, row["accuracy"] if row["metric"]["title"] == "accuracy" else None)
                for name, row in rows.items()
            ],
            "cbdsl_bans_total": [({"run": name}, row["banned"]) for name, row in rows.items()],
        }
    )


def _format(samples: dict[str, Sequence[Sample]]) -> str:
    """Return the lines of all samples; a value that is None has no line."""
    lines = []
    for name, found in samples.items():
        known = [(labels, value) for labels, value in found if value is not None]
        if known:
            kind, help_text = _HELP[name]
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_format_labels(labels)} {value}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _format_labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
