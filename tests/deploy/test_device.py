"""What a device has to load, and what it must not."""

from __future__ import annotations

import json
import subprocess
import sys

LOADED = "import sys, json, cbdsl.deploy.worker; print(json.dumps(sorted(sys.modules)))"


def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_a_device_loads_workers_engines_deploy_and_foundations_alone() -> None:
    rooms = {name.split(".")[1] for name in loaded() if name.startswith("cbdsl.")}
    foundations = {
        "archives", "arrays", "errors", "files", "machine", "plugins", "register", "rng", "spec", "spec_groups", "text",
    }  # fmt: skip
    assert rooms == {"codecs", "data", "deploy", "engines", "methods", "protocol", "workers"} | foundations


def test_a_device_loads_no_server_no_attacks_and_no_aggregators() -> None:
    ours = {name for name in loaded() if name.startswith("cbdsl.")}
    assert {name for name in ours if name.startswith("cbdsl.protocol.")} == {
        "cbdsl.protocol.ledger",
        "cbdsl.protocol.messages",
    }
    assert not {
        name for name in ours if name.split(".")[1] in {"byzantine", "swarms", "runs", "study", "report", "cli"}
    }


def test_a_device_needs_no_torch_and_nothing_else_that_is_heavy() -> None:
    heavy = {"torch", "matplotlib", "safetensors", "rich", "typer", "cryptography", "amqtt", "pandas", "scipy"}
    assert not {name.split(".")[0] for name in loaded()} & heavy
