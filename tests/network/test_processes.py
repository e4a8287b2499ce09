"""Real processes and a real broker: whatever is killed, the run ends with the numbers of the simulator."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.errors import UserError
from cbdsl.network import topics
from cbdsl.network.broker import Kind, find_mosquitto
from cbdsl.network.local_swarm import WorkerProcesses, run_swarm
from cbdsl.network.mqtt import Meter, MqttLink
from cbdsl.network.session import open_run, serve
from cbdsl.network.timeouts import Deadlines
from cbdsl.runs.build import Experiment
from cbdsl.spec import Spec
from support.deployment import (
    SWARM,
    Deployment,
    assert_as_simulated,
    brokers,
    deployment,
    memory_of,
    pictures,
    tiny_spec,
    wait_until,
)
from support.refusals import refused_as

pytestmark = pytest.mark.slow

BEST: Kind = brokers()[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))


def listen(made: Deployment, pattern: str, heard: list[str]) -> MqttLink:
    link = MqttLink(made.address, lambda topic, _: heard.append(topic), lambda: None, Meter())
    link.subscribe(pattern)
    link.open()
    assert link.connected.wait(10)
    return link


@pytest.mark.parametrize("kind", ["mosquitto", "embedded"])
def test_a_swarm_on_this_machine_agrees_with_the_simulator(kind: Kind, data: Path, tmp_path: Path) -> None:
    if kind == "mosquitto" and not find_mosquitto():
        pytest.skip("no mosquitto: apt-get install mosquitto")
    spec = tiny_spec(data, attack__byzantine=1, attack__name="liar")
    stage = Experiment.prepare(spec, threads=1)
    crews: list[WorkerProcesses] = []
    maps: list[str] = []

    def look(line: cbdsl.RoundRecord) -> None:
        if line.round == spec.rounds:
            maps.extend(Path(f"/proc/{process.pid}/maps").read_text() for process in crews[0].processes)

    outcome = run_swarm(stage, tmp_path / "run", kind, Deadlines(), crews.append, look)
    assert_as_simulated(tmp_path / "run", spec)
    assert outcome.served.result.summary.banned == list(stage.byzantine)
    assert outcome.broker == kind
    assert all(process.poll() == 0 for process in crews[0].processes)
    assert len(maps) == spec.workers
    assert not any("libtorch" in text for text in maps)
    sent, payload = outcome.workers_wire["sent"], outcome.served.result.summary
    assert sent["upload"][0] == payload.uploads
    assert payload.model_uplink_bytes < sent["upload"][1] < 1.5 * payload.model_uplink_bytes
    assert sent["claim"][0] == payload.traffic["score"][0]
    assert {kind: outcome.served.wire["received"][kind] for kind in ("claim", "upload")} == {
        kind: sent[kind] for kind in ("claim", "upload")
    }


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg", "restart"])
def test_bytes_on_the_wire_are_those_of_the_simulator_and_framing(method: str, tmp_path: Path) -> None:
    rotation = {"selection__name": "rotation", "selection__k": 2, "defence__guard": True} if method == "restart" else {}
    data = pictures(tmp_path / "large", 64)
    spec = tiny_spec(data, method=method, model="mlp", rounds=6, codec__up="q4", codec__down="q4", **rotation)
    outcome = run_swarm(Experiment.prepare(spec, threads=1), tmp_path / "run", BEST, Deadlines(), lambda _: None, None)
    assert_as_simulated(tmp_path / "run", spec)
    summary, sent = outcome.served.result.summary, outcome.workers_wire["sent"]
    received = outcome.workers_wire["received"]
    with np.load(tmp_path / "run" / "checkpoint.npz") as stored:
        meta = json.loads(str(stored["meta"]))
    last = meta["updates"][-1] * sum(told < meta["version"] for _, told in meta["told"])  # of no round: devices keep it
    pieces = {"upload": (*sent["upload"], 0), "broadcast": (*received["update"], last)}
    for kind, (messages, carried, beyond) in pieces.items():
        assert 0 <= carried - beyond - summary.traffic[kind][1] < 0.03 * carried + 200 * messages, kind
    assert received.get("model", [0, 0])[0] == 0  # nobody was away, so nobody fetched a whole model


@pytest.mark.parametrize(("method", "codec"), [("cb-dsl", "none"), ("fedavg", "none"), ("cb-dsl", "q4")])
def test_kill_9_of_workers_in_mid_round_changes_no_number(method: str, codec: str, data: Path, tmp_path: Path) -> None:
    spec = tiny_spec(data, method=method, rounds=12, codec__up=codec, codec__down=codec)
    rng = random.Random(1)
    with deployment(tmp_path, spec, BEST) as made:
        made.start_workers()

        def strike(_: cbdsl.RoundRecord) -> None:
            name = rng.choice(made.names)

            def kill() -> None:
                made.kill_worker(name)
                made.start_worker(name)

            made.later(rng.uniform(0, 0.02), kill)

        serve(made.stage, open_run(made.stage, made.out), made.config(), None, strike)
        assert_as_simulated(made.out, spec)


def test_kill_9_in_mid_upload_changes_no_number(tmp_path: Path) -> None:
    spec = tiny_spec(pictures(tmp_path / "large", 64), model="mlp", rounds=3)  # 11 pieces a model
    with deployment(tmp_path, spec, BEST) as made:
        heard: list[str] = []
        watcher = listen(made, topics.from_worker(SWARM, "+", "upload/#"), heard)
        made.start_workers()
        killed: list[str] = []

        def watch() -> None:
            while len(killed) < 2:
                if heard:
                    name = heard[0].split("/")[3]
                    made.kill_worker(name)
                    killed.append(name)
                    made.start_worker(name)
                    time.sleep(1)
                    heard.clear()
                time.sleep(0.0005)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        serve(made.stage, open_run(made.stage, made.out), made.config())
        watcher.close()
        assert killed
        assert_as_simulated(made.out, spec)


@pytest.mark.parametrize(("kind", "codec"), [*((kind, "none") for kind in brokers()), (BEST, "q3")])
def test_kill_9_of_the_broker_changes_no_number(kind: Kind, codec: str, data: Path, tmp_path: Path) -> None:
    spec = tiny_spec(data, rounds=8, codec__up=codec, codec__down=codec)
    with deployment(tmp_path, spec, kind) as made:
        made.start_workers()

        def strike(line: cbdsl.RoundRecord) -> None:
            if line.round in {2, 5}:
                made.later(0.005 * line.round, made.kill_broker)

        serve(made.stage, open_run(made.stage, made.out), made.config(), None, strike)
        assert_as_simulated(made.out, spec)
        assert "broker_back" in (made.out / "events.jsonl").read_text()


@pytest.mark.parametrize("codec", ["none", "q4"])
def test_kill_9_of_the_server_loses_no_model_and_forgets_no_ban(codec: str, data: Path, tmp_path: Path) -> None:
    spec = tiny_spec(data, workers=5, rounds=24, attack__byzantine=1, codec__up=codec, codec__down=codec)
    rng = random.Random(2)
    with deployment(tmp_path, spec, BEST) as made:
        made.start_workers()
        made.start_server()
        for stop in (3, 11, 18):
            wait_until(lambda stop=stop: made.rounds_played() >= stop)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.03))
            made.kill_server()
            made.start_server()
        made.wait_for_end()
        assert_as_simulated(made.out, spec)
        assert len(cbdsl.run(spec).summary.banned) == 1
        assert not (made.out / "journal.bin").exists()


UNHURRIED = """
import time
import cbdsl
from cbdsl.algorithm.selection import Best

