"""What each operator asks of its tensors: one small file per family, registered by being imported here."""

from quark_onnx.rules import (  # noqa: F401  (importing is registering)
    activation,
    attention,
    combine,
    conv,
    einsum,
    elementwise,
    embedding,
    matmul,
    norm,
    passthrough,
    pool,
    recurrent,
    reduce,
    sampling,
    selection,
    sensitive,
)
from quark_onnx.rules.base import WEIGHTED, Rule, rule

__all__ = ["WEIGHTED", "Rule", "rule"]
