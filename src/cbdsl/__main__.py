"""`python -m cbdsl`: the command line."""

from cbdsl.cli.main import main

main()
