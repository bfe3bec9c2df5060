"""The structure of a model: decoder blocks, quantizable layers and embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.models.language import decoder_of, named_part, towers_of
from quark_onnx.torch.models.names import (
    block_around,
    instances,
    outside_of,
    within_any,
)
from quark_onnx.torch.models.quantized_layer import kind_of


def layers_of(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """Return every quantizable layer by name, with its kind.

    >>> list(layers_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    ['0']
    """
    layers = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None:
            layers[name] = (module, kind)
    return layers


def blocks_of(model: nn.Module) -> dict[str, Any]:
    """Return the blocks that a model runs in sequence, by name.

    Blocks are the elements of the outermost ``nn.ModuleList`` with most linear weights. The result
    is empty if there is no such list. Lists of the decoder have priority where transformers names a
    decoder, and the decoder's own lists have priority over lists of its parts: a vision tower or an
    encoder may have more weights.

    Args:
        model: the model.

    Returns:
        The blocks in their order, by names such as "model.layers.0".

    >>> blocks_of(nn.Sequential(nn.Linear(2, 2)))
    {}
    """
    lists = outside_of(instances(model, nn.ModuleList), towers_of(model))
    decoder = decoder_of(model)
    if decoder is not None:
        # Direct children first: a deeper list may belong to a tower inside the decoder.
        for inner in (decoder.children(), decoder.modules()):
            # By identity, as names within the decoder differ from those in the model.
            parts = {id(module) for module in inner}
            of_decoder = {
                name: module for name, module in lists.items() if id(module) in parts
            }
            blocks = _largest(of_decoder)
            if blocks:
                return blocks
    return _largest(lists)


def _largest(lists: Mapping[str, Any]) -> dict[str, Any]:
    """Return the elements of the outermost list with most weights, by their names in the model.

    The result is empty if no list has weights.
    """
    sizes = dict[str, int]()
    for name, module in lists.items():
        # Lists inside of another list belong to its elements.
        if not within_any(name, (other for other in lists if other != name)):
            sizes[name] = sum(_weights(module))
    # Of equal sizes the first list wins, in the order of the model.
    prefix = max(sizes, key=lambda name: sizes[name], default="")
    if not sizes.get(prefix):
        return {}
    return {f"{prefix}.{index}": block for index, block in enumerate(lists[prefix])}


def _weights(module: nn.Module) -> Iterator[int]:
    """Yield the sizes of matrices and of stacks of matrices."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            yield parameter.numel()


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module of a model by another.

    Args:
        model: model, changed in place.
        name: name of the module. Other names of the same module keep it (see ``put_modules``).
        module: the replacement.
    """
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if child.isdigit() and isinstance(owner, nn.ModuleList | nn.Sequential):
        owner[int(child)] = module
    else:
        setattr(owner, child, module)


def put_modules(model: nn.Module, made: Mapping[str, Any]) -> None:
    """Replace modules by name, at every place of the model that holds them.

    Args:
        model: model, changed in place.
        made: the replacements, by the names of the modules that they replace.

    >>> shared = nn.Linear(2, 2)
    >>> model = nn.Sequential(shared, nn.ReLU(), shared)
    >>> put_modules(model, {"0": nn.Identity()})
    >>> model[0] is model[2]
    True
    """
    # By identity: the same module may be a child of several parents.
    new = {id(model.get_submodule(name)): module for name, module in made.items()}
    # Lists of modules and children are copied, as both change during the loop.
    for owner in list(model.modules()):
        for child, old in list(owner._modules.items()):
            if id(old) in new:
                setattr(owner, child, new[id(old)])


def shared_parameter(model: nn.Module, blocks: Mapping[str, Any]) -> str | None:
    """Return the name of a parameter of two blocks, or of a block and the rest.

    None if no parameter is shared.

    Args:
        model: the model.
        blocks: its blocks, by name.

    >>> model = nn.ModuleList([nn.LayerNorm(2), nn.LayerNorm(2)])
    >>> model[1].bias = model[0].bias
    >>> shared_parameter(model, {"0": model[0], "1": model[1]})
    '1.bias'
    """
    owners = dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = block_around(name, blocks)
        # The first block with a parameter owns it; "" stands for the rest of the model.
        if owners.setdefault(id(parameter), block) != block:
            return str(name)
    return None


def shared_among(
    model: nn.Module, blocks: Mapping[str, Any], layers: Mapping[str, Any]
) -> bool:
    """Return whether a layer is part of two blocks, or of a block and of the rest.

    Args:
        model: the model.
        blocks: its blocks, by name.
        layers: layers to look for, by one of their names.
    """
    # Modules are compared by identity under all of their names.
    identities = {id(model.get_submodule(name)) for name in layers}
    owners = dict[int, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        block = block_around(name, blocks)
        if id(module) in identities and owners.setdefault(id(module), block) != block:
            return True
    return False


def embedding_of(model: nn.Module) -> nn.Module | None:
    """Return the token embedding.

    None if a model has several (one per codebook), or no token embedding.
    """
    return named_part(model, "get_input_embeddings")


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the layer that computes logits.

    None if a model has several (one per codebook), or none.
    """
    return named_part(model, "get_output_embeddings")


def vocabulary_of(model: nn.Module) -> int:
    """Return the number of rows of the token embedding.

    Raises:
        ModelError: the model has no single token embedding.
    """
    weight = getattr(embedding_of(model), "weight", None)
    if weight is None:
        raise ModelError(
            f"{type(model).__name__} has no single embedding of tokens; text cannot be its data",
        )
    return len(weight)


def positions_of(model: nn.Module) -> int | None:
    """Return the number of positions in a learned table of positions.

    GPT-2 and OPT have such a table; rotary embeddings compute any position.

    Returns:
        The number; None without a table.
    """
    config = getattr(model, "config", None)
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int):
        return None
    tokens = embedding_of(model)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module is tokens:
            continue
        # OPT has two more rows than positions
        if 0 <= module.num_embeddings - count <= 2:
            return count
    return None
