"""Reports of runs, and the quality of results."""

from quark_onnx.report.figures import decibels, percent, percentage, size_change
from quark_onnx.report.loop import Loop, verdicts
from quark_onnx.report.measure import OutputError, measure
from quark_onnx.report.report import (
    Report,
    ResultNote,
    make_report,
    of_float_model,
    summarize,
)

__all__ = [
    "Loop",
    "OutputError",
    "Report",
    "ResultNote",
    "decibels",
    "make_report",
    "measure",
    "of_float_model",
    "percent",
    "percentage",
    "size_change",
    "summarize",
    "verdicts",
]