@cbdsl.register.selection("unhurried")
class Unhurried(Best):
    def invite(self, waiting, believed, view):
        time.sleep(0.3)
        return super().invite(waiting, believed, view)
"""


def test_an_attacker_a_staller_a_thousand_malformed_messages_and_the_right_model_wins(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "unhurried.py").write_text(UNHURRIED)  # or a fast machine is done before the messages are
    spec = tiny_spec(
        data, workers=5, rounds=12, attack__byzantine=1, attack__name="staller", selection__name="unhurried",
        plugins=[str(tmp_path / "unhurried.py")],
    )  # fmt: skip
    with deployment(tmp_path, spec, BEST) as made:
        honest = [number for number in range(5) if number not in made.stage.byzantine]
        attacker, flooded = honest[0], made.names[honest[1]]
        for number, name in enumerate(made.names):
            made.start_worker(name, *(["--attack", "liar"] if number == attacker else []))
        made.start_server("--upload-seconds", "0.5", "--round-seconds", "3")
        wait_until(lambda: made.rounds_played() >= 1)
        assert made.server is not None
        before = memory_of(made.server.pid)
        rng = random.Random(3)
        stranger = listen(made, "nothing", [])
        for number in range(1000):
            name = rng.choice([flooded, "stranger", "x" * 64])
            what = rng.choice(["claim", "hello", "status", "upload/0", "upload/77", "upload/x", "odd/topic"])
            junk = rng.randbytes(100_000 if number % 50 == 0 else rng.randrange(200))
            stranger.publish(topics.from_worker(SWARM, name, what), junk)
        peak = before
        while made.server.poll() is None:
            with contextlib.suppress(OSError, StopIteration):  # it ended just now
                peak = max(peak, memory_of(made.server.pid))
            time.sleep(0.02)
        made.wait_for_end()
        stranger.close()
        assert peak - before < 120_000  # of which the picture at the end takes most
        events = [json.loads(line) for line in (made.out / "events.jsonl").read_text().splitlines()]
        assert sum(events[-1]["refused"].values()) >= 900
        assert len([event for event in events if event["event"] == "refused"]) < 40
        summary = json.loads((made.out / "summary.json").read_text())
        bans = [event for event in events if event["event"] == "banned"]
        assert [(event["worker"], bool(event["reason"])) for event in bans] == [(summary["names"][str(attacker)], True)]
        assert summary["banned"] == [attacker]  # a staller is passed over, not banned
        assert summary["final_accuracy"] > 0.8


def _endless_swarm(data: Path, folder: Path, workers: int) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A swarm that has played a round and would go on for ever, and the processes that it started."""
    (folder / "spec.toml").write_text(tiny_spec(data, rounds=100_000).to_toml())
    process = subprocess.Popen(
        [sys.executable, "-m", "cbdsl", "swarm", str(folder / "spec.toml"), "--workers", str(workers),
         "--broker", BEST, "--out", str(folder / "run")],
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_until((folder / "run" / "rounds.jsonl").exists)
    return process, _descendants(process.pid)


def test_ctrl_c_ends_everything_that_was_started(data: Path, tmp_path: Path) -> None:
    process, children = _endless_swarm(data, tmp_path, 3)
    assert len(children) == 4  # a broker and three workers
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_workers_do_not_outlive_a_swarm_that_is_killed(data: Path, tmp_path: Path) -> None:
    process, children = _endless_swarm(data, tmp_path, 2)
    process.kill()
    process.wait()
    wait_until(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()], 20)


