"""What can go wrong with data files."""


class DataMissingError(FileNotFoundError):
    """Files of a data set are not there; the message says which ones, where they go and how to fetch them."""


class DataCorruptError(ValueError):
    """A file is not what its name promises: wrong format, truncated, or unsafe to read."""


class DownloadError(RuntimeError):
    """A download failed or arrived damaged; nothing was put in place."""
