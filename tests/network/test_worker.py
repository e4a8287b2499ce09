"""Workers in threads over a bus in memory: what they compute, keep and answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import cbdsl
from cbdsl.arrays import Samples
from cbdsl.errors import UserError
from cbdsl.network import topics, wire
from cbdsl.network.device_worker import DeviceWorker, make_engine, parse_announcement
from cbdsl.network.journal import Events
from cbdsl.network.mqtt import Address
from cbdsl.network.samples import SharedLayout, pack_shared, read_samples, unpack_shared, write_samples
from cbdsl.network.server import ServerConfig
from cbdsl.network.session import ServedRun, announce, open_run, serve, spec_for_workers
from cbdsl.network.wire import Announcement, OrderMessage, WireError
from cbdsl.network.worker import Worker, WorkerInbox
from cbdsl.network.worker_state import WorkerStateFolder
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.bus import Bus
from support.deployment import wait_until
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as
from support.stateful_parts import momentum  # noqa: F401 - a fixture
from support.worker_threads import PACE, Crew, crew, play, prepared, without_time


def assert_as_simulated(served: ServedRun, spec: Spec) -> None:
    simulated = cbdsl.run(spec, model=perceptron, data=blobs())
    assert without_time(served.result) == without_time(simulated)
    assert np.array_equal(served.result.weights, simulated.weights)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "fedavg"},
        {"method": "fedpso"},
        {"method": "pso"},
        {"method": "fedprox", "options.fedprox.mu": 0.5},
        {"method": "scaffold"},
        {"method": "scaffold", "participation": 0.5},
        {"method": "fedavgm"},
        {"method": "fedadam"},
        {"participation": 2},
        {"participation": 0.5, "method": "fedavg"},
        {"shared": "none"},
        {"shared": "train"},
        {"swarm.start": "apart", "codec.up": "q4"},
        {"swarm.draw": "parameter", "local.momentum": 0.9, "data.partition": "dirichlet"},
        {"attack.byzantine": 2, "attack.name": "liar"},
        {"attack.byzantine": 2, "attack.name": "copycat", "defence.commitment": True},
        {"attack.byzantine": 1, "attack.name": "staller"},
        {"attack.byzantine": 1, "attack.name": "nan"},
        {"attack.byzantine": 2, "attack.name": "boiler", "defence.commitment": True},
        {"attack.byzantine": 2, "attack.name": "permuter"},
        {"attack.byzantine": 2, "attack.name": "poisoned-fl", "options.poisoned-fl.honest_claim": True},
        {"attack.byzantine": 2, "attack.name": "momentum", "participation": 4},
        {"attack.byzantine": 2, "attack.name": "momentum", "method": "fedavg"},
        {"attack.byzantine": 1, "attack.name": "absent"},
        {"attack.byzantine": 2, "attack.name": "label-flip", "selection.name": "soup", "defence.guard": True},
        {"attack.byzantine": 2, "attack.name": "sign-flip", "method": "fedavg", "defence.aggregator": "median"},
        {"codec.up": "q4", "codec.down": "q4", "defence.commitment": True, "rounds": 11},
        {"codec.up": "q3"},
        {"codec.down": "q8", "participation": 2, "rounds": 12},
        {"codec.up": "adaptive", "codec.down": "adaptive"},
        {"codec.up": "q2", "codec.down": "q2", "method": "pso", "rounds": 9},
        {"codec.up": "topk", "codec.down": "q4", "method": "fedavg"},
        {"codec.up": "q4", "codec.down": "q4", "method": "restart", "selection.name": "rotation", "selection.k": 3},
        {"codec.up": "q4", "codec.down": "q4", "selection.name": "soup", "attack.byzantine": 2, "attack.name": "nan"},
        {"codec.up": "q4", "codec.down": "q4", "attack.byzantine": 2, "attack.name": "copycat"},
    ],
    ids=lambda settings: ",".join(f"{key}={value}" for key, value in settings.items()) or "plain",
)
@pytest.mark.usefixtures("momentum")
def test_a_swarm_of_workers_reaches_the_simulators_numbers(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = small_spec().with_settings(settings)
    stage, bus = prepared(spec), Bus()
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert_as_simulated(served, spec)
    assert served.refused == {}


def test_an_order_is_carried_out_once_however_often_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[int, int]] = []
    honest = DeviceWorker.carry_out

    def counting(self: DeviceWorker, order_message: OrderMessage, *rest: Any) -> Any:  # noqa: ANN401
        played.append((self.number, order_message.round))
        return honest(self, order_message, *rest)

    monkeypatch.setattr(DeviceWorker, "carry_out", counting)
    stage, bus = prepared(small_spec()), Bus()
    bus.copies = 3
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert sorted(played) == [(worker, number) for worker in range(6) for number in range(1, 6)]
    assert_as_simulated(served, small_spec())


@pytest.mark.parametrize("codec", ["none", "q4"])
def test_workers_that_are_restarted_between_rounds_go_on_as_if_nothing_had_been(
    codec: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cbdsl.network")
    spec = small_spec(rounds=12, codec__up=codec, codec__down=codec)
    stage, bus = prepared(spec), Bus()
    with crew(bus, stage, tmp_path) as workers:

        def restart(line: cbdsl.RoundRecord) -> None:
            number = line.round % 6
            workers.stop(number)
            workers.start(number)

        served = play(bus, stage, tmp_path, workers.names, on_round=restart)
    assert_as_simulated(served, spec)
    assert "worker w3 is number 3, 40 samples; it continues after round 3" in caplog.messages


def test_pieces_and_welcomes_that_a_broker_dropped_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.server.REPEAT_SECONDS", 0.3)
    stage, bus = prepared(small_spec()), Bus()
    lost: list[str] = []

    def lose(topic: str) -> bool:
        drop = lost.count(topic) < 2 and topic.endswith(("/model/0", "/shared/0", "w1/welcome"))
        lost.extend([topic] if drop else [])
        return drop

    bus.lose = lose
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert {topic.rpartition("/down/")[2] for topic in lost} >= {"model/0", "shared/0"}
    assert_as_simulated(served, small_spec())


def test_an_update_that_a_broker_dropped_is_fetched_again_or_a_whole_model_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.server.REPEAT_SECONDS", 0.3)
    spec = small_spec(rounds=12, codec__up="q4", codec__down="q4")
    stage, bus = prepared(spec), Bus()
    lost: list[str] = []

    def lose(topic: str) -> bool:
        drop = lost.count(topic) < 4 and "/update/" in topic
        lost.extend([topic] if drop else [])
        return drop

    bus.lose = lose
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert len(set(lost)) == 4  # every slot
    assert_as_simulated(served, spec)


@pytest.mark.parametrize("codec", ["none", "q4"])
def test_a_latecomer_catches_up_from_what_is_retained(codec: str, tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=9, codec__up=codec, codec__down=codec)), Bus()
    made = Crew(bus, stage, tmp_path)
    for number in range(5):
        made.start(number)

    def late(line: cbdsl.RoundRecord) -> None:
        if line.round == 6:
            made.start(5)
            assert made.workers[5]._inbox.changed.acquire(timeout=1)
            made.workers[5]._inbox.changed.release()

    config = ServerConfig("s", Address("127.0.0.1", 1), replace(PACE, join_seconds=0.5), made.names)
    served = serve(stage, open_run(stage, tmp_path / "run"), config, None, late, bus.link)
    claims = [line.traffic["score"][0] for line in served.result.rounds]
    assert claims[:6] == [5] * 6
    told = [(line.participants, line.absent, line.traffic["order"][0]) for line in served.result.rounds]
    assert told[:6] == [(6, 1, 5)] * 6
    assert told[8] == (6, 0, 6)
    models = [line.traffic["broadcast"] for line in served.result.rounds]
    simulated = cbdsl.run(stage.spec, model=perceptron, data=blobs()).rounds[0].traffic["broadcast"]
    assert models[0] == [5, simulated[1] // 6 * 5]  # nothing is counted for a worker that is not there
    joined = next(number for number, line in enumerate(served.result.rounds) if not line.absent)
    assert models[joined][0] == 6  # it gets w^g, too
    complete = sum(not line.absent for line in served.result.rounds)
    summary = served.result.summary
    uploads = 6 * complete + 5 * (9 - complete)
    assert summary.fedavg_model_uplink_bytes == uploads * 4 * summary.parameters
    assert claims[8] == 6
    assert served.result.rounds[-1].banned == []
    for number in made.workers:
        made.stop(number)


def _listening(take: Callable[[str, bytes], str], heard: list[str]) -> Callable[[str, bytes], str]:
    def listen(topic: str, payload: bytes) -> str:
        heard.append(topic)
        return take(topic, payload)

    return listen


def test_shared_samples_are_fetched_once_and_kept(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec()), Bus()
    with crew(bus, stage, tmp_path) as workers:
        first = play(bus, stage, tmp_path, workers.names)
    (tmp_path / "run").rename(tmp_path / "earlier")
    heard: list[str] = []
    with crew(bus, stage, tmp_path) as workers:
        for worker in workers.workers.values():
            worker._inbox._take = _listening(worker._inbox._take, heard)  # type: ignore[method-assign,assignment]
        second = play(bus, stage, tmp_path, workers.names)
    assert without_time(first.result) == without_time(second.result)  # another run, nothing left of the first
    assert not [topic for topic in heard if "/shared/" in topic]


def test_a_worker_that_waited_through_the_end_of_another_run_is_sent_the_shared_samples_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.server._FINISH_SECONDS", 0.2)
    staying = Worker.run
    monkeypatch.setattr(Worker, "run", lambda self: staying(self, stay=True))
    stage, bus = prepared(small_spec(rounds=2)), Bus()
    with crew(bus, stage, tmp_path / "first") as workers:
        play(bus, stage, tmp_path / "first", workers.names)
    heard: list[str] = []
    with crew(bus, stage, tmp_path / "second") as workers:  # without the state of the first
        wait_until(lambda: all((tmp_path / "second" / name / "model.safetensors").exists() for name in workers.names))
        for worker in workers.workers.values():
            worker._inbox._take = _listening(worker._inbox._take, heard)  # type: ignore[method-assign,assignment]
        play(bus, prepared(small_spec(rounds=2, seed=1)), tmp_path / "second", workers.names)
    assert len([topic for topic in heard if "/shared/" in topic]) == 6  # one piece each


def test_shared_samples_that_are_on_their_way_are_not_requested_again(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec()), Bus()
    worker = Worker("s", "w0", Crew(bus, stage, tmp_path).own(0), tmp_path, lambda *given: bus.link(*given[:3]))
    worker._link.open()
    shared = np.random.default_rng(0).bytes(3 * wire.CHUNK)
    pieces = wire.split_content(b"run-0001", 0, shared)
    bus.publish(topics.spec("s"), wire.encode(announce(stage, b"run-0001", shared)))
    order_message = wire.encode(OrderMessage(b"run-0001", 1, "swarm", b"", 0.5, 0.1, 1, bytes(16)))
    bus.publish(topics.order("s"), order_message)

    def subscribes_again() -> bool:
        before = worker._link.patterns.count(topics.shared("s", "+"))  # type: ignore[attr-defined]
        bus.publish(topics.order("s"), order_message)
        return bool(worker._link.patterns.count(topics.shared("s", "+")) > before)  # type: ignore[attr-defined]

    for _ in range(2):
        piece = next(pieces)
        bus.publish(topics.shared("s", piece.index), wire.encode(piece))
        assert not subscribes_again()
    assert subscribes_again()  # no piece since the last time
    worker.leave()


def test_a_worker_whose_model_does_not_arrive_logs_what_may_be_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cbdsl.network.server.REPEAT_SECONDS", 0.1)
    stage, bus = prepared(small_spec(rounds=2)), Bus()
    bus.lose = lambda topic: "/upload/" in topic and "--largest-model" not in caplog.text
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert len([line for line in caplog.messages if "3 times in round 1" in line]) == 1
    assert_as_simulated(served, small_spec(rounds=2))


def test_a_damaged_state_is_left_and_the_worker_starts_from_the_global_model(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec()), Bus()
    with crew(bus, stage, tmp_path) as workers:

        def damage(line: cbdsl.RoundRecord) -> None:
            if line.round == 2:
                workers.stop(0)
                (tmp_path / "w0" / "state.npz").write_bytes(b"PK\x03\x04 torn")
                workers.start(0)

        served = play(bus, stage, tmp_path, workers.names, on_round=damage)
    assert served.result.rounds[-1].banned == []
    assert served.result.rounds[-1].traffic["score"][0] == 6


def test_samples_that_do_not_fit_the_run_are_an_error(tmp_path: Path) -> None:
    stage = prepared(small_spec())
    assignment = parse_announcement(announce(stage, b"run-0001", b""))
    odd = Samples(np.zeros((4, 3), np.float32), np.zeros(4, np.int32))
    with refused_as("wrong-shape", "(8,)"):
        DeviceWorker(assignment, 0, odd, b"", 1)
    assert WorkerStateFolder(tmp_path).load(b"run-0001", 0, 5, 0) is None


OWN = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 6), nn.Dropout(0.5), nn.GELU(), nn.Linear(6, 3))


class Strange(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 6), nn.PReLU(), nn.Linear(6, 3))
"""


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_a_class_in_the_servers_file_reaches_devices_as_data(tmp_path: Path, engine: str) -> None:
    (tmp_path / "nets.py").write_text(OWN)
    spec = replace(small_spec(engine=engine), model="Net", plugins=(f"{tmp_path}/nets.py:Net",))
    announcement = announce(Experiment.prepare(resolve(spec), UserParts(data=blobs()), 1), b"run-0001", b"")
    assert str(tmp_path) not in repr(announcement)
    assignment = parse_announcement(announcement)
    assert assignment.architecture is not None
    assert [type(layer).__name__ for layer in assignment.architecture.layers] == ["Linear", "Dropout", "Gelu", "Linear"]
    assert make_engine(assignment, 1).size == 8 * 6 + 6 + 6 * 3 + 3


