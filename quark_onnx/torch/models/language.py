"""The language part of a multimodal model: decoder and encoder of text, without towers.

Towers are the parts of a model for images, video and sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from quark_onnx.containers import present

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def decoder_of(model: nn.Module) -> nn.Module | None:
    """Return the decoder of a model, as transformers names it.

    None if there is no decoder, or if the model itself is the decoder.
    """
    try:
        found = cast("PreTrainedModel", model).get_decoder()
    except (AttributeError, NotImplementedError):
        return None
    return None if found is model else found


def encoder_of(model: nn.Module) -> nn.Module | None:
    """Return the encoder of a sequence-to-sequence model, if the model has one.

    The encoder's blocks belong to the model like the decoder's blocks.
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    try:
        found = cast("PreTrainedModel", model).get_encoder()
    except (AttributeError, NotImplementedError):
        return None
    return None if found is model else found


def reads_more_than_text(model: nn.Module) -> bool:
    """Return whether a model or a part of it reads images, video or sound."""
    return any(set(_modalities(module)) - {"text"} for module in model.modules())


def towers_of(model: nn.Module) -> list[str]:
    """Return the names of a model's vision and audio towers: parts that read no text.

    A part that contains the decoder is no tower, whatever its modalities are. Neither is the
    encoder of a sequence-to-sequence model.
    """
    parts = present((decoder_of(model), encoder_of(model)))
    kept = {id(part) for part in parts}
    found = list[str]()
    for name, module in model.named_modules():
        modalities = _modalities(module)
        inside = any(name.startswith(f"{tower}.") for tower in found)
        if not name or not modalities or "text" in modalities or inside:
            continue
        if not any(id(each) in kept for each in module.modules()):
            found.append(name)
    return found


def language_parts(model: nn.Module) -> list[str]:
    """Return the names of the language part's modules, without embeddings and heads.

    Empty if the model reads text alone, or if transformers names no decoder.
    """
    if not reads_more_than_text(model):
        return []
    parts = {
        id(part) for part in (decoder_of(model), encoder_of(model)) if part is not None
    }
    return [
        name for name, module in model.named_modules() if name and id(module) in parts
    ]


def outside_language(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules outside of the language part, such as towers."""
    parts, towers = language_parts(model), towers_of(model)
    for name, _ in model.named_modules():
        in_tower = any(f"{name}.".startswith(f"{tower}.") for tower in towers)
        in_part = any(f"{name}.".startswith(f"{part}.") for part in parts)
        if in_tower or (parts and not in_part):
            yield name


def _modalities(module: nn.Module) -> tuple[str, ...]:
    """Return the input modalities of a model of transformers; empty otherwise."""
    found = getattr(module, "input_modalities", ())
    return (found,) if isinstance(found, str) else tuple(found)
