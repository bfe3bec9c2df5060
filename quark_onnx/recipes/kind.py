"""The kind of a model, by structure."""

from __future__ import annotations

from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.patterns.depthwise import is_depthwise

#: Kinds of models, with those of the strictest criteria first.
KINDS = ("transformer", "superres", "speech", "detector", "depthwise", "classifier")

_ATTENTION = frozenset(
    {
        "Attention",
        "MultiHeadAttention",
        "GroupQueryAttention",
        "EmbedLayerNormalization",
    },
)
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_SPECTRA = frozenset({"STFT", "DFT", "MelWeightMatrix"})
#: Operators that enlarge images.
_UPSAMPLING = frozenset({"DepthToSpace", "Resize", "Upsample", "ConvTranspose"})
#: Minimum number of final weighted nodes of a detector, which predicts boxes and scores at
#: several sizes.
_HEADS = 3
#: Minimum share of depthwise convolutions of a depthwise network.
_SHARE = 0.25
#: Rank of an image (batch, channels, height, width), rank of a 1-D convolution's weight, and
#: maximum number of channels of a viewable image.
_IMAGE_RANK, _SEQUENCE_RANK, _COLORS = 4, 3, 4


def kind_of(graph: Graph) -> tuple[str, str]:
    """Return the kind of a model from ``KINDS``, and the evidence.

    >>> from onnx import parser
    >>> text = "g (float[1,3,9,9] x) => (float[1,8,7,7] y) <float[8,3,3,3] w> { y = Conv (x, w) }"
    >>> model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {text}')
    >>> kind_of(Graph.of(model))
    ('classifier', '1 convolution, 0 of them depthwise')
    """
    # The order of ``KINDS``: speech models may have attention, too.
    attention = [node for node in graph.nodes if _attends(graph, node)]
    if attention:
        return (
            "transformer",
            f"{counted(len(attention), 'product')} of activations, as attention has them",
        )
    if reason := _is_superres(graph):
        return "superres", reason
    if reason := _is_speech(graph):
        return "speech", reason
    products = graph.nodes_of(LAYERS)
    convolutions = graph.nodes_of(("Conv",))
    last = _last(graph, products)
    if len(last) >= _HEADS and convolutions:
        return ("detector", f"{len(last)} parallel output heads, as of a detector")
    depthwise = [node for node in convolutions if is_depthwise(graph, node)]
    reason = f"{counted(len(convolutions), 'convolution')}, {len(depthwise)} of them depthwise"
    if depthwise and len(depthwise) >= _SHARE * len(convolutions):
        return "depthwise", reason
    return "classifier", reason


def _attends(graph: Graph, node: Node) -> bool:
    """Return whether a node is an attention operator, or a product of two activations."""
    return node.kind in _ATTENTION or (
        # Exporters write attention as products of queries, keys and values, none of which is
        # constant.
        node.kind == "MatMul" and not any(map(graph.is_constant, node.inputs))
    )


def _is_superres(graph: Graph) -> str:
    """Return the evidence for an image-to-image model; empty without evidence.

    Args:
        graph: the graph, with one image input and one image output for evidence. Sizes that are
            not known are taken to grow if an operator enlarges images.
    """
    shapes = [
        graph.sizes(value.name)
        for value in graph.inputs
        if not graph.is_constant(value.name)
    ]
    images = [shape for shape in shapes if len(shape) == _IMAGE_RANK]
    results = [graph.sizes(output.name) for output in graph.outputs]
    if len(images) != 1 or [len(shape) for shape in results] != [_IMAGE_RANK]:
        return ""
    before, after = images[0], results[0]
    # (batch, channels, height, width).
    channels = after[1]
    # The result has the channels of the input, or is a picture in gray or color. More channels are
    # masks or features.
    if channels not in {before[1], 1, 3}.intersection(range(1, _COLORS + 1)):
        return ""
    if isinstance(before[2], int) and isinstance(after[2], int):
        grows = after[2] >= before[2]
    else:  # open sizes
        grows = bool(graph.nodes_of(_UPSAMPLING))
    return f"an image of {channels} channels from an image" if grows else ""


def _is_speech(graph: Graph) -> str:
    """Return the evidence for an audio model; empty without evidence."""
    spectra = graph.nodes_of(_SPECTRA)
    if spectra:
        return f"{spectra[0].kind}, as spectra of sound are computed by"
    convolutions = graph.nodes_of(("Conv",))
    # Weights of a 1-D convolution are (outputs, inputs, kernel).
    ranks = {len(graph.sizes(node.input(1))) for node in convolutions}
    if ranks == {_SEQUENCE_RANK}:
        return f"{counted(len(convolutions), 'convolution')} along one axis"
    recurrent = graph.nodes_of(_RECURRENT)
    if not recurrent:
        return ""
    return counted(len(recurrent), "recurrent layer")


def _last(graph: Graph, products: list[Node]) -> list[Node]:
    """Return the last weighted nodes, without a path to a further weighted node."""
    # Nodes from which another weighted node can be reached, each without itself.
    leaders = [leader for node in products for leader in graph.leaders(node)]
    before = reach(leaders, graph.leaders)
    return [node for node in products if node not in before]
