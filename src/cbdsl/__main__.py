"""`python -m cbdsl`: the command line."""

from cbdsl.cli.main import main

if __name__ == "__main__":
    main()
