"""The app that `cbdsl flower new` writes, started by `flwr run`: in a simulation, and with SuperNodes as processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Flower's simulation is not installed here; `make flower-test` has it")

from cbdsl.flower.new import write_app
from support.flower_federation import SMALL, rounds_of, simulated
from support.flower_processes import LIMIT, Federation, federation

NODES = "client-resources-num-cpus=1 init-args-num-cpus=2 num-supernodes"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flower") / "app"
    write_app(folder, "paper-iid", 8)
    return folder


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("simulation"), ["--simulation"]) as made:
        yield made


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("deployment")) as made:
        yield made


def test_a_simulation_of_eight_nodes_plays_the_rounds_of_the_simulator(
    app: Path, simulation: Federation, tmp_path: Path
) -> None:
    settings = "workers=8 attack.name=liar attack.byzantine=2 defence.guard=true defence.commitment=true"
    wanted = simulated(tmp_path / "simulated", settings, 3)
    said = simulation.run(app, f'out="eight" rounds=3 settings="{settings}"', f"{NODES}=8")
    assert rounds_of(app / "runs/eight") == wanted, said
    assert len(wanted[-1]["banned"]) == 2, "the liars are banned"
    assert (app / "runs/eight/model.safetensors").read_bytes() == (
        tmp_path / "simulated/model.safetensors"
    ).read_bytes()
    assert not list((simulation.home / "cache/cbdsl/flower").iterdir()), "desks are cleared when the run is over"


def test_a_simulation_with_too_few_nodes_says_so(app: Path, simulation: Federation) -> None:
    said = simulation.run(app, f'out="few" rounds=1 settings="{SMALL} workers=5"', f"{NODES}=3")
    assert "The run has 5 workers and the federation 3 nodes" in said
    assert not (app / "runs/few/summary.json").exists()


def test_two_supernodes_play_the_rounds_of_the_simulator_and_a_liar_is_banned(
    app: Path, deployment: Federation, tmp_path: Path
) -> None:
    settings = f"{SMALL} workers=2 attack.name=sign-flip attack.byzantine=1"
    wanted = simulated(tmp_path / "simulated", settings, 3)
    nodes = [deployment.node(worker, 2) for worker in range(2)]
    said = deployment.run(app, f'out="two" rounds=3 settings="{settings}"')
    assert rounds_of(app / "runs/two") == wanted, said
    assert len(wanted[-1]["banned"]) == 1
    for node in nodes:
        node.terminate()
        node.wait(60)


def test_a_supernode_that_is_killed_comes_back_and_nobody_is_banned(app: Path, deployment: Federation) -> None:
    folder = app / "runs/killed"
    nodes = [deployment.node(worker, 2, f'state-path="{deployment.home}/state"') for worker in range(2)]
    settings = f"{SMALL} workers=2"

    def kill() -> None:
        deadline = time.monotonic() + LIMIT
        while not (folder / "rounds.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        nodes[1].kill()
        nodes[1].wait()
        deployment.node(1, 2, f'state-path="{deployment.home}/state"')

    killer = threading.Thread(target=kill)
    killer.start()
    said = deployment.run(app, f'out="killed" rounds=4 round-seconds=90 settings="{settings}"')
    killer.join()
    lines = rounds_of(folder)
    assert len(lines) == 4, said
    assert lines[-1]["banned"] == []
    assert all(line["traffic"]["score"][0] >= 1 for line in lines), "the other one is there all the time"
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 4
