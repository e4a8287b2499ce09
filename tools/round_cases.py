"""The runs whose numbers are compared: their names, the words of their commands, and the small data sets they use.

Commands are the only interface used here, because they stay when modules are renamed. `round_hashes.py` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

METHODS = ("cb-dsl", "restart", "fedavg", "fedpso", "pso", "fedprox", "scaffold", "fedavgm", "fedadam")
REGIMES = ("paper-iid", "paper-noniid", "script-noniid", "strong-iid")
CODECS = ("q8", "q4", "q3", "q2", "topk", "adaptive")
ATTACKS = (
    "gaussian", "sign-flip", "scaled", "zero", "nan", "alie", "ipm", "mimic", "min-max", "min-sum", "fang-trim",
    "fang-krum", "poisoned-fl", "neurotoxin", "dba", "a3fl", "model-replacement", "edge-case", "label-flip", "backdoor",
    "liar", "memoriser", "staller", "absent", "flooder", "copycat", "slow-drift", "rescaler", "permuter", "crammer",
    "boiler", "sleeper", "sleeper-lite", "pair-flip", "drop-class", "fifth",
)  # fmt: skip
SHORT_ATTACKS = ("alie", "label-flip", "liar", "memoriser", "nan", "staller")
AGGREGATORS = (
    "mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centred-clipping", "bulyan", "fltrust",
    "zeno", "rlr", "mda", "align-ins", "dnc", "sign-guard", "flame", "bant", "auto-bant", "fedgreed", "loss-clusters",
)  # fmt: skip
PARTITIONS = ("iid", "shards", "dirichlet", "similarity", "quantity", "feature", "by-client")
DATA = {
    "images": (1, 16, 16),
    "sensors": (6, 64),
    "sounds": (1, 49, 10),
    "colours": (3, 32, 32),
}
"""Names of the small data sets and the shapes of their samples."""
MODELS = {
    "cnn": "images",
    "mlp": "images",
    "softmax": "images",
    "har-cnn": "sensors",
    "ds-cnn": "sounds",
    "resnet8": "colours",
    "mobilenet-025": "colours",
}
"""Models and the data set that each one is trained on."""
SIZES = {"samples_per_worker": 60, "shard_size": 30, "shared_training": 40, "shared_scoring": 100, "holdout": 100}
"""Settings of `data` in short runs."""
GUARD = ("--set", "defence.guard=true", "--set", "defence.commitment=true")
SOUP = ("--soup", "3")
FEW = tuple(
    word
    for size in ("samples_per_worker=20", "shared_training=10", "shared_scoring=30", "holdout=30")
    for word in ("--set", f"data.{size}")
)
"""Smaller sizes for large networks, which portable kernels train slowly."""
ROTATION = ("--select", "rotation", "--set", "selection.k=4")


@dataclass(frozen=True)
class Case:
    """One run: the words of its command, and how it is carried out.

    words: a data set of `DATA` appears as its file name. stopped: the run is killed after a checkpoint and resumed.
    twin: the name of another case that must have the same numbers. short: the case is part of the committed set.
    """

    words: tuple[str, ...]
    stopped: bool = False
    twin: str = ""
    short: bool = False


def small(preset: str, *more: str, rounds: int = 3, workers: int = 8, data: str = "images") -> tuple[str, ...]:
    """Return the words of a short run on a small data set, with the sizes that `write_files` wrote for a preset."""
    counts = ("--rounds", str(rounds), "--workers", str(workers))
    return ("run", f"{preset}.toml", "--data", f"{data}.npz", *counts, *more)


def all_cases() -> dict[str, Case]:
    """Return all cases by name. Those that take longest come first, so that two processes end at about one time."""
    return {
        "preset rotation-noniid": Case(("run", "--preset", "rotation-noniid")),
        "preset paper-iid": Case(("run", "--preset", "paper-iid")),
        **_elsewhere(),
        **_methods(),
        **_models(),
        **_codecs(),
        **_attacks(),
        **_servers(),
        **_settings(),
    }


def _elsewhere() -> dict[str, Case]:
    """Return runs on a Ray cluster and over MQTT, and runs that are resumed."""
    rotation = ("--method", "restart", *ROTATION, *GUARD, "--codec", "q4", "--byzantine", "2", "--attack", "liar")
    ways = {
        "cb-dsl": (),
        "cb-dsl liar q4": ("--codec", "q4", "--byzantine", "2", "--attack", "liar"),
        "rotation": rotation,
        "scaffold": ("--method", "scaffold"),
    }
    found = {}
    for name, words in ways.items():
        here = small("strong-iid", *words, rounds=20)
        found[f"ray {name}"] = Case((*small("strong-iid", *words), "--on", "ray", "--shards", "3"), twin=f"here {name}")
        found[f"resume {name}"] = Case(here, stopped=True, twin=f"whole {name}", short=name == "rotation")
        found[f"here {name}"] = Case(small("strong-iid", *words))
        found[f"whole {name}"] = Case(here, short=name == "rotation")
    for name, words in {**ways, "fedavg": ("--method", "fedavg"), "fedpso": ("--method", "fedpso")}.items():
        found[f"mqtt {name}"] = Case(("swarm", *small("strong-iid", *words, rounds=2, workers=6)[1:]))
    return found


def _methods() -> dict[str, Case]:
    found = {}
    for method in METHODS:
        found[f"method {method} torch"] = Case(small("strong-iid", "--method", method, "--engine", "torch"))
        for regime in REGIMES:
            words = small(regime, "--method", method, "--engine", "native")
            found[f"method {method} {regime}"] = Case(words, short=regime in {"paper-noniid", "strong-iid"})
        words = small("paper-noniid", "--method", method, "--participation", "0.5")
        found[f"participation {method}"] = Case(words, short=method in {"cb-dsl", "scaffold"})
    return found


def _models() -> dict[str, Case]:
    found = {}
    for model, data in MODELS.items():
        words = small("paper-iid", "--model", model, *FEW, rounds=2, workers=2, data=data)
        found[f"model {model}"] = Case(words, short=model in {"mlp", "softmax", "ds-cnn"})
        found[f"model {model} torch"] = Case((*words, "--engine", "torch"))
    return found


def _codecs() -> dict[str, Case]:
    found = {}
    for codec in CODECS:
        up, down = ("--set", f"codec.up={codec}"), ("--set", f"codec.down={codec}")
        found[f"codec {codec} up"] = Case(small("strong-iid", *up))
        found[f"codec {codec} down"] = Case(small("strong-iid", *down))
        found[f"codec {codec} both"] = Case(small("strong-iid", *up, *down), short=True)
        found[f"codec {codec} soup"] = Case(small("strong-iid", *SOUP, *up, *down))
        if codec != "adaptive":  # it measures on D_sc, which averaging does not have
            found[f"codec {codec} fedavg"] = Case(small("strong-iid", "--method", "fedavg", *up, *down), short=True)
    for option in ("q4.block=64", "topk.share=0.2", "adaptive.slack=0.1"):
        words = ("--codec", option.partition(".")[0], "--set", f"options.{option}")
        found[f"codec {option}"] = Case(small("strong-iid", *words))
    return found


def _attacks() -> dict[str, Case]:
    ways = {
        "best": (),
        "soup": (*SOUP, *GUARD),
        "rotation": ("--method", "restart", *ROTATION, *GUARD),
        "fedavg": ("--method", "fedavg"),
    }
    return {
        f"attack {attack} {name}": Case(
            small("strong-iid", "--byzantine", "2", "--attack", attack, *words), short=attack in SHORT_ATTACKS
        )
        for attack in ATTACKS
        for name, words in ways.items()
    }


def _servers() -> dict[str, Case]:
    """Return the selections with their settings, and the aggregators."""
    restart = ("--method", "restart")
    ways = {
        "best": ("--select", "best"),
        "best guarded": ("--select", "best", *GUARD),
        "best restart": ("--select", "best", *restart),
        "soup": ("--select", "soup"),
        "soup restart q4": ("--select", "soup", *restart, "--codec", "q4"),
        "rotation": (*ROTATION, *restart),
        "rotation cb-dsl": (*ROTATION, *GUARD),
        "rotation slow": (*ROTATION, *restart, *GUARD, "--set", "server.momentum=0.0"),
        "rotation agreement": (*ROTATION, *restart, "--set", "options.rotation.agreement=true"),
    }
    found = {f"selection {name}": Case(small("strong-iid", *words), short=True) for name, words in ways.items()}
    for rule in AGGREGATORS:
        lying = ("--method", "fedavg", "--shared", "both", "--byzantine", "2", "--attack", "alie")
        words = small("strong-iid", *lying, workers=11)
        short = rule in {"geometric-median", "krum", "trimmed-mean", *AGGREGATORS[10:]}
        found[f"aggregator {rule}"] = Case((*words, "--aggregator", rule), short=short)
        if rule == "median":
            found[f"aggregator bucketing+{rule}"] = Case((*words, "--aggregator", f"bucketing+{rule}"), short=True)
        found[f"aggregator nnm+{rule}"] = Case((*words, "--aggregator", f"nnm+{rule}"), short=rule == "median")
    return found


def _settings() -> dict[str, Case]:
    """Return runs with one setting changed: data, swarm, local training, seed, threads."""
    found = {}
    for partition in PARTITIONS:
        words = ("--set", f"data.partition={partition}")
        found[f"partition {partition}"] = Case(small("strong-iid", *words), short=True)
        found[f"partition {partition} fedavg"] = Case(small("strong-iid", *words, "--method", "fedavg"))
    for shared in ("none", "score", "train", "both"):
        found[f"shared {shared}"] = Case(small("strong-iid", "--shared", shared))
    changed = (
        "swarm.start=apart", "swarm.draw=worker", "swarm.sgd_from=current",
        "swarm.velocity=full", "swarm.cognitive=0.5", "local.steps=5", "local.weight_decay=0.01", "local.batch_size=7",
        "verification.tolerance=0.0", "defence.invitations=1",
    )  # fmt: skip
    for setting in changed:
        found[f"setting {setting}"] = Case(small("strong-iid", "--set", setting))
    found["seed 7"] = Case(small("strong-iid", "--seed", "7"))
    found["threads 1"] = Case(small("strong-iid"))
    found["threads 2"] = Case((*small("strong-iid"), "--threads", "2"), twin="threads 1")
    real = ("run", "--preset", "script-noniid", "--workers", "2", "--rounds", "2", "--set", "data.shared_scoring=400")
    found["mnist"] = Case(real, short=True)
    return found


def write_files(folder: Path) -> None:
    """Write what the commands name: a spec per preset with small sizes, and the small data sets."""
    for preset in REGIMES:
        sizes = "\n".join(f"{key} = {size}" for key, size in SIZES.items())
        (folder / f"{preset}.toml").write_text(f'preset = "{preset}"\n[data]\n{sizes}\n')
    _write_data(folder)


def _write_data(folder: Path) -> None:
    """Write the small data sets: noisy copies of one random pattern per class, the same bits on every machine."""
    for seed, (name, shape) in enumerate(DATA.items()):
        draw = np.random.Philox(seed)
        patterns = _random_bytes(draw, (10, *shape))
        arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
        for part, count in (("train", 1500), ("test", 200)):
            labels = np.arange(count) % 10
            noise = _random_bytes(draw, (count, *shape))
            mixed = patterns[labels] + 3 * noise - 4 * 128  # whole numbers, so no rounding depends on the machine
            arrays[f"{part}_features"] = mixed.astype(np.float32) / np.float32(256)
            arrays[f"{part}_labels"] = labels
        arrays["train_clients"] = np.arange(1500) // 10 % 12
        with (folder / f"{name}.npz").open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def _random_bytes(draw: np.random.Philox, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return random whole numbers from 0 to 255, taken from the generator's raw output."""
    count = int(np.prod(shape))
    words = np.asarray(draw.random_raw(-(-count // 8)), "<u8")
    return words.view(np.uint8)[:count].reshape(shape).astype(np.int64)
