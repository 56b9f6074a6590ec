"""One module per command; those that need no run are in `credo.cli.catalogue`."""
