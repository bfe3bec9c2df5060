"""preflight: a forecast of the nodes and subgraphs on a Ryzen AI processor.

The forecast needs no compiler. It is an estimate: AMD does not publish all limits of its compilers.
Every placement has a reason, a source and a confidence, and ``ep_report`` compares the forecast
with the processor's own report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto

from quark_onnx.check.inlined import inlined
from quark_onnx.common.containers import grouped_by
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted, in_units, tally
from quark_onnx.config.checks import require
from quark_onnx.files.io import load
from quark_onnx.graph import Graph, Node, gather_constants
from quark_onnx.graph.codes import beyond_pairs
from quark_onnx.graph.cost import operations
from quark_onnx.npu.doubts import Doubt, doubts_of
from quark_onnx.npu.page import forecast_blocks
from quark_onnx.npu.partition import EDGE, edges, expected_edges, pieces
from quark_onnx.npu.placement import (
    ABORT,
    CPU,
    NPU,
    Case,
    NodePlacement,
    alone,
    on_device,
    place,
    placement,
    whole_model,
)
from quark_onnx.npu.support import KINDS, RELEASE, RELEASES
from quark_onnx.page.blocks import Block
from quark_onnx.page.reported import Reported
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.report import percentage
from quark_onnx.report.verdict.verdict import Band
from quark_onnx.targets import Target
from quark_onnx.targets.check import kind_of
from quark_onnx.targets.pairs import Pairs
from quark_onnx.targets.target import npu_of

_WIDE = frozenset({TensorProto.INT16, TensorProto.UINT16})


#: Limits of the bands of a forecast: shares of operations, and a number of subgraphs.
_GOOD, _POOR, _FEW = 0.95, 0.5, 3
#: Maximum number of operator types in the text of a group.
_SHOWN = 5


@dataclass(frozen=True)
class Group:
    """Nodes that stay off the processor for a common reason.

    Attributes:
        device: "CPU" or "abort".
        cause: the reason in words.
        fix: how to bring the nodes to the processor; empty if no way is known.
        placements: placements on the nodes.
    """

    device: str
    cause: str
    fix: str
    placements: tuple[NodePlacement, ...]

    @property
    def kinds(self) -> str:
        """Return the operator types with their numbers of nodes."""
        op_types = Counter(placement.op_type for placement in self.placements)
        kinds = op_types.most_common()
        shown = tally(kinds[:_SHOWN])
        return shown + (", ..." if len(kinds) > _SHOWN else "")

    @property
    def confidence(self) -> str:
        """Return the confidence, such as "measured on XDNA2, Ryzen AI 1.7"."""
        return ", ".join(dict.fromkeys(map(_certainty, self.placements)))


def _certainty(placed: NodePlacement) -> str:
    """Return the confidence of a placement, with the device of a measurement."""
    if placed.measured_on:
        return f"{placed.confidence} on {placed.measured_on}"
    return placed.confidence


def _amount(operations: int) -> str:
    """Format a number of operations.

    >>> _amount(1_070_000_000), _amount(2_500_000), _amount(640)
    ('1.07 GOPs', '2.50 MOPs', '640 operations')
    """
    units = (("GOPs", 1e9), ("MOPs", 1e6))
    return in_units(operations, units, ".2f") or counted(operations, "operation")


@dataclass(frozen=True, repr=False)
class Preflight(Reported):
    """Forecast of the devices of a model's nodes.

    Attributes:
        target: the device.
        kind: number format of the model; for a float model, the assumed format.
        release: release of Ryzen AI.
        placements: placements on the nodes except Q and DQ nodes, in graph order.
        operations: number of operations of each node, in the same order.
        pieces: number of each node's subgraph partition, on the processor or off it.
        links: pairs of connected partitions: producer, consumer.
        counts: nodes of the quantized model on "NPU", "CPU", and "VITIS_EP_CPU" (Q and DQ nodes
            around the others).
        quantized: True if the model has Q/DQ pairs.
        doubts: reasons why partitions that are placed on the processor may not run there.
    """

    target: Target
    kind: str
    release: str
    placements: tuple[NodePlacement, ...]
    operations: tuple[int, ...]
    pieces: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    counts: dict[str, int]
    quantized: bool = False
    doubts: tuple[Doubt, ...] = ()

    @property
    def subgraphs(self) -> int:
        """Return the number of partitions on the processor."""
        return len(set(compress(self.pieces, self._on_npu)))

    @property
    def share(self) -> float:
        """Return the greatest fraction of operations on the processor, in [0, 1]."""
        return self._share(frozenset())

    @property
    def least_share(self) -> float:
        """Return the fraction of operations in partitions without a doubt, in [0, 1]."""
        return self._share(frozenset().union(*(doubt.pieces for doubt in self.doubts)))

    def _share(self, excluded: frozenset[int]) -> float:
        """Return the fraction of operations on the processor, without some partitions."""
        # Operations, not nodes: one convolution outweighs hundreds of reshapes.
        rows = zip(self.operations, self.pieces, self._on_npu, strict=True)
        there = sum(
            count for count, piece, inside in rows if inside and piece not in excluded
        )
        # A model of moves alone has no operations.
        return there / max(1, sum(self.operations))

    @property
    def _on_npu(self) -> list[bool]:
        return [placed.device == NPU for placed in self.placements]

    @property
    def certainty(self) -> str:
        """Return the shares of the operations by the confidence of their placements."""
        work = Counter[str]()
        for placed, count in zip(self.placements, self.operations, strict=True):
            work[_certainty(placed)] += count
        total = max(1, work.total())
        shares = [
            f"{percentage(count / total)} {name}" for name, count in work.most_common()
        ]
        return ", ".join(shares)

    @property
    def amount(self) -> str:
        """Return the number of operations with its unit."""
        return _amount(sum(self.operations))

    @property
    def aborts(self) -> list[NodePlacement]:
        """Return the nodes that crash the compiler."""
        return [placed for placed in self.placements if placed.device == ABORT]

    @property
    def groups(self) -> list[Group]:
        """Return the nodes off the processor, grouped by reason; crashes come first."""
        outside = [placed for placed in self.placements if placed.device != NPU]
        by_reason = grouped_by(
            outside,
            # Reasons with names of tensors would make a group per node.
            lambda placed: (placed.device, placed.cause or placed.reason, placed.fix),
        )
        groups = [
            Group(*reason, tuple(placements))
            for reason, placements in by_reason.items()
        ]
        return sorted(
            groups, key=lambda group: (group.device != ABORT, -len(group.placements))
        )

    @property
    def device(self) -> str:
        """Return the device with the number format and the release, in words."""
        return f"{self.target.name} ({self.kind}, Ryzen AI {self.release})"

    @property
    def sentence(self) -> str:
        """Return the forecast in one sentence."""
        if self.aborts:
            return (
                f"the compiler would crash at {counted(len(self.aborts), 'node')}, such as"
                f" {self.aborts[0].op_type} {self.aborts[0].node}"
            )
        # Rounding must not lift a share over the limit of a band.
        share = percentage(self.share, (_GOOD, _POOR))
        pieces = counted(self.subgraphs, "subgraph")
        return f"{share} of {self.amount} on the NPU, in {pieces}{self._in_doubt}"

    @property
    def _in_doubt(self) -> str:
        """Return the share in doubt with its main reason, as the end of a sentence."""
        in_doubt = self.share - self.least_share
        if not in_doubt:
            return ""
        main = min(self.doubts, key=lambda doubt: self._share(doubt.pieces))
        return f"; {percentage(in_doubt)} in doubt ({main.summary})"

    @property
    def band(self) -> Band:
        """Return the forecast's band: "good", "risky" or "poor".

        ``good`` is 95 % of the operations, without those in doubt, in 3 subgraphs at most. ``poor``
        is less than half of the operations, or a crash. ``risky`` is between them, and where a
        known defect makes results wrong.
        """
        if self.aborts or self.share < _POOR:
            return "poor"
        is_right = all(doubt.pieces for doubt in self.doubts)
        if self.least_share >= _GOOD and self.subgraphs <= _FEW and is_right:
            return "good"
        return "risky"

    @property
    def actions(self) -> list[tuple[str, str]]:
        """Return fixes for the largest groups, with their effect."""
        counts = dict[str, int]()
        for group in self.groups:
            # Several causes may have one command: its effects add up.
            if group.fix:
                counts[group.fix] = counts.get(group.fix, 0) + len(group.placements)
        return [
            (fix, f"affects {counted(count, 'node')}") for fix, count in counts.items()
        ]

    def blocks(self) -> list[Block]:
        """Return the forecast as blocks."""
        return forecast_blocks(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values."""
        rows = zip(self.placements, self.operations, self.pieces, strict=True)
        return {
            "target": self.target.name,
            "kind": self.kind,
            "release": self.release,
            "counts": self.counts,
            "subgraphs": self.subgraphs,
            "share": self.share,
            "least_share": self.least_share,
            "doubts": [str(doubt) for doubt in self.doubts],
            "nodes": [
                {**asdict(placement), "operations": count, "piece": piece}
                for placement, count, piece in rows
            ],
        }


