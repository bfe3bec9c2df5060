"""What a run did and how good its result is."""

from quark_onnx.report.loop import measure_loop, verdicts
from quark_onnx.report.measure import OutputError, measure
from quark_onnx.report.report import Report, summarize

__all__ = ["OutputError", "Report", "measure", "measure_loop", "summarize", "verdicts"]
