"""quantize_static in reading order, one file a step."""

from quark_onnx.steps.calibrate import Ranges, calibrate
from quark_onnx.steps.finish import finish
from quark_onnx.steps.guard import guard
from quark_onnx.steps.insert import insert
from quark_onnx.steps.make_plan import make_plan
from quark_onnx.steps.prepare import clean, prepare, raise_opset_for
from quark_onnx.steps.run import Reference
from quark_onnx.steps.search import search
from quark_onnx.steps.solve import Params, solve, solve_biases
from quark_onnx.steps.tolerate import tolerated

__all__ = [
    "Params",
    "Ranges",
    "Reference",
    "calibrate",
    "clean",
    "finish",
    "guard",
    "insert",
    "make_plan",
    "prepare",
    "raise_opset_for",
    "search",
    "solve",
    "solve_biases",
    "tolerated",
]
