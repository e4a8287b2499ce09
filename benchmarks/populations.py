"""What a large population costs: rounds of a cohort of many workers against rounds of as many workers in full.

    python benchmarks/populations.py --workers 1000000 --cohort 500 --rounds 5

Both runs are verified rotation with overlapping data (the preset `population`), played by turns in one process. Prints
user CPU seconds per round of each, their ratio, and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
from collections.abc import Iterator

from cbdsl.presets import preset
from cbdsl.runs.build import Experiment
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve


def user_seconds(rounds: Iterator[object]) -> float:
    """Play a round; return the user CPU seconds that it took."""
    before = os.times().user
    next(rounds)
    return os.times().user - before


def main() -> None:
    """Play both runs by turns, and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    runs = {}
    for name, workers in (("population", given.workers), ("in full", given.cohort)):
        spec = preset("population").with_settings(
            {"workers": workers, "participation": given.cohort, "rounds": given.rounds + 1, "model": given.model}
        )
        experiment = Experiment.prepare(resolve(spec), threads=given.threads)
        runs[name] = play_rounds(experiment, experiment.first_state())
    for rounds in runs.values():
        next(rounds)  # memory is touched for the first time
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(given.rounds):
        for name, rounds in runs.items() if number % 2 else reversed(runs.items()):
            seconds[name].append(user_seconds(rounds))
    for name, each in seconds.items():
        rounded = ", ".join(f"{one:.2f}" for one in each)
        print(f"{name:12} {statistics.median(each):.2f} s of user CPU per round ({rounded})")
    pairs = zip(seconds["population"], seconds["in full"], strict=True)
    ratio = statistics.median(many / few for many, few in pairs)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"ratio        {ratio:.3f}, the median of {given.rounds} pairs of rounds")
    print(f"memory       {peak / 1e9:.2f} GB at most, of both runs together")


if __name__ == "__main__":
    main()
