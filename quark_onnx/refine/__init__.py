"""Optimizers of the float graph and of layers, and the acceptance of their results."""

from quark_onnx.refine.bias_means import InputMeans, correct_biases
from quark_onnx.refine.optimize_float import GOOD, give_biases, optimize_float
from quark_onnx.refine.refine import refine

__all__ = [
    "GOOD",
    "InputMeans",
    "correct_biases",
    "give_biases",
    "optimize_float",
    "refine",
]
