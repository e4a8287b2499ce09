"""Every command that takes a spec takes it in the same words, and refuses options that change nothing."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cbdsl.cli.app import app
from cbdsl.cli.measure_commands import theory
from cbdsl.cli.run_commands import run
from cbdsl.cli.serve_commands import _with_roster, serve, swarm
from cbdsl.cli.spec_options import SpecWords, read_words
from cbdsl.cli.study_commands import resolve_grid, sweep
from cbdsl.engines.native_engine import available
from cbdsl.engines.torch_engine import accelerators
from cbdsl.errors import UserError
from cbdsl.presets import preset
from cbdsl.spec import Spec, setting_values
from support.helpers import SMALL, cbdsl
from support.refusals import refused_as

OPTIONS = {
    "--preset", "--spec", "--method", "--shared", "--rounds", "--workers", "--participation", "--byzantine", "--attack",
    "--aggregator", "--guard", "--soup", "--select", "--seed", "--model", "--data", "--init", "--engine", "--device",
    "--plugin", "--set",
}  # fmt: skip

PLUGIN = """
import numpy as np
import cbdsl

@cbdsl.register.attack("mute")
class Mute(cbdsl.Attack):
    \"\"\"Says nothing that means anything.\"\"\"
    def __init__(self, depth: float = 2.0) -> None:
        self.depth = depth
