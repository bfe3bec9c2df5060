"""Names of tensors in checkpoint files, where transformers uses other names in memory.

``save_pretrained`` of transformers writes the file names, and vLLM reads them. Example: Mixtral's
router is ``block_sparse_moe.gate`` in files, and ``mlp.gate`` in memory.
"""

from __future__ import annotations

import re
from typing import Any

_EXPERT = re.compile(r"(.*\bexperts\.\d+\.)(gate|up|down)_proj(\..+)")
_ONE_EXPERT = re.compile(r"experts\.\*\.(\w+)\.weight$")


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
        for each in get_model_conversion_mapping(model, add_legacy=False)[::-1]:
            if isinstance(each, WeightRenaming) and not isinstance(each, PrefixChange):
                self._renamings.append(each.reverse_transform())
            # Last parts of one expert's layers in files, such as w1 and w3 of Mixtral.
            singles = [
                found[1]
                for pattern in each.source_patterns
                if (found := _ONE_EXPERT.search(pattern))
            ]
            # Gate and up are fused from two sources in this order; down, or up without a gate, has
            # one.
            if len(singles) == len(each.source_patterns):
                sides = ("gate", "up") if len(singles) == 2 else ("down",)
                if (
                    "up_proj" in each.target_patterns[0] and len(singles) == 1
                ):  # experts without a gate
                    sides = ("up",)
                self._experts |= dict(zip(sides, singles, strict=False))

    def __call__(self, name: str) -> str:
        """Return the file name of a tensor with this name in memory."""
        if found := _EXPERT.fullmatch(name):
            name = (
                f"{found[1]}{self._experts.get(found[2], found[2] + '_proj')}{found[3]}"
            )
        for renaming in self._renamings:
            name = str(renaming.rename_source_key(name)[0])
        return name

    def layer(self, name: str) -> str:
        """Return the file name of a layer."""
        return self(f"{name}.weight").removesuffix(".weight")

    def experts(self, name: str) -> str:
        """Return the file name of the parent of expert layers such as "0.gate_proj"."""
        return self.layer(f"{name}.0.down_proj").rsplit(".", 2)[0]
