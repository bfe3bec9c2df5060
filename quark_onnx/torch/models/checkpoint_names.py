"""Names of tensors in checkpoint files, where transformers uses other names in memory.

``save_pretrained`` of transformers writes the file names, and vLLM reads them. Example: Mixtral's
router is ``block_sparse_moe.gate`` in files, and ``mlp.gate`` in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

_EXPERT = re.compile(r"(.*\bexperts\.\d+\.)(gate|up|down)_proj(\..+)")
_ONE_EXPERT = re.compile(r"experts\.\*\.(\w+)\.weight$")


#: Names of tables of embeddings, which clients do not take for linear layers.
_EMBEDDINGS = re.compile(
    r"(^|[._])(embed|embeddings?|wte|wpe|embed_\w+|\w+_embeddings?)($|\.)",
)
_FLOATS = ("F64", "F32", "F16", "BF16")


def is_embedding(name: str) -> bool:
    """Return whether a layer of a checkpoint has the name of an embedding.

    >>> is_embedding("model.embed_tokens"), is_embedding("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return _EMBEDDINGS.search(name) is not None


class StoredMatrix(Protocol):
    """Tensor of a file, known by its header."""

    @property
    def dtype(self) -> str:
        """Type name in safetensors files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""


def float_matrices(tensors: Mapping[str, StoredMatrix]) -> list[str]:
    """Return the layers whose weight is a matrix of floats, sorted, without embeddings.

    Clients may take such layers for quantized ones unless they are listed. Embeddings are left out:
    vLLM fails on an embedding in AMD Quark's ``exclude`` (``QuarkConfig.get_quant_method`` returns
    the method of a linear layer), and takes no embedding for quantized.

    Args:
        tensors: tensors of a checkpoint by name.
    """
    layers = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and tensor.dtype in _FLOATS
        and len(tensor.shape) == 2
    ]
    return sorted(layer for layer in layers if not is_embedding(layer))


class DiskNames:
    """Mapping from names in memory to names in checkpoint files.

    Args:
        model: model of transformers, with stacked or unfused experts. Names of another kind of
            model stay unchanged.
    """

    def __init__(self, model: Any) -> None:
        self._renamings: list[Any] = []
        self._experts = dict[str, str]()
        if not hasattr(model, "base_model_prefix"):
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming

        # Loading applies the list from files to memory, and saving applies the reverse in reverse
        # order. Legacy entries name parameters of old files (LayerNorm.gamma), which nobody writes.
        for change in get_model_conversion_mapping(model, add_legacy=False)[::-1]:
            is_prefix = isinstance(change, PrefixChange)
            if isinstance(change, WeightRenaming) and not is_prefix:
                self._renamings.append(change.reverse_transform())
            self._experts |= _expert_names(change)

    def __call__(self, name: str) -> str:
        """Return the file name of a tensor.

        Args:
            name: name in memory, with unfused experts: "...experts.3.up_proj.weight".
        """
        if match := _EXPERT.fullmatch(name):
            prefix, side, suffix = match.groups()
            name = prefix + self._experts.get(side, f"{side}_proj") + suffix
        for renaming in self._renamings:
            name = str(renaming.rename_source_key(name)[0])
        return name

    def layer(self, name: str) -> str:
        """Return the file name of a layer."""
        return self(f"{name}.weight").removesuffix(".weight")

    def experts(self, name: str) -> str:
        """Return the file name of the parent of expert layers such as "0.gate_proj".

        Args:
            name: name in memory of the module of all experts.
        """
        return self.layer(f"{name}.0.down_proj").rsplit(".", 2)[0]


def _expert_names(conversion: Any) -> dict[str, str]:
    """Return the file names of an expert's layers that a conversion of transformers stacks.

    The names are by "gate", "up" and "down"; a conversion of other weights has none.
    """
    # Last parts of one expert's layers in files, such as w1 and w3 of Mixtral.
    names = list[str]()
    for pattern in conversion.source_patterns:
        match = _ONE_EXPERT.search(pattern)
        if match is None:
            return {}
        names.append(match[1])
    # Gate and up are fused from two sources in this order; down, or up without a gate, has one.
    sides: tuple[str, ...] = ("down",)
    if len(names) == 2:
        sides = ("gate", "up")
    elif len(names) == 1 and "up_proj" in conversion.target_patterns[0]:
        sides = ("up",)
    return dict(zip(sides, names, strict=False))
