"""Folders on users' disks stay readable: each of `folders/` opens, goes on and is used by the commands that read it.

Numbers depend on the machine's kernels in their last digits. So a resumed run is compared with the recorded one only
where a fresh run of the same spec gives the recorded numbers; that it goes on and keeps its records is always checked.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import cbdsl
from cbdsl import spec as specs
from cbdsl.cli.app import app
from cbdsl.data.download import fingerprint
from support import wire_code as code
from support.refusals import refused_as

GOLDEN = Path(__file__).parent
KEYS: dict[str, dict[str, str]] = json.loads((GOLDEN / "spec_keys.json").read_text())
SIZES = ("samples_per_worker=20", "shared_training=12", "shared_scoring=30", "holdout=100")
SETTINGS = [*(f"--set=data.{size}" for size in SIZES), "--set=workers=4", "--set=local.learning_rate=0.1"]
SMALL = ["--data", "data/points.npz", "--model", "softmax", *SETTINGS]
STUDY = [*SETTINGS, "--set=data.source=data/points.npz", "--set=model=softmax", "--set=rounds=2", "--jobs", "1"]

SIMULATED = (
    "finished", "finished-from-a-model", "on-generated", "plugin", "whole-cb-dsl", "whole-scaffold",
    "whole-fedadam", "sweep/runs/45b29f9b4c60615d", "arena/runs/56e49430d4b6bb47", "tuned/runs/5df04d851b4e4ba9",
    "study/runs/7e9dcc9017161e22",
)  # fmt: skip
FINISHED = (*SIMULATED, "served/server")
INTERRUPTED = ("cb-dsl", "scaffold", "fedadam")


RESULTS = ("round", "test_accuracy", "global_score", "accepted", "refuted", "uploads", "banned")

on_the_native_engine = pytest.mark.skipif(
    not code.HAS_NATIVE, reason="checkpoints are of the native engine, which is not built here"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy all folders to where the test may write, and work there: paths in specs are relative."""
    shutil.copytree(GOLDEN / "folders", tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(cbdsl.__file__).parents[1]))  # processes run the same code
    return tmp_path / "work"


def command(*words: str) -> str:
    """Run a command of the command line in this process; return what it prints."""
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


