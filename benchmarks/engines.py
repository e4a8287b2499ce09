"""Print how the engines compare on this machine: `python benchmarks/engines.py [--quick] [--json]`."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from cbdsl.bench import measure, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["cnn", "mlp", "softmax"])
    parser.add_argument("--workers", nargs="+", type=int, default=[50])
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--scoring", type=int, default=2000, help="samples that every worker scores")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(
        options.models,
        options.workers,
        options.batch,
        options.threads,
        options.repeats,
        scoring=options.scoring,
        quick=options.quick,
        progress=lambda done, total, what: print(f"[{done}/{total}] {what}", file=sys.stderr),
    )
    if options.json:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(table(rows))


if __name__ == "__main__":
    main()
