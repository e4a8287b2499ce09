"""One run: what it is built from, how it is played, recorded and resumed."""