"""


@pytest.mark.parametrize("command", ["run", "serve", "swarm", "sweep", "theory"])
def test_every_command_with_a_spec_has_the_same_options(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    assert "[SPEC]" in said
    assert set(re.findall(r"--[\w-]+", said)) >= OPTIONS


def test_the_options_come_first_and_are_those_of_one_function() -> None:
    shared = list(inspect.signature(read_words).parameters)
    for command in (run, serve, swarm, sweep, theory):
        assert list(inspect.signature(command).parameters)[: len(shared)] == shared


def test_options_become_settings() -> None:
    words = read_words(
        "strong-iid", method="cb-dsl", shared="both", rounds=3, workers=9, participation=0.5, byzantine=2,
        attack="alie", guard=True, soup=2, seed=4, model="mlp", data="mnist", engine="native",
        settings=["local.epochs=2", "swarm.inertia=[0.5, 0.1]"],
    )  # fmt: skip
    spec = words.resolved()
    expected = preset("strong-iid").with_settings(
        {
            "method": "cb-dsl", "shared": "both", "rounds": 3, "workers": 9, "participation": 0.5,
            "attack.byzantine": 2, "attack.name": "alie", "defence.guard": True, "defence.commitment": True,
            "defence.declared": 2, "selection.name": "soup", "selection.k": 2, "seed": 4, "model": "mlp",
            "data.source": "mnist", "engine": "native", "local.epochs": 2, "swarm.inertia": [0.5, 0.1],
        }
    )  # fmt: skip
    assert spec == expected


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "mps"])
@pytest.mark.parametrize("engine", [None, "torch"])
def test_a_device_is_a_setting_beside_the_engine(device: str, engine: str | None) -> None:
    spec = read_words(device=device, engine=engine).resolved()
    assert (spec.device, spec.engine) == (device, engine or "auto")
    assert read_words(settings=[f"device={device}"], engine=engine).resolved() == spec


def test_a_word_that_is_no_device_is_an_error_with_those_there_are() -> None:
    with refused_as("unknown-name", "device", "'gpu'", "auto, cpu, cuda, mps"):
        read_words(device="gpu").resolved()


def test_a_gpu_that_is_not_there_ends_a_run_with_code_2_before_it_begins(tmp_path: Path) -> None:
    missing = next(name for name in ("mps", "cuda") if name not in accelerators())  # no machine has both
    done = cbdsl("run", *SMALL, "--device", missing, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"cbdsl: The device {missing} was asked for, but torch" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_method_brings_its_own_shared_data_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(Spec(shared="both").to_toml())
    assert read_words(str(file), method="fedavg").resolved().shared == "none"
    assert read_words(spec_file=file, method="fedavg", shared="train").resolved().shared == "train"
    assert read_words(str(file)).resolved().shared == "both"


def test_a_plugin_registers_names_and_is_kept_in_the_spec(tmp_path: Path) -> None:
    file = tmp_path / "parts.py"
    file.write_text(PLUGIN)
    words = read_words(plugin=[str(file)], attack="mute", byzantine=1, settings=["options.mute.depth=3.0"])
    assert words.resolved().plugins == (str(file),)
    listed = json.loads(cbdsl("list", "attacks", "--plugin", "parts.py", "--json", cwd=tmp_path).stdout)
    words_of_it = {"summary": "Says nothing that means anything.", "family": ""}
    assert {"name": "mute", "settings": {"depth": 2.0}, **words_of_it} in listed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"aggregator": "krum"}, "'cb-dsl' takes verified models one by one"),
        ({"attack": "alie"}, "no worker is an attacker"),
        ({"settings": ["attack.scale=3"]}, "no worker is an attacker"),
        ({"settings": ["swarm.inertia=0.5"], "method": "fedavg"}, "do not move as a swarm"),
        ({"settings": ["swarm.social=3"], "method": "fedpso", "guard": True}, "the guard and the soup need"),
        ({"guard": True, "method": "fedavg"}, "FedAvg's defences are its aggregators"),
        ({"soup": 3, "method": "fedavg"}, "FedAvg's defences are its aggregators"),
        ({"settings": ["selection.k=3"]}, "the selection 'best'"),
        ({"settings": ["data.shard_size=10"]}, "the partition is 'iid'"),
        ({"settings": ["local.epochs=2"], "method": "pso"}, "does not train with gradients"),
        ({"settings": ["defence.false_alarm=0.1"]}, "There is no guard"),
        ({"settings": ["defence.declared=2"], "method": "fedavg"}, "a mean takes every model"),
        ({"settings": ["local.epochs=2", "local.steps=5"]}, "local.steps says"),
        ({"shared": "score", "method": "fedavg"}, "nobody scores"),
        ({"shared": "train", "method": "pso"}, "nobody trains"),
        ({"settings": ["options.liar.scale=2.0"]}, "no worker is an attacker"),
        ({"settings": ["options.fedprox.mu=2.0"]}, "a part that this run does not use"),
        ({"device": "cpu", "engine": "native"}, "device has no effect here: the native engine runs on the CPU alone"),
        ({"device": "cuda", "engine": "native"}, "runs on the CPU, but the device cuda was asked for"),
    ],
)
def test_an_option_without_effect_is_an_error_that_says_why(options: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=f"(?i){re.escape(why)}"):
        read_words(**options).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        ["--aggregator", "krum"],
        ["--attack", "alie"],
        ["--set", "swarm.inertia=0.5", "--method", "fedavg"],
        ["--guard", "--method", "fedavg"],
        ["--set", "selection.k=3"],
        ["--set", "data.shard_size=10"],
        ["--device", "cpu", "--engine", "native"],
    ],
)
def test_idle_options_end_a_run_with_code_2_before_it_begins(words: list[str], tmp_path: Path) -> None:
    done = cbdsl("run", *SMALL, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_matters_in_one_point_of_a_sweep_is_welcome() -> None:
    words = SpecWords(options={"attack.name": "alie"})
    points = resolve_grid(words, [("attack.byzantine", [0, 2])]).specs
    assert [point.attack.byzantine for point in points] == [0, 2]
    with refused_as("no-effect", "attack.name"):
        resolve_grid(words, [("seed", [0, 1])])
    with refused_as("no-effect", "swarm.inertia", "fedavg"):
        resolve_grid(SpecWords(options={"method": "fedavg"}), [("swarm.inertia", [0.1, 0.2])])
    with refused_as("conflict", "seed", "--over"):
        resolve_grid(SpecWords(options={"seed": 1}), [("seed", [0, 1])])


def test_swept_methods_bring_their_own_shared_data(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(Spec(shared="both").to_toml())
    points = resolve_grid(SpecWords(str(file)), [("method", ["cb-dsl", "fedavg"])]).specs
    assert [point.shared for point in points] == ["both", "none"]


def test_the_setting_of_a_part_can_be_swept() -> None:
    key = "options.fedprox.mu"
    points = resolve_grid(SpecWords(options={"method": "fedprox"}), [(key, [0.1, 0.2])]).specs
    assert [setting_values(point, [key, "swarm.inertia"]) for point in points] == [
        {key: 0.1, "swarm.inertia": (1.0, 0.0)},
        {key: 0.2, "swarm.inertia": (1.0, 0.0)},
    ]


def test_a_wrong_name_in_the_last_point_of_a_sweep_is_found_before_anything_runs(tmp_path: Path) -> None:
    done = cbdsl(
        "sweep", *SMALL, "--byzantine", "1", "--over", "attack.name=liar,alie,lair", "--out", "here", cwd=tmp_path
    )
    done.check_refused("unknown-name", "'lair'", "'liar'")
    assert list(tmp_path.iterdir()) == []


def test_a_server_of_real_workers_takes_no_option_of_simulated_ones(tmp_path: Path) -> None:
    serve = ["serve", "--broker", "mqtt://127.0.0.1:1", "--out", "here"]
    for key, option in (
        ("attack.byzantine", ["--byzantine", "2"]),
        ("data.samples_per_worker", ["--set", "data.samples_per_worker=20"]),
    ):
        cbdsl(*serve, *option, cwd=tmp_path).check_refused("no-effect", key)
    (tmp_path / "roster.txt").write_text("east\nwest\n")
    done = cbdsl(*serve, "--roster", "roster.txt", "--workers", "3", cwd=tmp_path)
    done.check_refused("conflict", "--workers", "3", "roster.txt", "2")


def test_a_run_that_has_begun_keeps_its_number_of_workers_whatever_the_roster_names_now(tmp_path: Path) -> None:
    from cbdsl.network.roster import RosterFile  # noqa: PLC0415

    (tmp_path / "roster.txt").write_text("east\nwest\nnorth\n")
    listed, words = RosterFile(tmp_path / "roster.txt"), SpecWords("paper-iid", False, (), {})
    assert _with_roster(words, listed, tmp_path / "run").options["workers"] == 3
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.toml").write_text(Spec(workers=2).to_toml())
    assert _with_roster(words, listed, tmp_path / "run").options["workers"] == 2
    with refused_as("conflict", "--workers", "3", "2"):
        _with_roster(replace(words, options={"workers": 3}), listed, tmp_path / "run")


def test_folders_are_named_after_what_was_run() -> None:
    from cbdsl.runs.folder import folder_name  # noqa: PLC0415

    def named(**options: object) -> str:
        return folder_name(read_words(**options).resolved())  # type: ignore[arg-type]

    assert named() == "mnist-iid-cb-dsl-seed0"
    assert named(start="paper-noniid", shared="none", seed=7) == "mnist-shards-cb-dsl-shared-none-seed7"
    assert named(method="fedavg", aggregator="nnm+krum", attack="alie", byzantine=5) == (
        "mnist-iid-fedavg-nnm+krum-alie5-seed0"
    )
    assert named(guard=True, soup=3) == "mnist-iid-cb-dsl-guard-soup3-seed0"
    assert named(data="/some where/My data: (new).npz") == "My-data-new-iid-cb-dsl-seed0"
    assert len(named(data=f"/tmp/{'x' * 300}.npz")) < 60


def test_another_method_or_number_of_attackers_leaves_nothing_of_the_old_behind(tmp_path: Path) -> None:
    from cbdsl.runs.resolve import resolve  # noqa: PLC0415
    from cbdsl.spec import Spec  # noqa: PLC0415

    old = tmp_path / "spec.toml"
    old.write_text(resolve(Spec(method="pso").with_settings({"attack.byzantine": 1})).to_toml())
    words = SpecWords(str(old), True, (), {"method": "cb-dsl", "attack.byzantine": 3})
    found = words.resolved()
    assert (found.swarm.start, found.shared, found.defence.declared) == ("together", "both", 3)


def test_a_class_in_a_file_is_a_plugin_and_a_model(tmp_path: Path) -> None:
    path = tmp_path / "nets.py"
    path.write_text(
        "from torch import nn\n\nclass Tiny(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    words = read_words(model=f"{path}:Tiny", plugin=[str(path)])
    assert (words.options["model"], words.plugins) == ("Tiny", (str(path), f"{path}:Tiny"))
    done = cbdsl("run", *SMALL[2:], "--model", "nets.py:Tiny", "--rounds", "2", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["engine"] == ("native" if available() is None else "torch")
    assert [copy.name.partition("-")[2] for copy in (tmp_path / "out" / "plugins").iterdir()] == ["nets.py"]
    path.unlink()
    refused = cbdsl("resume", "out", cwd=tmp_path)
    assert refused.returncode == 2
    assert "not there any more" in refused.stderr


def test_a_method_in_which_nobody_is_invited_leaves_a_presets_rotation_behind() -> None:
    spec = read_words("rotation-iid", method="fedavg", shared="train").resolved()
    assert (spec.method, spec.selection.name, spec.defence.guard, spec.codec.up) == ("fedavg", "best", False, "none")
    assert read_words("rotation-iid", method="fedavg", codec="q4").resolved().codec.up == "q4"
    assert read_words("rotation-iid", method="cb-dsl").resolved().selection.name == "rotation"
    assert read_words("strong-iid", method="fedavg").resolved().method == "fedavg"


@pytest.mark.parametrize(
    ("start", "source", "task"),
    [
        ("regression", "own.npz", "regression"), ("regression", "own.csv", "auto"),  # its targets say so
        ("anomaly", "own.npz", "reconstruction"), ("anomaly", "own.csv", "reconstruction"),
        ("anomaly", "mnist", "auto"), ("paper-iid", "own.npz", "auto"),
    ],
)  # fmt: skip
def test_a_file_has_the_task_of_the_preset(start: str, source: str, task: str) -> None:
    assert SpecWords(start, options={"data.source": source}).spec().data.task == task


def test_a_task_that_is_given_is_the_files() -> None:
    words = SpecWords("regression", options={"data.source": "own.npz", "data.task": "classification"})
    assert words.spec().data.task == "classification"
