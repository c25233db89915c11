"""`python -m headrace`: the command line, where the `headrace` script is not on the path."""

from headrace.cli import main

if __name__ == "__main__":
    main()
