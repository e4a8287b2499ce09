"""What a network costs: `python tests/deploy/overhead.py`. Not collected by pytest.

First the time of a round with next to no training, beside the simulator's for the same spec; then the bytes that
workers send in CB-DSL and in FedAvg, counted as whole MQTT packets on their connections.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import cbdsl
from cbdsl.network.broker import Kind
from cbdsl.network.local_swarm import WorkerProcesses, run_swarm
from cbdsl.network.mqtt import total_bytes
from cbdsl.network.timeouts import Deadlines
from cbdsl.presets import preset
from cbdsl.runs.build import Experiment
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.deployment import memory_of, pictures, tiny_spec


def main() -> None:
    """Print one JSON object a measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 50])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--brokers", nargs="+", default=["mosquitto", "embedded"])
    parser.add_argument("--bytes", type=int, nargs="*", default=[8], help="numbers of workers for the count of bytes")
    parser.add_argument("--byte-rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = pictures(Path(folder) / "pictures", train=max(options.workers) * 10 + 200)
        for workers in options.workers:
            for broker in options.brokers:
                spec = tiny_spec(
                    data, workers=workers, rounds=options.rounds, data__samples_per_worker=10, local__steps=1,
                    local__learning_rate=1e-3,
                )  # fmt: skip
                print(json.dumps(overhead(spec, Path(folder) / f"{broker}-{workers}", broker)), flush=True)
        for workers in options.bytes:
            base = replace(preset("paper-iid"), workers=workers, rounds=options.byte_rounds)
            for method in ("cb-dsl", "fedavg"):
                spec = resolve(replace(base, method=method, shared="default"))
                print(json.dumps(uplink(spec, Path(folder) / f"bytes-{method}-{workers}")), flush=True)


def overhead(spec: Spec, out: Path, broker: Kind) -> dict[str, object]:
    """Seconds a round on the network and in memory."""
    crews: list[WorkerProcesses] = []
    memory: list[int] = []

    def look(line: cbdsl.RoundRecord) -> None:
        if line.round == spec.rounds:
            memory.extend(memory_of(process.pid) for process in crews[0].processes)

    outcome = run_swarm(Experiment.prepare(spec, threads=1), out, broker, Deadlines(), crews.append, look)
    seconds = sorted(line.seconds for line in outcome.served.result.rounds[1:])
    simulated = [line.seconds for line in cbdsl.run(spec).rounds[1:]]
    return {
        "workers": spec.workers,
        "broker": broker,
        "median_ms": round(1000 * statistics.median(seconds), 1),
        "p95_ms": round(1000 * seconds[int(0.95 * len(seconds))], 1),
        "simulator_ms": round(1000 * statistics.median(simulated), 1),
        "worker_rss_kb": [min(memory), max(memory)],
    }


def uplink(spec: Spec, out: Path) -> dict[str, object]:
    """Bytes that workers send, and what of it is models."""
    crews: list[WorkerProcesses] = []
    memory: list[int] = []

    def look(line: cbdsl.RoundRecord) -> None:
        if line.round == spec.rounds:
            memory.extend(memory_of(process.pid, "VmHWM") for process in crews[0].processes)

    outcome = run_swarm(Experiment.prepare(spec, threads=None), out, "auto", Deadlines(), crews.append, look)
    summary, wire = outcome.served.result.summary, outcome.workers_wire
    home = out / "workers" / crews[0].names[0]
    return {
        "method": spec.method,
        "workers": spec.workers,
        "rounds": spec.rounds,
        "accuracy": summary.final_accuracy,
        "uplink_wire_bytes": total_bytes(wire, "sent"),
        "uplink_payload_bytes": summary.uplink_bytes,
        "downlink_wire_bytes": total_bytes(wire, "received"),
        "sent": wire["sent"],
        "received": wire["received"],
        "worker_peak_rss_kb": [min(memory), max(memory)],
        "worker_disk": {file.name: file.stat().st_size for file in sorted(home.iterdir())},
    }


if __name__ == "__main__":
    main()
