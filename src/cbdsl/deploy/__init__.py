"""The swarm on a network: server and workers as processes that talk over MQTT."""
