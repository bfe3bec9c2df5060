"""Copy of a quantized model whose layers become placeholder nodes in an export."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, Rounding
from quark_onnx.torch.models.structure import set_module

#: The domain of placeholder nodes.
DOMAIN = "quark_onnx.layers"
#: Placeholders: a Linear layer, the weight of another layer, a rounded activation.
LINEAR, WEIGHT, ROUNDING = "Linear", "Weight", "Rounding"

_SHORT = (torch.float16, torch.bfloat16)


class MarkedRounding(nn.Module):
    """Rounding of an activation that becomes a placeholder node in an export.

    The node names the layer and the side: "input" or "output", or "" for a module of a graph
    without a layer.
    """

    def __init__(self, rounding: Rounding, layer: str, side: str) -> None:
        super().__init__()
        self.rounding, self._attributes = rounding, {"layer": layer, "side": side}

    def forward(self, x: torch.Tensor) -> Any:
        """Round the activation."""
        # Outside of an export, the activation is rounded in torch.
        if not torch.compiler.is_exporting():
            return self.rounding(x)
        return _node(ROUNDING, (x,), self._attributes, x.dtype, x.shape)


class StandIn(nn.Module):
    """Quantized layer whose weight becomes a placeholder node in an export.

    Args:
        layer: the quantized layer.
        name: the name of the layer.
    """

    def __init__(self, layer: QuantizedLayer, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name
        for side in ("input", "output"):
            rounding = getattr(layer, side)
            if rounding is not None:
                setattr(layer, side, MarkedRounding(rounding, name, side))

    def forward(self, input: torch.Tensor, *more: Any, **named: Any) -> Any:
        """Compute the layer's output."""
        layer = self.layer
        # A float weight is traced as it is.
        if layer.quantized is None or not torch.compiler.is_exporting():
            return layer(input, *more, **named)
        # The indices of an embedding are not rounded.
        if layer.input is not None and input.is_floating_point():
            input = layer.input(input)
        return layer.rounded(self._exported(input, more, named))

    def _exported(
        self, x: torch.Tensor, more: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        """Compute the output with a placeholder: of the layer if it is linear, else of its weight.

        Args:
            x: input of the layer, rounded if the layer rounds it.
        """
        layer, attributes = self.layer, {"layer": self.name}
        assert layer.quantized is not None
        if layer.kind == "Linear":
            operands = (x,) if layer.bias is None else (x, layer.bias)
            return _node(
                LINEAR,
                operands,
                attributes,
                x.dtype,
                # (..., outputs).
                (*x.shape[:-1], layer.shape[0]),
            )
        # Layers of other kinds are traced with a weight from a placeholder.
        weight = _node(WEIGHT, (), attributes, layer.quantized.dtype, layer.shape)
        return layer.compute(x, weight, more, named)


def _node(
    kind: str,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    dtype: torch.dtype,
    shape: Sequence[Any],
) -> Any:
    """Return the output of a placeholder node; sizes of its shape may be symbolic."""
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{kind}",
        inputs,
        attributes,
        dtype=dtype,
        shape=shape,
        version=1,
    )


def _check_has_nodes(name: str, spec: LayerSpec) -> None:
    """Raise ConfigError for a rounding inside of attention, which no node stands for."""
    if spec.rotated:
        raise ConfigError(
            f"{name}: an ONNX model has no node for keys that are rounded after"
            " they are rotated; quantize with where='projection', or without"
            " kv_cache",
        )
    if spec.probabilities is not None:
        raise ConfigError(
            f"{name}: an ONNX model has no node for probabilities of attention that"
            " are rounded; quantize without attention",
        )


def _moved_tensors(module: nn.Module, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Return a module's own tensors by id, on the CPU, cast to a dtype unless they are codes."""
    moved = dict[int, torch.Tensor]()
    parameters = dict(module.named_parameters(recurse=False))
    for parameter in parameters.values():
        target = dtype if parameter.is_floating_point() else parameter.dtype
        # ``to`` copies nothing if device and dtype are the same.
        moved[id(parameter)] = nn.Parameter(
            parameter.detach().to("cpu", target), requires_grad=False
        )
    holds_codes = isinstance(module, QuantizedLayer)
    for buffer in module.buffers(recurse=False):
        # Scales of codes keep their type.
        is_cast = buffer.is_floating_point() and not holds_codes
        # Frequencies of RoPE, for instance, lose digits in 16 bits.
        if is_cast and (parameters or buffer.dtype in _SHORT):
            moved[id(buffer)] = buffer.detach().to("cpu", dtype)
        else:
            moved[id(buffer)] = buffer.detach().to("cpu")
    return moved


def standing_in(
    model: nn.Module,
    dtype: torch.dtype,
) -> tuple[Any, dict[str, QuantizedLayer], dict[str, Rounding]]:
    """Copy a model with a StandIn in place of each quantized layer.

    Codes, and tensors of the requested dtype, are shared with the model. Floats in modules without
    parameters, such as the frequencies of rotary embeddings, stay float32.

    Args:
        model: a model from ``quantize_model``.
        dtype: torch.float32 or torch.float16.

    Returns:
        The copy, the quantized layers by name, and the roundings between layers by name.

    Raises:
        ConfigError: rotated keys or attention probabilities are quantized, for which no placeholder
            exists.
    """
    for name, layer in instances(model, QuantizedLayer).items():
        _check_has_nodes(name, layer.spec)
    # deepcopy takes these tensors in place of copies, by the identity of the originals.
    memo = dict[int, Any]()
    for module in model.modules():
        memo |= _moved_tensors(module, dtype)
    with warnings.catch_warnings():
        # torch warns of its own exported graphs.
        warnings.simplefilter("ignore", FutureWarning)
        copied = copy.deepcopy(model, memo)
    layers = dict[str, QuantizedLayer]()
    stand_ins = dict[int, StandIn]()
    between = dict[str, Rounding]()
    # A module that is shared has several names.
    modules = dict(copied.named_modules(remove_duplicate=False))
    quantized = {
        name for name, module in modules.items() if isinstance(module, QuantizedLayer)
    }
    for name, module in modules.items():
        if name in quantized:
            # One stand-in for a shared module, and one node for each call.
            if id(module) not in stand_ins:
                if module.quantized is not None:
                    # The weight is dequantized to the dtype of the computation.
                    module.quantized = replace(module.quantized, dtype=dtype)
                layers[name], stand_ins[id(module)] = module, StandIn(module, name)
            set_module(copied, name, stand_ins[id(module)])
        # Roundings within quantized layers are marked by their stand-ins.
        elif isinstance(module, Rounding) and name.rpartition(".")[0] not in quantized:
            between[name] = module
            set_module(copied, name, MarkedRounding(module, name, ""))
    return copied.eval(), layers, between
