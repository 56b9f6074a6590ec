"""Where training runs, and in which precision."""
