"""The networks, and the way between a module and its flat weights."""
