"""Modules: the tensors of a layer, layer classes, fused layers, and expected sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quark_onnx.torch.models.fused_groups import FUSED
from quark_onnx.torch.validate.header import FLOATS, Tensor

#: Names of scales in files of amd-quark before 0.9, and their current names.
_OLD = re.compile(r"\.(weight|input|output|bias)_quantizer\.(scale|zero_point)$")
#: Names of the values of a Linear in the supported layouts.
WEIGHTS = ("weight", "weight_packed", "qweight")
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.")
_EMBEDDINGS = re.compile(
    r"(^|[._])(embed|embeddings?|wte|wpe|embed_\w+|\w+_embeddings?)($|\.)",
)
_DECODER = re.compile(r"((model|language_model)\.)*layers\.\d+\.")
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Module:
    """Tensors of a layer.

    Attributes:
        name: name of the layer, such as "model.layers.0.mlp.up_proj".
        tensors: tensors by the last part of the current name: "weight", "weight_scale", ...
    """

    name: str
    tensors: dict[str, Tensor]

    @property
    def weight(self) -> Tensor | None:
        """The values of the layer; None for a module without a weight."""
        return next(
            (self.tensors[name] for name in WEIGHTS if name in self.tensors),
            None,
        )

    def has_type(self, dtype: str) -> bool:
        """Return whether the layer has values of a type, such as "I32"."""
        weight = self.weight
        return weight is not None and weight.dtype == dtype

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The name of the module around the layer."""
        return self.name.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Whether the layer is a matrix, but neither an embedding nor a head.

        Clients treat embeddings and heads separately.
        """
        weight = self.weight
        return (
            weight is not None
            and len(weight.shape) == 2
            and not self.is_head
            and not _EMBEDDINGS.search(self.name)
        )

    @property
    def is_head(self) -> bool:
        """Whether the layer computes the logits."""
        return self.last == HEAD

    @property
    def is_router(self) -> bool:
        """Whether the layer chooses experts; most clients keep routers float."""
        return self.last in _ROUTERS

    @property
    def experts(self) -> str:
        """Name of the module of experts around the layer, or an empty string."""
        found = _EXPERT.match(f"{self.name}.")
        return found["experts"] if found else ""

    @property
    def is_quantized(self) -> bool:
        """Whether the values are not 16-bit or 32-bit floats, or have a scale."""
        weight = self.weight
        scaled = any(
            "scale" in name and not name.startswith(("output", "k_", "v_"))
            for name in self.tensors
        )
        return weight is not None and (scaled or weight.dtype not in (*FLOATS, "F64"))


def today(name: str) -> str:
    """Return the name of a tensor in amd-quark since 0.9.

    >>> today("model.layers.0.mlp.up_proj.weight_quantizer.scale")
    'model.layers.0.mlp.up_proj.weight_scale'
    """
    return _OLD.sub(r".\1_\2", name)


def modules_of(tensors: Mapping[str, Tensor]) -> dict[str, Module]:
    """Return modules by name, with their tensors."""
    found = dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        module, _, what = today(name).rpartition(".")
        found.setdefault(module, {})[what] = tensor
    return {name: Module(name, parts) for name, parts in found.items()}


def fused(modules: Mapping[str, Module]) -> Iterator[tuple[str, list[Module]]]:
    """Yield the layers that clients fuse: a common name, and the Linear layers.

    The experts of a mixture count as fused.
    """
    groups = dict[str, list[Module]]()
    for module in modules.values():
        if not module.is_linear:
            continue
        for shards in FUSED:
            if module.last in shards and not module.experts:
                groups.setdefault(f"{module.parent}.{{{','.join(shards)}}}", []).append(
                    module
                )
        if module.experts:
            groups.setdefault(module.experts, []).append(module)
    yield from groups.items()


def is_partial(flags: Sequence[bool]) -> bool:
    """Return whether something holds for some of the layers that are fused, and not for all.

    >>> is_partial([True, False]), is_partial([True, True])
    (True, False)
    """
    return any(flags) and not all(flags)


_DENSE = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "smollm3",
)
_MIXTURES = {
    "mixtral": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether the sizes of a family's layers are known."""
    return config.get("model_type") in (*_DENSE, *_MIXTURES)


def size_of(name: str, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the (out, in) that a Linear layer of a known family must have.

    None if the size is unknown.

    >>> size_of("model.layers.0.mlp.down_proj", {"model_type": "llama", "hidden_size": 8, "intermediate_size": 24})
    (8, 24)
    """  # noqa: E501
    family = config.get("model_type")
    if not is_known(config) or not _DECODER.match(name):
        return None
    experts = ".experts." in name
    hidden, wide = config.get("hidden_size"), config.get("intermediate_size")
    if family in _MIXTURES and name.endswith((".mlp.gate", ".block_sparse_moe.gate")):
        count = config.get("num_local_experts", config.get("num_experts"))
        return (count, hidden) if type(count) is int and type(hidden) is int else None
    if experts:
        wide = config.get(_MIXTURES.get(str(family), "intermediate_size"))
    elif family in _MIXTURES and ".mlp." in name:
        return None  # dense layers and shared experts, for example, have other sizes
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    groups = heads if groups is None else groups
    if not all(
        type(number) is int and number > 0 for number in (hidden, wide, heads, groups)
    ):
        return _mlp(name, hidden, wide)
    assert (
        isinstance(hidden, int) and isinstance(heads, int) and isinstance(groups, int)
    )
    width = config.get("head_dim") or hidden // heads
    if type(width) is not int:
        return None
    sizes = {"q_proj": (heads * width, hidden), "o_proj": (hidden, heads * width)}
    sizes |= {"k_proj": (groups * width, hidden), "v_proj": (groups * width, hidden)}
    return sizes.get(name.rpartition(".")[2]) or _mlp(name, hidden, wide)


def _mlp(name: str, hidden: Any, wide: Any) -> tuple[int, int] | None:
    if not (type(hidden) is int and type(wide) is int):
        return None
    up, down = (wide, hidden), (hidden, wide)
    sizes = {
        "gate_proj": up,
        "up_proj": up,
        "down_proj": down,
        "w1": up,
        "w3": up,
        "w2": down,
    }
    return sizes.get(name.rpartition(".")[2])
