"""Server and workers as processes that exchange messages over MQTT."""
