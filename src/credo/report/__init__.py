"""HTML report that compares runs: metrics with intervals, calibration, uncertainty, training, examples, findings."""

from credo.core.support.extras import needs

with needs("report", "credo.report"):
    from credo.report.content import Content, RunContent, gather
    from credo.report.html import render, write_report

__all__ = ["Content", "RunContent", "gather", "render", "write_report"]
