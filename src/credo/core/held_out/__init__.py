"""What held-out rows gave a posterior: its calibration, and the ledger of the rows that were used."""
