"""The language part of a multimodal model: decoder and encoder of text, without towers.

Towers are the parts of a model for images, video and sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quark_onnx.torch.models.names import within_any

if TYPE_CHECKING:
    from torch import nn


def decoder_of(model: nn.Module) -> nn.Module | None:
    """Return the decoder of a model, as transformers names it.

    None if there is no decoder, or if the model itself is the decoder.
    """
    return named_part(model, "get_decoder")


def encoder_of(model: nn.Module) -> nn.Module | None:
    """Return the encoder of a sequence-to-sequence model, if the model has one.

    The encoder's blocks belong to the model like the decoder's blocks.
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    return named_part(model, "get_encoder")


def named_part(model: nn.Module, getter: str) -> nn.Module | None:
    """Return the part that a method of transformers names; None for the model itself."""
    # Modules outside of transformers lack the method, and some models of transformers raise.
    try:
        part: nn.Module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    # get_decoder() of a bare decoder returns the model itself.
    return None if part is model else part


def _text_parts(model: nn.Module) -> set[int]:
    """Return the identities of the decoder and of the encoder, as far as there are such."""
    parts = (decoder_of(model), encoder_of(model))
    # By identity: the parts are looked for among named_modules().
    return {id(part) for part in parts if part is not None}


def reads_more_than_text(model: nn.Module) -> bool:
    """Return whether a model or a part of it reads images, video or sound."""
    return any(set(_modalities(module)) - {"text"} for module in model.modules())


def towers_of(model: nn.Module) -> list[str]:
    """Return the names of a model's vision and audio towers: parts that read no text.

    A part that contains the decoder is no tower, whatever its modalities are. Neither is the
    encoder of a sequence-to-sequence model.

    Returns:
        Names of the outermost modules, in the order of the model.
    """
    text_parts = _text_parts(model)
    towers = list[str]()
    for name, module in model.named_modules():
        modalities = _modalities(module)
        # The model itself (name "") is no tower, nor is a part that reads text among others.
        if not name or not modalities or "text" in modalities:
            continue
        # named_modules() yields a tower before its own parts, which are not listed again.
        if within_any(name, towers):
            continue
        if text_parts.isdisjoint(id(part) for part in module.modules()):
            towers.append(name)
    return towers


def language_parts(model: nn.Module) -> list[str]:
    """Return the names of the language part's modules, without embeddings and heads.

    Empty if the model reads text alone, or if transformers names no decoder.
    """
    if not reads_more_than_text(model):
        return []
    parts = _text_parts(model)
    return [
        name for name, module in model.named_modules() if name and id(module) in parts
    ]


def outside_language(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules outside of the language part, such as towers.

    Modules inside of towers are included. Without towers, and for a model that reads text alone,
    there are no names.
    """
    parts, towers = language_parts(model), towers_of(model)
    for name, _ in model.named_modules():
        # Without a decoder that transformers names, only towers are known to be outside.
        beside_parts = bool(parts) and not within_any(name, parts)
        if beside_parts or within_any(name, towers):
            yield name


def _modalities(module: nn.Module) -> tuple[str, ...]:
    """Return the input modalities of a model of transformers; empty otherwise."""
    modalities = getattr(module, "input_modalities", ())
    return (modalities,) if isinstance(modalities, str) else tuple(modalities)
