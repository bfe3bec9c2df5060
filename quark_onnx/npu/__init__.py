"""Ryzen AI processors: whether a model runs there, and why not; and what it computes there, to the bit."""

from quark_onnx.npu.check import Check, check
from quark_onnx.npu.finding import RULES, Finding, Rule
from quark_onnx.npu.simulate import Simulation, simulate

__all__ = ["RULES", "Check", "Finding", "Rule", "Simulation", "check", "simulate"]
