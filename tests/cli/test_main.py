from __future__ import annotations

import errno
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.main import get_command

from cbdsl.cli import app
from cbdsl.cli.doctor_command import examine
from cbdsl.cli.main import main
from cbdsl.util.files import write_atomically
from support import helpers
from support.helpers import SMALL, cbdsl

NOBODY = 65534  # a user without any rights


def test_a_run_ends_with_a_summary_and_a_folder_that_explains_itself(tmp_path: Path) -> None:
    done = cbdsl("run", *SMALL, "--rounds", "3", "--byzantine", "1", "--seed", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("accuracy", "uploads", "FedAvg", "traffic", "attackers", "banned", "folder"):
        assert word in done.stdout
    assert re.search(r"attackers +worker (\d); banned: \1 *\n", done.stdout)
    folder = tmp_path / "runs" / "mnist-iid-cb-dsl-liar1-seed5"
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "README.txt", "accuracy.png", "checkpoint.npz", "claims.bin", "model.safetensors", "rounds.jsonl",
        "spec.toml", "summary.json",
    }  # fmt: skip
    keys = set(json.loads((folder / "rounds.jsonl").read_text().splitlines()[0]))
    assert keys >= {
        "round", "test_accuracy", "global_score", "accepted", "refuted", "silent", "banned", "uploads", "uplink_bytes",
        "downlink_bytes", "seconds",
    }  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= {
        "method", "preset", "seed", "rounds", "final_accuracy", "best_accuracy", "uploads", "uplink_bytes",
        "downlink_bytes", "banned", "seconds",
    }  # fmt: skip
    assert summary["banned"] == summary["byzantine"]
    again = cbdsl("run", "--spec", str(folder / "spec.toml"), "--json", "--out", "again", cwd=tmp_path)
    assert json.loads(again.stdout)["final_accuracy"] == summary["final_accuracy"]


def test_json_prints_the_summary_alone(tmp_path: Path) -> None:
    done = cbdsl("run", *SMALL, "--rounds", "1", "--json", "--out", "here", cwd=tmp_path)
    assert json.loads(done.stdout) == json.loads((tmp_path / "here" / "summary.json").read_text())


def test_another_method_brings_its_own_shared_data(tmp_path: Path) -> None:
    done = cbdsl("run", *SMALL, "--method", "fedavg", "--rounds", "1", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["shared"] == "none"
    done = cbdsl("run", *SMALL, "--method", "fedavg", "--shared", "train", "--rounds", "1", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["shared"] == "train"


def test_resume_of_a_finished_run_prints_its_summary(tmp_path: Path) -> None:
    first = cbdsl("run", *SMALL, "--rounds", "2", "--json", "--out", "here", cwd=tmp_path)
    again = cbdsl("resume", "here", "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == json.loads(first.stdout)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["run", "--preset", "paper-idd"], ("unknown-name", "'paper-idd'", "'paper-iid'")),
        (["run", "--method", "fedsgd"], ("unknown-name", "'fedsgd'")),
        (["run", "--set", "local.epoch=2"], ("unknown-setting", "'local.epoch'", "'local.epochs'")),
        (["run", "--set", "local.epochs"], ("unknown-setting", "local.epochs")),
        (["run", "--model", "resnet"], ("unknown-name", "'resnet'")),
        (["run", "--engine", "cuda"], ("unknown-name", "'cuda'")),
        (["run", "--attack", "lair", "--byzantine", "1"], ("unknown-name", "'lair'", "'liar'")),
        (["run", "--shared", "all"], ("unknown-name", "shared", "'all'")),
        (["run", "--rounds", "0"], ("out-of-range", "rounds", "1", "0")),
        (["run", "--threads", "0"], ("out-of-range", "threads", "1", "0")),
        (["run", "--byzantine", "51"], ("out-of-range", "51", "50")),
        (["run", "--preset", "paper-noniid", "--workers", "1000"], ("out-of-range", "2,000")),
        (["run", "--data", "nowhere"], ("unknown-name", "nowhere", "mnist, ", "hapt, ")),
        (["run", "--data", "broken"], ("damaged-file", "broken")),
        (["run", "--spec", "nowhere.toml"], ("unreadable-file", "nowhere.toml")),
        (["run", "--preset", "paper-iid", "--spec", "x.toml"], ("conflict", "--preset", "--spec")),
        (["run", "strong-iid", "--preset", "paper-iid"], ("conflict", "SPEC", "--preset")),
        (["run", "paper-idd"], ("unknown-name", "'paper-idd'", "'paper-iid'")),
        (["run", "--plugin", "nowhere.py"], ("missing-file", "nowhere.py")),
        (["run", "--model", "nowhere.py:Net"], ("missing-file", "nowhere.py", "Net")),
        (["run", "--set", "preset=paper-noniid"], ("not-allowed", "preset")),
        (["run", "--rounds", "3", "--set", "rounds=4"], ("conflict", "--rounds", "--set rounds=4")),
        (["run", "--soup", "2", "--select", "best"], ("conflict", "--soup 2", "--select best")),
        (["run", "--select", "worst"], ("unknown-name", "'worst'")),
        (["run", "--select", "two-best"], ("unknown-name", "--plugin FILE")),
        (["run", "--method", "fedavg", "--aggregator", "mine"], ("unknown-name", "--plugin FILE")),
        (["run", "--data", "mine"], ("unknown-name", "--plugin FILE")),
        (["arena", "--defences", "mine"], ("unknown-name", "--plugin FILE")),
        (["run", "--participation", "51"], ("out-of-range", "participation")),
        (["swarm", "--broker", "rabbit"], ("unknown-name", "'rabbit'")),
        (["theory", "paper-idd"], ("unknown-name", "'paper-iid'")),
        (["list", "attack"], ("unknown-name", "'attack'", "'attacks'")),
        (["presets", "paper-idd"], ("unknown-name", "'paper-idd'")),
        (["resume", "nowhere"], ("missing-file",)),
        (["bench", "--workers", "many"], ("wrong-type", "--workers", "many")),
        (["bench", "--shards", "2"], ("not-supported", "benchmarks/ray_rounds.py")),
        (["bench", "--on", "ray", "--quick", "--batch", "5"], ("not-supported", "benchmarks/ray_rounds.py")),
        (["bench", "--codecs", "q4", "--models", "cnn"], ("not-supported", "benchmarks/codecs.py")),
        (["run", *SMALL, "--out", "full"], ("exists-already", "full")),
        (["run", *SMALL, "--out", "full/file.txt"], ("exists-already", "full")),
        (["run", *SMALL, "--out", "full/file.txt/below"], ("not-allowed", "full/file.txt")),
        (["resume", "full"], ("missing-file",)),
        (["resume", "nowhere"], ("missing-file",)),
    ],
)
def test_bad_input_is_one_readable_message_and_exit_code_2(
    words: list[str], refusal: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file.txt").write_text("precious")
    (tmp_path / "broken").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "broken" / f"{name}-ubyte").write_bytes(b"\0\0\x08\x03\0\0\0\x09")
    done = cbdsl(*words, cwd=tmp_path)
    done.check_refused(*refusal)
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "full"]
    assert (tmp_path / "full" / "file.txt").read_text() == "precious"


