"""A long run with many worker processes, killed at random: `python tests/deploy/soak.py --workers 50 --rounds 200`.

Not collected by pytest. Kills a random worker every `--every` seconds, and the server and the broker a few times on the
way; starts each again at once. Ends with figures, and fails if the run is stuck, an accepted model is lost, an honest
worker is banned or the attacker is not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from cbdsl.network.broker import Kind, find_mosquitto
from cbdsl.runs.folder import read_result
from support.deployment import Deployment, deployment, memory_of, pictures, tiny_spec


def main() -> None:
    """Run the soak and print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills of workers")
    parser.add_argument("--broker", choices=["mosquitto", "embedded"], default=None)
    parser.add_argument("--minutes", type=float, default=20, help="a run that takes longer is taken for stuck")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = pictures(Path(folder) / "pictures", train=options.workers * 20 + 400, contrast=12)
        spec = tiny_spec(
            data, workers=options.workers, rounds=options.rounds, data__samples_per_worker=20, attack__byzantine=1,
            attack__name="liar", local__learning_rate=0.002,
        )  # fmt: skip
        kind: Kind = options.broker or ("mosquitto" if find_mosquitto() else "embedded")
        with deployment(Path(folder) / "soak", spec, kind) as made:
            figures = soak(made, options.every, options.minutes * 60)
    print(json.dumps(figures, indent=2))


def soak(made: Deployment, every: float, seconds: float) -> dict[str, object]:
    """Play the run under fire."""
    rng = random.Random(0)
    rounds, attacker = made.spec.rounds, made.names[made.stage.byzantine[0]]
    deadlines = ("--grace-seconds", "2", "--upload-seconds", "10", "--round-seconds", "60")
    started = time.monotonic()
    made.start_workers()
    made.start_server(*deadlines)
    while made.rounds_played() == 0:
        time.sleep(0.1)
    joined = time.monotonic() - started
    kills = {"worker": 0, "server": 0, "broker": 0}
    memory: dict[str, list[int]] = {"server": [], "worker": []}
    plan = {rounds * part // 8: "server" for part in (1, 3, 6)} | {rounds * part // 8: "broker" for part in (2, 5)}
    last = time.monotonic()
    assert made.server is not None
    while made.server.poll() is None:
        time.sleep(0.05)
        if time.monotonic() - started > seconds:
            sys.exit(f"stuck: {made.rounds_played()} of {rounds} rounds after {seconds:.0f} s")
        played = made.rounds_played()
        due = [number for number in plan if number <= played]
        for number in due:
            what = plan.pop(number)
            kills[what] += 1
            if what == "server":
                made.kill_server()
                made.start_server(*deadlines)
            else:
                made.kill_broker()
        if time.monotonic() - last > every and played < rounds - 2:
            last = time.monotonic()
            name = rng.choice([name for name in made.names if name != attacker])
            made.kill_worker(name)
            made.start_worker(name)
            kills["worker"] += 1
            memory["server"].append(memory_of(made.server.pid) if made.server.poll() is None else 0)
            memory["worker"].append(memory_of(made.workers[rng.choice([n for n in made.names if n != name])].pid))
    assert made.server.returncode == 0, (made.folder / "server.log").read_text()[-3000:]
    took = time.monotonic() - started
    return {"seconds": round(took, 1), "joining_seconds": round(joined, 1), "kills": kills} | judge(made, memory)


def judge(made: Deployment, memory: dict[str, list[int]]) -> dict[str, object]:
    """What the run left, and whether it is right."""
    _, summary, records = read_result(made.out)
    assert [line.round for line in records] == list(range(1, made.spec.rounds + 1)), "a round is missing"
    assert summary.banned == list(made.stage.byzantine), "the wrong workers are banned"
    scores = [line.global_score for line in records if line.global_score is not None]
    assert scores == sorted(scores, reverse=True), "F^g rose: an accepted model was lost"
    fell = [line.round for line, before in zip(records[1:], scores, strict=False) if (line.global_score or 0) < before]
    assert [line.round for line in records[1:] if line.accepted] == fell, "a score fell without an accepted model"
    with np.load(made.out / "checkpoint.npz") as stored:
        verifier = made.stage.server.verifier
        assert verifier.score is not None
        measured = verifier.score(stored["global_best"])
    assert scores[-1] is not None
    assert abs(measured - scores[-1]) < 1e-4, "w^g is not the model that was accepted last"
    events = [json.loads(line) for line in (made.out / "events.jsonl").read_text().splitlines()]
    answered = [event["answered"] for event in events if event["event"] == "closed"]
    durations = [event["seconds"] for event in events if event["event"] == "closed"]
    return {
        "workers": made.spec.workers,
        "rounds": len(records),
        "accuracy": summary.final_accuracy,
        "uploads": summary.uploads,
        "accepted": sum(len(line.accepted) for line in records),
        "silent": sum(len(line.silent) for line in records),
        "answers_per_round": [min(answered), statistics.median(answered), max(answered)],
        "round_seconds": {
            "median": statistics.median(durations),
            "longest": max(durations),
        },
        "server_rss_kb": [value for value in memory["server"] if value][:: max(1, len(memory["server"]) // 8)],
        "worker_rss_kb": [min(memory["worker"]), max(memory["worker"])],
        "refused": events[-1]["refused"],
        "disk_of_a_worker": sum(
            file.stat().st_size
            for file in (made.folder / "workers" / made.names[0]).iterdir()
            if file.name not in {"samples.npz", "worker.log"}
        ),
    }


if __name__ == "__main__":
    main()
