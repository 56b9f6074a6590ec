"""Errors about data files."""


class DataMissingError(FileNotFoundError):
    """Files of a data set are missing; the message lists them, where they go and how to download them."""


class DataCorruptError(ValueError):
    """A file has the wrong format, is truncated, or is unsafe to read."""


class DownloadError(RuntimeError):
    """A download failed or arrived damaged; nothing was changed."""
