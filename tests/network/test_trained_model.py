"""The trained model on devices: what they keep of a run, when it is over and while it is played."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import cbdsl
from cbdsl.cli.app import app
from cbdsl.cli.spec_options import read_words
from cbdsl.data.dataset import Scaling
from cbdsl.models.saved_model import notes_of
from cbdsl.network import topics, wire
from cbdsl.network.device_worker import parse_announcement
from cbdsl.network.session import announce, open_run, use_kept_init
from cbdsl.network.wire import Announcement, OrderMessage, WireError
from cbdsl.network.worker import TrainedModelFile, Worker
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.util.files import write_json
from support.bus import Bus
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as
from support.worker_threads import Crew, crew, play, prepared

SCALING = Scaling(tuple(np.linspace(-1, 1, 8)), tuple(np.linspace(0.1, 0.7, 8)))
CLASS_NAMES = ("rain", "sun", "Nebel über See")


def kept(folder: Path, name: str) -> Path:
    return folder / name / "model.safetensors"


def assert_kept(workers: Crew, numbers: Any = None) -> None:  # noqa: ANN401
    served = cbdsl.load(workers.folder / "run")
    for number in range(len(workers.names)) if numbers is None else numbers:
        path = kept(workers.folder, workers.names[number])
        model = cbdsl.load(path)
        assert np.array_equal(model.weights, served.weights)
        assert model.card == served.card
        assert notes_of(path)["final"] == "yes"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "scaffold"},
        {"participation": 2},
        {"codec__up": "q4", "codec__down": "q4", "rounds": 6},
        {"codec__down": "q8", "participation": 2, "rounds": 7},
        {"method": "fedavg", "codec__up": "topk", "codec__down": "q4"},
    ],
    ids=lambda settings: ",".join(f"{key}={value}" for key, value in settings.items()) or "plain",
)
def test_every_device_ends_a_run_with_the_servers_model(settings: dict[str, Any], tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(**settings)), Bus()
    stage = replace(stage, dataset=replace(stage.dataset, scaling=SCALING, class_names=CLASS_NAMES))
    with crew(bus, stage, tmp_path) as workers:
        play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(20)
        assert_kept(workers)
    assert cbdsl.load(kept(tmp_path, "w0")).card.scaling == SCALING
    assert cbdsl.load(kept(tmp_path, "w0")).card.class_names == CLASS_NAMES


@pytest.mark.parametrize("codec", ["none", "q4"])
def test_a_device_that_is_away_in_the_last_rounds_fetches_the_model_when_it_is_back(codec: str, tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=9, codec__up=codec, codec__down=codec)), Bus()
    with crew(bus, stage, tmp_path) as workers:

        def leave(line: cbdsl.RoundRecord) -> None:
            if line.round == 2:
                workers.stop(3)

        play(bus, stage, tmp_path, workers.names, on_round=leave)
        assert not kept(tmp_path, "w3").exists()
        workers.start(3)  # the server is gone
        workers.threads[3].join(20)
        assert not workers.threads[3].is_alive()
        assert_kept(workers)


def test_a_device_that_is_done_with_a_run_or_had_no_part_in_it_waits_for_the_next_one(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=3)), Bus()
    with crew(bus, stage, tmp_path) as workers:
        play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(20)
        written = kept(tmp_path, "w0").stat().st_mtime_ns
        workers.start(0)
        workers.names = (*workers.names, "new")
        workers.own = lambda number: Crew.own(workers, 0)  # type: ignore[method-assign]  # noqa: ARG005
        workers.start(6)
        wait_for(lambda: kept(tmp_path, "new").exists())
        assert_kept(workers)
        assert workers.threads[0].is_alive()
        assert workers.threads[6].is_alive()
        assert kept(tmp_path, "w0").stat().st_mtime_ns == written


def test_a_device_that_is_to_stop_while_it_keeps_the_model_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staying, save_final = Worker.run, TrainedModelFile.save_final
    monkeypatch.setattr(Worker, "run", lambda self: staying(self, stay=True))
    stage, bus = prepared(small_spec(rounds=3)), Bus()
    with crew(bus, stage, tmp_path) as workers:

        def told_to_stop(self: TrainedModelFile, *words: Any) -> None:  # noqa: ANN401
            for worker in workers.workers.values():
                worker.stop()
            save_final(self, *words)

        monkeypatch.setattr(TrainedModelFile, "save_final", told_to_stop)
        play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(20)
            assert not thread.is_alive()


def test_with_keep_model_a_device_has_the_global_model_of_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Worker.run
    monkeypatch.setattr(Worker, "run", lambda self: honest(self, keep_model=True))
    stage, bus = prepared(small_spec(rounds=6)), Bus()
    found = []
    with crew(bus, stage, tmp_path) as workers:

        def look(line: cbdsl.RoundRecord) -> None:
            del line
            notes = notes_of(kept(tmp_path, "w1"))
            found.append((int(notes["version"]), notes["final"]))

        play(bus, stage, tmp_path, workers.names, on_round=look)
        for thread in workers.threads.values():
            thread.join(20)
        assert_kept(workers)
    versions = [version for version, _ in found]
    assert versions == sorted(versions)
    assert versions[0] == 1
    assert versions[-1] > 1
    assert {final for _, final in found} == {"no"}


def test_a_device_that_is_never_given_the_trained_model_keeps_the_last_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cbdsl.network.worker._LAST_MODEL_SECONDS", 1.0)
    monkeypatch.setattr("cbdsl.network.worker._ASK_SECONDS", 0.2)
    monkeypatch.setattr("cbdsl.network.worker._WAIT_SECONDS", 0.05)
    stage, bus = prepared(small_spec(method="fedavg", rounds=4)), Bus()
    over = False

    def lose_the_last(line: cbdsl.RoundRecord) -> None:
        nonlocal over
        over = line.round == 4

    def forget() -> None:  # the broker, too
        while workers.threads[0].is_alive():
            for topic in [one for one in bus.retained if over and "/model/" in one]:
                bus.retained.pop(topic, None)
            time.sleep(0.001)

    bus.lose = lambda topic: over and "/model/" in topic
    with crew(bus, stage, tmp_path) as workers:
        thread = threading.Thread(target=forget)
        thread.start()
        play(bus, stage, tmp_path, workers.names, on_round=lose_the_last)
        for one in (*workers.threads.values(), thread):
            one.join(20)
            assert not one.is_alive()
    notes = notes_of(kept(tmp_path, "w0"))
    assert (notes["final"], notes["version"]) == ("no", "4")
    assert "the trained model was not received; " in caplog.text
    assert "version 4 of 5" in caplog.text
    assert not np.array_equal(cbdsl.load(kept(tmp_path, "w0")).weights, cbdsl.load(tmp_path / "run").weights)


def test_a_disk_that_is_full_does_not_keep_a_device_from_ending_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cbdsl.network.worker.write_atomically", full)
    stage, bus = prepared(small_spec(rounds=2)), Bus()
    with crew(bus, stage, tmp_path) as workers:
        play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(20)
            assert not thread.is_alive()
    assert "No space left" in caplog.text
    assert "trained model is in" not in caplog.text


def test_a_member_that_says_hello_again_and_again_does_not_hold_up_the_end(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=2)), Bus()
    over = threading.Event()
    with crew(bus, stage, tmp_path) as workers:
        hello = wire.Hello(b"session.", 40, 0, bytes(8), 0, bytes(16), "test")

        def chatter() -> None:
            over.wait(60)
            while bus.links:
                bus.publish(topics.from_worker("s", "w0", "hello"), wire.encode(hello))
                bus.publish(topics.from_worker("s", "w0", "status"), wire.encode(wire.Status(True, b"session.")))
                time.sleep(0.002)

        thread = threading.Thread(target=chatter)
        thread.start()
        started = time.monotonic()
        play(bus, stage, tmp_path, workers.names, on_event=lambda event, _: over.set() if event == "over" else None)
        assert time.monotonic() - started < 60  # it would go on for ever
        for one in workers.threads.values():
            one.join(20)
        assert_kept(workers)
        thread.join(20)


def test_one_set_of_devices_plays_run_after_run_each_from_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.server._FINISH_SECONDS", 1.0)  # nobody leaves
    honest = Worker.run
    monkeypatch.setattr(Worker, "run", lambda self: honest(self, stay=True))
    spec = small_spec(rounds=4)
    stage, bus = prepared(spec), Bus()
    with crew(bus, stage, tmp_path) as workers:
        first = play(bus, stage, tmp_path, workers.names).result
        again = replace(stage.spec, init=str(tmp_path / "run"), rounds=3, seed=1)
        second = Experiment.prepare(again, UserParts(model=perceptron, data=blobs()), 1)
        start = second.first_state()
        assert second.test_accuracy(start) == first.summary.final_accuracy
        assert np.array_equal(start.global_best, first.weights)
        (tmp_path / "second").mkdir()
        result = play(bus, second, tmp_path / "second", workers.names).result
        assert (tmp_path / "second" / "run" / "init.safetensors").exists()
        assert result.rounds[0].global_score is not None
        assert result.rounds[0].global_score <= start.global_score
        wait_for(lambda: all(notes_of(kept(tmp_path, name)).get("final") == "yes" for name in workers.names))
        trained = cbdsl.load(tmp_path / "second" / "run").weights
        wait_for(lambda: all(np.array_equal(cbdsl.load(kept(tmp_path, n)).weights, trained) for n in workers.names))
        assert all(thread.is_alive() for thread in workers.threads.values())


@pytest.mark.parametrize("changed", [False, True])
def test_a_second_run_goes_on_when_what_it_began_with_is_gone_or_another_one(changed: bool, tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=3)), Bus()
    (tmp_path / "second").mkdir()

    def stop(_: cbdsl.RoundRecord) -> None:
        raise KeyboardInterrupt

    with crew(bus, stage, tmp_path) as workers:
        play(bus, stage, tmp_path, workers.names)
    again = replace(stage.spec, init=str(tmp_path / "run"))
    with crew(bus, stage, tmp_path / "second") as workers:
        second = Experiment.prepare(again, UserParts(model=perceptron, data=blobs()), 1)
        with pytest.raises(KeyboardInterrupt):
            play(bus, second, tmp_path / "second", workers.names, on_round=stop)
        out = tmp_path / "second" / "run"
        shutil.copy(tmp_path / "second" / workers.names[0] / "model.safetensors", tmp_path / "run") if changed else None
        assert use_kept_init(again, out).init == str(out / "init.safetensors")
        if not changed:
            shutil.rmtree(tmp_path / "run")
        assert use_kept_init(replace(again, init="elsewhere"), out).init == "elsewhere"  # not the one it began with
        third = Experiment.prepare(use_kept_init(again, out), UserParts(model=perceptron, data=blobs()), 1)
        assert third.key == second.key
        assert play(bus, third, tmp_path / "second", workers.names).result.summary.rounds == 3


@pytest.mark.slow
def test_a_local_swarm_is_resumed_without_its_initial_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--workers", "2", "--rounds", "1", "--model", "softmax", "--set", "data.samples_per_worker=20"]
    spec = read_words(workers=2, rounds=1, model="softmax", settings=["data.samples_per_worker=20"]).resolved()
    cbdsl.run(spec, out="first", threads=1)
    open_run(Experiment.prepare(replace(spec, init="first"), threads=1), Path("out")).close()
    shutil.rmtree("first")
    prepared: list[Experiment] = []

    def stop(experiment: Experiment, *_: object) -> None:
        prepared.append(experiment)
        raise cbdsl.UserError("It would start now.")

    monkeypatch.setattr("cbdsl.cli.serve_commands.run_swarm", stop)
    CliRunner().invoke(app, ["swarm", *small, "--init", "first", "--out", "out", "--threads", "1"])
    assert [experiment.spec.init for experiment in prepared] == [str(Path("out") / "init.safetensors")]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sensors, self.verdict = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.verdict(torch.relu(self.sensors(rows)))
        return out


def test_a_device_calls_weights_as_the_servers_code_does_so_that_its_model_can_be_a_start(tmp_path: Path) -> None:
    given, bus = UserParts(model=Named, data=blobs()), Bus()
    stage = Experiment.prepare(resolve(small_spec(rounds=3)), given, 1)
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(20)
        assert_kept(workers)
    assert cbdsl.load(kept(tmp_path, "w0")).card.tensors[0] == "sensors.weight"
    again = Experiment.prepare(replace(stage.spec, init=str(kept(tmp_path, "w0"))), given, 1)
    assert np.array_equal(again.initial[0], served.result.weights)


def wait_for(condition: Any, seconds: float = 30) -> None:  # noqa: ANN401
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
import numpy as np
import cbdsl
from cbdsl.network import wire
from cbdsl.network.worker import GlobalModelHolder, TrainedModelFile
from cbdsl.network.device_worker import parse_announcement
folder = Path(sys.argv[1])
assignment = parse_announcement(wire.decode((folder / "announcement").read_bytes(), wire.Announcement))
held = GlobalModelHolder(assignment)
held.model, held.digest, held.version = np.arange(assignment.size, dtype=np.float32), b"d" * 16, 3
order = wire.OrderMessage(assignment.run, 4, "finish", b"", 0.0, 0.0, 3, b"d" * 16)
kept = TrainedModelFile(folder, "w0")
assert kept.save(held, order) and TrainedModelFile(folder, "w0").is_final(order)
assert np.array_equal(cbdsl.load(kept.path).weights, held.model)
"""


