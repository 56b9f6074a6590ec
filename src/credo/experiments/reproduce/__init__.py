"""Published tables, run again."""
