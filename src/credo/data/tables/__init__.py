"""CSV tables: columns, targets, and rows to predict."""
