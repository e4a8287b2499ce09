"""What a device has to load, and what it must not."""

from __future__ import annotations

import json
import subprocess
import sys

LOADED = "import sys, json, cbdsl.network.worker; print(json.dumps(sorted(sys.modules)))"


def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_a_device_loads_the_worker_side_alone() -> None:
    packages = {name.split(".")[1] for name in loaded() if name.startswith("cbdsl.")}
    foundations = {"arrays", "errors", "register", "rng", "spec", "util"}
    assert packages == {"algorithm", "codecs", "data", "engines", "models", "network", "swarms"} | foundations


def test_a_device_loads_no_server_no_attacks_and_no_aggregators() -> None:
    ours = {name.removeprefix("cbdsl.algorithm.") for name in loaded() if name.startswith("cbdsl.algorithm.")}
    assert ours == {"ledger", "messages", "methods", "particles", "worker_round", "worker_table"}
    assert {name for name in loaded() if name.startswith("cbdsl.swarms.")} == {"cbdsl.swarms.local"}


def test_a_device_needs_no_torch_and_nothing_else_that_is_heavy() -> None:
    heavy = {"torch", "matplotlib", "safetensors", "rich", "typer", "cryptography", "amqtt", "pandas", "scipy"}
    assert not {name.split(".")[0] for name in loaded()} & heavy
