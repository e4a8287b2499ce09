from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cbdsl.cli.options import is_installed
from support.helpers import cbdsl


def test_new_writes_an_app_that_says_how_it_is_started(tmp_path: Path) -> None:
    done = cbdsl("flower", "new", "app", "--spec", "rotation-iid", "--workers", "5", cwd=tmp_path)
    assert done.returncode == 0
    assert "num-supernodes=5" in done.stdout
    assert ("flwr is not installed" in done.stdout) != is_installed("flwr")
    project = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    assert (app["config"]["spec"], app["config"]["settings"]) == ("rotation-iid", "workers=5")
    for component in app["components"].values():
        module = tmp_path / "app" / f"{component.partition(':')[0].replace('.', '/')}.py"
        compile(module.read_text(), str(module), "exec")
    assert "/runs/" in (tmp_path / "app/.gitignore").read_text(), "results are no part of the app"


def test_new_overwrites_nothing_and_knows_its_specs(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    taken = cbdsl("flower", "new", "full", cwd=tmp_path)
    taken.check_refused("exists-already", "full")
    unknown = cbdsl("flower", "new", "app", "--spec", "paper-iod", cwd=tmp_path)
    unknown.check_refused("unknown-name", "'paper-iid'")
    assert not (tmp_path / "app").exists()


@pytest.mark.skipif(is_installed("flwr"), reason="flwr is installed here")
@pytest.mark.parametrize("module", ["client", "server"])
def test_without_flwr_there_is_one_sentence(module: str) -> None:
    program = f"""
try:
    import cbdsl.flower.{module}
except ValueError as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("UserError flwr is needed here")
    assert "pip install 'flwr[simulation]' cbdsl" in said
