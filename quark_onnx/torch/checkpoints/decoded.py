"""Float tensors of a checkpoint that another tool has quantized.

The module supports FP8 weights with per-tensor, per-channel or block scales (DeepSeek's 128 x 128),
GPTQ, AWQ, compressed-tensors, AMD Quark, and the MXFP4 experts of GPT-OSS. A tensor is decoded on
reading. Calibrated scales of activations and of the KV cache are left out, with a note. Other
tensors are in the reader unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.common.wording import counted
from quark_onnx.config.checks import require
from quark_onnx.torch.checkpoints.layouts import Layout, read_layout
from quark_onnx.torch.checkpoints.load import quantized_layers, restored_weight
from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader, read_json
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES as FILE_TYPES
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.formats.bit_packing import unpack_bits, unpack_words
from quark_onnx.torch.formats.block_formats import Shared
from quark_onnx.torch.formats.block_formats import decode as decode_blocks
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.quantized_layer import kind_of, outputs_first
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

_E4M3, _MXFP4 = TensorSpec("fp8e4m3"), TensorSpec("mxfp4e2m1")


@dataclass(frozen=True)
class DecodedTensor(StoredTensor):
    """Tensor that is computed from stored tensors.

    Attributes:
        decode: function that computes the tensor.
        codes: function that returns the integer codes, if a format of this package represents them.
        stored: the tensors in files from which this tensor is computed.
    """

    decode: Callable[[], Any] = field(default=lambda: None, repr=False)
    codes: Callable[[], Quantized] | None = field(default=None, repr=False)
    stored: tuple[StoredTensor, ...] = field(default=(), repr=False)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensors in files from which this tensor is computed."""
        return self.stored

    def read(self) -> Any:
        """Compute the tensor from its stored tensors, which are read on each call.

        Raises:
            ModelError: a file cannot be read, or a stored tensor is missing.
        """
        return self.decode()


#: Ends of the names of scales and zero points of activations, keys, values and queries.
_ACTIVATIONS = re.compile(
    r".*\.((input|output|prob_output)_(scale|scale_2|zero_point|global_scale)"
    r"|activation_scale|(q|k|v|kv|prob)_(scale|zero_point))"
)


def decoded_reader(
    folder: Path,
    dtype: torch.dtype,
    model: Callable[[], Any] | None = None,
    *,
    adapter: bool = False,
) -> CheckpointReader:
    """Return a reader of the dequantized tensors of a quantized checkpoint.

    Args:
        folder: folder of the checkpoint.
        dtype: dtype of decoded tensors.
        model: function that returns the float model with empty parameters, whose shapes the layout
            of AMD Quark needs; None for other layouts.
        adapter: whether the caller applies the adapter in the folder.

    Raises:
        ModelError: the quantization method is unknown, or a tensor is missing.
    """
    reader = CheckpointReader(folder, adapter=adapter)
    settings = read_json(folder / "config.json").get("quantization_config")
    # An entry of another type has no method, and is refused below.
    if not isinstance(settings, dict):
        settings = {}
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"{folder} is quantized already ({method}); give the folder of the float"
            f" model. Checkpoints of {', '.join(METHODS)} are decoded",
        )
    try:
        if method == "quark":
            assert model is not None
            decoded = _quark(reader, settings, dtype, model())
        else:
            decoded = _DECODERS[method](reader, settings, dtype)
    except ConfigError as error:
        raise ModelError(
            f"{folder} is quantized already ({method}), and cannot be decoded: {error}"
        ) from error
    if not decoded and method != "quark":
        raise ModelError(
            f"{folder} is quantized already ({method}), but none of its tensors are",
        )
    # A decoded tensor takes the place of its parts.
    replaced = {name for _, parts in decoded for name in parts}
    scales = [name for name in reader if _ACTIVATIONS.fullmatch(name)]
    if scales:
        reader.notes.append(
            f"{counted(len(scales), 'calibrated scale')} of activations or of the KV"
            f" cache in {folder} {'is' if len(scales) == 1 else 'are'} left out: what the"
            " result needs is calibrated again"
        )
    replaced.update(scales)
    unchanged = {
        name: tensor for name, tensor in reader.tensors.items() if name not in replaced
    }
    reader.tensors = unchanged | {tensor.name: tensor for tensor, _ in decoded}
    return reader


#: Decoded tensors with the names of their stored parts.
_DecodedParts = list[tuple[DecodedTensor, tuple[str, ...]]]


