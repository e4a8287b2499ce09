"""The command line: reads words, calls the rest, shows what happens."""
