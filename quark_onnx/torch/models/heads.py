"""Heads of a model, and the layers that stay float by default.

A head is found by what the model computes: its class may call it lm_head, score, classifier,
qa_outputs or cls.predictions.decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from quark_onnx.torch.config.torch_config import DEFAULT_TYPES
from quark_onnx.torch.models.forward_trace import forward_trace
from quark_onnx.torch.models.language import outside_language
from quark_onnx.torch.models.names import instances, outside_of, within_any
from quark_onnx.torch.models.structure import (
    blocks_of,
    embedding_of,
    head_of,
    layers_of,
)


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers of a model's heads; empty without a head.

    Heads of a language model are the layer that computes logits, and layers that run after the
    blocks and do not belong to transformers' base model. Heads of any other model are all layers
    that run after the last block, such as those of a pooler and a classifier.

    Args:
        model: model of transformers, or any other module, which has no head.

    Returns:
        All names of the heads, in the order of the model.
    """
    if not hasattr(model, "get_output_embeddings"):
        return ()
    head = head_of(model)
    # All names of the layer.
    logits = {name for name, module in model.named_modules() if module is head}
    heads = _after_blocks(model)
    if logits:
        heads = heads & _outside_base(model) | logits
    return tuple(name for name, _ in model.named_modules() if name in heads)


def _after_blocks(model: nn.Module) -> set[str]:
    """Return the names of the layers that run after the last block."""
    blocks = blocks_of(model)
    layers = _layers_outside(model, blocks)
    trace = forward_trace(model)
    if not trace.is_whole:
        return _probable_heads(model, layers)
    in_blocks = [
        index for index, name in enumerate(trace.called) if within_any(name, blocks)
    ]
    if not in_blocks:
        return set()
    return layers.intersection(trace.called[max(in_blocks) :])


def _layers_outside(model: nn.Module, blocks: Iterable[str]) -> set[str]:
    """Return the names of the layers outside of the blocks, and of other lists of blocks."""
    lists = [
        name
        for name, modules in instances(model, nn.ModuleList).items()
        # the elements of a list may be heads themselves, one per codebook
        if any(list(module.children()) for module in modules)
    ]
    layers = outside_of(layers_of(model), (*blocks, *lists))
    return {name for name, (_, kind) in layers.items() if kind in DEFAULT_TYPES}


def _outside_base(model: nn.Module) -> set[str]:
    """Return the names of the modules outside of transformers' base model; empty without one."""
    base = getattr(model, "base_model", model)
    if base is model:
        return set()
    inside = {id(module) for module in base.modules()}
    return {name for name, module in model.named_modules() if id(module) not in inside}


def _probable_heads(model: nn.Module, layers: set[str]) -> set[str]:
    """Return the layers that probably run after the blocks of a model that cannot be traced.

    These are the layers outside of the base model. Without such layers, these are the layers with
    one output per row of the token embedding: models with remote code may not name their base
    model.
    """
    outside = layers & _outside_base(model) - set(outside_language(model))
    if outside:
        return outside
    weight = getattr(embedding_of(model), "weight", None)
    if weight is None:
        return set()
    return {
        name
        for name, module in instances(model, nn.Linear).items()
        if name in layers and module.out_features == len(weight)
    }


def usually_float(model: nn.Module, asked: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of layers that stay float unless a user selects them.

    They are heads, and layers outside of the language part of a multimodal model.

    Args:
        model: model to inspect.
        asked: globs of layer names. A glob selects such layers if it matches no other layer.
    """
    layers = list(layers_of(model))
    usual = {*outside_language(model), *heads_of(model)}.intersection(layers)
    selected = set[str]()
    for glob in asked:
        names = [name for name in layers if fnmatchcase(name, glob)]
        # A broad glob such as "*" also matches other layers: it does not ask for heads or towers.
        if usual.issuperset(names):
            selected.update(names)
    return tuple(name for name in layers if name in usual - selected)
