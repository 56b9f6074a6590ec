"""Commands that show what there is and need no run: names, data sets, the size of a network."""