def test_a_class_that_no_device_could_build_is_refused_at_the_server(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(OWN)
    spec = replace(small_spec(), model="Strange", plugins=(f"{tmp_path}/nets.py:Strange",))
    stage = Experiment.prepare(resolve(spec), UserParts(data=blobs()), 1)
    with refused_as("not-supported", "Strange", "layer 1 (PReLU)"):
        announce(stage, b"run-0001", b"")


def test_a_model_that_needs_torch_is_told_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    build = lambda: nn.Sequential(nn.Linear(8, 6), nn.PReLU(), nn.Linear(6, 3))  # noqa: E731
    stage = Experiment.prepare(resolve(replace(small_spec(), model="custom")), UserParts(model=build, data=blobs()), 1)
    announcement = announce(stage, b"run-0001", b"")
    assert announcement.architecture == ""
    own = Samples(np.zeros((4, 8), np.float32), np.zeros(4, np.int32))
    with refused_as("not-supported", "given to the server in Python"):
        DeviceWorker(parse_announcement(announcement), 0, own, b"", 1)
    monkeypatch.setitem(sys.modules, "cbdsl.engines.torch_engine", None)
    with refused_as("missing-package", "torch"):
        DeviceWorker(parse_announcement(announcement), 0, own, b"", 1)


class Wrapper(nn.Module):
    """A class of one's own, as a server's user writes it; a worker has never seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("native", [True, False])
def test_a_worker_builds_a_class_of_the_servers_user_from_its_description(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(small_spec(), model="custom")
    stage = Experiment.prepare(resolve(spec), UserParts(model=Wrapper, data=blobs()), 1)
    if not native:
        monkeypatch.setattr("cbdsl.engines.native_engine.available", lambda: "the native engine was not built")
    bus = Bus()
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    simulated = cbdsl.run(spec, model=perceptron, data=blobs(), threads=1)
    assert np.allclose(served.result.weights, simulated.weights, atol=1e-5)
    assert served.result.summary.banned == []


def test_a_network_may_have_more_outputs_than_the_data_has_classes() -> None:
    spec = resolve(replace(small_spec(), model="custom"))
    stage = Experiment.prepare(spec, UserParts(model=lambda: nn.Sequential(nn.Linear(8, 5)), data=blobs()), 1)
    assert parse_announcement(announce(stage, b"run-0001", b"")).classes == 3


def test_a_model_that_torch_alone_can_run_runs(tmp_path: Path) -> None:
    stage = Experiment.prepare(resolve(replace(small_spec(), model="mlp", engine="torch")), UserParts(data=blobs()), 1)
    bus = Bus()
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    simulated = cbdsl.run(replace(small_spec(), model="mlp", engine="torch"), data=blobs(), threads=1)
    assert np.allclose(served.result.weights, simulated.weights, atol=1e-5)
    assert served.result.summary.banned == []


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_a_worker_computes_on_its_cpu_whatever_device_a_server_names(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Experiment.prepare(resolve(replace(small_spec(), model="mlp", engine=engine)), UserParts(data=blobs()), 1)
    with_gpu = replace(stage, spec=replace(stage.spec, device="cuda"))
    assert spec_for_workers(with_gpu.spec).device == "auto"
    assert announce(with_gpu, b"run-0001", b"") == announce(stage, b"run-0001", b"")
    insisting = replace(announce(stage, b"run-0001", b""), spec=with_gpu.spec.to_toml())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert parse_announcement(insisting).spec.device == "cuda"
    assert (
        make_engine(parse_announcement(insisting), 1).name
        == make_engine(parse_announcement(announce(stage, bytes(8), b"")), 1).name
    )
    assert make_engine(parse_announcement(insisting), 1).name in {"native", "torch"}


def test_a_worker_imports_no_torch() -> None:
    code = (
        "import sys, cbdsl.cli.main, cbdsl.network.worker, cbdsl.network.samples, cbdsl.engines.native_engine;"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(topic=st.sampled_from(["down/spec", "down/order", "down/model/0", "down/shared/3", "to/w0/welcome",
                              "to/w0/invitation", "to/w0/start/0", "to/w0", "from/w0/claim", "x"]),
       payload=st.binary(max_size=200))  # fmt: skip
def test_no_bytes_upset_a_worker(topic: str, payload: bytes) -> None:
    stage_announcement = Announcement(b"run-0001", small_spec().to_toml(), "", 5, 1, "[8]", 3, 0, 0, bytes(16), 0)
    inbox = WorkerInbox("s", "w0", Events())
    inbox.handle(topics.spec("s"), wire.encode(stage_announcement))
    inbox.handle(f"cbdsl/s/{topic}", payload)
    assert inbox.assignment is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": "not toml ["},
        {"spec": "workers = -3"},
        {"architecture": "[]"},
        {"architecture": '{"format": 1, "shape": [8], "layers": [{"kind": "linear", "inputs": 8, "outputs": 3}]}'},
        {"spec": "rounds = 1e400"},
        {"spec": 'plugins = ["evil.py"]'},
        {"spec": 'init = "somewhere.safetensors"'},
        {"shape": "[0]"},
        {"shape": "7"},
        {"shape": "[" * 1000},
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused(changes: dict[str, str]) -> None:
    good = Announcement(b"run-0001", small_spec().to_toml(), "", 5, 1, "[8]", 3, 0, 0, bytes(16), 0)
    parse_announcement(good)
    with pytest.raises(WireError):
        parse_announcement(replace(good, **changes))  # type: ignore[arg-type]


def test_shared_samples_come_back_and_nothing_else_does() -> None:
    rng = np.random.default_rng(0)
    shared = Samples(rng.normal(size=(5, 2, 3)).astype(np.float32), np.array([0, 1, 2, 0, 1], np.int32))
    layout, packed = SharedLayout(2, 3, (2, 3)), pack_shared(shared)
    back = unpack_shared(packed, layout, 3)
    assert np.array_equal(back.features, shared.features)
    assert np.array_equal(back.labels, shared.labels)
    bomb = pack_shared(Samples(np.zeros((100_000, 6), np.float32), np.zeros(100_000, np.int32)))
    bad: list[Callable[[], object]] = [
        lambda: unpack_shared(packed[:-3], layout, 3),
        lambda: unpack_shared(bomb, layout, 3),
        lambda: unpack_shared(b"junk", layout, 3),
        lambda: unpack_shared(packed, layout, 2),
        lambda: unpack_shared(packed, SharedLayout(2, 4, (2, 3)), 3),
        lambda: unpack_shared(b"", SharedLayout(10**9, 0, (10**6,)), 3),
    ]
    for call in bad:
        with pytest.raises(WireError):
            call()


def test_a_workers_file_of_samples(tmp_path: Path) -> None:
    own = Samples(np.ones((3, 8), np.float32), np.arange(3, dtype=np.int32))
    write_samples(tmp_path / "own.npz", own)
    assert np.array_equal(read_samples(tmp_path / "own.npz").labels, own.labels)
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    np.savez(tmp_path / "odd.npz", features=np.ones((3, 8)), labels=np.array([0.5, 1.0, 2.0], object))
    np.savez(tmp_path / "nan.npz", features=np.full((3, 8), np.nan), labels=np.arange(3))
    for name in ("bad.npz", "odd.npz", "nan.npz", "missing.npz"):
        with pytest.raises(UserError):
            read_samples(tmp_path / name)
