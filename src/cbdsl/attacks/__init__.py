"""Byzantine workers: the attacks, and what an attacker may know."""
