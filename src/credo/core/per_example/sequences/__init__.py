"""Rules for layers over sequences: recurrent cells, unrolled over time, and attention."""
