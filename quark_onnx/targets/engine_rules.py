"""Rules of the engines that take Q/DQ pairs, each with its source.

The name of a rule is that of the engine and of a field of ``Takes``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.codes import beyond_pairs
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.patterns.activation import FUNCTIONS, GATES
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.patterns.openvino_faults import padded_means, unscaled_products
from quark_onnx.targets.finding import RULES, Finding, Rule
from quark_onnx.targets.pairs import PairParameters, Pairs
from quark_onnx.targets.target import Takes, Target

_OPENVINO = "measured with OpenVINO 2026.4, docs/howto/engines.md"
_TYPES = "TensorRT, Working with Quantized Types (2026-11)"
_IMPORTER = "onnx-tensorrt, docs/operators.md and onnxOpImporters.cpp"
_CONFIG = "onnxruntime 1.32, quantization/execution_providers/qnn/quant_config.py"
_QNN = "onnxruntime, QNN-ExecutionProvider.md 019bde6"
_UNITS = "onnxruntime, core/providers/qnn/builder 3c93a0a: node units"
_MLAS = "onnxruntime, core/mlas/lib/qgemm.h 3c93a0a"

_AGAIN = "quark-onnx quantize FLOAT.onnx --target"
_U8S8 = "quark-onnx convert --to u8s8"
_PAIRS = "quark-onnx convert --to qoperator-to-qdq"

_RULES = {
    "openvino.activations": Rule(
        "codes of activations are uint8: with int8 up to 16 dB were lost",
        _OPENVINO,
        True,
        _U8S8,
    ),
    "openvino.weights": Rule(
        "codes of weights are int8: layers with others run in float",
        _OPENVINO,
        False,
        _U8S8,
    ),
    "openvino.biases": Rule(
        "biases are int32 or float", _OPENVINO, True, f"{_AGAIN} openvino"
    ),
    "openvino.floats": Rule(
        "weights of LSTM and GRU are float: beside uint8 activations it loads no others",
        _OPENVINO,
        True,
        f"{_AGAIN} openvino",
    ),
    "openvino.fused": Rule(
        "no pair separates a layer from its activation function, which run as one kernel",
        _OPENVINO,
        False,
        f"{_AGAIN} openvino",
    ),
    "openvino.padded_means": Rule(
        "an AveragePool that counts its padding has the zero point 0, with which it pads codes",
        _OPENVINO,
        True,
        f"{_AGAIN} openvino",
    ),
    "openvino.small_products": Rule(
        "small products without a bias have a Max before the next pair, which keeps their scales",
        _OPENVINO,
        True,
        f"{_AGAIN} openvino",
    ),
    "openvino.codes": Rule(
        "operators compute between ONNX's own Q/DQ pairs", _OPENVINO, False, _PAIRS
    ),
    "tensorrt.activations": Rule(
        "codes of activations are int8", _TYPES, True, f"{_AGAIN} tensorrt"
    ),
    "tensorrt.weights": Rule(
        "codes of weights are int8", _TYPES, True, f"{_AGAIN} tensorrt"
    ),
    "tensorrt.zero_points": Rule(
        "zero points are 0", f"{_TYPES}; {_IMPORTER}", True, f"{_AGAIN} tensorrt"
    ),
    "tensorrt.biases": Rule(
        "biases are float: DequantizeLinear takes no int32",
        _IMPORTER,
        True,
        f"{_AGAIN} tensorrt",
    ),
    "tensorrt.codes": Rule(
        "operators compute between ONNX's own Q/DQ pairs", _IMPORTER, True, _PAIRS
    ),
    "tensorrt.refused": Rule(
        "the importer has every operator", _IMPORTER, True, f"{_AGAIN} tensorrt"
    ),
    "qnn.activations": Rule(
        "codes of activations are uint8", _CONFIG, True, f"{_AGAIN} qnn"
    ),
    "qnn.weights": Rule(
        "codes of weights are int8 or uint8", _CONFIG, True, f"{_AGAIN} qnn"
    ),
    "qnn.biases": Rule("biases are int32 or float", _CONFIG, True, f"{_AGAIN} qnn"),
    "qnn.channels": Rule(
        "only weights of Conv and ConvTranspose have a scale per channel",
        _CONFIG,
        True,
        f"{_AGAIN} qnn",
    ),
    "qnn.one_scale": Rule(
        "codes of the weights of other layers are uint8", _QNN, False, f"{_AGAIN} qnn"
    ),
    "qnn.codes": Rule("operators compute between Q/DQ pairs", _QNN, True, _PAIRS),
    "qnn.refused": Rule(
        "the provider has every operator; others run on the CPU",
        _QNN,
        False,
        f"{_AGAIN} qnn",
    ),
    "qnn.static": Rule(
        "shapes are static", _QNN, True, "quark-onnx convert --to fixed-shapes"
    ),
    "qnn.paired": Rule(
        "the result of a layer on codes is quantized, too",
        _UNITS,
        False,
        f"{_AGAIN} qnn",
    ),
    "web.activations": Rule(
        "codes of activations are uint8: others have no fast kernel in WebAssembly",
        _MLAS,
        False,
        _U8S8,
    ),
}
RULES.update(_RULES)

_NAMES = {
    TensorProto.DataType.Value(name): name.lower()
    for name in TensorProto.DataType.keys()  # noqa: SIM118  a protobuf enumeration
}
#: Operators with a weight and a bias, and their inputs.
_WEIGHTED = LAYERS | {
    "InstanceNormalization",
    "LayerNormalization",
    "BatchNormalization",
}
_WEIGHT, _BIAS = 1, 2
#: Operators of onnxruntime with the meaning of ONNX's.
_VENDOR_PAIRS = frozenset(
    {"com.microsoft::QuantizeLinear", "com.microsoft::DequantizeLinear"}
)


def engine_findings(
    graph: Graph, pairs: Pairs, target: Target, takes: Takes
) -> Iterator[Finding]:
    """Yield the rules of an engine that a model breaks.

    Args:
        graph: the graph of the model.
        pairs: its Q and DQ nodes.
        target: the engine.
        takes: what it takes.
    """
    findings = [*engine_structure(graph, target, takes)]
    for node in pairs.quantizing:
        findings += _of_activation(node, pairs.grid(node), target, takes)
    for node in pairs.dequantizing:
        if graph.is_constant(node.inputs[0]):
            findings += _of_constant(graph, node, pairs.grid(node), target, takes)
    if takes.paired:
        findings += _unpaired(graph, pairs, target)
    if takes.fuses:
        findings += _separated(graph, pairs, target)
    if not takes.small_products:
        for node in unscaled_products(graph):
            size = graph.sizes(node.outputs[0])
            findings.append(
                _finding(target, "small_products", node, f"a result of {size}")
            )
    if not takes.padded_means:
        for node in padded_means(graph):
            findings.append(
                _finding(target, "padded_means", node, "another zero point")
            )
    yield from findings


def engine_structure(graph: Graph, target: Target, takes: Takes) -> Iterator[Finding]:
    """Yield the rules of an engine that no quantization changes: operators and shapes."""
    for node in graph.nodes:
        if node.kind in takes.refused:
            yield _finding(target, "refused", node, f"it is {node.op_type}")
        elif node.domain and not _is_taken(node, takes):
            yield _finding(target, "codes", node, f"it is {node.domain}.{node.op_type}")
    if not takes.static:
        return
    for value in graph.fed:
        if not graph.has_static_shape(value.name):
            shape = graph.shape(value.name)
            text = "unknown" if shape is None else f"{list(shape)}"
            yield Finding(
                f"{target.name}.static",
                "",
                f"input {value.name!r} has the shape {text}",
            )


def _is_taken(node: Node, takes: Takes) -> bool:
    """Return whether an engine may load an operator of a domain other than ONNX's."""
    return takes.codes or (takes.vendor_pairs and node.kind in _VENDOR_PAIRS)


