"""Whether vLLM, transformers or llama.cpp loads a checkpoint, from its headers.

And a copy with what can be mended.
"""

from quark_onnx.torch.validate.clients import validate
from quark_onnx.torch.validate.finding import Finding, Rule, Verdict
from quark_onnx.torch.validate.repair import Mended, repair
from quark_onnx.torch.validate.rules import RULES

__all__ = [
    "RULES",
    "Finding",
    "Mended",
    "Rule",
    "Verdict",
    "repair",
    "validate",
]
