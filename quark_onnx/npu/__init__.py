"""Ryzen AI processors: whether a model runs there, and why not."""

from quark_onnx.npu.check import Check, check
from quark_onnx.npu.finding import RULES, Finding, Rule

__all__ = ["RULES", "Check", "Finding", "Rule", "check"]
