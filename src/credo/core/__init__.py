"""The posterior interface and what all methods stand on."""
