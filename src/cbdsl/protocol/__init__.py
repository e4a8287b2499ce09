"""The conversation between a server and a swarm: messages, rounds, verification. No transport, no data, no torch."""
