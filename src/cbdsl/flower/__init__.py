"""CB-DSL as a Flower app: the same conversation over the messages of a Grid; workers are Flower's nodes.

Nothing here decides on a claim or does arithmetic: that is `protocol` and `workers`, as everywhere.
"""
