"""Rewrite a graph without changing its function; the tuples give the order of the passes."""

from quark_onnx.passes.base import Pass
from quark_onnx.passes.batch_norm_to_conv import batch_norm_to_conv
from quark_onnx.passes.cancel_transposes import cancel_transposes
from quark_onnx.passes.fold_affine import fold_affine
from quark_onnx.passes.fold_batch_norm import fold_batch_norm
from quark_onnx.passes.fold_constants import fold_constants
from quark_onnx.passes.fold_gemm_alpha_beta import fold_gemm_alpha_beta
from quark_onnx.passes.fold_shapes import fold_shapes
from quark_onnx.passes.fuse_gelu import fuse_gelu
from quark_onnx.passes.fuse_layer_norm import fuse_layer_norm, whole_image_norms
from quark_onnx.passes.hard_swish_to_gate import hard_swish_to_gate
from quark_onnx.passes.lower_rank_moves import lower_rank_moves
from quark_onnx.passes.mean_to_pool import mean_to_pool
from quark_onnx.passes.opsets import at_opset, raise_opset, to_opset
from quark_onnx.passes.padded_means_to_conv import padded_means_to_conv
from quark_onnx.passes.pick_channels import pick_channels
from quark_onnx.passes.remove_identity import remove_identity
from quark_onnx.passes.split_large_pools import split_large_pools
from quark_onnx.passes.split_to_slices import split_to_slices
from quark_onnx.passes.sum_to_add import sum_to_add
from quark_onnx.passes.unshare_initializers import unshare_initializers
from quark_onnx.passes.write_attributes import write_attributes
from quark_onnx.passes.write_bounds import write_bounds
from quark_onnx.passes.write_defaults import write_defaults
from quark_onnx.passes.write_ranks import write_ranks
from quark_onnx.passes.write_sizes import write_sizes

#: Constants come first: a weight may be the result of a Cast or a Transpose, and the parameters of
#: a BatchNormalization may be Constant nodes.
CLEANING: tuple[Pass, ...] = (
    fold_constants,
    remove_identity,
    cancel_transposes,
    fold_batch_norm,
    fold_affine,
    pick_channels,
    sum_to_add,
)
#: Equivalent forms for the compiler of an accelerator, for float and quantized graphs.
CANONICALIZE: tuple[Pass, ...] = (
    fold_gemm_alpha_beta,
    unshare_initializers,
    write_sizes,
    write_attributes,
    write_bounds,
    write_defaults,
)
#: Replace operators that accelerators do not support; before quantization, as the new operators
#: need scales. Decomposed operators come first: the means in them are not pools.
LOWER: tuple[Pass, ...] = (
    fuse_gelu,
    fuse_layer_norm,
    whole_image_norms,
    split_to_slices,
    hard_swish_to_gate,
    mean_to_pool,
    lower_rank_moves,
    batch_norm_to_conv,
    split_large_pools,
)
#: All passes, for a float graph; sizes come first, from which reshapes are computed.
LEGALIZING: tuple[Pass, ...] = (fold_shapes, *CLEANING, *LOWER, *CANONICALIZE)
#: Forms that OpenVINO computes rightly and fast, for a float graph that no accelerator takes.
FOR_OPENVINO: tuple[Pass, ...] = (write_ranks, padded_means_to_conv)

__all__ = [
    "CANONICALIZE",
    "CLEANING",
    "FOR_OPENVINO",
    "LEGALIZING",
    "LOWER",
    "Pass",
    "at_opset",
    "batch_norm_to_conv",
    "cancel_transposes",
    "fold_affine",
    "fold_batch_norm",
    "fold_constants",
    "fold_gemm_alpha_beta",
    "fold_shapes",
    "fuse_gelu",
    "fuse_layer_norm",
    "hard_swish_to_gate",
    "lower_rank_moves",
    "mean_to_pool",
    "padded_means_to_conv",
    "pick_channels",
    "raise_opset",
    "remove_identity",
    "split_large_pools",
    "split_to_slices",
    "sum_to_add",
    "to_opset",
    "unshare_initializers",
    "whole_image_norms",
    "write_attributes",
    "write_bounds",
    "write_defaults",
    "write_ranks",
    "write_sizes",
]
