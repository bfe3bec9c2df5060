"""Plan the tensors of operators, in a file per family of operators."""

from quark_onnx.rules import (
    activation,  # noqa: F401
    attention,  # noqa: F401
    combine,  # noqa: F401
    conv,  # noqa: F401
    einsum,  # noqa: F401
    elementwise,  # noqa: F401
    embedding,  # noqa: F401
    matmul,  # noqa: F401
    mixture,  # noqa: F401
    norm,  # noqa: F401
    passthrough,  # noqa: F401
    pool,  # noqa: F401
    recurrent,  # noqa: F401
    reduce,  # noqa: F401
    sampling,  # noqa: F401
    selection,  # noqa: F401
    sensitive,  # noqa: F401
)
from quark_onnx.rules.base import WEIGHTED, Rule, rule

__all__ = ["WEIGHTED", "Rule", "rule"]
