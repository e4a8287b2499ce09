"""Folders of runs as `run`, `serve` and `sweep` write them, made by hand: of any size, and with whatever names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbdsl.runs.records import RoundRecord
from cbdsl.spec import Spec


def spec_of(**settings: object) -> Spec:
    start = Spec(preset=str(settings.pop("preset", "")))
    return start.with_settings({key.replace("__", "."): value for key, value in settings.items()})


def line(number: int, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """A round as rounds.jsonl has it: the worker with the round's number is accepted."""
    accepted = changes.pop("accepted", [number % 3])
    record = RoundRecord(
        round=number, test_accuracy=min(0.95, 0.1 + 0.02 * number), global_score=2.3 / (1 + number / 10),
        participants=10, accepted=accepted, refuted=[], declined=[], silent=[], banned=[], set_aside={}, uploads=1,
        uplink_bytes=1000, downlink_bytes=5000,
        verdicts=[
            {"worker": one, "outcome": "accepted", "claimed": 1.5, "measured": 1.5, "reason": ""} for one in accepted
        ],
        traffic={}, wasted_bytes=0, seconds=0.5,
    )  # fmt: skip
    return record.to_json() | changes


def lie(number: int, worker: int, reason: str = "the claim is not what the server measures") -> dict[str, Any]:
    """A round in which a liar is banned."""
    verdict = {"worker": worker, "outcome": "refuted", "claimed": 0.001, "measured": 7.25, "reason": reason}
    return line(number, refuted=[worker], banned=[worker], accepted=[], verdicts=[verdict])


def write_run(folder: Path, lines: Sequence[dict[str, Any]], spec: Spec | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.toml").write_text((spec or spec_of(workers=10, rounds=100)).to_toml())
    write_lines(folder / "rounds.jsonl", lines)
    return folder


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)


def write_large_served_run(folder: Path, workers: int, rounds: int) -> list[str]:
    """A served run of many workers, one of them banned, some away; their names."""
    names = [f"sensor-{number:04}" for number in range(workers)]
    lines = [
        line(number, accepted=[number % workers], phases={"train": 0.3, "wait": 0.1, "upload": 0.05, "verify": 0.05})
        for number in range(1, rounds + 1)
    ]
    lines[0] |= lie(1, 7)
    for one in lines[1:]:
        one["banned"] = [7]
    write_run(folder, lines, spec_of(workers=workers, rounds=2 * rounds, preset="paper-iid"))
    (folder / "roster.json").write_text(json.dumps({"names": names, "closed": True, "samples": {}}))
    events = [{"time": 1e9, "event": "started", "round": 0}]
    events += [{"time": 1e9 + 1, "event": "connected", "worker": name} for name in names[: workers - 20]]
    events += [{"time": 1e9 + 2, "event": "disconnected", "worker": name} for name in names[100:130]]
    write_lines(folder / "events.jsonl", events)
    for number in range(1, rounds + 1):
        add_claims(folder, number, names)
    return names


def add_claims(folder: Path, number: int, names: Sequence[str]) -> None:
    said = {name: 2.5 - 0.01 * number - 0.0005 * place for place, name in enumerate(names)}
    append(folder / "claims.jsonl", {"time": 1e9, "event": "claims", "round": number, "claims": said})
