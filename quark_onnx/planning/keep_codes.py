"""Keep the scales of weights that the model stores as integer codes, so that the codes stay."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.config import QConfig, QuantizationSpec, TensorOverride
from quark_onnx.dtypes import INT8, UINT8, Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.patterns.coded_constants import CodedConstant, CodedParameters
from quark_onnx.patterns.weight_axes import weight_axes
from quark_onnx.plan import select
from quark_onnx.plan.select import NodeSpec


def keep_codes(
    config: QConfig, graph: Graph, coded: Mapping[str, CodedConstant]
) -> QConfig:
    """Return the configuration with an override for each constant that keeps its stored codes.

    Other constants are quantized anew, for example if the configuration has weights of four bits
    or power-of-two scales.

    Args:
        config: the settings; the user's overrides for single tensors take precedence.
        graph: the prepared float graph.
        coded: the constants that the model stores as codes, by name.
    """
    names = [name for name in coded if graph.is_constant(name)]
    if not names or config.form == "vendor":
        return config
    specs = select(graph, config, strict=False)
    overrides = list[TensorOverride]()
    for name in names:
        override = _override(graph, name, coded[name], specs)
        if override is not None:
            overrides.append(override)
    if not overrides:
        return config
    return config.with_(tensors=(*overrides, *config.tensors))


def _override(
    graph: Graph, name: str, coded: CodedConstant, specs: Mapping[Node, NodeSpec]
) -> TensorOverride | None:
    """Return the override with the stored scale; None if a reader does not accept the scale."""
    parameters = coded.parameters()
    readers = graph.consumers(name)
    if parameters is None or not readers:
        return None
    # An activation has no scale per row: the table stays float in the plan, and is written with its
    # codes.
    if parameters.axis is not None and all(
        _looks_up_activations(reader, specs[reader]) for reader in readers
    ):
        return TensorOverride(name, keep=True)
    dtype = INT8 if coded.tensor.data_type == TensorProto.INT8 else UINT8
    zeros = parameters.zero_point
    lowest_code = min(int(values(coded.tensor).min(initial=0)), *zeros.tolist())
    for reader in readers:
        spec = _spec_for(graph, reader, name, specs[reader], parameters)
        if spec is None:
            return None
        # The stored codes may use the least one.
        grid = spec.with_(dtype=dtype, narrow=False).grid
        if lowest_code < grid.qmin or zeros.max() > grid.qmax:
            return None
    return TensorOverride(
        name,
        dtype=dtype,
        narrow=False,
        axis=parameters.axis,
        scale=tuple(parameters.scale.tolist()),
        zero_point=tuple(parameters.zero_point.tolist()),
    )


def _looks_up_activations(reader: Node, specs: NodeSpec) -> bool:
    """Return whether a node is a Gather whose result is an activation of an integer format."""
    spec = specs.activation
    if reader.kind != "Gather" or spec is None or not specs.static:
        return False
    return isinstance(spec.dtype, Integer) and not spec.pow2


def _spec_for(
    graph: Graph, reader: Node, name: str, specs: NodeSpec, parameters: CodedParameters
) -> QuantizationSpec | None:
    """Return the format of a reader for a constant; None if it does not allow the stored scales."""
    # A body is planned apart from the graph whose constants it reads.
    if name not in reader.inputs:
        return None
    axes = weight_axes(graph, reader, reader.inputs.index(name))
    # A Gather passes the codes of its table on, with the format of activations.
    is_weight = axes is not None and not _looks_up_activations(reader, specs)
    spec = specs.weight if is_weight else specs.activation
    if spec is None or not isinstance(spec.dtype, Integer) or spec.dtype.bits < 8:
        return None
    if spec.pow2 or spec.block_size or spec.reduce_range or spec.scale != "float32":
        return None
    if parameters.axis is None:
        return spec
    # Integer kernels accept scales per output channel, and no zero points with them.
    if axes is None or not is_weight or axes.channels != (parameters.axis,):
        return None
    return None if parameters.zero_point.any() else spec
