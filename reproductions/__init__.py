"""Published tables and figures, reproduced. From a checkout: `python -m reproductions --help`."""
