"""`python -m cbdsl`: the command line."""

from cbdsl.cli import main

main()
