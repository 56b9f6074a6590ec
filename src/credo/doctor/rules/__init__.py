"""The doctor's rules, by topic."""
