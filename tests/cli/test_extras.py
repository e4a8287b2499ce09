"""The command line on an installation without the optional libraries, and how little it loads with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.bare_environment import LIBRARIES, bare
from support.helpers import SMALL, cbdsl

pytestmark = pytest.mark.slow


def test_doctor_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    done = bare("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.partition(" ")[2].strip() for line in done.stdout.splitlines()}
    assert lines["torch"] == "not installed (pip install 'cbdsl[torch]')"
    assert lines["matplotlib"] == "not installed (pip install 'cbdsl[study]')"
    assert lines["cryptography"] == lines["amqtt"] == "not installed (pip install 'cbdsl[deploy]')"
    assert lines["onnx"] == "not installed (pip install 'cbdsl[export]')"
    assert lines["PIL"] == "not installed (pip install 'cbdsl[data]')"
    assert lines["engine"] == "native, for models made of known layers; the rest needs torch, which is not installed"
    assert lines["devices"] == "cpu; GPUs need torch, which is not installed (pip install 'cbdsl[torch]')"
    whole = cbdsl("doctor", cwd=tmp_path).stdout
    assert "not installed" not in whole


def test_a_run_leaves_its_picture_out_and_says_so_in_one_line(tmp_path: Path) -> None:
    done = bare("run", *SMALL, "--rounds", "2", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "accuracy.png" in line]
    assert said == ["accuracy.png is left out: matplotlib is not installed (pip install 'cbdsl[study]')."]
    assert not (tmp_path / "here" / "accuracy.png").exists()
    assert "accuracy" in done.stdout
    again = bare("resume", "here", "--json", cwd=tmp_path)
    assert (again.returncode, "accuracy.png" in again.stderr) == (0, False)
    assert cbdsl("resume", "here", cwd=tmp_path).returncode == 0
    assert (tmp_path / "here" / "accuracy.png").exists()


def test_a_model_file_that_needs_torch_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\n")
    done = bare("run", *SMALL, "--model", "net.py:Net", "--out", "here", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert done.stderr.endswith("Try pip install 'cbdsl[torch]', or leave it out.\n")


def test_a_search_leaves_its_page_out_and_says_so(tmp_path: Path) -> None:
    words = ["tune", *SMALL, "--rounds", "1", "--set", "data.holdout=100", "--over", "swarm.social=0..2"]
    done = bare(*words, "--budget", "1", "--confirm", "0", "--jobs", "1", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tuning.html was not written: matplotlib is not installed (pip install 'cbdsl[study]')." in done.stderr
    assert not (tmp_path / "here" / "tuning.html").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", *SMALL, "--rounds", "1", "--over", "seed=0,1", "--out", "here"],
        ["theory", *SMALL, "--rounds", "2"],
        ["list", "methods"],
        ["presets"],
        ["--help"],
    ],
    ids=lambda words: words[0],
)
def test_what_needs_no_extra_works_without(words: list[str], tmp_path: Path) -> None:
    done = bare(*words, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_trained_model_predicts_and_is_exported_without_torch(tmp_path: Path) -> None:
    assert bare("run", *SMALL, "--rounds", "2", "--out", "here", cwd=tmp_path).returncode == 0
    np.savez(tmp_path / "x.npz", features=np.zeros((3, 28, 28), np.uint8), labels=np.arange(3))
    done = bare("predict", "here", "--data", "x.npz", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["samples"], done.stderr) == (3, "")
    for to, name in (("c", "model.c"), ("safetensors", "copy.safetensors")):
        done = bare("export", "here", "--to", to, "--out", name, cwd=tmp_path)
        assert (done.returncode, (tmp_path / name).is_file()) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("words", "library", "extra"),
    [
        (["reproduce", "--quick"], "matplotlib", "study"),
        (["arena", "--quick"], "matplotlib", "study"),
        (["watch", "run"], "uvicorn", "watch"),
        (["bench"], "torch", "torch"),
        (["audit", "run"], "torch", "torch"),
        (["run", *SMALL, "--engine", "torch"], "torch", "torch"),
        (["provision", "keys", "--workers", "2"], "cryptography", "deploy"),
        (["swarm", *SMALL, "--broker", "embedded"], "amqtt", "deploy"),
        (["export", "run", "--to", "onnx", "--out", "model.onnx"], "onnx", "export"),
    ],
)
def test_what_needs_an_extra_says_which_before_it_begins(
    words: list[str], library: str, extra: str, tmp_path: Path
) -> None:
    done = bare(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"cbdsl: {library} is needed here, because ")
    assert done.stderr.endswith(f"it is not installed. Try pip install 'cbdsl[{extra}]'.\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hook"]


def loaded(*words: str, cwd: Path) -> set[str]:
    """The modules that a command has loaded at its end."""
    script = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        "from cbdsl.cli.main import main\n"
        f"sys.argv = ['cbdsl', *{words!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_a_run_with_json_loads_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    modules = loaded("run", *SMALL, "--rounds", "1", "--json", cwd=tmp_path)
    assert "numpy" in modules
    assert not modules & set(LIBRARIES)


def test_help_loads_no_command_and_a_command_s_help_no_other_command(tmp_path: Path) -> None:
    ours = {name for name in loaded("--help", cwd=tmp_path) if name.startswith("cbdsl.")}
    assert ours == {
        "cbdsl.cli",
        "cbdsl.cli.app",
        "cbdsl.cli.interrupts",
        "cbdsl.cli.main",
        "cbdsl.errors",
    }
    modules = loaded("run", "--help", cwd=tmp_path)
    assert "cbdsl.cli.study_commands" not in modules
    assert not modules & set(LIBRARIES)


def test_a_worker_loads_nothing_of_the_server(tmp_path: Path) -> None:
    modules = loaded("work", "--help", cwd=tmp_path)
    assert not modules & {"cbdsl.runs.loop", "cbdsl.network.server", "cbdsl.attacks.attack", *LIBRARIES}


def test_a_generator_says_that_it_needs_torch(tmp_path: Path) -> None:
    done = bare("generate", cwd=tmp_path)
    assert done.returncode == 2
    assert "torch is needed here" in done.stderr
    assert "cbdsl[torch]" in done.stderr
