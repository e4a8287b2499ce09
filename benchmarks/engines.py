"""Print how the engines compare on this machine: `python benchmarks/engines.py [options of cbdsl bench]`."""

from __future__ import annotations

import sys

from cbdsl.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
