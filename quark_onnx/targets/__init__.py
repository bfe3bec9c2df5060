"""Describe target devices as data, and their constraints on scales."""

from quark_onnx.targets.check import Check, check, check_structure, require_rules
from quark_onnx.targets.constraints import Constraints, Positions
from quark_onnx.targets.finding import RULES
from quark_onnx.targets.formats import format_of, refusal, unfit
from quark_onnx.targets.target import Target
from quark_onnx.targets.wiring import chain, constraints_of, is_fused

__all__ = [
    "RULES",
    "Check",
    "Constraints",
    "Positions",
    "Target",
    "chain",
    "check",
    "check_structure",
    "constraints_of",
    "format_of",
    "is_fused",
    "refusal",
    "require_rules",
    "unfit",
]
