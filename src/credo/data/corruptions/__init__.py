"""Image corruptions at five severities (Hendrycks and Dietterich 2019)."""
