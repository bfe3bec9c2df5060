"""A verdict on a quantized model in the terms of its task."""

from quark_onnx.report.verdict.advice import AdvisedSettings, next_steps
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
    Gain,
    MeasuredValue,
    NextStep,
    Verdict,
)

__all__ = [
    "DESCRIPTIONS",
    "TASKS",
    "THRESHOLDS",
    "AdvisedSettings",
    "Exhibits",
    "Gain",
    "MeasuredValue",
    "NextStep",
    "Score",
    "Scorer",
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
