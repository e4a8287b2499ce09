"""Finished runs that nobody played, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbdsl.runs.records import RoundRecord, Summary
from cbdsl.spec import Spec
from cbdsl.studies.sweep import FinishedRun


def make_run(
    accuracies: Sequence[float],
    folder: Path = Path("run"),
    uplink: int = 1000,
    parameters: int = 100,
    banned: Sequence[int] = (),
    **settings: Any,  # noqa: ANN401 - any setting of a spec
) -> FinishedRun:
    """A run with these accuracies by round; settings use __ for a dot."""
    spec = Spec().with_settings({key.replace("__", "."): value for key, value in settings.items()})
    spec = spec.with_settings({"rounds": len(accuracies)})
    lines = tuple(
        RoundRecord(
            round=number, test_accuracy=accuracy, global_score=None, participants=spec.workers,
            accepted=[], refuted=[], declined=[], silent=[],
            banned=list(banned), set_aside={}, uploads=1, uplink_bytes=uplink, downlink_bytes=2 * uplink, verdicts=[],
            traffic={}, wasted_bytes=0, seconds=0.1,
        )
        for number, accuracy in enumerate(accuracies, 1)
    )  # fmt: skip
    count = len(lines)
    summary = Summary(
        method=spec.method, conversation="swarm", preset=spec.preset, shared=spec.shared,
        model=spec.model, engine="native", seed=spec.seed,
        workers=spec.workers, parameters=parameters, rounds=count, final_accuracy=accuracies[-1],
        best_accuracy=max(accuracies), final_score=None, uploads=count, uplink_bytes=count * uplink,
        downlink_bytes=2 * count * uplink, model_uplink_bytes=0, wasted_uplink_bytes=0, fedavg_model_uplink_bytes=0,
        banned=list(banned), byzantine=[], attack="", codec="", defence="", attack_success=None, class_accuracy=[],
        aimed_accuracy=None, honest_banned=0, traffic={}, seconds=1.0,
        spec_key=spec.key(), version="1",
    )  # fmt: skip
    return FinishedRun(spec, summary, lines, folder)