def test_a_swarm_that_was_interrupted_goes_on(data: Path, tmp_path: Path) -> None:
    spec = tiny_spec(data, workers=3)
    stage = Experiment.prepare(spec, threads=1)

    def interrupt(line: cbdsl.RoundRecord) -> None:
        if line.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_swarm(stage, tmp_path / "run", BEST, Deadlines(), None, interrupt)
    with pytest.raises(UserError, match="cbdsl swarm"):
        cbdsl.resume(tmp_path / "run")
    run_swarm(stage, tmp_path / "run", BEST, Deadlines())
    assert_as_simulated(tmp_path / "run", spec)


def _descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if parent == pid:
                found.append(int(entry.name))
    return found


def test_serve_says_what_is_wrong(tmp_path: Path, data: Path) -> None:
    (tmp_path / "spec.toml").write_text(tiny_spec(data).to_toml())
    for arguments, words in (
        (["serve", str(tmp_path / "spec.toml"), "--broker", "http://x", "--out", "o"], "not the address of a broker"),
        (["work", "--id", "a/b", "--broker", "mqtt://127.0.0.1", "--data", "x.npz"], "cannot be the name"),
        (["work", "--id", "a", "--broker", "mqtt://127.0.0.1", "--data", "x.npz"], "cannot be read"),
        (["work", "--id", "a", "--broker", "mqtts://x", "--cert", "c.pem", "--data", "x"], "--cert and --key together"),
        (["swarm", "--broker", "rabbit"], "Unknown broker"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "cbdsl", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path,
            env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        assert result.returncode == 2
        assert words in result.stderr


def test_the_spec_of_a_folder_is_not_changed_by_another(tmp_path: Path, data: Path) -> None:
    spec = tiny_spec(data)
    stage = Experiment.prepare(spec, threads=1)
    opened = open_run(stage, tmp_path / "run")
    opened.close()
    other: Spec = tiny_spec(data, seed=9)
    with refused_as("wrong-run"):
        open_run(Experiment.prepare(other, threads=1), tmp_path / "run")
