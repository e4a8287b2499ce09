"""Models as few bytes: what travels instead of 32 bits a weight."""
