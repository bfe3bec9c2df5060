"""Subgraph partitions for a processor, and the Q and DQ nodes around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import beyond_pairs
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.npu.placement import NPU
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.targets import chain, is_fused

#: Device of Q and DQ nodes around nodes off the processor, which the provider runs on the CPU.
EDGE = "VITIS_EP_CPU"
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Min", "Max"})
#: Operators that a factor may follow to imitate the engine's arithmetic.
_FACTORED = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean", "HardSigmoid"})
_MOVING = frozenset({"Flatten", "Reshape", "Squeeze"})

Devices = Mapping[Node, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Connected nodes on one side: on the processor, or off the processor.

    Attributes:
        nodes: nodes in graph order.
        inside: True if the nodes run on the processor.
        level: number of exits from the processor on the way from an input.
    """

    nodes: tuple[Node, ...]
    inside: bool
    level: int


def pieces(graph: Graph, devices: Devices) -> list[Piece]:
    """Return the partitions of a model, in the order of their first nodes.

    Connected nodes share a partition unless a node on a path between them runs elsewhere. A
    partition with such a path would wait for its own result.
    """
    levels, root = dict[Node, int](), dict[Node, Node]()
    for node in (node for node in graph.nodes if node in devices):
        leaders, inside = beyond_pairs(node, graph.leaders), devices[node] == NPU
        steps = [levels[each] + (inside and devices[each] != NPU) for each in leaders]
        levels[node] = max(steps, default=-1)
        levels[node] = max(0, levels[node]) if inside else levels[node]
        root[node] = node
        for each in leaders:
            if (devices[each] == NPU) == inside and levels[each] == levels[node]:
                root[_root(root, each)] = _root(root, node)
    found = dict[Node, list[Node]]()
    for node in root:
        found.setdefault(_root(root, node), []).append(node)
    return [
        Piece(tuple(nodes), devices[first] == NPU, levels[first])
        for first, nodes in found.items()
    ]


def edges(graph: Graph, devices: Devices) -> Counter[str]:
    """Count the Q and DQ nodes of a quantized model by device."""
    found = Counter[str]()
    for node in graph.nodes:
        if node.op_type in QUANTIZE:
            producer = graph.producer(node.inputs[0])
            near = [producer] if producer is not None else []
        elif node.op_type in DEQUANTIZE:
            near = graph.followers(node)
        else:
            continue
        inside = near and all(devices.get(each, NPU) == NPU for each in near)
        found[
            NPU if inside and not any(map(graph.is_output, node.outputs)) else EDGE
        ] += 1
    return found


def expected_edges(graph: Graph, devices: Devices) -> Counter[str]:
    """Count Q and DQ nodes by device, as amd-quark would quantize a float model.

    Every tensor between operators that are not fused is rounded. Each reader, weight and bias has a
    DequantizeLinear of its own.
    """
    found = Counter[str]()
    inner = {id(node) for start in graph.nodes for node in _chain(graph, start)[1:]}
    for name in (
        value.name for value in graph.inputs if value.name not in graph.initializers
    ):
        readers = graph.consumers(name)
        found[EDGE] += 1
        found.update(NPU if devices[reader] == NPU else EDGE for reader in readers)
    for node in graph.nodes:
        for name in node.inputs:
            weight = node.kind in LAYERS or (
                node.kind in _ELEMENTWISE and id(node) not in inner
            )
            if weight and graph.is_constant(name):
                found[NPU if devices[node] == NPU else EDGE] += 1
        if id(node) in inner or not node.outputs:
            continue
        last = _chain(graph, node)[-1]
        result = last.outputs[0]
        if graph.is_output(result) and last.kind in _MOVING:
            continue  # it ends the model as float
        found[NPU if devices[last] == NPU else EDGE] += 1
        found.update(
            NPU if devices[reader] == NPU else EDGE
            for reader in graph.consumers(result)
        )
        found[EDGE] += graph.is_output(result)
    return found


def _chain(graph: Graph, node: Node) -> list[Node]:
    """Return a node with its fused nodes."""

    def follows(each: Node, behind: Node) -> bool:
        factor = behind.kind == "Mul" and any(map(graph.is_constant, behind.inputs))
        return is_fused(each, behind) or (factor and each.kind in _FACTORED)

    return chain(graph, node, lambda each: False, follows)


def _root(root: dict[T, T], node: T) -> T:
    """Return the root of a node, with path halving (Tarjan & van Leeuwen 1984).

    Without halving, a chain takes quadratic time.
    """
    while root[node] is not node:
        root[node] = root[root[node]]
        node = root[node]
    return node