def test_a_device_without_torch_keeps_a_model(tmp_path: Path) -> None:
    (tmp_path / "announcement").write_bytes(wire.encode(announcement()))
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# --- what an announcement says of features and classes


def announcement() -> Announcement:
    stage = prepared(small_spec())
    stage = replace(stage, dataset=replace(stage.dataset, scaling=SCALING, class_names=CLASS_NAMES))
    return wire.decode(wire.encode(announce(stage, b"run-0001", b"")), Announcement)


def test_scaling_and_names_of_classes_arrive_as_they_are() -> None:
    understood = parse_announcement(announcement())
    assert understood.scaling == SCALING
    assert understood.class_names == CLASS_NAMES
    plain = parse_announcement(announce(prepared(small_spec()), b"run-0001", b""))
    assert (plain.scaling, plain.class_names) == (None, ())


@pytest.mark.parametrize(
    "change",
    [
        {"scaling": b"\0" * 7},
        {"scaling": np.ones(15, "<f8").tobytes()},
        {"scaling": np.ones(18, "<f8").tobytes()},  # nine channels; there are eight
        {"scaling": np.full(16, np.nan, "<f8").tobytes()},
        {"scaling": np.full(16, np.inf, "<f8").tobytes()},
        {"scaling": np.full(16, 1e300, "<f8").tobytes()},
        {"scaling": np.zeros(16, "<f8").tobytes()},  # nothing to divide by
        {"class_names": "["},
        {"class_names": '{"a": 1}'},
        {"class_names": "[1]"},
        {"class_names": '["a", "b", "c", "d"]'},  # of three
        {"class_names": json.dumps(["\x1b[2J"])},
        {"class_names": json.dumps(["x" * 101])},
        {"class_names": "[" * 20_000},
        {"tensors": '["a", "b"]'},  # of four
        {"tensors": '["a", "a", "b", "c"]'},
        {"tensors": '["a", "b", "c", "__metadata__"]'},  # what a file says of itself stands there
        {"architecture": "", "tensors": "[]", "scaling": b"", "shape": "[1048575, 1048575]"},
        {"architecture": "", "tensors": "[]", "scaling": b"", "shape": "[1048575, 1048575, 1048575, 1048575]"},
        {"tensors": '["a", "b", "c", "../../d\\n"]'},
        {"tensors": '["a", "b", "c", 4]'},
        {"tensors": "{}"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_forged_scaling_or_name_is_refused(change: dict[str, Any]) -> None:
    forged = wire.decode(wire.encode(replace(announcement(), **change)), Announcement)
    with pytest.raises(WireError):
        parse_announcement(forged)


@pytest.mark.parametrize(
    "change", [{"scaling": bytes(60_008)}, {"class_names": " " * 20_001}, {"shades": 1}, {"scaling": "text"}],
    ids=["scaling", "names", "shades", "kind"],
)  # fmt: skip
def test_an_oversized_scaling_or_name_is_no_message(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        wire.encode(replace(announcement(), **change))


def test_a_run_that_does_not_fit_into_one_announcement_is_refused_at_the_server() -> None:
    stage = prepared(small_spec())
    many = Scaling((0.0,) * 4000, (1.0,) * 4000)
    with refused_as("too-large", "64,000 bytes"):
        announce(replace(stage, dataset=replace(stage.dataset, scaling=many)), b"run-0001", b"")


def test_a_file_that_is_no_model_is_written_over(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=2)), Bus()
    (tmp_path / "w0").mkdir()
    write_json(kept(tmp_path, "w0"), {"no": "model"})
    with crew(bus, stage, tmp_path) as workers:
        play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(20)
        assert_kept(workers)
    last = wire.decode(bus.retained[topics.order("s")], OrderMessage)
    assert notes_of(kept(tmp_path, "w0"))["digest"] == last.model_digest.hex()
