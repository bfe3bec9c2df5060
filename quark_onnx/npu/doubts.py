"""Doubts: reports and limits by which less of a model may run than its nodes' placements say.

A placement is about a single node. A compiler also fails at the size of a node, gives up small
partitions, or refuses a kind of model as a whole. Such limits are not published, so that a doubt
lowers the least share of a forecast and leaves the placements as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import beyond_pairs, constant_behind
from quark_onnx.graph.cost import operations
from quark_onnx.npu.placement import FLOAT_TAIL, NPU, Case, NodePlacement
from quark_onnx.npu.support import LOGS, ONNXSIM
from quark_onnx.patterns.conv_and_gemm import LAYERS

#: Formats in which transformers are reported to stay on the CPU; Windows ML recommends A16W8.
_UNSEEN = ("XINT8", "A8W8")
#: Operations of the largest product in a model that AMD shows in BF16: the encoder of Whisper base,
#: 1500 x 512 x 2048 multiplications and additions.
_LARGEST_PRODUCT = 2 * 1500 * 512 * 2048
_PRODUCTS = frozenset({"MatMul", "Gemm"})
#: Partitions of which each one is seen to run, and the least share of the operations of a
#: partition among more: default of the option threshold_gops_percent.
_FEW, _LEAST_SHARE = 3, 0.2
#: Rank of an image: batch, channels, height and width.
_IMAGE = 4


@dataclass(frozen=True)
class Doubt:
    """A reason why partitions that are placed on the processor may run on the CPU.

    Attributes:
        reason: the reason in words.
        confidence: "measured" on a device, "documented", "inferred" from another case, or
            "unknown".
        source: publication with the case, and its date.
        pieces: numbers of the partitions; none for a defect that makes results wrong.
    """

    reason: str
    confidence: str
    source: str
    pieces: frozenset[int]

    def __str__(self) -> str:
        return f"{self.reason} ({self.confidence}) [{self.source}]"

    @property
    def summary(self) -> str:
        """Return the beginning of the reason, which says what is in doubt."""
        return re.split("[,;]", self.reason)[0]


def doubts_of(
    case: Case, placements: Mapping[Node, NodePlacement], numbers: Mapping[Node, int]
) -> tuple[Doubt, ...]:
    """Return the doubts about a forecast.

    Args:
        case: the model and the device.
        placements: placement of each node.
        numbers: number of each node's partition.
    """
    inside = [node for node, placed in placements.items() if placed.device == NPU]
    if not inside:
        return ()
    in_tail = [
        node for node, placed in placements.items() if placed.reason == FLOAT_TAIL
    ]
    return (
        *_wrong_results(case),
        *_float_tail(case, inside, numbers, len(in_tail)),
        *_attention(case, inside, numbers),
        *_large_product(case, inside, numbers),
        *_other_ranks(case, inside, numbers),
        *_without_layers(case, inside, numbers),
        *_small_pieces(case, inside, numbers),
        *_joining(case, inside, numbers),
    )


def _wrong_results(case: Case) -> Iterator[Doubt]:
    """Yield the known defects of the BF16 compiler, whose results are wrong without a message."""
    if case.kind != "BF16":
        return
    slopes = case.graph.nodes_of({"PRelu"})
    if slopes:
        yield Doubt(
            f"{counted(len(slopes), 'PRelu')} such as {slopes[0].name}: with trained slopes results"
            " were wrong without a message; compare.py tells, and A16W8 avoids it",
            "measured",
            "amd/RyzenAI-SW#390 (Ryzen AI 1.7.1)",
            frozenset(),
        )
    if len(case.graph.outputs) > 1:
        yield Doubt(
            f"{len(case.graph.outputs)} outputs: results of such models were wrong without a"
            " message; compare.py tells, and a single output, joined by a Concat, avoids it",
            "measured",
            "amd/RyzenAI-SW#369",
            frozenset(),
        )


def _attention(
    case: Case, inside: list[Node], numbers: Mapping[Node, int]
) -> Iterator[Doubt]:
    """Yield the doubt about transformers in 8 bits."""
    if case.kind not in _UNSEEN or not has_attention(case.graph):
        return
    confidence = "measured" if case.kind == "XINT8" else "inferred"
    yield Doubt(
        "a transformer in 8-bit integers, of which another one (Depth-Anything in XINT8) ran"
        " almost entirely on the CPU",
        confidence,
        "amd/RyzenAI-SW#208 (2025-07)",
        frozenset(numbers[node] for node in inside),
    )


def has_attention(graph: Graph) -> bool:
    """Return whether a product of two computed tensors follows a Softmax or precedes one."""
    return bool(graph.nodes_of({"Softmax"})) and any(
        not constant_behind(graph, name)
        for node in graph.nodes_of({"MatMul"})
        for name in node.inputs[1:2]
    )


def _float_tail(
    case: Case, inside: list[Node], numbers: Mapping[Node, int], count: int
) -> Iterator[Doubt]:
    """Yield the doubt about models with float nodes behind the last layer on X1."""
    if not count or not case.on_convolution_engine:
        return
    yield Doubt(
        f"{counted(count, 'float node decodes', 'float nodes decode')} behind the last layer; with"
        " such nodes YOLOv8n ran on the CPU as a whole, without them 922 of 929 nodes ran on the"
        " NPU: deploy with --cut",
        "measured" if case.target.architecture == "XDNA1" else "inferred",
        "XDNA1 study, Ryzen AI 1.7.1",
        frozenset(numbers[node] for node in inside),
    )


def _large_product(
    case: Case, inside: list[Node], numbers: Mapping[Node, int]
) -> Iterator[Doubt]:
    """Yield the doubt about partitions with a product that the compiler may not place."""
    if case.kind != "BF16":
        return
    large = [
        node
        for node in inside
        if node.kind in _PRODUCTS and operations(case.graph, node) > _LARGEST_PRODUCT
    ]
    if not large:
        return
    yield Doubt(
        f"{counted(len(large), 'product is', 'products are')} larger than in any model that AMD"
        f" shows, such as {large[0].name}; one that the compiler cannot place (L1 placement"
        " failure) leaves its subgraph on the CPU",
        "inferred",
        "amd/RyzenAI-SW#374 (Ryzen AI 1.7.1, Strix Halo)",
        frozenset(numbers[node] for node in large),
    )


def _other_ranks(
    case: Case, inside: list[Node], numbers: Mapping[Node, int]
) -> Iterator[Doubt]:
    """Yield the doubt about convolutions along one axis or three."""
    others = [
        node
        for node in inside
        if node.kind == "Conv" and len(case.graph.sizes(node.outputs[0])) != _IMAGE
    ]
    if not others:
        return
    yield Doubt(
        f"{counted(len(others), 'convolution is', 'convolutions are')} not on images, such as"
        f" {others[0].name}; AMD shows none, and the converter of X1 takes none",
        "unknown",
        "zmaychek84/vaip ad80269 (2025-03), to_xir_ops_pass.cpp; amd/RyzenAI-SW#85",
        frozenset(numbers[node] for node in others),
    )


def _without_layers(
    case: Case, inside: list[Node], numbers: Mapping[Node, int]
) -> Iterator[Doubt]:
    """Yield the doubt about partitions of activations, norms and moves alone."""
    # The converter of X1 looks at single operators.
    if case.on_convolution_engine:
        return
    with_layers = {numbers[node] for node in inside if node.kind in LAYERS}
    others = frozenset(numbers[node] for node in inside) - with_layers
    if not others:
        return
    yield Doubt(
        f"{counted(len(others), 'subgraph has', 'subgraphs have')} no convolution or product;"
        " models of such operators alone stayed on the CPU, while one between two gates of"
        " MobileNetV3 ran",
        "inferred",
        f"{ONNXSIM}; {LOGS}",
        others,
    )


def _small_pieces(
    case: Case, inside: list[Node], numbers: Mapping[Node, int]
) -> Iterator[Doubt]:
    """Yield the doubt about small partitions among many."""
    if case.kind != "BF16":
        return
    work = dict[int, int]()
    for node in inside:
        work[numbers[node]] = work.get(numbers[node], 0) + operations(case.graph, node)
    if len(work) <= _FEW:
        return
    total = sum(work.values())
    small = frozenset(
        number for number, count in work.items() if count < _LEAST_SHARE * total
    )
    if not small:
        return
    yield Doubt(
        f"{counted(len(small), 'of the subgraphs is', 'of the subgraphs are')} small; compilers of"
        " the family leave subgraphs below 20 % of the operations to the CPU",
        "inferred",
        "Vitis AI 6.2 documentation, threshold_gops_percent (adaptive SoCs)",
        small,
    )


def _joining(
    case: Case, inside: list[Node], numbers: Mapping[Node, int]
) -> Iterator[Doubt]:
    """Yield the doubt about partitions that join results of others.

    In AMD's logs every subgraph of MobileNetV2 (18), MobileNetV3 (32), EfficientNet (66, 93) and
    ShuffleNetV2 (18) ran. Of DenseNet121's 63 and DenseNet169's 87 five did: those without a Concat
    of results of other subgraphs.
    """
    if case.kind == "BF16" or case.on_convolution_engine:
        return
    joining, on_processor = set[int](), set(inside)
    for node in inside:
        if node.kind != "Concat":
            continue
        leaders = on_processor.intersection(beyond_pairs(node, case.graph.leaders))
        if {numbers[leader] for leader in leaders} - {numbers[node]}:
            joining.add(numbers[node])
    if not joining:
        return
    yield Doubt(
        f"{counted(len(joining), 'subgraph joins', 'subgraphs join')} results of others; such"
        " subgraphs of DenseNet121 did not run, while all of networks without them did",
        "inferred",
        f"{LOGS}, DenseNet121 and DenseNet169",
        frozenset(joining),
    )