def preflight(
    model: str | Path | ModelProto,
    target: str = "stx",
    *,
    kind: str = "",
    release: str = RELEASE,
) -> Preflight:
    """Forecast where the nodes of a model will run.

    Args:
        model: a path or a model, float or with Q/DQ pairs of any tool. Nodes of a float model are
            counted as if the model were quantized.
        target: name of the device.
        kind: number format that a float model will get: "XINT8", "A8W8", "A16W8" or "BF16"; empty
            for the device's first format.
        release: release of Ryzen AI, such as "1.7".

    Returns:
        Verdicts on the nodes, and the subgraph partitions.

    Raises:
        ConfigError: the device, number format or release is unknown.
        ModelError: the model cannot be read.
    """
    row = npu_of(target)
    require(kind in ("", *KINDS), "kind", kind, f"one of: {', '.join(KINDS)}")
    if release not in RELEASES:
        raise ConfigError(f"release is {release!r}; known are: {', '.join(RELEASES)}")
    graph = Graph.of(inlined(load(model)))
    # The compiler is given the model as it is.
    gather_constants(graph, keep_inputs=True)
    pairs = Pairs(graph)
    known = _kind(pairs)
    # The format of a quantized model is known; a wish of the caller does not change it.
    case = Case(graph, row, known or kind or row.presets[0], release, bool(known))
    # Q and DQ nodes have no device of their own: they are counted by the devices around.
    in_pairs = {*pairs.quantizing, *pairs.dequantizing}
    nodes = [node for node in graph.nodes if node not in in_pairs]
    placements = _placements(case, nodes)
    devices = {node: placed.device for node, placed in placements.items()}
    numbers = dict[Node, int]()
    # Partitions are numbered in the order of their first nodes.
    for number, piece in enumerate(pieces(graph, devices)):
        numbers.update(dict.fromkeys(piece.nodes, number))
    counts = _counts(case, devices)
    return Preflight(
        row,
        case.kind,
        release,
        tuple(placements.values()),
        tuple(operations(graph, node) for node in nodes),
        tuple(numbers[node] for node in nodes),
        _links(graph, numbers),
        _shown_counts(counts),
        bool(known),
        doubts_of(case, placements, numbers),
    )


