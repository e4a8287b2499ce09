"""A deployment of processes in which each device has a table or a file of its own: numbers, anomalies and classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.export.predict import predict, predict_values, read_unseen
from cbdsl.network.broker import running_broker
from support.deployment import brokers

pytestmark = pytest.mark.slow

NET = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.hidden = nn.Linear(shape[0], 16)
        self.last = nn.Linear(16, outputs)

    def forward(self, x):
        return self.last(nn.functional.relu(self.hidden(x)))
"""
SIZES = ("rounds=3", "data.shared_training=60", "data.shared_scoring=200", "data.holdout=200")
TASKS = {
    "regression": ("regression", "--set", "data.target=life"),
    "reconstruction": ("anomaly", "--set", "data.task=reconstruction"),
    "classification": ("rotation-iid", "--set", "data.task=classification", "--set", "data.target=state"),
}


def write_tables(folder: Path, task: str) -> list[Path]:
    """Write the server's table and the samples of three devices, in one form each."""
    rng = np.random.default_rng(1)
    made = []
    for name, count in (("server.csv", 1000), ("one.csv", 150), ("two.parquet", 150), ("three.npz", 150)):
        heat, load = rng.uniform(20, 60, count), rng.uniform(0, 1, count)
        columns = {"heat": heat, "load": load}
        if task == "regression":
            columns["life"] = 100 - heat - 20 * load * load + rng.normal(0, 1, count)
        if task == "classification":
            columns["state"] = np.where(heat + 20 * load > 50, "worn", "fresh")
        path = folder / name
        made.append(path)
        if path.suffix == ".npz":
            *_, labels = columns.values()
            named: dict[str, Any] = {} if task == "reconstruction" else {"labels": labels}
            np.savez(path, features=np.stack([heat, load], 1), **named)
        elif path.suffix == ".parquet":
            arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.table(columns), path)
        else:
            rows = (",".join(map(str, row)) for row in zip(*columns.values(), strict=True))
            path.write_text("\n".join([",".join(columns), *rows]) + "\n")
    return made


@pytest.mark.parametrize("task", TASKS)
def test_devices_with_tables_of_their_own_learn_together(task: str, tmp_path: Path) -> None:
    server, *devices = write_tables(tmp_path, task)
    (tmp_path / "net.py").write_text(NET)
    settings = [word for size in SIZES for word in ("--set", size)]
    common = ["--swarm", "tables", "--threads", "1", "--broker"]
    start = [sys.executable, "-m", "cbdsl"]
    with running_broker(tmp_path / "broker", brokers()[0]) as broker, (tmp_path / "log").open("ab") as log:
        address = f"mqtt://{broker.host}:{broker.port}"
        workers = [
            subprocess.Popen(
                [*start, "work", "--id", path.stem, *common, address, "--data", path, "--state", tmp_path / path.stem],
                stdout=log, stderr=log,
            )
            for path in devices
        ]  # fmt: skip
        try:
            done = subprocess.run(
                [
                    *start, "serve", *TASKS[task], *settings, "--data", server, "--model", "net.py:Net",
                    "--workers", "3", *common, address, "--out", tmp_path / "run", "--least-seconds", "60",
                ],
                cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-3000:] + (tmp_path / "log").read_text()[-3000:]
            assert [worker.wait(60) for worker in workers] == [0, 0, 0]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    model, own = cbdsl.load(tmp_path / "run"), cbdsl.load(tmp_path / "one" / "model.safetensors")
    assert np.array_equal(model.weights, own.weights)
    if task == "classification":
        assert own.card.class_names == ("fresh", "worn")
        assert (predict(own, read_unseen(devices[0], own), 1).accuracy or 0) > 0.8
    else:
        assert (model.card.threshold is not None, own.card.threshold) == (task == "reconstruction", None)
        here, there = (predict_values(one, read_unseen(devices[0], one), 1).outputs for one in (model, own))
        assert np.array_equal(here, there)
