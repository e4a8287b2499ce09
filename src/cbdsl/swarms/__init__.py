"""Swarms that implement `report` and `upload`: in this process and on a Ray cluster."""
