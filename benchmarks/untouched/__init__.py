"""What users get who set nothing: every method with its defaults, beside plain networks and other libraries."""
