"""Reports of runs, and the quality of results."""

from quark_onnx.report.figures import decibels, percent, percentage, size_change
from quark_onnx.report.loop import Loop, verdicts
from quark_onnx.report.measure import OutputError, measure
from quark_onnx.report.report import (
    Report,
    make_report,
    summarize,
)

__all__ = [
    "Loop",
    "OutputError",
    "Report",
    "decibels",
    "make_report",
    "measure",
    "percent",
    "percentage",
    "size_change",
    "summarize",
    "verdicts",
]
