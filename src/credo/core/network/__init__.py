"""A network as an object: private copies of its module tree."""
