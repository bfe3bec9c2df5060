"""Subgraph partitions for a processor, and the Q and DQ nodes around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from quark_onnx.common.containers import grouped_by
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
    levels = dict[Node, int]()
    root = dict[Node, Node]()
    for node in graph.nodes:
        if node not in devices:
            continue
        inside = devices[node] == NPU
        # Q and DQ nodes belong to no partition: the producers behind them count.
        leaders = beyond_pairs(node, graph.leaders)
        # The first nodes off the processor have level -1, so that the nodes behind them are at
        # level 0, as those at the inputs are.
        level = 0 if inside else -1
        for leader in leaders:
            # An edge from the CPU back to the processor starts a new level.
            exits = inside and devices[leader] != NPU
            level = max(level, levels[leader] + exits)
        levels[node] = level
        root[node] = node
        for leader in leaders:
            # Equal levels exclude a path through the other side, which would raise the level.
            if (devices[leader] == NPU) == inside and levels[leader] == level:
                root[root_in(root, leader)] = root_in(root, node)
    members = grouped_by(root, lambda node: root_in(root, node))
    return [
        Piece(tuple(nodes), devices[first] == NPU, levels[first])
        for first, nodes in members.items()
    ]


def edges(graph: Graph, devices: Devices) -> Counter[str]:
    """Count the Q and DQ nodes of a quantized model by device."""
    counts = Counter[str]()
    for node in graph.nodes:
        if node.op_type in QUANTIZE:
            # A QuantizeLinear runs with its producer, a DequantizeLinear with its readers.
            producer = graph.producer(node.inputs[0])
            near = [] if producer is None else [producer]
        elif node.op_type in DEQUANTIZE:
            near = graph.followers(node)
        else:
            continue
        # Q and DQ nodes have no device of their own.
        inside = {devices.get(neighbour, NPU) for neighbour in near} == {NPU}
        if inside and not any(map(graph.is_output, node.outputs)):
            counts[NPU] += 1
        else:
            # Also a Q node of an input, which nothing produces: ``near`` is empty then.
            counts[EDGE] += 1
    return counts


def expected_edges(graph: Graph, devices: Devices) -> Counter[str]:
    """Count Q and DQ nodes by device, as amd-quark would quantize a float model.

    Every tensor between operators that are not fused is rounded. Each reader, weight and bias has a
    DequantizeLinear of its own.
    """
    counts = Counter[str]()

    def device_beside(node: Node) -> str:
        return NPU if devices[node] == NPU else EDGE

    # An input has one Q node, and a DQ node for each reader.
    for value in graph.fed:
        counts[EDGE] += 1
        counts.update(map(device_beside, graph.consumers(value.name)))
    fused = {member for start in graph.nodes for member in _chain(graph, start)[1:]}
    for node in graph.nodes:
        starts_a_chain = node not in fused
        if node.kind in LAYERS or (starts_a_chain and node.kind in _ELEMENTWISE):
            # Constants have codes in the model, and one DQ node each.
            counts[device_beside(node)] += sum(map(graph.is_constant, node.inputs))
        if not starts_a_chain or not node.outputs:
            continue
        last = _chain(graph, node)[-1]
        result = last.outputs[0]
        ends_model = graph.is_output(result)
        if ends_model and last.kind in _MOVING:
            continue  # it stays float
        # One Q node beside the last node of the chain, one DQ node beside each reader.
        counts.update(map(device_beside, (last, *graph.consumers(result))))
        counts[EDGE] += ends_model
    return counts


def _chain(graph: Graph, node: Node) -> list[Node]:
    """Return a node with its fused nodes."""

    def follows(node: Node, follower: Node) -> bool:
        if is_fused(node, follower):
            return True
        if node.kind not in _FACTORED or follower.kind != "Mul":
            return False
        return any(map(graph.is_constant, follower.inputs))

    return chain(graph, node, lambda _: False, follows)


def root_in(root: dict[T, T], node: T) -> T:
    """Return the root of a node, with path halving (Tarjan & van Leeuwen 1984).

    Without halving, a chain takes quadratic time.
    """
    while root[node] is not node:
        root[node] = root[root[node]]
        node = root[node]
    return node