def _placements(case: Case, nodes: Sequence[Node]) -> dict[Node, NodePlacement]:
    """Return the placement of each node; one reason may apply to all nodes."""
    # One reason for all nodes: rules of single nodes do not matter then.
    refusal = whole_model(case)
    if refusal is not None:
        return {
            node: on_device(case.target, placement(node, CPU, *refusal))
            for node in nodes
        }
    placements = {node: place(case, node) for node in nodes}
    # The converter of X1 has been read, and wants two convolutions anyway.
    if case.on_convolution_engine or any(
        placed.device == NPU and node.kind in LAYERS
        for node, placed in placements.items()
    ):
        return placements
    for node, placed in placements.items():
        if placed.device == NPU:
            placements[node] = on_device(case.target, alone(node))
    return placements


def _counts(case: Case, devices: dict[Node, str]) -> Counter[str]:
    """Count the nodes by device, with the Q and DQ nodes that the model has or will get."""
    counts = Counter(devices.values())
    if case.quantized:
        counts.update(edges(case.graph, devices))
    # The BF16 compiler reads a float model, without Q and DQ nodes.
    elif case.kind != "BF16":
        counts.update(expected_edges(case.graph, devices))
    return counts


def _shown_counts(counts: Counter[str]) -> dict[str, int]:
    """Return the counts other than 0, and that of the NPU, in a fixed order."""
    shown = dict[str, int]()
    for device in (NPU, CPU, EDGE, ABORT):
        # 0 nodes on the NPU are a result, 0 crashes need no mention.
        if counts[device] or device == NPU:
            shown[device] = counts[device]
    return shown


def _links(graph: Graph, numbers: dict[Node, int]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of partitions of which the second reads a result of the first."""
    links = set[tuple[int, int]]()
    for node, number in numbers.items():
        for leader in beyond_pairs(node, graph.leaders):
            if numbers[leader] != number:
                links.add((numbers[leader], number))
    return tuple(sorted(links))


def _kind(pairs: Pairs) -> str:
    """Return the number format of a quantized model; empty for a float model."""
    # The generic target infers the format, whatever the device takes.
    kind = kind_of(pairs, TARGETS["npu"])
    if kind == "integer":
        wide = any(pairs.grid(node).elem_type in _WIDE for node in pairs.quantizing)
        return "A16W8" if wide else "A8W8"
    return "" if kind == "float" else kind
