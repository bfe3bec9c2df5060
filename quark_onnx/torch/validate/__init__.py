"""Validation of checkpoints for vLLM and other clients, from file headers.

``repair`` writes a copy with fixed names and configuration.
"""

from quark_onnx.torch.validate.clients import validate
from quark_onnx.torch.validate.finding import Finding, Rule, Validation
from quark_onnx.torch.validate.repair import Repair, repair
from quark_onnx.torch.validate.rules import RULES

__all__ = ["RULES", "Finding", "Repair", "Rule", "Validation", "repair", "validate"]