def _of_activation(
    node: Node, grid: PairParameters, target: Target, takes: Takes
) -> Iterator[Finding]:
    """Yield the broken rules at a QuantizeLinear."""
    name = _NAMES[grid.elem_type]
    if takes.activations and name not in takes.activations:
        yield _finding(target, "activations", node, f"codes of {name}")
    yield from _of_zero_point(node, grid, target, takes)
    if takes.channels and grid.scale is not None and grid.scale.size != 1:
        yield _finding(target, "channels", node, f"{grid.scale.size} scales")


def _of_zero_point(
    node: Node, grid: PairParameters, target: Target, takes: Takes
) -> Iterator[Finding]:
    zeros = grid.zero_point
    if not takes.zero_points and (zeros is None or np.any(zeros)):
        text = "computed" if zeros is None else f"{zeros[zeros != 0][0]}"
        yield _finding(target, "zero_points", node, f"a zero point of {text}")


def _of_constant(
    graph: Graph, node: Node, grid: PairParameters, target: Target, takes: Takes
) -> Iterator[Finding]:
    """Yield the broken rules at a DequantizeLinear of a constant."""
    name = _NAMES[grid.elem_type]
    result = node.outputs[0]
    for reader in graph.consumers(result):
        if reader.kind in takes.floats:
            yield _finding(target, "floats", reader, f"a weight of {name}")
            return
    readers = [node for node in graph.consumers(result) if node.kind in _WEIGHTED]
    # No other constant has codes of int32: an Add of its own may hold the bias of a MatMul.
    is_bias = grid.elem_type == TensorProto.INT32
    if is_bias or any(reader.input(_BIAS) == result for reader in readers):
        if takes.biases and name not in takes.biases:
            yield _finding(target, "biases", node, f"a bias of {name}")
        return
    layers = [reader for reader in readers if reader.input(_WEIGHT) == result]
    kinds = {reader.kind for reader in layers}
    taken = takes.weights if layers else (*takes.weights, *takes.activations)
    if takes.weights and name not in taken:
        rule = "weights" if layers else "activations"
        yield _finding(target, rule, node, f"codes of {name}")
    yield from _of_zero_point(node, grid, target, takes)
    if not takes.channels or (kinds and kinds <= set(takes.channels)):
        return
    if grid.scale is not None and grid.scale.size != 1:
        yield _finding(target, "channels", node, f"{grid.scale.size} scales")
    if layers and takes.one_scale and name != takes.one_scale:
        yield _finding(target, "one_scale", node, f"codes of {name}")


