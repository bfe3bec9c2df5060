"""Rewrites of the float graph that keep its function; the tuple is the order in which they run."""

from quark_onnx.passes.base import Pass
from quark_onnx.passes.fold_batch_norm import fold_batch_norm
from quark_onnx.passes.fold_constants import fold_constants, store_constants
from quark_onnx.passes.fold_shapes import fold_shapes
from quark_onnx.passes.raise_opset import raise_opset, to_opset
from quark_onnx.passes.remove_identity import remove_identity
from quark_onnx.passes.write_attributes import write_attributes

#: Constants first: a weight may hide behind a Cast or a Transpose, and a BatchNormalization behind Constant nodes.
CLEANING: tuple[Pass, ...] = (fold_constants, remove_identity, fold_batch_norm)
#: What the compiler of an accelerator needs to be told.
SPELLING: tuple[Pass, ...] = (write_attributes,)

__all__ = [
    "CLEANING",
    "SPELLING",
    "Pass",
    "fold_batch_norm",
    "fold_constants",
    "fold_shapes",
    "raise_opset",
    "remove_identity",
    "store_constants",
    "to_opset",
    "write_attributes",
]
