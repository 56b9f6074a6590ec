"""`python -m credo` is the command `credo`."""

from credo.cli import main

if __name__ == "__main__":
    main()
