"""Bans of a served run are lifted on request, while it runs and while it is stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import cbdsl
from cbdsl.network.unban import request_unban
from cbdsl.watch.run_state import RunProgress
from support.bus import Bus
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as
from support.worker_threads import crew, play, prepared

SPEC = small_spec(rounds=6, attack__byzantine=1, attack__name="liar")


def banning(out: Path) -> list[tuple[str, int, str]]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [(one["event"], one["round"], one["worker"]) for one in lines if one["event"] in {"banned", "unbanned"}]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_takes_part_again_from_the_next_round_on(stopped: bool, tmp_path: Path) -> None:
    stage, bus, out = prepared(SPEC), Bus(), tmp_path / "run"
    records: list[cbdsl.RoundRecord] = []

    def on_round(line: cbdsl.RoundRecord) -> None:
        records.append(line)
        if len(records) == 3:
            request_unban(out, liar)
            if stopped:
                raise KeyboardInterrupt

    with crew(bus, stage, tmp_path) as workers:
        (attacker,) = stage.byzantine
        liar = workers.names[attacker]
        if stopped:
            with pytest.raises(KeyboardInterrupt):
                play(bus, stage, tmp_path, workers.names, on_round=on_round)
        play(bus, stage, tmp_path, workers.names, on_round=on_round)
    first = records[0]
    assert first.refuted == first.banned == [attacker]
    assert [line.participants for line in records] == [6, 5, 5, 6, 6, 6]
    assert [line.banned for line in records] == [[attacker]] * 3 + [[]] * 3
    assert [line.traffic["score"][0] for line in records] == [6, 5, 5, 6, 6, 6]
    assert banning(out) == [("banned", 1, liar), ("unbanned", 4, liar)]
    assert not list((out / "unban").iterdir())


def test_a_request_without_effect_is_refused(tmp_path: Path) -> None:
    stage, bus, out = prepared(SPEC), Bus(), tmp_path / "run"

    def on_round(line: cbdsl.RoundRecord) -> None:
        if line.round == 2:
            honest = next(name for number, name in enumerate(workers.names) if number not in stage.byzantine)
            with refused_as("no-effect", "Banned: w"):
                request_unban(out, honest)
            with refused_as("unknown-name", "../w1"):
                request_unban(out, "../w1")

    with crew(bus, stage, tmp_path) as workers:
        play(bus, stage, tmp_path, workers.names, on_round=on_round)
    with refused_as("no-effect", "finished"):
        request_unban(out, "w0")
    with refused_as("missing-file"):
        request_unban(tmp_path, "w0")


def test_the_page_shows_a_lifted_ban_as_over() -> None:
    progress, result = RunProgress(), cbdsl.run(small_spec(rounds=4), model=perceptron, data=blobs())
    for record, now in zip(result.rounds, ([1], [1], [], [1]), strict=True):
        progress.add(replace(record, banned=now))
        assert progress.banned == set(now)
    assert progress.bans == 2
