"""The files in deploy/: their options exist, their units are valid, and a configuration file replaces options."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cbdsl.cli.app import app
from cbdsl.spec import parse_toml

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, f"{done.output}{done.exception or ''}"


@pytest.mark.parametrize("command", ["work", "serve"])
def test_the_example_configurations_name_options_that_exist(command: str) -> None:
    given = parse_toml((DEPLOY / {"work": "worker.toml", "serve": "server.toml"}[command]).read_text())
    known = set(re.findall(r"--([a-z-]+)", run(command, "--help")[1]))
    assert set(given) <= known


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units_are_valid(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    assert len(UNITS) == 3
    assert "NoNewPrivileges=true" in text
    if shutil.which("systemd-analyze") is None:
        return
    # what a unit starts need not be installed on the machine that tests it
    (tmp_path / unit.name).write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)], capture_output=True, text=True, check=False
    )
    assert unit.name not in done.stderr, done.stderr


def test_options_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "worker.toml"
    config.write_text('id = "porch"\nbroker = "mqtt://localhost:1"\ndata = "from-file.npz"\nlog-format = "text"\n')
    assert "from-file.npz" in run("work", "--config", str(config))[1]
    assert "elsewhere.npz" in run("work", "--config", str(config), "--data", "elsewhere.npz")[1]
    config.write_text("brokr = 1\n")
    code, text = run("work", "--config", str(config))
    assert code
    assert "Did you mean 'broker'" in text
    assert "cannot be read" in run("work", "--config", str(tmp_path / "nowhere.toml"))[1]


def test_a_log_line_is_one_json_object() -> None:
    from cbdsl.cli.network_options import _JsonFormatter  # noqa: PLC0415

    record = logging.LogRecord("cbdsl.network", logging.WARNING, "x.py", 1, "worker %s\nis %s", ("porch", "late"), None)
    line = json.loads(_JsonFormatter().format(record))
    assert (line["level"], line["logger"]) == ("warning", "cbdsl.network")
    assert "porch" in line["message"]
    assert "\n" not in line["message"]
