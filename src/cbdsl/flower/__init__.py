"""CB-DSL as a Flower app: the rounds of `algorithm` over the messages of a Grid, with Flower's nodes as workers."""
