"""The structure of a model: decoder blocks, quantizable layers, embedding and heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from quark_onnx.errors import ModelError
from quark_onnx.torch.models.language import decoder_of, outside_language, towers_of
from quark_onnx.torch.models.names import block_around, instances, within_any
from quark_onnx.torch.models.quantized_layer import kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layers_of(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """Return every quantizable layer by name, with its kind.

    >>> list(layers_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    ['0']
    """
    found = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None:
            found[name] = (module, kind)
    return found


def blocks_of(model: nn.Module) -> dict[str, Any]:
    """Return the blocks that a model runs in sequence, by name.

    Blocks are the elements of the outermost ``nn.ModuleList`` with most linear weights. The result
    is empty if there is no such list. Lists of the decoder have priority where transformers names a
    decoder, and the decoder's own lists have priority over lists of its parts: a vision tower or an
    encoder may have more weights.

    >>> blocks_of(nn.Sequential(nn.Linear(2, 2)))
    {}
    """
    towers = towers_of(model)
    lists = [
        (name, module)
        for name, module in instances(model, nn.ModuleList).items()
        if not within_any(name, towers)
    ]
    decoder = decoder_of(model)
    for inner in () if decoder is None else (decoder.children(), decoder.modules()):
        parts = {id(module) for module in inner}
        if own := [
            (name, module)
            for name, module in lists
            if id(module) in parts and any(_weights(module))
        ]:
            return _largest(own)
    return _largest(lists)


def _largest(lists: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the elements of the outermost list with most weights, by name."""
    outer = [
        (name, module)
        for name, module in lists
        if not any(name.startswith(f"{other}.") for other, _ in lists if other != name)
    ]
    sizes = [sum(_weights(module)) for _, module in outer]
    if not sizes or not max(sizes):
        return {}
    prefix, chosen = outer[sizes.index(max(sizes))]
    return {f"{prefix}.{index}": block for index, block in enumerate(chosen)}


def _weights(module: nn.Module) -> Iterator[int]:
    """Return the sizes of matrices and of stacks of matrices."""
    return (
        parameter.numel() for parameter in module.parameters() if parameter.ndim >= 2
    )


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module of this name by another."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if child.isdigit() and isinstance(owner, nn.ModuleList | nn.Sequential):
        owner[int(child)] = module
    else:
        setattr(owner, child, module)


def put_modules(model: nn.Module, made: Mapping[str, Any]) -> None:
    """Replace modules by name, at every place of the model that holds them.

    >>> shared = nn.Linear(2, 2)
    >>> model = nn.Sequential(shared, nn.ReLU(), shared)
    >>> put_modules(model, {"0": nn.Identity()})
    >>> model[0] is model[2]
    True
    """
    new = {id(model.get_submodule(name)): module for name, module in made.items()}
    for owner in list(model.modules()):
        for child, old in list(owner._modules.items()):
            if id(old) in new:
                setattr(owner, child, new[id(old)])


def shared_parameter(model: nn.Module, blocks: Mapping[str, Any]) -> str | None:
    """Return the name of a parameter of two blocks, or of a block and the rest.

    None if no parameter is shared.

    >>> model = nn.ModuleList([nn.LayerNorm(2), nn.LayerNorm(2)])
    >>> model[1].bias = model[0].bias
    >>> shared_parameter(model, {"0": model[0], "1": model[1]})
    '1.bias'
    """
    owners = dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = block_around(name, blocks)
        if owners.setdefault(id(parameter), block) != block:
            return str(name)
    return None


def shared_among(
    model: nn.Module,
    blocks: Mapping[str, Any],
    layers: Mapping[str, Any],
) -> bool:
    """Return whether a layer is part of two blocks, or of a block and of the rest."""
    own = {id(model.get_submodule(name)) for name in layers}
    places = dict[int, set[str]]()
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in own:
            block = block_around(name, blocks)
            places.setdefault(id(module), set()).add(block)
    return any(len(found) > 1 for found in places.values())


def embedding_of(model: nn.Module) -> nn.Module | None:
    """Return the token embedding.

    None if a model has several (one per codebook), or no token embedding.
    """
    try:
        return cast("PreTrainedModel", model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


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


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that compute logits; empty without a head.

    Models with remote code may not name their head. The head is then a Linear after the blocks with
    one output per row of the token embedding.
    """
    if not hasattr(model, "get_output_embeddings"):
        return ()
    try:
        head = cast("PreTrainedModel", model).get_output_embeddings()
    except NotImplementedError:  # several codebooks, each with a head of its own
        return ()
    if head is not None:
        return tuple(name for name, module in model.named_modules() if module is head)
    weight = getattr(embedding_of(model), "weight", None)
    if weight is None:
        return ()
    rows, blocks = len(weight), blocks_of(model)
    outside = (
        (name, module)
        for name, module in model.named_modules()
        if not within_any(name, blocks)
    )
    return tuple(
        name
        for name, module in outside
        if isinstance(module, nn.Linear) and module.out_features == rows
    )


def usually_float(model: nn.Module, asked: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of layers that stay float unless a user selects them.

    They are heads, and layers outside of the language part of a multimodal model.

    Args:
        model: model to inspect.
        asked: globs of layer names. A glob selects such layers if it matches no other layer.
    """
    outside = set(outside_language(model)) | set(heads_of(model))
    layers = list(layers_of(model))
    usual = [name for name in layers if name in outside]
    for glob in asked:
        found = [name for name in layers if fnmatchcase(name, glob)]
        if all(name in outside for name in found):
            usual = [name for name in usual if name not in found]
    return tuple(usual)
