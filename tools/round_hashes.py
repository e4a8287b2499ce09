"""Prove that a change left the numbers alone: hash the rounds and the model of many short and long runs, and compare.

    python tools/round_hashes.py record FILE     # before the change
    python tools/round_hashes.py compare FILE    # after it: exit code 1 and a list of what differs, key by key

Every preset with every method is played to its end, in the simulator; then attacks, aggregators, partitions, models and
both engines for a few rounds; then small swarms over a real broker. Hashes hold for one build on one kind of machine,
so they are recorded and compared in one place and not kept in the repository.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.numpy import load_file

PRESETS = ("paper-iid", "paper-noniid", "script-iid", "script-noniid", "strong-iid", "strong-noniid")
METHODS = ("cb-dsl", "fedavg", "fedpso", "pso")
ATTACKS = (
    "gaussian", "sign-flip", "scaled", "zero", "nan", "alie", "ipm", "mimic", "min-max", "label-flip", "backdoor",
    "liar", "memoriser", "staller", "flooder", "copycat", "slow-drift",
)  # fmt: skip
AGGREGATORS = (
    "mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centred-clipping", "bulyan", "fltrust",
    "zeno", "nnm+krum",
)  # fmt: skip
IGNORED = {"seconds"}  # the only key that differs between two runs of one spec


def cases() -> dict[str, list[str]]:
    """Names of runs and the words of the commands that make them."""
    found = {}
    for preset in PRESETS:
        for method in METHODS:
            found[f"{preset} {method}"] = ["run", "--preset", preset, "--method", method]
    short = ["run", "--preset", "strong-iid", "--set", "local.epochs=1", "--rounds", "3"]
    for attack in ATTACKS:
        lying = [*short, "--byzantine", "5", "--attack", attack]
        found[f"attack {attack}"] = [*lying, "--guard", "--soup", "3"]
        found[f"attack {attack} on best one"] = lying
        found[f"attack {attack} on fedavg"] = [*lying, "--method", "fedavg"]
    for rule in AGGREGATORS:
        lying = [*short, "--method", "fedavg", "--shared", "train", "--byzantine", "5", "--attack", "alie"]
        found[f"aggregator {rule}"] = [*lying, "--aggregator", rule]
    for shared in ("none", "score", "train", "both"):
        found[f"shared {shared}"] = [*short, "--shared", shared]
    for model in ("mlp", "softmax"):
        found[f"model {model}"] = [*short, "--model", model]
    for partition in ("dirichlet", "similarity"):
        found[f"partition {partition}"] = [*short, "--set", f"data.partition={partition}"]
    for method in METHODS:
        start = [
            word for word in short if method != "pso" or word not in {"--set", "local.epochs=1"}
        ]  # it trains nothing
        found[f"torch {method}"] = [*start, "--method", method, "--engine", "torch", "--workers", "6"]
        for preset in ("paper-noniid", "strong-iid"):
            words = ["swarm", preset, "--workers", "4", "--rounds", "3", "--set", f"method={method}"]
            found[f"swarm {preset} {method}"] = words
    guarded = ["--set", "defence.guard=true", "--set", "defence.commitment=true"]
    guarded += ["--set", "selection.name=soup", "--set", "selection.k=3"]
    found["swarm guarded soup"] = ["swarm", "strong-iid", "--workers", "6", "--rounds", "3", *guarded]
    return found


def hashes_of(words: list[str]) -> dict[str, str]:
    """One hash for each key of the rounds, and one for the model."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", "cbdsl", *words, "--out", str(out), "--threads", "1", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": done.stderr[-400:]}
        rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        model = load_file(out / "model.safetensors")
    hashes = {
        key: hashlib.sha256(json.dumps([line.get(key) for line in rounds]).encode()).hexdigest()[:12]
        for key in rounds[0]
        if key not in IGNORED
    }
    content = b"".join(model[name].tobytes() for name in sorted(model))
    return {**hashes, "model": hashlib.sha256(content).hexdigest()[:12]}


def main() -> None:
    """Record or compare."""
    order, path = sys.argv[1], Path(sys.argv[2])
    chosen = {name: words for name, words in cases().items() if all(part in name for part in sys.argv[3:])}
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(chosen, pool.map(hashes_of, chosen.values()), strict=True))
    if order == "record":
        path.write_text(json.dumps(found, indent=1) + "\n")
        return
    recorded = json.loads(path.read_text())
    differences = [
        f"{name}: {key}"
        for name in chosen
        for key in sorted(recorded[name])  # keys that are new say nothing about the old ones
        if recorded[name].get(key) != found[name].get(key)
    ]
    print("\n".join(differences) or f"{len(chosen)} runs, all the same")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
