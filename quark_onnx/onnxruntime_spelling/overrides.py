"""Translation of ``TensorQuantOverrides`` to TensorOverride."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quark_onnx.common.errors import nearest
from quark_onnx.config import TensorOverride
from quark_onnx.config.checks import refuse_first, require_known
from quark_onnx.graph import Graph
from quark_onnx.onnxruntime_spelling.request import CallError, flag, format_of

_KEYS = (
    "quant_type",
    "axis",
    "scale",
    "zero_point",
    "symmetric",
    "reduce_range",
    "rmin",
    "rmax",
    "convert",
)
#: Function from a ``quant_type`` to the name of a number format.
Formats = Callable[[Any], str]


def tensor_overrides(
    graph: Graph,
    value: object,
    formats: Formats = format_of,
) -> list[TensorOverride]:
    """Translate the overrides of tensors.

    Args:
        graph: the float model.
        value: dictionaries by tensor name, or lists of dictionaries with one for each channel.
        formats: function from a ``quant_type`` to a number format.

    Raises:
        CallError: a tensor or a key is unknown, or keys do not go together.
    """
    if not isinstance(value, Mapping):
        raise CallError(
            f"extra option TensorQuantOverrides is {value!r}; it must be a dictionary"
            " by tensor names",
        )
    # onnxruntime raises for an unknown tensor, too.
    names = {name for node in graph.nodes for name in (*node.inputs, *node.outputs)}
    overrides = list[TensorOverride]()
    for tensor, given in value.items():
        if tensor not in names:
            raise CallError(
                f"TensorQuantOverrides: tensor {tensor!r} is not present in the"
                f" model{nearest(str(tensor), names)}",
            )
        if isinstance(given, Mapping):
            # onnxruntime takes a list, of one dictionary for a per-tensor override; a bare one is
            # accepted here.
            channels = [given]
        else:
            channels = list(given or ())
        if channels:
            _check(graph, tensor, channels)
            overrides += _overrides(graph, tensor, channels, formats)
    return overrides


def _check(graph: Graph, tensor: str, channels: Sequence[Any]) -> None:
    where = f"TensorQuantOverrides[{tensor!r}]"
    for channel in channels:
        if not isinstance(channel, Mapping):
            raise CallError(f"{where} holds {channel!r}; it must be a dictionary")
        for key in channel:
            require_known(key, _KEYS, f"{where} has no key", CallError)
        # The wording is onnxruntime's.
        if ("scale" in channel) != ("zero_point" in channel):
            raise CallError(
                f"Must provide both 'scale' and 'zero_point', or none of them: {where}",
            )
        clash = [
            key
            for key in ("symmetric", "reduce_range", "rmin", "rmax")
            if key in channel
        ]
        if clash and "scale" in channel:
            raise CallError(
                f"{where}: option(s) [{clash[0]}] are invalid with 'scale' and"
                " 'zero_point'",
            )
    # Settings that all channels share are read from the first.
    shared = channels[0]
    constant = graph.is_constant(tensor)
    contradictions = (
        (
            len(channels) > 1 and "axis" not in shared,
            f"{where} has {len(channels)} channels, and no 'axis' in the first of them",
        ),
        (
            "reduce_range" in shared and not constant,
            f"{where}: option 'reduce_range' is for initializers, and this is an"
            " activation",
        ),
        (
            "convert" in shared and constant,
            f"{where}: option 'convert' is for activations, and this is an initializer",
        ),
    )
    refuse_first(contradictions, CallError)
    for key in ("quant_type", "symmetric", "reduce_range"):
        # As text: enumerations of onnxruntime and of this package have equal names.
        if len({str(channel.get(key)) for channel in channels}) > 1:
            raise CallError(
                f"{where}: option {key!r} must be the same for all channels",
            )


def _overrides(
    graph: Graph,
    tensor: str,
    channels: Sequence[Mapping[str, Any]],
    formats: Formats,
) -> list[TensorOverride]:
    shared = channels[0]
    overrides = [TensorOverride(tensor, **_settings(tensor, channels, formats))]
    if "convert" in shared:
        converted = dict(shared["convert"])
        # Without recv_nodes, every reader gets the converted tensor.
        readers = converted.pop("recv_nodes", None)
        if readers:
            # onnxruntime's recv_nodes is a set.
            names = sorted(readers)
        else:
            names = [consumer.name for consumer in graph.consumers(tensor)]
        _check(graph, tensor, [converted])
        if names:
            settings = _settings(tensor, [converted], formats)
            overrides.append(TensorOverride(tensor, names, **settings))
    return overrides


def _settings(
    tensor: str,
    channels: Sequence[Mapping[str, Any]],
    formats: Formats,
) -> dict[str, Any]:
    """Return the arguments of a TensorOverride."""
    shared, settings = channels[0], dict[str, Any]()
    if "quant_type" in shared:
        settings["dtype"] = formats(shared["quant_type"])
    if "axis" in shared:
        settings["axis"] = shared["axis"]
        if "scale" not in shared:
            settings["symmetric"] = True  # as in onnxruntime for channels
    for key in ("symmetric", "reduce_range"):
        if key in shared:
            settings[key] = flag(shared[key], f"{key} of {tensor!r}")
    for key, name in (
        ("scale", "scale"),
        ("zero_point", "zero_point"),
        ("rmin", "low"),
        ("rmax", "high"),
    ):
        values = [_number(channel[key]) for channel in channels if key in channel]
        if values and len(values) < len(channels):
            raise CallError(
                f"TensorQuantOverrides[{tensor!r}]: option {key!r} must be given for all"
                " channels, or for none",
            )
        if values:
            settings[name] = values
    return settings


def _number(value: Any) -> Any:
    # numpy scalars and arrays of one element, as scripts compute them.
    return value.item() if hasattr(value, "item") else value
