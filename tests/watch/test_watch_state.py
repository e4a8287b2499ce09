"""The state of runs and sweeps, as read from their folders."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

import cbdsl
from cbdsl.runs.records import RoundRecord
from cbdsl.watch import run_state as run_module
from cbdsl.watch.folder_reader import FileTail, read_file
from cbdsl.watch.metrics import describe_run, describe_sweep
from cbdsl.watch.run_state import ConnectionStates, RunProgress, RunView, ViewerPosition, list_verdicts
from cbdsl.watch.sweep_state import SweepView
from support.helpers import blobs, perceptron, small_spec
from support.run_folders import append, lie, line, spec_of, write_lines, write_run


def follow(folder: Path) -> RunView:
    """A view that reads the folder at every question."""
    return RunView(folder, least_seconds=0.0)


def progress_of(*lines: dict[str, Any]) -> RunProgress:
    progress = RunProgress()
    for one in lines:
        progress.add(RoundRecord.from_json(one))
    return progress


def news_of(view: RunView) -> dict[str, Any]:
    return view.collect_news(ViewerPosition())[0]


def test_the_progress_counts_what_became_of_every_invitation() -> None:
    progress = progress_of(
        line(1, accepted=[3]), line(2, accepted=[3], declined=[4], silent=[5]), lie(3, 6), line(4, banned=[6])
    )
    assert (progress.counts[3].invited, progress.counts[3].accepted, progress.counts[3].claim) == (2, 2, 1.5)
    assert (progress.counts[4].declined, progress.counts[5].silent, progress.counts[6].refuted) == (1, 1, 1)
    assert progress.counts[6].ban == "round 3: the claim is not what the server measures; claimed 0.001, measured 7.25"
    assert progress.banned == {6}
    totals = progress.totals
    assert (totals.uplink_bytes, totals.downlink_bytes, totals.uploads, totals.seconds) == (4000, 20000, 4, 2.0)


def test_the_progress_has_the_numbers_of_the_runs_summary(tmp_path: Path) -> None:
    result = cbdsl.run(small_spec(attack__byzantine=1), model=perceptron, data=blobs(), out=tmp_path / "run")
    view = follow(tmp_path / "run")
    facts, summary = news_of(view)["facts"], result.summary
    assert facts["status"] == "finished"
    totals = view.progress.totals
    assert (totals.uplink_bytes, totals.downlink_bytes) == (summary.uplink_bytes, summary.downlink_bytes)
    assert (facts["uploads"], facts["best"]) == (summary.uploads, summary.best_accuracy)
    assert facts["fedavg"] * summary.rounds == summary.fedavg_model_uplink_bytes
    assert view.progress.banned == set(summary.banned)
    (tmp_path / "run" / "summary.json").unlink()  # while it is played, the checkpoint says how large the model is
    assert follow(tmp_path / "run").collect_news(ViewerPosition())[0]["facts"]["fedavg"] == facts["fedavg"]


def test_a_round_that_is_not_the_next_one_is_refused() -> None:
    progress = progress_of(line(1))
    with pytest.raises(ValueError, match="round 3 follows on round 1"):
        progress.add(RoundRecord.from_json(line(3)))


def test_a_diverged_round_can_be_sent_as_json() -> None:
    progress = progress_of(line(1, test_accuracy=float("nan"), global_score=float("inf")))
    assert json.loads(json.dumps(progress.make_point(), allow_nan=False))[1:3] == [None, None]


def test_what_was_set_aside_is_among_the_verdicts_of_its_round() -> None:
    found = list_verdicts(RoundRecord.from_json(line(1, accepted=[], set_aside={"4": "not a number"})))
    assert found == [[4, "set aside", None, None, "not a number"]]


def test_a_line_is_taken_when_its_end_is_written(tmp_path: Path) -> None:
    path, tail = tmp_path / "file", FileTail(tmp_path / "file")
    assert list(tail.new_lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.new_lines()) == [(0, b"one\n")]
    assert list(tail.new_lines()) == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert not tail.starts_anew()
    assert list(tail.new_lines()) == [(4, b"two\n"), (8, b"three\n")]
    assert tail.read_again(4, 1) == [b"two\n"]


def test_a_file_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    path, tail = tmp_path / "file", FileTail(tmp_path / "file")
    path.write_bytes(b"one\ntwo\n")
    list(tail.new_lines())
    (tmp_path / "other").write_bytes(b"one\nfour\nfive\n")
    (tmp_path / "other").replace(path)
    assert tail.read_again(0, 1) == []
    assert tail.starts_anew()
    assert [one for _, one in tail.new_lines()] == [b"one\n", b"four\n", b"five\n"]
    path.unlink()
    assert tail.starts_anew()
    assert list(tail.new_lines()) == []
    assert read_file(path) == b""


def test_a_run_outside_the_folder_of_a_sweep_is_not_found(tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere", [line(1)])
    write_run(tmp_path / "sweep" / "runs" / "own", [line(1)])
    sweep = SweepView(tmp_path / "sweep")
    assert list(sweep.list_names()) == ["own"]
    for trick in ("..", ".", "", "../../elsewhere", "own/..", "own\0", str(tmp_path / "elsewhere")):
        assert sweep.open_run(trick) is None


def test_a_folder_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    view = follow(tmp_path / "run")
    assert news_of(view)["facts"]["status"] == "waiting"
    write_run(tmp_path / "run", [line(1), line(2)])
    found = news_of(view)
    assert (found["facts"]["status"], found["facts"]["round"], len(found["workers"])) == ("running", 2, 10)


def test_lines_that_are_not_rounds_are_skipped(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1)])
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2}\nno json\n[1]\n' + "[" * 100_000 + "\n" + json.dumps(line(2)) + "\n")
    view = follow(tmp_path)
    assert news_of(view)["facts"]["round"] == 2


def test_a_viewer_gets_only_what_is_new(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1), line(2)])
    view = follow(tmp_path)
    first, seen = view.collect_news(ViewerPosition())
    assert (first["whole"], len(first["points"]), len(first["workers"])) == (True, 2, 10)
    append(tmp_path / "rounds.jsonl", line(3, accepted=[7]))
    second, seen = view.collect_news(seen)
    assert (second["whole"], [point[0] for point in second["points"]]) == (False, [3])
    assert [row[0] for row in second["workers"]] == [2, 7]  # who was accepted before, and who is now
    assert view.collect_news(seen)[0]["workers"] == []


def test_a_resumed_run_that_rewrites_its_rounds_starts_the_page_anew(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1), line(2), line(3), lie(4, 5)])
    view = follow(tmp_path)
    _, seen = view.collect_news(ViewerPosition())
    assert view.progress.banned == {5}
    write_lines(tmp_path / "anew", [line(1), line(2)])
    (tmp_path / "anew").replace(tmp_path / "rounds.jsonl")
    found, seen = view.collect_news(seen)
    assert (found["whole"], found["facts"]["round"], found["facts"]["banned"]) == (True, 2, 0)
    write_run(tmp_path, [line(1)], spec_of(workers=4, rounds=9))  # another run in the same place
    found, _ = view.collect_news(seen)
    assert (found["whole"], found["facts"]["rounds"], len(found["workers"])) == (True, 9, 4)


def test_a_replayed_round_is_what_the_page_showed_after_it(tmp_path: Path) -> None:
    rounds = 100
    lines = [lie(5, 9) if number == 5 else line(number, banned=[9] * (number > 5)) for number in range(1, rounds + 1)]
    write_run(tmp_path / "whole", lines)
    whole = follow(tmp_path / "whole")
    whole.refresh()
    assert len(whole._copies) <= 16
    for number in (100, 5, 1, 4, 99, 33, 6, 64, 33):
        part = follow(write_run(tmp_path / f"part{number}", lines[:number]))
        now, then = news_of(part), whole.replay(number)
        assert then is not None
        assert then["latest"] == now["latest"]
        assert [row[3:] for row in then["workers"]] == [row[3:] for row in now["workers"]]
        assert then["verdicts"] == now["verdicts"]
        assert (then["banned"], then["best"]) == (now["facts"]["banned"], now["facts"]["best"])
    assert whole.replay(0) is None
    assert whole.replay(101) is None


def test_a_long_run_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_MOST_POINTS", 50)
    write_run(tmp_path, [line(number) for number in range(1, 1001)], spec_of(workers=3, rounds=2000))
    view = follow(tmp_path)
    found = news_of(view)
    assert 25 <= len(found["points"]) <= 50
    assert len(view._copies) <= 16
    assert found["latest"][0] == 1000
    assert view.replay(777)["latest"][0] == 777  # type: ignore[index]


def test_connections_follow_the_events() -> None:
    connections = ConnectionStates()
    for event, details in (
        ("started", {}), ("connected", {"worker": "a"}), ("connected", {"worker": "b"}), ("connected", {"worker": "c"}),
        ("disconnected", {"worker": "b"}), ("closed", {"round": 1, "missing": ["b", "c"]}),
        ("refused", {"worker": "a", "reason": "x\n<b>"}),
    ):  # fmt: skip
        connections.add({"time": 5.0, "event": event, **details})
    assert [connections.state_of(name) for name in "abcd"] == ["here", "away", "late", "unseen"]
    assert connections.recent[-1] == (5.0, "refused a message from a: x\\n<b>")
    connections.add({"event": "started"})
    assert connections.state_of("a") == "away"  # a server that starts again has no connections yet
    connections.add({"event": "connected", "worker": "a"})
    connections.add({"event": "over"})
    connections.add({"event": "disconnected", "worker": "a"})
    assert connections.state_of("a") == "done"


def test_names_claims_and_refusals_come_from_the_files_of_a_served_run(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1), line(2)], spec_of(workers=3, rounds=9))
    (tmp_path / "roster.json").write_text(json.dumps({"names": ["porch", "shed", "<attic>"]}))
    write_lines(tmp_path / "events.jsonl", [{"time": 1, "event": "connected", "worker": "shed"}])
    said = [{"round": number, "claims": {"porch": 0.5 + number, "shed": None}} for number in (1, 2)]
    write_lines(tmp_path / "claims.jsonl", said)
    (tmp_path / "refused.json").write_text(json.dumps({"reasons": {"x": 5}, "offences": [["shed", "x", 4]]}))
    view = follow(tmp_path)
    rows = news_of(view)["workers"]
    assert [row[1] for row in rows] == ["porch", "shed", "<attic>"]
    assert [row[2] for row in rows] == ["unseen", "here", "unseen"]
    assert [row[4] for row in rows] == [2.5, 1.5, 1.5]  # of the last round; else of the last invitation
    assert [row[11] for row in rows] == [0, 4, 0]
    assert view.replay(1)["workers"][0][4] == 1.5  # type: ignore[index]


def test_a_worker_that_was_away_at_the_end_is_not_done(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1)], spec_of(workers=2, rounds=1))
    (tmp_path / "roster.json").write_text(json.dumps({"names": ["a", "b"]}))
    (tmp_path / "summary.json").write_text('{"rounds": 1}')
    happened = [("connected", "a"), ("connected", "b"), ("disconnected", "b"), ("over", ""), ("disconnected", "a")]
    write_lines(tmp_path / "events.jsonl", [{"event": event, "worker": worker} for event, worker in happened])
    found = news_of(follow(tmp_path))
    assert found["facts"]["status"] == "finished"
    assert [row[2] for row in found["workers"]] == ["done", "away"]


def test_workers_that_join_and_leave_while_a_run_is_played_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1)], spec_of(workers=2, rounds=9))
    (tmp_path / "roster.json").write_text(json.dumps({"names": ["a", "b"]}))
    write_lines(tmp_path / "events.jsonl", [{"event": "connected", "worker": "b"}])
    view = follow(tmp_path)
    assert len(news_of(view)["workers"]) == 2
    (tmp_path / "roster.json").write_text(json.dumps({"names": ["a", "b", "porch"], "left": ["b"]}))
    happened = [("connected", "b"), ("enrolled", "porch"), ("left", "b"), ("connected", "porch")]
    write_lines(tmp_path / "events.jsonl", [{"event": event, "worker": worker} for event, worker in happened])
    write_lines(tmp_path / "rounds.jsonl", [line(1), line(2, accepted=[2])])
    found = news_of(view)
    assert [(row[1], row[2]) for row in found["workers"]] == [("a", "unseen"), ("b", "away"), ("porch", "here")]
    assert found["workers"][2][6] == 1  # accepted once
    assert view.replay(2)["workers"][2][6] == 1  # type: ignore[index]


def test_events_of_the_older_half_of_a_long_log_count(tmp_path: Path) -> None:
    write_run(tmp_path, [], spec_of(workers=2, rounds=9))
    (tmp_path / "roster.json").write_text(json.dumps({"names": ["a", "b"]}))
    write_lines(tmp_path / "events.jsonl", [{"event": "connected", "worker": "a"}])
    view = follow(tmp_path)
    assert [row[2] for row in news_of(view)["workers"]] == ["here", "unseen"]
    (tmp_path / "events.jsonl").replace(tmp_path / "events.old.jsonl")
    write_lines(tmp_path / "events.jsonl", [{"event": "connected", "worker": "b"}])
    assert [row[2] for row in news_of(view)["workers"]] == ["here", "here"]


def test_a_run_is_running_while_its_folder_is_locked(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1)])
    for name in ("rounds.jsonl", "spec.toml"):
        os.utime(tmp_path / name, (1e9, 1e9))
    view = follow(tmp_path)
    assert news_of(view)["facts"]["status"] == "stopped"
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert news_of(view)["facts"]["status"] == "running"
    assert news_of(view)["facts"]["status"] == "stopped"


def test_a_lock_on_a_file_with_the_same_inode_on_another_device_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, [line(1)])
    for name in ("rounds.jsonl", "spec.toml"):
        os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / ".lock").touch()
    inode = (tmp_path / ".lock").stat().st_ino
    locks = tmp_path / "locks"
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 7 ff:ff:{inode} 0 EOF\n")
    monkeypatch.setattr(run_module, "_LOCKS", locks)
    assert news_of(follow(tmp_path))["facts"]["status"] == "stopped"


def test_metrics_have_every_number_and_no_line_for_what_is_not_known(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1), lie(2, 4)], spec_of(workers=10, rounds=9))
    found = describe_run(follow(tmp_path))
    for words in (
        "# TYPE cbdsl_round gauge", "cbdsl_round 2", "cbdsl_rounds 9", "cbdsl_accuracy 0.14",
        'cbdsl_payload_bytes_total{direction="up"} 2000', 'cbdsl_payload_bytes_total{direction="down"} 10000',
        'cbdsl_workers{state="here"} 9', 'cbdsl_workers{state="banned"} 1', "cbdsl_bans_total 1",
    ):  # fmt: skip
        assert f"{words}\n" in found
    assert "wire" not in found
    assert "fedavg" not in found
    assert "None" not in found
    assert describe_run(follow(tmp_path / "nothing")).startswith("# HELP cbdsl_round ")


def test_a_sweep_is_a_table_of_what_differs(tmp_path: Path) -> None:
    for number in range(3):
        lines = [line(one) for one in range(1, 3 + number)]
        write_run(tmp_path / "runs" / f"run{number}", lines, spec_of(workers=4, rounds=9, seed=number))
    (tmp_path / "runs" / "run0" / "summary.json").write_text('{"rounds": 2}')
    view = SweepView(tmp_path, least_seconds=0.0)
    found = view.make_table()
    assert found["columns"] == ["seed"]
    assert [(one["name"], one["values"], one["round"], one["done"]) for one in found["runs"]] == [
        ("run0", ["0"], 2, True), ("run1", ["1"], 3, False), ("run2", ["2"], 4, False),
    ]  # fmt: skip
    assert 'cbdsl_round{run="run1"} 3\n' in describe_sweep(view)
    with (tmp_path / "runs" / "run1" / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(line(4)) + "\n" + json.dumps(line(5))[:40])  # the last one is being written
    assert view.make_table()["runs"][1]["round"] == 4
