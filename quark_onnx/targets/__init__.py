"""Describe target devices as data, and their constraints on scales."""

from quark_onnx.targets.check import (
    Check,
    check,
    check_loaded,
    check_structure,
    require_rules,
)
from quark_onnx.targets.constraints import NAMES, Constraint, Constraints, Positions
from quark_onnx.targets.finding import RULES, Finding, Rule
from quark_onnx.targets.formats import format_of, refusal, unfit
from quark_onnx.targets.target import Target
from quark_onnx.targets.wiring import FUSED, Wiring, chain, constraints_of, is_fused

__all__ = [
    "FUSED",
    "NAMES",
    "RULES",
    "Check",
    "Constraint",
    "Constraints",
    "Finding",
    "Positions",
    "Rule",
    "Target",
    "Wiring",
    "chain",
    "check",
    "check_loaded",
    "check_structure",
    "constraints_of",
    "format_of",
    "is_fused",
    "refusal",
    "require_rules",
    "unfit",
]
