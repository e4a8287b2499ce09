"""The package as others get it: sdist and wheel are whole, and a machine without torch installs and uses them."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.runs.folder import read_result
from support.deployment import SWARM, brokers, deployment, pictures, tiny_spec

pytestmark = pytest.mark.package
ROOT = Path(__file__).parents[2]
TREE = ("src", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
LEFT = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "*.dylib")


@dataclass(frozen=True)
class Installed:
    """A wheel, the sdist it was made of, and a fresh environment with nothing in it but the wheel and what it needs."""

    sdist: Path
    wheel: Path
    python: Path

    def __call__(self, *words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run `cbdsl` there, as a user would."""
        return _run(self.python.with_name("cbdsl"), *words, cwd=cwd, code=code)


def _run(*words: str | Path, cwd: Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = inherited | {"NO_COLOR": "1", "COLUMNS": "200", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, (words, done.stdout[-3000:], done.stderr[-3000:])
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("package")
    tree, made = folder / "tree", folder / "dist"
    tree.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=LEFT)
        else:
            shutil.copy(ROOT / name, tree / name)
    # The wheel is built from the sdist, so what the sdist lacks is missing from both.
    _run(sys.executable, "-m", "build", "--outdir", made, tree, cwd=folder, CBDSL_PORTABLE="1")
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    _run(sys.executable, "-m", "venv", folder / "environment", cwd=folder)
    python = folder / "environment" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--disable-pip-version-check", wheel, cwd=folder)
    return Installed(sdist, wheel, python)


def files_of_the_package() -> set[str]:
    found = (path.relative_to(ROOT / "src") for path in (ROOT / "src" / "cbdsl").rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts and path.suffix != ".so"}


def test_every_file_of_the_package_is_in_both(installed: Installed) -> None:
    wanted = files_of_the_package()
    assert {"cbdsl/py.typed", "cbdsl/engines/native/lanes.hpp"} < wanted
    inside = set(zipfile.ZipFile(installed.wheel).namelist())
    assert wanted - inside == set()
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/src/")[2] for name in archive.getnames()}
    assert wanted - names == set()
    assert not [name for name in names | inside if name.endswith((".pyc", "mqtt.log"))]
    assert len([name for name in inside if "/_lanes" in name]) == (3 if ctypes.sizeof(ctypes.c_void_p) == 8 else 1)


def test_a_package_for_devices_has_everything_but_mnist(installed: Installed, tmp_path: Path) -> None:
    tree, built = installed.sdist.parent.parent / "tree", tmp_path / "built"
    _run(sys.executable, "setup.py", "-q", "build_py", "--build-lib", built, cwd=tree, CBDSL_DEVICE="1")
    found = {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
    missing = files_of_the_package() - found
    assert missing == {name for name in files_of_the_package() if name.startswith("cbdsl/data/mnist/")}
    doctor = _run(sys.executable, "-m", "cbdsl", "doctor", cwd=tmp_path, PYTHONPATH=str(built)).stdout
    assert "left out" in doctor
    refused = _run(sys.executable, "-m", "cbdsl", "run", cwd=tmp_path, code=2, PYTHONPATH=str(built)).stderr
    assert "CBDSL_DEVICE=1" in refused


def test_one_version_everywhere(installed: Installed, tmp_path: Path) -> None:
    assert installed("--version", cwd=tmp_path).stdout.strip() == cbdsl.__version__
    said = "import importlib.metadata as m; print(m.version('cbdsl'))"
    assert _run(installed.python, "-c", said, cwd=tmp_path).stdout.strip() == cbdsl.__version__
    assert f"cbdsl-{cbdsl.__version__}-" in installed.wheel.name
    assert installed.sdist.name == f"cbdsl-{cbdsl.__version__}.tar.gz"


def test_there_is_no_torch_and_the_doctor_says_what_works(installed: Installed, tmp_path: Path) -> None:
    assert "No module named 'torch'" in _run(installed.python, "-c", "import torch", cwd=tmp_path, code=1).stderr
    said = installed("doctor", cwd=tmp_path).stdout
    assert "native" in said
    assert "torch, which is not installed" in said
    assert "_lanes" in said
    assert "MNIST" in said


def test_a_run_a_prediction_and_exports_need_no_torch(installed: Installed, tmp_path: Path) -> None:
    small = [
        "--workers",
        "3",
        "--rounds",
        "2",
        "--set",
        "data.samples_per_worker=60",
        "--set",
        "data.shared_scoring=100",
    ]
    installed("run", "--preset", "paper-iid", *small, "--out", "run", cwd=tmp_path)
    features = np.random.default_rng(0).random((5, 1, 28, 28), dtype=np.float32)
    np.savez(tmp_path / "x.npz", features=features)
    said = json.loads(installed("predict", "run", "--data", "x.npz", "--json", cwd=tmp_path).stdout)
    assert len(said["predictions"]) == 5
    for words in (
        ["c", "--out", "model.c"],
        ["c", "--int8", "--out", "small.c"],
        ["safetensors", "--out", "m.safetensors"],
    ):
        installed("export", "run", "--to", *words, cwd=tmp_path)
    assert "void predict(const float *in, float *out)" in (tmp_path / "model.c").read_text()
    assert (tmp_path / "small.c").stat().st_size < (tmp_path / "model.c").stat().st_size
    refused = installed("export", "run", "--to", "onnx", "--out", "m.onnx", cwd=tmp_path, code=2)
    assert "cbdsl[export]" in refused.stderr


@pytest.mark.parametrize("kind", brokers()[:1])
def test_devices_without_torch_take_part_in_a_swarm(installed: Installed, kind: str, tmp_path: Path) -> None:
    spec = tiny_spec(pictures(tmp_path / "pictures"), workers=2, rounds=3)
    with deployment(tmp_path / "swarm", spec, "mosquitto" if kind == "mosquitto" else "embedded") as made:
        for name in made.names:
            home = made.folder / "workers" / name
            words = ["work", "--id", name, "--swarm", SWARM, "--broker", str(made.address), "--threads", "1"]
            with (home / "worker.log").open("ab") as log:
                made.workers[name] = subprocess.Popen(
                    [installed.python.with_name("cbdsl"), *words, "--data", home / "samples.npz", "--state", home],
                    cwd=tmp_path, stdout=log, stderr=log,
                )  # fmt: skip
        made.start_server()
        made.wait_for_end(300)
        for name, process in made.workers.items():
            assert process.wait(120) == 0, (made.folder / "workers" / name / "worker.log").read_text()
    _, _, records = read_result(made.out)
    assert len(records) == 3
    assert any(record.accepted for record in records)
    assert records[-1].banned == []
