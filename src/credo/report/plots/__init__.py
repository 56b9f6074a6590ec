"""Plots of the HTML report as SVG and PNG."""
