"""A Flower federation in this process, and the simulated run to compare it with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cbdsl.flower.server import play
from cbdsl.presets import preset
from cbdsl.runs import loop as simulator
from cbdsl.runs.resolve import resolve
from cbdsl.spec import parse_setting
from support.local_grid import LocalGrid, context_of, federation

SMALL = (
    "workers=5 data.samples_per_worker=60 data.shared_training=40 data.shared_scoring=80 data.holdout=80 model=softmax"
)


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def simulated(folder: Path, settings: str, rounds: int) -> list[dict[str, Any]]:
    options = dict(parse_setting(text) for text in settings.split())
    spec = resolve(preset("paper-iid").with_settings({**options, "rounds": rounds}))
    simulator.run(spec, out=folder, callbacks=[])
    return rounds_of(folder)


def played(
    tmp_path: Path, settings: str = SMALL, rounds: int = 3, grid: LocalGrid | None = None, **more: object
) -> None:
    grid = grid or federation(5, tmp_path / "state")
    wishes = {"settings": settings, "rounds": rounds, "upload_seconds": 1, **more}
    play(grid, context_of(tmp_path / "run", **wishes))


def own_files(tmp_path: Path, count: int) -> list[str]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"own-{number}.npz" for number in range(count)]
    for number, path in enumerate(paths):
        size = 20 + 10 * number
        features = rng.standard_normal((size, 1, 28, 28)).astype(np.float32)
        np.savez(path, features=features, labels=rng.integers(10, size=size))
    return [str(path) for path in paths]
