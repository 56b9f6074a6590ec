"""`python -m credo` is the command `credo`."""

from credo.cli import main

main()
