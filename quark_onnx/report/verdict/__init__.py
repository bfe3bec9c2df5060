"""A verdict on a quantized model in the terms of its task."""

from quark_onnx.report.verdict.advice import Settings, next_steps
from quark_onnx.report.verdict.change import changed, is_possible
from quark_onnx.report.verdict.collect import VerdictCollector, check_task
from quark_onnx.report.verdict.exhibits import Exhibits
from quark_onnx.report.verdict.labels import (
    Score,
    Scorer,
    read_box_files,
    read_labels,
    score_lines,
)
from quark_onnx.report.verdict.verdict import (
    DESCRIPTIONS,
    TASKS,
    THRESHOLDS,
    Figure,
    Gain,
    NextStep,
    Verdict,
)

__all__ = [
    "DESCRIPTIONS",
    "TASKS",
    "THRESHOLDS",
    "Exhibits",
    "Figure",
    "Gain",
    "NextStep",
    "Score",
    "Scorer",
    "Settings",
    "Verdict",
    "VerdictCollector",
    "changed",
    "check_task",
    "is_possible",
    "next_steps",
    "read_box_files",
    "read_labels",
    "score_lines",
]
