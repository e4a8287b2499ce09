"""How long a whole command takes from nothing to its results, against torch: `python benchmarks/startup.py [TURNS]`.

start   `cbdsl run --rounds 1` against no more than `import torch`
job     ten rounds of FedAvg (50 workers, 300 samples each, one epoch, batches of 10, the test set every round) against
        the same work in two torch processes, see `torch_fedavg.py`; start-up and data are part of both

Contenders take turns and the fastest turn of each counts, so that what else the machine does meets both. Only the
ratios are worth reading, and only within one run. Processor seconds are those of all processes together.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROUNDS = 10


@dataclass
class Contender:
    """A command and how long it took at best."""

    title: str
    words: list[str]  # OUT stands for a folder that does not exist yet
    wall: float = float("inf")
    processor: float = float("inf")
    output: str = field(default="", repr=False)

    def take_a_turn(self) -> None:
        """Run the command once more, and keep the times if they are the best so far."""
        with tempfile.TemporaryDirectory() as folder:
            words = [word.replace("OUT", f"{folder}/run") for word in self.words]
            before, started = _processor_seconds(), time.perf_counter()
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
            wall, processor = time.perf_counter() - started, _processor_seconds() - before
        if done.returncode:
            raise SystemExit(f"{self.title} failed:\n{done.stderr}")
        self.wall, self.processor = min(self.wall, wall), min(self.processor, processor)
        self.output = done.stdout


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(name: str, ours: Contender, theirs: Contender, turns: int) -> None:
    for _ in range(turns):
        ours.take_a_turn()
        theirs.take_a_turn()
    print(f"{name}: {theirs.wall / ours.wall:.2f} times as fast by the clock, ", end="")
    print(f"{theirs.processor / ours.processor:.2f} times by processor seconds")
    for one in (ours, theirs):
        print(f"    {one.title:42} {one.wall:7.2f} s   {one.processor:7.2f} processor s", flush=True)


def main(turns: int) -> None:
    run = ["-m", "cbdsl", "run", "--preset", "paper-iid", "--json", "--out", "OUT"]
    start = Contender("cbdsl run --rounds 1", [*run, "--rounds", "1"])
    compare("start", start, Contender("import torch", ["-c", "import torch"]), turns)
    job = Contender("cbdsl run --method fedavg", [*run, "--method", "fedavg", "--rounds", str(ROUNDS)])
    script = str(Path(__file__).with_name("torch_fedavg.py"))
    by_torch = Contender("the same in two torch processes", [script, str(ROUNDS)])
    compare("job", job, by_torch, turns)
    reached = json.loads(job.output)["final_accuracy"], float(by_torch.output)
    print(f"    accuracy reached: {reached[0]:.2%} and {reached[1]:.2%}; the batches differ")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
