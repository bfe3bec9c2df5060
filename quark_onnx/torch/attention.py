"""Keys that are rounded after attention has rotated them, with scales of the layers that compute them.

Attention of transformers looks its function up, by a name that its configuration has. Under another name it finds the
same function behind one that lets layers round the keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from quark_onnx.errors import ModelError
from quark_onnx.torch.algorithms.base import Layers

_PREFIX = "quark_onnx_"


def hand_keys_over(model: Any, layers: Layers) -> Callable[[], None]:
    """From now on, attention hands rotated keys to ``round_keys`` of its layers and attends to what comes back.

    Args:
        model: of transformers.
        layers: by name; those count whose output is rounded after it is rotated.

    Returns:
        A function that undoes it.

    Raises:
        ModelError: attention of the model has no such function.
    """
    before = list[tuple[Any, str]]()

    def undo() -> None:
        for config, name in before:
            config._attn_implementation = name

    for name in (name for name, (_, spec) in layers.items() if spec.rotated):
        attention = model.get_submodule(name.rpartition(".")[0])
        own = getattr(getattr(attention, "config", None), "_attn_implementation", None)
        if own is None or not hasattr(_code_of(attention), "ALL_ATTENTION_FUNCTIONS"):
            undo()
            raise ModelError(
                f"kv_cache: {name} belongs to a {type(attention).__name__}, which hands its rotated keys to no "
                "attention function of transformers; round them where they are projected (where='projection')"
            )
        if not own.startswith(_PREFIX):
            before.append((attention.config, own))
            attention.config._attn_implementation = _registered(own)
    return undo


def _code_of(module: Any) -> Any:
    return sys.modules[type(module).__module__]


def _registered(own: str) -> str:
    """The name under which the function of this name gets rounded keys."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Any, key: Any, *args: Any, **named: Any) -> Any:
        for layer in module.children():
            round_keys = getattr(layer, "round_keys", None)
            key = key if round_keys is None else round_keys(key)
        code = _code_of(module)
        usual = getattr(code, "eager_attention_forward", None)  # what "eager" stands for is in each model's file
        return code.ALL_ATTENTION_FUNCTIONS.get_interface(own, usual)(module, query, key, *args, **named)

    AttentionInterface.register(_PREFIX + own, attend)
    if own in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(_PREFIX + own, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return _PREFIX + own
