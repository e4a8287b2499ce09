"""Studies of many runs: sweeps, comparisons, the arena, the reproduction, tuning, generated data, benchmarks."""