def _decoded(  # noqa: PLR0913
    reader: CheckpointReader,
    name: str,
    parts: Mapping[str, str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    decode: Callable[[dict[str, Any]], Any],
) -> tuple[DecodedTensor, tuple[str, ...]]:
    """Return a tensor that is decoded from stored parts, and the names of the parts.

    Nothing is read before the tensor is. The tensor replaces its parts in the reader.

    Args:
        parts: names of the stored tensors, by the keys of ``decode``'s argument.
    """
    # Looked up now, since the reader loses its parts after decoding is prepared.
    stored = _stored(reader, parts)

    def compute() -> Any:
        return decode(_read(stored)).to(dtype).contiguous()

    sources = tuple(stored.values())
    place = sources[0].path
    tensor = DecodedTensor(
        name, shape, FILE_TYPES[dtype], place, decode=compute, stored=sources
    )
    return tensor, tuple(parts.values())


def _stored(
    reader: CheckpointReader, parts: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Return the stored tensors of a mapping to their names, by its keys."""
    return {key: reader.tensors[name] for key, name in parts.items()}


def _read(stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Read stored tensors, by their keys."""
    return {key: tensor.read() for key, tensor in stored.items()}


def _present(
    reader: CheckpointReader, start: str, ends: Iterable[str]
) -> dict[str, str]:
    """Return the names of stored tensors with one of some ends, by the end."""
    return {end: start + end for end in ends if start + end in reader}


def _fp8(
    reader: CheckpointReader, settings: Mapping[str, Any], dtype: torch.dtype
) -> _DecodedParts:
    """Decode E4M3 weights: multiply by ``weight_scale_inv`` or ``weight_scale``."""
    size = _block_size(settings)
    decoded: _DecodedParts = []
    for name in reader:
        # Both are factors; DeepSeek and transformers call them inverse.
        scales = [
            scale for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in reader
        ]
        if name.endswith(".weight") and scales:
            decoded.append(_fp8_weight(reader, name, scales[0], size, dtype))
    return decoded


def _block_size(settings: Mapping[str, Any]) -> list[int] | None:
    """Return the rows and columns of a block with a common scale; None without blocks.

    Raises:
        ConfigError: the entry is not a pair of sizes.
    """
    size = settings.get("weight_block_size")
    if size is None:
        return None
    is_pair = isinstance(size, list) and len(size) == 2
    require(
        is_pair and all(type(length) is int and length > 0 for length in size),
        "weight_block_size",
        size,
        "a pair of rows and columns",
    )
    return list(size)


def _fp8_weight(
    reader: CheckpointReader,
    name: str,
    scale: str,
    size: list[int] | None,
    dtype: torch.dtype,
) -> tuple[DecodedTensor, tuple[str, ...]]:
    """Return a decoded E4M3 weight, with the names of its parts.

    Args:
        size: rows and columns of a block with a common scale; None without blocks.
    """

    def decode(parts: dict[str, Any]) -> Any:
        factors = parts["scale"].float()
        if size is not None:
            factors = _spread(factors, size, parts["weight"].shape)
        # A scale for each output, which is a row of the weight.
        elif factors.ndim == 1 and factors.numel() > 1:
            factors = factors[:, None]
        # torch has no arithmetic in float8; float32 holds both operands exactly.
        return parts["weight"].float() * factors

    stored, stored_scale = reader.tensors[name], reader.tensors[scale]

    def codes() -> Quantized:
        weight, factor = stored.read(), stored_scale.read().reshape(())
        shape = tuple(weight.shape)
        return Quantized(_E4M3, shape, weight, factor, None, None, dtype)

    parts = {"weight": name, "scale": scale}
    tensor, used = _decoded(reader, name, parts, reader.shape(name), dtype, decode)
    # E4M3 with a single scale is a format of this package: its codes can stay.
    if size is None and prod(reader.shape(scale)) == 1:
        tensor = replace(tensor, codes=codes)
    return tensor, used


def _spread(scale: torch.Tensor, size: list[int], shape: tuple[int, ...]) -> Any:
    """Expand block scales to one scale per value.

    >>> _spread(torch.tensor([[1.0, 2.0]]), [2, 2], (2, 3))
    tensor([[1., 1., 2.],
            [1., 1., 2.]])
    """
    # The last block of a row or column may be cut.
    rows = scale.repeat_interleave(size[0], 0)[: shape[0]]
    return rows.repeat_interleave(size[1], 1)[:, : shape[1]]


def _gptq(
    reader: CheckpointReader, settings: Mapping[str, Any], dtype: torch.dtype
) -> _DecodedParts:
    """Decode GPTQ weights: integers packed along the inputs.

    Stored zero points are one less than the true zero points, unless ``checkpoint_format`` is
    gptq_v2.
    """
    bits = settings.get("bits")
    # Three-bit codes cross the borders of int32 words, which ``_unpacked`` does not support.
    if type(bits) is not int or bits not in (2, 4, 8):
        raise ConfigError(f"bits is {bits!r}; 2, 4 and 8 are decoded")
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def decode(parts: dict[str, Any]) -> Any:
        codes = _unpacked(parts["qweight"], bits, 0)
        zeros = _unpacked(parts["qzeros"], bits, 1) + less
        scales = parts["scales"].float()
        groups = parts.get("g_idx")
        if groups is None:
            # Groups are runs of inputs, unless g_idx says otherwise.
            groups = torch.arange(len(codes)) // -(-len(codes) // len(scales))
        groups = groups.long()
        # Scales and zero points of (groups, outputs) become (inputs, outputs), by the group of each
        # input.
        return ((codes - zeros[groups]) * scales[groups]).T

    decoded: _DecodedParts = []
    for name in reader:
        if name.endswith(".qweight"):
            start = name.removesuffix("qweight")
            parts = _gptq_parts(reader, start)
            rows, columns = reader.shape(name)
            # Stored as (inputs * bits / 32, outputs): a word holds codes of neighbouring inputs.
            shape = (columns, rows * 32 // bits)
            weight = f"{start}weight"
            decoded.append(_decoded(reader, weight, parts, shape, dtype, decode))
    return decoded


def _gptq_parts(reader: CheckpointReader, start: str) -> dict[str, str]:
    """Return the names of the stored tensors of a GPTQ layer, by the end of their names.

    Args:
        start: name of the layer, with its dot.

    Raises:
        ModelError: a tensor is missing.
    """
    ends = ("qweight", "qzeros", "scales", "g_idx")
    parts = _present(reader, start, ends)
    # The last one, g_idx, is optional.
    if lost := [end for end in ends[:3] if end not in parts]:
        raise ModelError(f"{reader.folder} has {start}qweight without {start}{lost[0]}")
    return parts


def _unpacked(packed: Any, bits: int, axis: int) -> Any:
    """Unpack unsigned integers from int32 words, the lowest bits first, along an axis.

    >>> _unpacked(torch.tensor([[0x21]], dtype=torch.int32), 4, 1)
    tensor([[1, 2, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    if axis == 0:
        return _unpacked(packed.T, bits, 1).T
    return unpack_words(packed, bits, packed.shape[1] * 32 // bits).int()


def _mxfp4(
    reader: CheckpointReader, settings: Mapping[str, Any], dtype: torch.dtype
) -> _DecodedParts:
    """Decode GPT-OSS experts from ``_blocks`` and ``_scales``.

    Blocks have the shape (experts, outputs, blocks, 16 bytes). The shape in the model is
    (experts, inputs, outputs).
    """

    def decode(parts: dict[str, Any]) -> Any:
        # (experts, outputs, blocks, 32); flattened to (experts, outputs, inputs).
        shared = Shared(unpack_bits(parts["blocks"], 4), parts["scales"])
        return decode_blocks(shared, _MXFP4).flatten(-2).transpose(1, 2)

    decoded: _DecodedParts = []
    for name in reader:
        weight = name.removesuffix("_blocks")
        scales = f"{weight}_scales"
        if name.endswith("_blocks") and scales in reader:
            experts, outputs, blocks, half = reader.shape(name)
            shape = (experts, 2 * blocks * half, outputs)
            parts = {"blocks": name, "scales": scales}
            decoded.append(_decoded(reader, weight, parts, shape, dtype, decode))
    return decoded


def _by_layout(
    reader: CheckpointReader, settings: Mapping[str, Any], dtype: torch.dtype
) -> _DecodedParts:
    """Decode layers of a layout in ``layouts``."""
    config, layout = read_layout(settings)
    decoded: _DecodedParts = []
    # The layers of a checkpoint, each once, in its order.
    for name in dict.fromkeys(name.rpartition(".")[0] for name in reader):
        spec = config.spec_of(name, "Linear")
        if spec is None or spec.weight is None:
            continue
        parts = _present(reader, f"{name}.", layout.parts)
        # A layer with nothing but a weight is stored as floats.
        if parts.keys() - {"weight"}:
            decoded.append(_layer_of(reader, name, parts, layout, spec, dtype))
    return decoded


def _layer_of(  # noqa: PLR0913
    reader: CheckpointReader,
    name: str,
    parts: Mapping[str, str],
    layout: Layout,
    spec: LayerSpec,
    dtype: torch.dtype,
) -> tuple[DecodedTensor, tuple[str, ...]]:
    """Return the decoded weight of a layer, with the names of its parts.

    Args:
        parts: names of the stored tensors of its weight, by the layout's parts.
    """
    assert spec.weight is not None
    shape = _shape(reader, parts, spec.weight)
    stored = _stored(reader, parts)

    def decode(tensors: dict[str, Any]) -> Any:
        return layout.restored(tensors, spec, shape, dtype).dequantize()

    def codes() -> Quantized:
        return _with_usual_sign(layout.restored(_read(stored), spec, shape, dtype))

    entry, used = _decoded(reader, f"{name}.weight", parts, shape, dtype, decode)
    extra = _present(reader, f"{name}.", ["weight_shape"])
    return replace(entry, codes=codes), (*used, *extra.values())


def _quark(
    reader: CheckpointReader,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    model: Any,
) -> _DecodedParts:
    """Decode the weights of AMD Quark's layout.

    Shapes are those of the model: packed words of the layout may be padded, and layers of every
    class are in it.

    Args:
        model: the float model with empty parameters.

    Raises:
        ModelError: the model lacks a quantized layer.
    """
    config, layout = read_layout(settings)
    sources = Sources(reader, model)
    decoded: _DecodedParts = []
    for name, spec in quantized_layers(model, config, layout, sources).items():
        keys = {part: sources.key_of(f"{name}.{part}") for part in layout.parts}
        parts = {part: key for part, key in keys.items() if key in reader}
        # 16-bit floats are stored as they are, and so are weights of layers with rounded outputs.
        if spec.weight is not None and parts.keys() - {"weight"}:
            module = model.get_submodule(name)
            decoded.append(_quark_weight(reader, module, parts, layout, spec, dtype))
    used = {name for _, parts in decoded for name in parts}
    scales = [name for name in reader if name.rpartition(".")[2] in layout.parts[1:]]
    if lost := [scale for scale in scales if scale not in used]:
        layer = lost[0].rpartition(".")[0]
        raise ModelError(
            f"{reader.folder} has quantized weights for {layer}, which"
            f" {type(model).__name__} of transformers has no such layer for; they cannot be"
            " decoded: give the folder of the float model"
        )
    return decoded


def _quark_weight(  # noqa: PLR0913
    reader: CheckpointReader,
    module: Any,
    parts: Mapping[str, str],
    layout: Layout,
    spec: LayerSpec,
    dtype: torch.dtype,
) -> tuple[DecodedTensor, tuple[str, ...]]:
    """Return the decoded weight of a layer, with the names of its parts.

    Args:
        parts: names of the stored tensors of its weight, by the layout's parts.
    """
    name, kind = parts["weight"], kind_of(module)
    shape = tuple(outputs_first(module.weight, kind).shape)
    stored = _stored(reader, parts)

    def restored(tensors: dict[str, Any]) -> tuple[Quantized, Any]:
        return restored_weight(name, tensors, layout, spec, shape, dtype)

    def decode(tensors: dict[str, Any]) -> Any:
        return outputs_first(restored(tensors)[1], kind)

    def codes() -> Quantized:
        return restored(_read(stored))[0]

    float_shape = tuple(module.weight.shape)
    entry, used = _decoded(reader, name, parts, float_shape, dtype, decode)
    return replace(entry, codes=codes), used


def _with_usual_sign(weight: Quantized) -> Quantized:
    """Convert signed integers with zero points to unsigned integers, as schemes have.

    compressed-tensors stores them signed. Other weights are unchanged.
    """
    spec = weight.spec
    # Codes without zero points, and unsigned codes, have the sign that schemes have.
    if spec.symmetric or weight.zero is None or spec.grid.qmin >= 0:
        return weight
    offset = -spec.grid.qmin
    return replace(
        weight,
        spec=spec.with_(dtype=f"u{spec.dtype.name}"),
        # In int16, since int8 codes plus 128 exceed int8.
        codes=(weight.codes.to(torch.int16) + offset).to(torch.uint8),
        zero=weight.zero + offset,
    )


def _shape(
    reader: CheckpointReader,
    parts: Mapping[str, str],
    spec: TensorSpec,
) -> tuple[int, ...]:
    """Return the shape (outputs, inputs) of a weight, from stored shapes."""
    start = next(iter(parts.values())).rpartition(".")[0]
    # Packed words may be padded, so compressed-tensors stores the shape.
    if f"{start}.weight_shape" in reader:
        rows, columns = reader.get(f"{start}.weight_shape").tolist()
        return (int(rows), int(columns))
    if "qweight" in parts:  # AWQ: inputs by packed outputs
        inputs, outputs = reader.shape(parts["qweight"])
        return (outputs * 32 // spec.dtype.bits, inputs)
    key = parts.get("weight_packed", parts.get("weight", ""))
    shape = reader.shape(key)
    # A byte holds two codes of FP4.
    if reader.tensors[key].dtype == "U8" and spec.dtype.bits == 4:
        return (shape[0], 2 * prod(shape[1:]))
    return tuple(shape)


#: Functions that decode the checkpoints of a method.
_DECODERS: dict[
    str, Callable[[CheckpointReader, Mapping[str, Any], torch.dtype], _DecodedParts]
] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _by_layout,
    "compressed-tensors": _by_layout,
    "mxfp4": _mxfp4,
}
#: Methods whose checkpoints are decoded.
METHODS = (*_DECODERS, "quark")
