"""Look for honest workers that are banned: rounds without attackers, every claim compared at tolerance 0.

    python tools/clean_rounds.py --rounds 1000 --out clean      # the same folder goes on where it was stopped
    python tools/clean_rounds.py --rounds 250 --out clean --presets regression,anomaly

Goes through every preset on MNIST (or those named) with every codec on both engines, in short runs of ten workers (six
on torch), until so many rounds are played; from the second time on with another seed and another network. The servers
take turns, too: with the guard and commitments, with a soup, without either. Ends with exit code 1 if anybody was
banned or any claim set aside.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cbdsl import register
from cbdsl.presets import PRESETS
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec, words
from cbdsl.studies.sweep import FinishedRun, run_all

ENGINES = ("native", "torch")
MODELS: dict[str, tuple[str, ...]] = {  # by preset
    "regression": ("mlp", "softmax"), "anomaly": ("autoencoder", "mlp"), "": ("cnn", "mlp", "softmax")
}  # fmt: skip
ROUNDS = 9  # of a run: eight presets, seven codecs and two engines are a little over a thousand
SMALL: dict[str, Any] = {
    "rounds": ROUNDS,
    "verification.tolerance": 0.0,
    "data.samples_per_worker": 60,
    "data.shard_size": 30,
    "data.shared_training": 60,
    "data.shared_scoring": 400,
    "data.holdout": 400,
}
GUARD: dict[str, Any] = {"defence.guard": True, "defence.commitment": True}
SERVERS: tuple[dict[str, Any], ...] = (GUARD, {}, {**GUARD, "selection.name": "soup", "selection.k": 3})


def specs(presets: Sequence[str] = ()) -> Iterator[Spec]:
    """Short runs without end: all combinations, then all of them with the next seed."""
    embedded = [name for name, spec in PRESETS.items() if spec.data.source == "mnist"]  # nothing to fetch
    for seed in itertools.count():
        combined = itertools.product(presets or embedded, register.codec.names(), ENGINES)
        for place, (name, codec, engine) in enumerate(combined):
            rotates = PRESETS[name].selection.name == "rotation"
            models = MODELS.get(name, MODELS[""])
            server = {"selection.k": 4} if rotates else SERVERS[(place // 2 + seed) % len(SERVERS)]
            settings = {
                **SMALL,
                **server,
                "engine": engine,
                "workers": 10 if engine == "native" else 6,
                "model": models[(place // 2 + place // 14 + seed) % len(models)],
                "codec.up": codec,
                "codec.down": codec,
                "seed": seed,
            }
            yield resolve(PRESETS[name].with_settings(settings))


def show(played: int, total: int, share: float) -> None:
    """One line, written over."""
    del share
    print(f"\r{played} of {total} rounds", end="", file=sys.stderr, flush=True)


def report(runs: list[FinishedRun]) -> int:
    """Print what was played and who was banned; how many that are."""
    rounds, banned, aside, uploads = Counter[str](), 0, 0, 0
    for run in runs:
        wrong = sum(len(line.set_aside) for line in run.rounds)
        if run.summary.banned or wrong:
            print(f"{run.folder}: banned {run.summary.banned}, {wrong} claims set aside")
        banned, aside, uploads = banned + len(run.summary.banned), aside + wrong, uploads + run.summary.uploads
        for part in (run.spec.preset, run.spec.codec.up, run.spec.engine, run.spec.model, run.spec.selection.name):
            rounds[part] += len(run.rounds)
    print(", ".join(f"{part} {count}" for part, count in rounds.items()))
    print(f"{len(runs)} runs, {sum(len(run.rounds) for run in runs)} rounds, {uploads} uploads verified at tolerance 0")
    print(f"{banned} workers banned, {aside} claims set aside")
    return banned + aside


def main() -> None:
    """Play what is missing, then count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, help="processes at a time; as many as cores if not given")
    parser.add_argument("--presets", help="names with commas; those on MNIST if not given")
    given = parser.parse_args()
    presets = words(given.presets or "")
    runs = run_all(list(itertools.islice(specs(presets), -(-given.rounds // ROUNDS))), given.out, given.jobs, show)
    print(file=sys.stderr)
    sys.exit(bool(report(runs)))


if __name__ == "__main__":
    main()
