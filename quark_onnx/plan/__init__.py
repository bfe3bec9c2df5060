"""Decide the number format of every tensor before any node changes."""

from quark_onnx.plan.builder import PlanBuilder
from quark_onnx.plan.entries import (
    BiasOf,
    Entry,
    Keep,
    Quantize,
    SameAs,
    Use,
    fused_into,
)
from quark_onnx.plan.plan import OVERRIDABLE, Asked, Plan, explain
from quark_onnx.plan.select import EXCLUDED, NodeSpec, looks_up, matching, select

__all__ = [
    "EXCLUDED",
    "OVERRIDABLE",
    "Asked",
    "BiasOf",
    "Entry",
    "Keep",
    "NodeSpec",
    "Plan",
    "PlanBuilder",
    "Quantize",
    "SameAs",
    "Use",
    "explain",
    "fused_into",
    "looks_up",
    "matching",
    "select",
]
