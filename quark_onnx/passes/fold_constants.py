"""Compute once what depends on no input: Constant nodes and whatever follows from constants become
initializers.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from calibrators.onnx_runtime.session import open_session, tensor_bytes
from quark_onnx.graph import Graph, Node, store_constants
from quark_onnx.passes.base import register

logger = logging.getLogger(__name__)

#: A folded tensor above this many bytes must not have more elements than what it is computed from
#: (as after Expand, Tile, ConstantOfShape; a Cast of half-precision weights only makes them wider).
_LARGE = 1 << 20
_RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    },
)
_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
#: Types that numpy and onnxruntime exchange; others are left to onnxruntime.
_EXCHANGED = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL}
    | {TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64}
    | {TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64},
)


@register
def fold_constants(graph: Graph) -> int:
    """Fold every deterministic standard operator whose inputs are all constant."""
    count = store_constants(graph)
    foldable = _foldable(graph)
    inside = set(foldable)
    wanted = [
        name
        for node in foldable
        for name in node.outputs
        if graph.is_output(name)
        or any(reader not in inside for reader in graph.consumers(name))
    ]
    values = _compute(graph, foldable, wanted)
    for name, value in values.items():
        graph.initializers[name] = numpy_helper.from_array(value, name)
    done = [
        node
        for node in foldable
        if all(name in values or name not in wanted for name in node.outputs)
    ]
    if len(done) < len(
        foldable,
    ):  # some result was left out: what it is computed from must stay
        done = [node for node in done if any(name in values for name in node.outputs)]
    graph.remove(done)
    return count + len(done)


def _foldable(graph: Graph) -> list[Node]:
    known: set[str] = set()
    result = []
    budget = sum(math.prod(tensor.dims) for tensor in graph.initializers.values())
    for node in graph.nodes:
        if (
            node.domain
            or node.op_type in _RANDOM | _QUANTIZED
            or node.captures
            or node.has_subgraph
            or not node.inputs
        ):
            continue
        if not all(
            not name or name in known or graph.is_constant(name) for name in node.inputs
        ):
            continue
        if any(_is_larger(graph, name, budget) for name in node.outputs):
            continue  # the result would be thrown away
        if all(
            not name or graph.elem_type(name) in _EXCHANGED for name in node.outputs
        ):
            result.append(node)
            known.update(node.outputs)
    return result


def _is_larger(graph: Graph, name: str, budget: int) -> bool:
    """Whether a tensor is known to be too large to be kept, before it is computed."""
    shape = graph.shape(name) or ()
    size = math.prod(each for each in shape if isinstance(each, int))
    width = tensor_bytes(TensorProto(data_type=graph.elem_type(name)))
    return size * width > _LARGE and size > budget


def _compute(
    graph: Graph,
    nodes: list[Node],
    wanted: list[str],
) -> dict[str, np.ndarray]:
    """Values of the wanted tensors, without those that would make the model much larger."""
    if not wanted:
        return {}
    inputs = {name for node in nodes for name in node.inputs if graph.is_constant(name)}
    proto = helper.make_graph(
        [node.to_proto() for node in nodes],
        "constants",
        [],
        [onnx.ValueInfoProto(name=name) for name in wanted],
        [graph.initializers[name] for name in sorted(inputs)],
    )
    model = helper.make_model(
        proto,
        opset_imports=[helper.make_opsetid("", graph.opset)],
        ir_version=graph.ir_version,
    )
    try:
        values = open_session(model, optimize=False).run(wanted, {})
    except Exception as error:
        # onnxruntime raises several unrelated types; what it cannot run, it cannot fold
        logger.debug("constants are not folded: %s", error)
        return {}
    budget = sum(math.prod(graph.initializers[name].dims) for name in inputs)
    return {
        name: value
        for name, value in zip(wanted, values, strict=True)
        if isinstance(value, np.ndarray)
        and (value.nbytes <= _LARGE or value.size <= budget)
    }
