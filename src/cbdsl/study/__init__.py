"""Many runs: sweeps, the arena, the paper's figures and claims, benchmarks."""
