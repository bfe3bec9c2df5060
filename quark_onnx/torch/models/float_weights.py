"""Reasons why weights stay float, and the error for a float model."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import TYPE_CHECKING, Any

from quark_onnx.common.containers import grouped
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.wording import counted, first_of
from quark_onnx.report import percentage
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.mixtures import unknown_stacks_of
from quark_onnx.torch.models.quantized_layer import (
    inputs_of,
    unlike_its_base,
)

if TYPE_CHECKING:
    from torch import nn

ROUTER = "it chooses among experts"
EMPTY = "it has no weights"
UNCALLED = "the model reads its weight, and never calls the layer"
TOO_NARROW = "it has fewer inputs than a group"


def reason_of(name: str, config: TorchConfig) -> str:
    """Return why a layer without a spec stays float.

    Args:
        name: name of the layer.
        config: configuration that has no spec for the layer.
    """
    return "excluded" if config.excludes(name) else "nothing asks for it"


def fills_a_group(module: Any, spec: LayerSpec | None) -> bool:
    """Return whether a layer has the inputs of at least one group of its format.

    Clients refuse groups that are not full. True for formats without groups, and for float layers.
    """
    if spec is None or spec.weight is None or module.weight.ndim != 2:
        return True
    return inputs_of(module) >= spec.weight.group


def other_weights_of(
    model: nn.Module, layers: Container[str], routers: Container[str]
) -> dict[str, str]:
    """Return the matrices outside of quantizable layers by name, with the reason.

    A layer that computes other than its base class is listed under the layer's name.

    Args:
        model: model with unfused experts.
        layers: names of the quantizable layers.
        routers: names of the router modules.

    Returns:
        Reasons by the name of the layer or parameter.
    """
    reasons = dict[str, str]()
    stacks = unknown_stacks_of(model)
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        # Vectors (gains of norms, biases) always stay float and are not worth a line.
        if parameter.ndim < 2 or owner in layers:
            continue
        module = model.get_submodule(owner)
        kind = type(module).__name__
        # A layer is named once, as a whole; any other weight by the parameter.
        if (unlike := unlike_its_base(module)) is not None:
            reasons[owner] = ROUTER if owner in routers else unlike
        elif owner in routers:
            reasons[name] = ROUTER
        elif name in stacks:
            reasons[name] = (
                f"it is a stack of experts in a {kind}, which is not known and cannot"
                " be taken apart"
            )
        else:
            reasons[name] = (
                f"it is a weight of {kind}, which is no layer that can be quantized"
            )
    return reasons


def notes_on_stacks(model: nn.Module) -> list[str]:
    """Return a note on expert stacks that stay float, or no note.

    Unknown stacks may hold most of a model's weights.

    Returns:
        A list with one sentence for the user, or an empty list.
    """
    stacks = unknown_stacks_of(model)
    if not stacks:
        return []
    first = next(iter(stacks))
    count = sum(parameter.numel() for parameter in stacks.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    # A model may have a stack per block: the first stands for all.
    others = ""
    if len(stacks) > 1:
        others = f" and {counted(len(stacks) - 1, 'more stack')} of experts"
    kind = type(model.get_submodule(first.rpartition(".")[0])).__name__
    return [
        f"{first}{others} stay float, {percentage(count / total)} of all weights:"
        f" {kind} is no stack of experts that is known"
    ]


def notes_on_kept(kept: Mapping[str, str]) -> list[str]:
    """Return notes on layers that stay float though the configuration would quantize them.

    Args:
        kept: reasons why layers stay float, by name.
    """
    notes = list[str]()
    for reason in (UNCALLED, TOO_NARROW):
        names = [name for name, given in kept.items() if given == reason]
        if names:
            stays = "stays" if len(names) == 1 else "stay"
            notes.append(f"{first_of(names)} {stays} float: {reason}")
    return notes


def check_not_all_float(chosen: Collection[str], kept: Mapping[str, str]) -> None:
    """Raise ConfigError if no layer is quantized.

    Args:
        chosen: names of the layers that are quantized.
        kept: reasons why weights stay float, by name.
    """
    if chosen:
        return
    # Thousands of layers share few reasons: one part for each reason, with its first names.
    names_of_reason = grouped((reason, name) for name, reason in kept.items())
    parts = [
        f"{first_of(names)}: {reason}" for reason, names in names_of_reason.items()
    ]
    raise ConfigError(
        "no layer would be quantized;"
        f" {'; '.join(parts) or 'the model has no layer with a weight'}",
    )
