"""Clients that load a language model of a scheme, with supported layouts.

The table repeats the findings of ``quark_onnx.torch.validate`` and of the exports for a Llama, so
that torch is not needed. tests/quark_onnx/torch/test_scheme_clients.py compares both.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark_onnx.torch.config.number_formats import FloatScaled, TwoLevel
from quark_onnx.torch.config.schemes import GROUP_SIZES, SCHEMES

#: The layouts of checkpoints, by the name of ``--layout``.
LAYOUT_NAMES = (
    "quark",
    "compressed-tensors",
    "awq",
    "fp8",
    "finegrained-fp8",
    "oga",
)
#: Programs that run language models. The first two read checkpoints, the third a GGUF file.
CLIENTS = ("vllm", "transformers", "llama.cpp", "onnxruntime", "onnxruntime-genai")

#: Names of layouts, or of kinds of files (``--export``), by client.
Clients = Mapping[str, tuple[str, ...]]

_ONNX: dict[str, tuple[str, ...]] = {"onnxruntime": ("onnx",)}
_GGUF: dict[str, tuple[str, ...]] = {"llama.cpp": ("gguf",)}
_GENAI: dict[str, tuple[str, ...]] = {"onnxruntime-genai": ("oga", "awq")}
_GENAI_AWQ: dict[str, tuple[str, ...]] = {"onnxruntime-genai": ("awq",)}


def _checkpoint(vllm: str, transformers: str) -> dict[str, tuple[str, ...]]:
    """Return the clients of checkpoints with the layouts they read, given as words of a text."""
    texts = {"vllm": vllm, "transformers": transformers}
    # a client that reads none is not named
    return {client: tuple(text.split()) for client, text in texts.items() if text}


def _in_groups(dtype: str, clients: Clients) -> dict[str, Clients]:
    """Return the same clients for the schemes of a number format in groups."""
    return {f"{dtype}_wo_{size}": clients for size in GROUP_SIZES}


_BOTH = "quark compressed-tensors"
_COMPRESSED = _checkpoint("compressed-tensors", "compressed-tensors")
_INTEGERS = _checkpoint(f"{_BOTH} awq oga", f"{_BOTH} awq oga") | _GGUF | _ONNX | _GENAI
# vLLM reads AMD Quark's 4-bit integers in groups alone, and the layout oga has groups alone.
_PER_CHANNEL = (
    _checkpoint("compressed-tensors awq", f"{_BOTH} awq") | _GGUF | _ONNX | _GENAI_AWQ
)
_FEW_BITS = _COMPRESSED | _GGUF | _ONNX
_TWO_BITS = _checkpoint("compressed-tensors", _BOTH) | _GGUF | _ONNX

#: By scheme; what is missing is refused.
SCHEME_CLIENTS: dict[str, Clients] = {
    "fp8": _checkpoint(f"{_BOTH} fp8", f"{_BOTH} finegrained-fp8") | _ONNX,
    "ptpc_fp8": _checkpoint(_BOTH, _BOTH) | _ONNX,
    "int8": _checkpoint(_BOTH, _BOTH) | _GGUF | _ONNX,
    "int8_per_channel": _checkpoint(_BOTH, _BOTH) | _GGUF | _ONNX,
    **_in_groups("int4", _INTEGERS),
    **_in_groups("uint4", _INTEGERS),
    "int4_wo_per_channel": _PER_CHANNEL,
    "uint4_wo_per_channel": _PER_CHANNEL,
    "int4_wa_64": _checkpoint("compressed-tensors", _BOTH) | _GGUF | _ONNX,
    "uint4_int8": _checkpoint("compressed-tensors", _BOTH) | _GGUF | _ONNX,
    "mxfp4": _checkpoint(_BOTH, "quark") | _GGUF | _ONNX,
    "mxfp4_weight_only": _checkpoint(_BOTH, "quark") | _GGUF | _ONNX,
    "mxfp6_e2m3": _checkpoint("quark", "quark") | _ONNX,
    "mxfp6_e3m2": _checkpoint("quark", "quark") | _ONNX,
    "mxfp4_mxfp6_e2m3": _checkpoint("quark", "quark") | _GGUF | _ONNX,
    "mxfp4_fp8": _checkpoint("quark", "quark") | _GGUF | _ONNX,
    "mxfp8": _checkpoint(_BOTH, "") | _ONNX,
    "nvfp4": _checkpoint(_BOTH, "") | _ONNX,
    "amdfp4": _checkpoint("", "quark") | _ONNX,
    "amdfp4_g32": _checkpoint("", "quark") | _ONNX,
    "int4_fp8": _GGUF | _ONNX,
    **dict.fromkeys(("mx6", "mx9", "bfp16"), _ONNX),
    **_in_groups("int3", _FEW_BITS),
    **_in_groups("uint3", _FEW_BITS),
    **_in_groups("uint2", _TWO_BITS),
    **dict.fromkeys(("bf16", "fp16"), _GGUF | _ONNX),
}


#: Bits for each value with its share of the shared exponents.
_BLOCK_FLOATS = {"mx6": 6, "mx9": 9, "bfp16": 9}


def weight_bits(name: str) -> float:
    """Return the bits per weight in AMD Quark's layout, with scales and zero points.

    Scales of integers have 16 bits. Symmetric integers have zero points in that layout, too.
    Per-tensor and per-channel scales are neglected.

    >>> weight_bits("int4_wo_128"), weight_bits("uint4_wo_32"), weight_bits("mxfp4")
    (4.15625, 4.625, 4.25)
    """
    spec = SCHEMES[name].weight
    assert spec is not None  # every scheme has a weight
    if spec.dtype.name in _BLOCK_FLOATS:
        return _BLOCK_FLOATS[spec.dtype.name]
    if not spec.group:
        return spec.dtype.bits
    if isinstance(spec.dtype, TwoLevel | FloatScaled) or not spec.dtype.scaled:
        block = 8  # microscaling: a scale of one byte
    else:
        # A scale of 16 bits, and a zero point of the width of a code.
        block = 16 + spec.dtype.bits
    return spec.dtype.bits + block / spec.group