def lines(path: Path | str) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def numbers_of(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rounds without the time they took, and without reasons, whose words may change."""
    return [
        {key: value for key, value in one.items() if key not in {"seconds", "verdicts"}}
        | {"verdicts": [{key: verdict[key] for key in verdict if key != "reason"} for verdict in one["verdicts"]]}
        for one in rounds
    ]


def rows_of(name: str) -> list[dict[str, str]]:
    """Read the table of a study."""
    with Path(name, "results.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def contents(folder: Path | str) -> dict[str, bytes]:
    """Return the files below a folder and what is in them."""
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_the_keys_of_specs_are_the_recorded_ones() -> None:
    assert {name: cbdsl.preset(name).key() for name in code.PRESETS} == KEYS["presets"]
    found = {str(path): code.from_toml(path.read_text()).key() for path in sorted(Path().rglob("spec.toml"))}
    assert found == KEYS["folders"]


def test_a_spec_is_written_as_it_was_read() -> None:
    """Settings that did not exist when a folder was written are added at their defaults."""
    later = {name for _, name, _ in specs._ADDED_LATER}
    for path in KEYS["folders"]:
        text = Path(path).read_text().splitlines()
        written = code.from_toml("\n".join(text)).to_toml().splitlines()
        missing = Counter(written) - Counter(text)
        assert {line.partition(" = ")[0] for line in missing} <= later, path
        assert [line for line in written if line not in missing] == text, path


@pytest.mark.parametrize("name", FINISHED)
def test_a_summary_has_the_key_of_its_spec(name: str) -> None:
    assert json.loads(Path(name, "summary.json").read_text())["spec_key"] == KEYS["folders"][f"{name}/spec.toml"]


@on_the_native_engine
@pytest.mark.parametrize("name", SIMULATED)
def test_a_finished_run_opens(name: str) -> None:
    before = contents(name)
    result = cbdsl.resume(name, callbacks=[])
    recorded = json.loads(before[f"{name}/summary.json"])
    for key in ("method", "workers", "rounds", "uploads", "uplink_bytes", "downlink_bytes", "banned", "byzantine",
                "spec_key", "parameters", "traffic", "codec", "seed", "final_score"):  # fmt: skip
        assert getattr(result.summary, key) == recorded[key], key
    assert [one.to_json() for one in result.rounds] == lines(GOLDEN / "folders" / name / "rounds.jsonl")
    assert contents(name)[f"{name}/rounds.jsonl"] == before[f"{name}/rounds.jsonl"]
    assert contents(name)[f"{name}/model.safetensors"] == before[f"{name}/model.safetensors"]
    features = np.load("data/samples.npz")["features"]
    assert result.predict(features).shape == (12,)


def test_a_run_with_the_storage_that_was_removed_is_refused() -> None:
    spec = Path("finished", "spec.toml")
    spec.write_text(spec.read_text().replace('storage = "float32"', 'storage = "bfloat16"'))
    with refused_as("not-supported", "swarm.storage", "bfloat16", "Leave it out"):
        cbdsl.resume("finished", callbacks=[])


@on_the_native_engine
@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_stopped_run_goes_on(name: str) -> None:
    stopped, whole = Path(f"interrupted-{name}"), Path(f"whole-{name}")
    before, expected = lines(stopped / "rounds.jsonl"), lines(whole / "rounds.jsonl")
    assert len(before) == 4  # the checkpoint is of round 3
    command("resume", str(stopped), "--json")
    after = lines(stopped / "rounds.jsonl")
    assert after[:3] == before[:3]
    assert numbers_of(before) == numbers_of(expected[:4])
    assert [one["round"] for one in after] == [1, 2, 3, 4, 5, 6]
    assert json.loads((stopped / "summary.json").read_text())["rounds"] == 6
    command("run", "--spec", str(stopped / "spec.toml"), "--out", "again", "--json")
    resumed, recorded, fresh = (Path(one, "model.safetensors").read_bytes() for one in (stopped, whole, "again"))
    if fresh == recorded:  # this processor computes as the one that wrote the folders
        assert resumed == recorded
        assert numbers_of(after) == numbers_of(expected) == numbers_of(lines("again/rounds.jsonl"))


def test_a_checkpoint_of_another_spec_is_refused() -> None:
    shutil.copy("interrupted-scaffold/checkpoint.npz", "interrupted-cb-dsl/checkpoint.npz")
    with pytest.raises(cbdsl.UserError):
        cbdsl.resume("interrupted-cb-dsl", callbacks=[])


@on_the_native_engine
def test_a_plugin_is_compared_with_its_copy() -> None:
    command("resume", "plugin", "--json")
    command("run", "--spec", "plugin/spec.toml", "--out", "again", "--json")
    assert lines("again/rounds.jsonl")[-1]["round"] == 2
    with Path("plugins/middle.py").open("a") as file:
        file.write("# edited\n")
    with pytest.raises(cbdsl.UserError):
        cbdsl.resume("plugin", callbacks=[])


def test_a_model_predicts_and_is_exported() -> None:
    data = np.load("data/points.npz")
    np.savez("test.npz", features=data["test_features"], labels=data["test_labels"])
    for name in ("finished", "served/server"):
        told = json.loads(command("predict", name, "--data", "test.npz", "--json"))
        recorded = json.loads(Path(name, "summary.json").read_text())
        assert told["samples"] == 60
        assert abs(told["accuracy"] - recorded["final_accuracy"]) < 0.02
    command("predict", "served/sensor-1/model.safetensors", "--data", "data/samples.npz")
    first = json.loads(command("predict", "finished", "--data", "test.npz", "--json"))
    for form in ("c", "onnx", "safetensors"):
        command("export", "finished", "--to", form, "--out", f"to-{form}.{form}")
        assert Path(f"to-{form}.{form}").stat().st_size > 0
    assert sum(one.numel() for one in cbdsl.load("finished").model.parameters()) == len(cbdsl.load("finished").weights)
    assert json.loads(command("predict", "to-safetensors.safetensors", "--data", "test.npz", "--json")) == first
    command("export", "finished", "--to", "c", "--int8", "--out", "small.c")


@pytest.mark.usefixtures("svg_only")
def test_runs_are_compared() -> None:
    told = command("compare", *FINISHED[:4], "served/server", "--out", "page")
    for name in ("finished", "plugin"):
        accuracy = json.loads(Path(name, "summary.json").read_text())["final_accuracy"]
        assert f"{accuracy:.1%}"[:4] in told or f"{100 * accuracy:.1f}" in told
    assert any(Path("page").glob("*.html"))


def test_a_run_starts_from_a_recorded_model() -> None:
    command("run", "paper-iid", *SMALL, "--rounds", "1", "--init", "finished", "--out", "again", "--json")
    assert Path("again/init.safetensors").read_bytes() == Path("finished-from-a-model/init.safetensors").read_bytes()


def test_theory_of_a_recorded_run_has_the_recorded_findings() -> None:
    recorded = json.loads(Path("finished/theory.json").read_text())
    command("theory", "finished")
    assert _shape_of(json.loads(Path("finished/theory.json").read_text())) == _shape_of(recorded)


def _shape_of(value: object) -> object:
    """Return what a JSON value is made of, without its numbers."""
    if isinstance(value, dict):
        return {key: _shape_of(item) for key, item in value.items()}
    return [_shape_of(value[0])] if isinstance(value, list) and value else type(value).__name__


STUDIES = {
    "sweep": ["sweep", "paper-iid", *SMALL, "--rounds", "2", "--over", "seed=0..1", "--over", "swarm.inertia=0.5,0.9"],
    "arena": ["arena", "--attacks", "gaussian", "--defences", "fedavg", "--byzantine", "1", "--seeds", "1",
              "--preset", "paper-iid", *STUDY],
    "tuned": ["tune", "paper-iid", *SMALL, "--rounds", "2", "--over", "swarm.inertia=0.1..1", "--budget", "2",
              "--confirm", "1"],
    "study": ["study", "fashion", "--seeds", "1", "--ways", "fedavg", "--clean", *STUDY],
}  # fmt: skip


@pytest.mark.usefixtures("svg_only")
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_goes_on_and_runs_nothing_again(name: str) -> None:
    parts = [Path(name, part) for part in ("runs", "trials") if Path(name, part).is_dir()]
    before = {path: text for part in parts for path, text in contents(part).items()}
    table = rows_of(name)
    command(*STUDIES[name], *([] if "--jobs" in STUDIES[name] else ["--jobs", "1"]), "--out", name)
    after = {path: text for part in parts for path, text in contents(part).items() if not path.endswith(".lock")}
    assert {path for path in after if "README" not in path} == set(before)
    assert {path: text for path, text in after.items() if path in before} == before
    known = [{key: row[key] for key in old} for row, old in zip(rows_of(name), table, strict=True)]
    assert known == table  # there may be new columns
    assert any(Path(name).glob("*.html"))


def test_a_generator_goes_on_and_its_samples_are_used() -> None:
    before, shared = Path("generated/passes.jsonl").read_bytes(), dict(np.load("generated/shared.npz"))
    sizes = [one for one in SETTINGS if "learning_rate" not in one]
    words = ["--samples", "12", "--scoring", "30", "--passes", "1", "--out", "generated"]
    command("generate", "paper-iid", "--data", "data/points.npz", *sizes, *words)
    assert Path("generated/passes.jsonl").read_bytes() == before
    made = np.load("generated/shared.npz")
    assert {name: (made[name].dtype, made[name].shape) for name in made} == {
        name: (one.dtype, one.shape) for name, one in shared.items()
    }
    np.savez_compressed("other.npz", **shared)
    words = ["--rounds", "1", "--set=data.shared_source=other.npz", "--out", "again", "--json"]
    command("run", "paper-iid", *SMALL, *words)


def test_a_fetched_data_set_is_found_and_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "cache" / "cbdsl").mkdir(parents=True)
    shutil.copy("data/points.npz", tmp_path / "cache" / "cbdsl" / "hapt.npz")
    here = {row["name"]: row["here"] for row in json.loads(command("data", "list", "--json"))}
    assert here["hapt"]
    assert not here["cifar10"]
    data = np.load("data/points.npz")
    assert fingerprint({name: data[name] for name in data}) == FINGERPRINT


FINGERPRINT = "2cb1f6da059c3c902c8d3f773000daeeaf8c5006ad508aa885af9207eae387d4"


@pytest.mark.slow
@on_the_native_engine
def test_a_stopped_swarm_goes_on_with_the_state_of_its_workers() -> None:
    before, run = lines("swarm/rounds.jsonl"), Path("swarm/deployment.json").read_text()
    words = ["swarm", "--preset", "paper-iid", *SMALL, "--rounds", "12", "--codec", "q8", "--out", "swarm", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "cbdsl", *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    after = lines("swarm/rounds.jsonl")
    assert len(before) == 3
    assert after[:2] == before[:2]  # the checkpoint is of round 2
    assert [after[2][key] for key in RESULTS] == [before[2][key] for key in RESULTS]  # from the journal
    assert [one["round"] for one in after] == list(range(1, 13))
    assert Path("swarm/deployment.json").read_text() == run
    assert not Path("swarm/journal.bin").exists()
    for number in range(4):  # no worker started anew
        log = Path(f"swarm/workers/worker-{number}/worker.log").read_text()
        assert "cannot be used" not in log
        assert Path(f"swarm/workers/worker-{number}/model.safetensors").is_file()
    command("run", "--spec", "swarm/spec.toml", "--out", "again", "--json")
    same = [[one[key] for key in RESULTS] for one in lines("again/rounds.jsonl")]
    if same[: len(before)] == [[one[key] for key in RESULTS] for one in before]:  # the simulator's numbers, to the last
        assert same == [[one[key] for key in RESULTS] for one in after]


def test_a_journal_and_the_state_of_a_worker_are_read() -> None:
    claims, uploads = code.read_journal(Path("swarm/journal.bin"))
    verdict = lines("swarm/rounds.jsonl")[2]["verdicts"][0]
    assert sorted(claims) == [0, 1, 2, 3]
    assert float.fromhex(claims[1]) == min(map(float.fromhex, claims.values())) == verdict["claimed"]
    assert uploads == {1: "0300000000ca1a280070c9cc946a6c88e8a347a9864f"}
    run = bytes.fromhex(json.loads(Path("swarm/deployment.json").read_text())["run"])
    pack = code.build_codec("q8", {}).longest_pack(15)
    for worker, score in claims.items():
        state = code.read_state(Path(f"swarm/workers/worker-{worker}"), run, worker, 15, pack)
        assert (state["round"], state["version"], state["score"]) == (3, 3, score)
        assert state["model"] == "4b10800515ec6befe092062d648d92d8"
        if worker == 1:
            assert state["best"] == BEST


BEST = (
    "e0d343bf60d839bf00454b3e8071523fe0472a3f002a05be8027fcbe40dda1bec033e93ec03ce13e207b0a3f80acd4be002d6f3e40ebacbe"
    "001670bd"
)


def test_a_served_run_is_not_resumed_without_its_workers() -> None:
    for name in ("served/server", "swarm", "flower/run"):
        with pytest.raises(cbdsl.UserError):
            cbdsl.resume(name, callbacks=[])


@on_the_native_engine
def test_a_stopped_flower_run_goes_on_with_the_state_of_its_nodes() -> None:
    before = lines("flower/run/rounds.jsonl")
    assert len(before) == 2
    sizes = " ".join(one.removeprefix("--set=") for one in SETTINGS if "workers" not in one)
    settings = f"model=softmax data.source=data/points.npz codec.up=q8 codec.down=q8 workers=3 {sizes}"
    config, hellos = {"rounds": 5, "settings": settings, "join-seconds": 30.0}, list[Any]()
    tokens = {path.read_bytes() for path in Path("flower/state").glob("*/worker-*/token")}
    messages = code.flower_conversation(Path("flower"), 3, config, hellos=hellos)
    assert {hello.session for hello in hellos} == tokens
    assert sorted(hello.round for hello in hellos) == [2, 2, 3]  # they have their state
    run = json.loads(Path("flower/run/flower.json").read_text())["run"]
    assert {hello.run.hex() for hello in hellos} == {run}
    after = lines("flower/run/rounds.jsonl")
    assert after[:2] == before
    assert [one["round"] for one in after] == [1, 2, 3, 4, 5]
    found = {one for ways in messages.values() for names in ways.values() for one in names}
    assert not [one for one in found if any(word in one for word in ("refusal", "stranger", "lacks", "silent"))]
    command("run", "--spec", "flower/run/spec.toml", "--out", "again", "--json")
    same = [[one[key] for key in RESULTS] for one in lines("again/rounds.jsonl")]
    if same[:2] == [[one[key] for key in RESULTS] for one in before]:  # the simulator's numbers, to the last
        assert same == [[one[key] for key in RESULTS] for one in after]
    command("compare", "flower/run", "finished")


def test_members_join_and_leave_a_recorded_swarm() -> None:
    before = contents("provisioned")
    command("provision", "provisioned", "--add", "--names", "sensor-4")
    after = contents("provisioned")
    for path in ("ca/ca.key", "ca/ca.crt", "workers/sensor-1/worker.crt", "workers/sensor-1/worker.key"):
        assert after[f"provisioned/{path}"] == before[f"provisioned/{path}"]
    assert Path("provisioned/server/roster.txt").read_text().split() == ["sensor-1", "sensor-2", "sensor-4"]
    rules = Path("provisioned/broker/acl").read_text()
    topic = code.topics.from_worker("lab", "sensor-4", "claim")
    assert topic in rules or "cbdsl/lab/from/%u" in rules
    command("provision", "provisioned", "--revoke", "sensor-1")
    assert Path("provisioned/server/roster.txt").read_text().split() == ["sensor-2", "sensor-4"]
    revoked = Path("provisioned/ca/revoked.txt").read_text().splitlines()
    assert {line.split()[1] for line in revoked} == {"sensor-1", "sensor-3"}
    with pytest.raises(AssertionError):
        command("provision", "provisioned", "--add", "--names", "sensor-2")


@contextmanager
def watched(folder: str) -> Iterator[HTTPConnection]:
    """Start the page of a folder as a user does, and connect to it."""
    words = [sys.executable, "-m", "cbdsl", "watch", folder, "--port", "0", "--parent", str(os.getpid())]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split("http://")[1].split("/")[0]
        connection = HTTPConnection(address, timeout=20)
        yield connection
        connection.close()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def asked(connection: HTTPConnection, path: str) -> str:
    """Return what the page answers; of events the first."""
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200
    if path != "/events":
        return answer.read().decode()
    while not (line := answer.readline()).startswith(b"data: "):
        assert line
    return line[6:].decode()


@pytest.mark.parametrize(
    ("name", "status", "rounds"),
    [("finished", "finished", 4), ("interrupted-cb-dsl", "stopped", 4), ("swarm", "stopped", 3)],
)
def test_a_run_is_watched(name: str, status: str, rounds: int) -> None:
    with watched(name) as connection:
        metrics = asked(connection, "/metrics")
        assert "cbdsl_" in metrics
        facts = json.loads(asked(connection, "/events"))["facts"]
    assert (facts["status"], facts["round"]) == (status, rounds)


def test_a_served_run_and_a_sweep_are_watched() -> None:
    with watched("served/server") as connection:
        assert "sensor-1" in asked(connection, "/events")
    with watched("sweep") as connection:
        assert "45b29f9b4c60615d" in asked(connection, "/events")
