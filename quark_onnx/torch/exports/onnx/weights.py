"""Codes and scales of layers in an ONNX graph, without quantizing again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from quark_onnx.common.errors import ConfigError
from quark_onnx.dtypes import DType, Integer, Scaled
from quark_onnx.graph import Graph
from quark_onnx.kernels.nbits import BLOCK_SIZES, NBitsWeight, from_codes
from quark_onnx.torch.config.number_formats import FloatScaled, TwoLevel, format_named
from quark_onnx.torch.formats.affine import explicit_zero
from quark_onnx.torch.formats.block_formats import (
    BIAS,
    Shared,
    decode,
    scale_codes,
    scale_values,
)
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import QuantizedLayer

#: MatMulNBits widths by integer bits.
_WIDTHS = {2: 2, 3: 4, 4: 4, 8: 8}
_FLOAT = int(TensorProto.FLOAT)


def array_of(tensor: torch.Tensor, dtype: DType | None = None) -> NDArray[Any]:
    """Convert a tensor to numpy.

    Small floats and codes get the numpy type of a number format.
    """
    tensor = tensor.detach().cpu().contiguous()
    if (
        tensor.is_floating_point()
        and tensor.itemsize < 4
        and tensor.dtype != torch.float16
    ):
        # Types that numpy has by ml_dtypes alone.
        names = {torch.float8_e5m2: "fp8e5m2", torch.bfloat16: "bfloat16"}
        named = names.get(tensor.dtype, "fp8e4m3")
        # The bits are reinterpreted.
        raw = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)
        array: NDArray[Any] = raw.numpy().view(_numpy(format_named(named)))
        return array
    values: NDArray[Any] = tensor.numpy()
    if dtype is None:
        return values
    return values.astype(_numpy(dtype))


def _numpy(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type of a format's codes."""
    kind: np.dtype[Any] = dtype.numpy  # type: ignore[attr-defined]
    return kind


def stored_as(dtype: DType) -> DType:
    """Return the format of ONNX and onnxruntime that holds the codes of a format.

    >>> stored_as(format_named("uint3")).name, stored_as(format_named("int8")).name
    ('uint4', 'int8')
    """
    if isinstance(dtype, Integer) and dtype.bits < 4:
        return format_named("int4" if dtype.qmin < 0 else "uint4")
    return dtype