def test_an_unwritable_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_rights() -> None:  # root may write everywhere
        own = os.geteuid()
        os.seteuid(own or NOBODY)
        try:
            main()
        finally:
            os.seteuid(own)

    monkeypatch.setattr(helpers, "main", without_rights)
    tmp_path.chmod(0o755)
    (tmp_path / "closed").mkdir(mode=0o500)
    cbdsl("run", *SMALL, "--out", "closed/run", cwd=tmp_path).check_refused("not-allowed", "closed/run")


def test_a_full_disk_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fill() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/one/rounds.jsonl")

    monkeypatch.setattr(app, "app", fill)
    with pytest.raises(SystemExit, match="2"):
        main()
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("cbdsl: the disk is full at runs/one/rounds.jsonl.")


def test_a_full_disk_is_named_with_what_is_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fill)
    monkeypatch.setattr("shutil.disk_usage", lambda _: mock.Mock(free=12_000))
    monkeypatch.setattr(app, "app", lambda: write_atomically(tmp_path / "shared.bin", bytes(392_000)))
    with pytest.raises(SystemExit, match="2"):
        main()
    message = capsys.readouterr().err
    assert f"the disk is full at {tmp_path / 'shared.bin'} (392.0 kB are needed, 12.0 kB are free)" in message
    assert not list(tmp_path.iterdir())  # nothing of it is left


def test_a_word_that_is_no_number_is_an_error_of_the_command_line(tmp_path: Path) -> None:
    assert cbdsl("run", "--rounds", "many", cwd=tmp_path).returncode == 2


def test_a_corrupt_checkpoint_is_one_message_and_nothing_is_changed(tmp_path: Path) -> None:
    cbdsl("run", *SMALL, "--rounds", "1", "--out", "here", cwd=tmp_path)
    (tmp_path / "here" / "checkpoint.npz").write_bytes(b"rubbish")
    before = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    cbdsl("resume", "here", cwd=tmp_path).check_refused("damaged-file", "checkpoint.npz")
    assert {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()} == before


def test_every_command_is_listed_as_its_own_help_describes_it() -> None:
    commands = get_command(app.app).commands  # type: ignore[attr-defined]
    for panel in app.COMMANDS.values():
        for name, (_, text) in panel.items():
            assert inspect.cleandoc(commands[name].help).split("\n\n")[0] == text


def test_help_version_and_presets_answer(tmp_path: Path) -> None:
    assert "run" in cbdsl("--help", cwd=tmp_path).stdout
    assert cbdsl("--version", cwd=tmp_path).stdout.strip()
    assert "paper-iid" in cbdsl("presets", cwd=tmp_path).stdout


def test_doctor_names_engine_threads_data_and_versions(tmp_path: Path) -> None:
    said = cbdsl("doctor", cwd=tmp_path).stdout
    for word in ("engine", "threads", "embedded MNIST is whole", "torch", "numpy"):
        assert word in said


@pytest.mark.parametrize(
    ("gpus", "said"), [([], "cpu; torch sees no GPU"), (["cuda"], "cpu, cuda"), (["cuda", "mps"], "cpu, cuda, mps")]
)
def test_doctor_says_which_devices_torch_sees(gpus: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.engines.torch_engine.accelerators", lambda: gpus)
    assert dict(examine())["devices"] == said


@pytest.mark.slow
def test_bench_prints_rows_that_programs_can_read(tmp_path: Path) -> None:
    done = cbdsl("bench", "--quick", "--models", "softmax", "--workers", "3", "--scoring", "20", "--json", cwd=tmp_path)
    rows = json.loads(done.stdout)
    keys = {"model", "task", "workers", "batch", "engine", "seconds", "ratio_to_torch_loop", "peak_share"}
    assert all(set(row) == keys for row in rows)
    assert {row["task"] for row in rows} == {"train", "score"}
    assert {"torch-loop", "torch-vmap"} <= {row["engine"] for row in rows}
    assert cbdsl("bench", "--models", "resnet", cwd=tmp_path).returncode == 2


def test_on_a_system_without_posix_the_import_says_so() -> None:
    code = "import pathlib, os\nos.name = 'nt'\nimport cbdsl"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "ImportError: cbdsl needs a POSIX system" in found.stderr