def _unpaired(graph: Graph, pairs: Pairs, target: Target) -> Iterator[Finding]:
    """Yield layers that read codes, and whose result is not quantized."""
    for node in graph.nodes:
        if node.kind not in LAYERS or not node.results:
            continue
        reads_codes = graph.producer_of_type(node.inputs[0], DEQUANTIZE) is not None
        last = pairs.chain(node)[-1]
        if reads_codes and not _is_quantized(graph, last):
            yield _finding(target, "paired", node, "its result is float")


def _separated(graph: Graph, pairs: Pairs, target: Target) -> Iterator[Finding]:
    """Yield layers with a pair between them and their activation functions."""
    for node in pairs.dequantizing:
        quantize = graph.producer_of_type(node.inputs[0], QUANTIZE)
        if quantize is None:
            continue
        layer = graph.producer_of_kind(quantize.inputs[0], LAYERS)
        function = _only_function(graph, node.outputs[0])
        if layer is None or function is None:
            continue
        # Other readers of the plain result separate the two in any case.
        if _is_quantized(graph, layer):
            yield _finding(target, "fused", layer, f"a pair before {function.op_type}")


def _only_function(graph: Graph, tensor: str) -> Node | None:
    """Return the activation function of a tensor that nothing else reads, but a product with it."""
    readers = graph.consumers(tensor)
    functions = [reader for reader in readers if reader.kind in FUNCTIONS]
    if len(functions) != 1 or functions[0].inputs[0] != tensor:
        return None
    function = functions[0]
    gated = [reader for reader in readers if reader is not function]
    if not gated:
        return function
    if function.kind not in GATES or _is_output(graph, function):
        return None
    if len(gated) != 1 or gated != beyond_pairs(function, graph.followers):
        return None
    return function if gated[0].kind == "Mul" else None


def _is_output(graph: Graph, node: Node) -> bool:
    """Return whether the result of a node, or its rounded result, is an output of the model."""

    def pairs(member: Node) -> list[Node]:
        readers = graph.followers(member)
        return [reader for reader in readers if reader.op_type in QUANTIZE | DEQUANTIZE]

    return any(graph.is_output(member.outputs[0]) for member in reach([node], pairs))


def _is_quantized(graph: Graph, node: Node) -> bool:
    """Return whether all readers of a node's result quantize it."""
    readers = graph.consumers(node.outputs[0])
    return bool(readers) and all(reader.op_type in QUANTIZE for reader in readers)


def _finding(target: Target, field: str, node: Node, figures: str) -> Finding:
    return Finding(f"{target.name}.{field}", node.name, figures)