def nbits_weight(quantized: Quantized) -> NBitsWeight | None:
    """Return an integer matrix in MatMulNBits layout; None if unsupported.

    A per-channel or per-tensor scale is repeated for each block.
    """
    spec = quantized.spec
    # Without groups, one block holds a row if a block size is large enough for it.
    group = spec.group or next(
        (size for size in BLOCK_SIZES if size >= quantized.shape[1]),
        BLOCK_SIZES[-1],
    )
    # Other formats, widths and block sizes are written with DequantizeLinear.
    if (
        not isinstance(spec.dtype, Integer)
        or spec.dtype.bits not in _WIDTHS
        or group not in BLOCK_SIZES
    ):
        return None
    # 3-bit codes are stored in 4 bits. MatMulNBits has unsigned codes.
    bits, signed = _WIDTHS[spec.dtype.bits], spec.grid.qmin < 0
    offset = 1 << bits - 1 if signed else 0
    # In int16, since int8 codes plus 128 exceed int8.
    codes = array_of(quantized.matrix).astype(np.int16) + offset
    (n, k), blocks = codes.shape, -(-quantized.shape[1] // group)
    # The last block is padded with the code of 0.
    padding = [(0, 0), (0, blocks * group - k)]
    codes = np.pad(codes, padding, constant_values=offset).reshape(n, blocks, group)
    scale, zero = _scales(quantized)
    scale = _by_block(scale, n, blocks)
    zero = _by_block(zero + offset, n, blocks)
    # Zero points of HQQ are no integers.
    is_whole = bool(
        (zero == np.rint(zero)).all() and zero.min() >= 0 and zero.max() < 1 << bits,
    )
    if (zero == 1 << bits - 1).all():
        points = None  # the operator's own
    else:
        points = zero.astype(np.uint8) if is_whole else zero
    return from_codes(codes, np.ascontiguousarray(scale), points, bits, k)


def _by_block(values: NDArray[Any], rows: int, blocks: int) -> NDArray[Any]:
    """Repeat scales or zero points of a tensor or of rows to (rows, blocks)."""
    if values.ndim != 2:
        values = values.reshape(-1, 1)
    return np.broadcast_to(values, (rows, blocks))


def _scales(quantized: Quantized) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scale and zero point as float32 of one shape."""
    scale = array_of(quantized.scale.float())
    zero = array_of(explicit_zero(quantized.zero, quantized.scale).float())
    return scale, np.broadcast_to(zero, scale.shape)


def write_weight(
    graph: Graph,
    name: str,
    layer: QuantizedLayer,
    kind: int,
) -> tuple[str, str]:
    """Add the weight of a layer as constants, and nodes that dequantize it.

    Args:
        graph: the graph, which is changed.
        name: the name of the layer.
        layer: a layer with a quantized weight.
        kind: the ``TensorProto.DataType`` of the result, FLOAT or FLOAT16.

    Returns:
        The name of the float tensor, and a description. The tensor has the shape of the float
        layer's weight, but (inputs, outputs) for a Linear layer.

    Raises:
        ConfigError: no ONNX operator reads the codes.
    """
    quantized = layer.quantized
    assert quantized is not None
    # Placeholders have (inputs, outputs) for these kinds, and outputs first for the others.
    turned = layer.kind in ("Linear", "ConvTranspose2d")
    format = quantized.spec.dtype.name
    if isinstance(quantized.spec.dtype, Scaled):
        result = _dequantized(graph, name, quantized, turned, kind)
        return result, f"DequantizeLinear of {format}"
    if quantized.scale is None:  # a cast, or floats whose blocks would not be smaller
        values, form = quantized.codes, "they are"
        if not quantized.spec.is_cast:
            values, form = quantized.dequantize(torch.float32), "float32"
        values = values.reshape(quantized.shape)
        if turned:
            values = values.transpose(0, 1)
        stored = graph.add_constant(f"{name}.weight", array_of(values))
        text = f"values of {format}, stored as {form}"
        return _cast(graph, stored, kind), text
    result = _looked_up(graph, name, quantized, turned, kind)
    return result, f"codes of {format} and a table of their values"


def _dequantized(
    graph: Graph,
    name: str,
    quantized: Quantized,
    turned: bool,
    kind: int,
) -> str:
    """Add codes with a DequantizeLinear."""
    dtype, group = stored_as(quantized.spec.dtype), quantized.spec.group
    # ONNX has no DequantizeLinear for the type.
    if not getattr(dtype, "read", False) or dtype.bits > 16:
        raise ConfigError(
            f"layer {name!r}: no operator of ONNX reads weights of {dtype.name}",
        )
    shape, columns = quantized.shape, len(quantized.shape) == 2
    scale, zero = _scales(quantized)
    # Zero points of HQQ are no integers.
    if not (zero == np.rint(zero)).all():
        raise ConfigError(
            f"layer {name!r}: its zero points are no integers, which {dtype.name} in ONNX wants",
        )
    codes = quantized.matrix if group else quantized.codes.reshape(shape)
    swap = turned and (columns or not group)  # otherwise blocks span merged axes
    values = array_of(codes.transpose(0, 1) if swap else codes, dtype)
    attributes = dict[str, Any]()
    if scale.ndim:
        # Channels are the first axis and blocks lie along the second one; swapped codes swap
        # both.
        attributes["axis"] = int(swap) ^ int(bool(group))
    if group:
        attributes["block_size"] = group
        scale, zero = (scale.T, zero.T) if swap else (scale, zero)
    factor: NDArray[Any] = scale
    narrow = False
    # The type of the scale is that of the result: float16 scales need no Cast, if they are exact.
    if kind == TensorProto.FLOAT16:
        half = scale.astype(np.float16)
        narrow = bool((half.astype(np.float32) == scale).all())
        if narrow:
            factor = half
    inputs = [
        graph.add_constant(f"{name}.weight", values),
        graph.add_constant(f"{name}.weight_scale", factor),
        graph.add_constant(f"{name}.weight_zero_point", zero.astype(values.dtype)),
    ]
    result = graph.fresh(f"{name}.weight_dequantized")
    graph.add("DequantizeLinear", inputs, [result], **attributes)
    # Blocks span all inputs of a convolution, whose weight is reshaped afterwards.
    if group and not columns:
        result = _in_shape(graph, result, shape, turned)
    if narrow:
        return result
    return _cast(graph, result, kind)


def _looked_up(
    graph: Graph,
    name: str,
    quantized: Quantized,
    turned: bool,
    kind: int,
) -> str:
    """Add block codes, a lookup table of their values, and block scales."""
    spec, codes = quantized.spec, quantized.codes
    # Every code: 16 of FP4, 64 of FP6 and 256 of FP8.
    every = torch.arange(1 << max(4, spec.dtype.bits), dtype=torch.uint8)
    every = every.view(codes.dtype)[None, None]
    # The values of all codes are what each decodes to under scales of 1.
    one = scale_codes(torch.ones((1, 1)), spec.dtype)
    table = array_of(decode(Shared(every, one, torch.ones(())), spec)).reshape(-1)
    code_format = format_named("uint4") if len(table) == 16 else None
    stored = array_of(codes.view(torch.uint8), code_format)
    weight = graph.add_constant(f"{name}.weight", stored)
    values = _gathered(graph, weight, f"{spec.dtype.name}_values", table)
    # (rows, blocks, 1), to be multiplied with (rows, blocks, block size).
    scale = array_of(quantized.scale)[..., None]
    scales = graph.add_constant(f"{name}.weight_scale", scale)
    if isinstance(spec.dtype, TwoLevel):
        value = array_of(quantized.whole.float()).reshape(())
        global_scale = graph.add_constant(f"{name}.weight_scale_2", value)
        # E4M3 codes become float32 without a table.
        scales = _cast(graph, scales, _FLOAT, always=True)
        scales = _result(graph, "Mul", scales, global_scale)
    elif isinstance(spec.dtype, FloatScaled):
        decoded = array_of(scale_values(torch.arange(256), spec.dtype))
        scales = _gathered(graph, scales, "e5m3_values", decoded)
    else:
        # The last byte is NaN in E8M0 and never written; its power overflows.
        with np.errstate(over="ignore"):
            powers = np.ldexp(np.float32(1), np.arange(256) - BIAS).astype(np.float32)
        scales = _gathered(graph, scales, "e8m0_values", powers)
    result = _result(graph, "Mul", values, scales)
    # (rows, blocks * block size), with the padding of the last block.
    result = _shaped(graph, result, (quantized.shape[0], -1))
    columns = quantized.matrix.shape[1]
    if columns % spec.group:
        bounds = [
            graph.add_constant(f"{name}.weight_{end}", np.array([index], np.int64))
            for end, index in (("start", 0), ("end", columns), ("axis", 1))
        ]
        result = _result(graph, "Slice", result, *bounds)
    result = _in_shape(graph, result, quantized.shape, turned)
    return _cast(graph, result, kind)


def _gathered(graph: Graph, codes: str, table: str, values: NDArray[Any]) -> str:
    """Add a look-up of codes in a table, and return the name of the values."""
    # Layers of a format share the table.
    [shared] = graph.once((table,), lambda: [graph.add_constant(table, values)])
    indices = _cast(graph, codes, int(TensorProto.INT32), always=True)
    return _result(graph, "Gather", shared, indices)


def _cast(graph: Graph, tensor: str, kind: int, *, always: bool = False) -> str:
    """Cast a tensor unless it already has the type."""
    # An unknown type is that of the float graph.
    current = graph.elem_type(tensor) or _FLOAT
    if current == kind and not always:
        return tensor
    return _result(graph, "Cast", tensor, to=kind)


def _shaped(graph: Graph, tensor: str, shape: tuple[int, ...]) -> str:
    """Add a Reshape, and return the name of the result."""
    key = "x".join(map(str, shape))
    [name] = graph.once(
        ("shape", key),
        lambda: [graph.add_constant(f"shape_{key}", np.array(shape, np.int64))],
    )
    return _result(graph, "Reshape", tensor, name)


def _in_shape(graph: Graph, matrix: str, shape: tuple[int, ...], turned: bool) -> str:
    """Give a matrix of outputs and merged inputs the shape of a weight.

    Args:
        turned: whether the first two axes of the shape are swapped afterwards.
    """
    result = matrix if len(shape) == 2 else _shaped(graph, matrix, shape)
    if not turned:
        return result
    return _result(graph, "Transpose", result, perm=[1, 0, *range(2, len(shape))])


def _result(graph: Graph, op_type: str, *inputs: str, **attributes: Any) -> str:
    """Add a node with one output, and return the name of the output."""
    result = graph.fresh(f"{inputs[0]}_{op_type}")
    graph.add(op_type, inputs, [result], **attributes)
    return result
