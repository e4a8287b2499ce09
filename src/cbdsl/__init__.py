"""CB-DSL: communication-efficient and Byzantine-robust distributed swarm learning (arXiv 2208.05578)."""
