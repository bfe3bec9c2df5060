"""cut: split a model so that operators without NPU support form a second model.

On XDNA1, float operators after a detector, which decode boxes, can push the whole model off the
processor. Without these operators, the whole first model runs on the processor (measured on
YOLOv8n: XDNA1 study, Ryzen AI 1.7.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto, ValueInfoProto, helper

from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.common.wording import counted
from quark_onnx.files.half_precision import upcast_to_float32
from quark_onnx.files.io import load, staged
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.constant_input import private
from quark_onnx.graph.matching import only_reader
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.npu.named import producers_of
from quark_onnx.page.blocks import Block, Facts
from quark_onnx.page.reported import Reported
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.running.run import Reference, agree
from quark_onnx.writing.destination import destination, keeps_weights_beside


@dataclass(frozen=True, repr=False)
class Parts(Reported):
    """Two models that replace a model.

    Attributes:
        first: the model from the inputs to the cut. Outputs of the original model that are
            computed before the cut stay outputs.
        second: the model from the cut to the outputs. Its inputs are the cut tensors and the
            inputs of the original model that its nodes read.
        tensors: names of the tensors at the cut: outputs of the first, inputs of the second model.
        verified: True if running both models gave the original model's outputs.
    """

    first: ModelProto
    second: ModelProto
    tensors: tuple[str, ...]
    verified: bool

    def blocks(self) -> list[Block]:
        """Return the cut tensors and the sizes of the models as blocks."""
        second = counted(len(self.second.graph.node), "node")
        facts = {
            "cut at": self.tensors,
            "models": [f"{len(self.first.graph.node)} and {second}"],
        }
        if not self.verified:
            facts["warning"] = [
                "the model runs on no random input, so that nothing was verified"
            ]
        return [Facts((), facts)]

    def to_dict(self) -> dict[str, Any]:
        """Return the cut as plain values, without the models."""
        return {"tensors": list(self.tensors), "verified": self.verified}


def cut(
    model: str | Path | ModelProto,
    tensors: Sequence[str] = (),
    *,
    first: str | Path | None = None,
    second: str | Path | None = None,
) -> Parts:
    """Split a model in two.

    Args:
        model: a path or a model.
        tensors: names of the tensors at which to cut; empty to cut after the last Conv,
            ConvTranspose, Gemm and MatMul on every path.
        first: path where the first model is written; None to write no file.
        second: path where the second model is written; None to write no file.

    Returns:
        Both models and the tensors at the cut.

    Raises:
        ConfigError: a tensor does not exist, the cut does not separate the model, or an output
            cannot be written.
        ModelError: the model cannot be read, or the parts compute other values than the model.

    >>> from onnx import parser
    >>> text = '''g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}>
    ...     { a = MatMul (x, w) b = Exp (a) y = Add (b, x) }'''
    >>> parts = cut(parser.parse_model('<ir_version: 9, opset_import: ["": 17]>' + text))
    >>> parts.tensors, [value.name for value in parts.second.graph.input]
    (('a',), ['x', 'a'])
    """
    # Both destinations are checked before the model is read, which may take long.
    paths = _destinations(model, first, second)
    beside = [keeps_weights_beside(model, path) for path in paths]
    original = load(model)
    graph = Graph.of(inlined(original))
    # The front is closed under producers: no tail node can feed a front node.
    front = set(reach(_ends(graph, tensors), graph.leaders))
    tail = [node for node in graph.nodes if node not in front]
    # A cut at the only output leaves no tail.
    if not front or not tail:
        raise ConfigError(
            "the cut leaves one part empty; name tensors in the middle of the model",
        )
    crossing = _crossing(graph, front, tail)
    _check_crossing(graph, crossing, tensors)
    for name in crossing:
        front.update(_round(graph, name))
    parts = _split(graph, front, tail, crossing)
    verified = _same(graph, original, parts)
    for part, path, external in zip(parts, paths, beside, strict=True):
        if path is not None:
            with staged(part, path, external=external) as written:
                Reference(part, written).session  # noqa: B018  (that it opens is the check)
    return Parts(parts[0], parts[1], crossing, verified)


def _round(graph: Graph, tensor: str) -> list[Node]:
    """Round a tensor before the cut where a Q/DQ pair alone reads it, and return the new pair.

    A layer without a pair behind it would run in float, and its result lacks a Relu that the pair
    has replaced. The pair behind the cut stays: it changes nothing of rounded values.
    """
    quantize = only_reader(graph, tensor)
    layer = graph.producer(tensor)
    if quantize is None or quantize.op_type not in QUANTIZE or layer is None:
        return []
    dequantize = only_reader(graph, quantize.outputs[0])
    if dequantize is None or dequantize.op_type not in DEQUANTIZE:
        return []
    if not private(graph, tensor):
        return []
    result = graph.fresh(f"{tensor}_QuantizeLinear_Input")
    graph.set_output(layer, layer.outputs.index(tensor), result)
    codes = graph.fresh(f"{tensor}_codes")
    return [
        graph.add(
            node.op_type,
            [source, *node.inputs[1:]],
            [target],
            domain=node.domain,
            **node.attributes,
        )
        for node, source, target in (
            (quantize, result, codes),
            (dequantize, codes, tensor),
        )
    ]


def _destinations(
    model: str | Path | ModelProto, first: str | Path | None, second: str | Path | None
) -> list[Path | None]:
    """Return the paths of the two models, which must differ."""
    paths = [destination(model, first), destination(model, second)]
    # Compared as absolute paths: a relative and an absolute path may name one file.
    written = [path.absolute() for path in paths if path is not None]
    if len(set(written)) < len(written):
        raise ConfigError(
            f"both models would be written to {paths[0]}; give two names",
        )
    return paths


def _crossing(graph: Graph, front: set[Node], tail: Sequence[Node]) -> tuple[str, ...]:
    """Return the tensors that nodes before the cut compute, and nodes after it read."""
    read = _read_by(tail)
    # In graph order, in which a caller passes the tensors from one model to the other.
    return tuple(
        name
        for node in graph.nodes
        if node in front
        for name in node.outputs
        if name in read
    )


def _check_crossing(
    graph: Graph, crossing: Sequence[str], tensors: Sequence[str]
) -> None:
    """Check the tensors that cross the cut.

    Args:
        crossing: tensors that the first part computes and the second one reads.
        tensors: the tensors that the user names; empty for a cut after the last layers.

    Raises:
        ConfigError: a tensor crosses that is not named, or that is no tensor.
    """
    # A skip connection around the named tensors crosses the cut as well.
    missing = [name for name in crossing if name not in tensors]
    if tensors and missing:
        raise ConfigError(
            f"behind the cut {missing[0]!r} is read, too, which is computed in front;"
            " name it as well",
        )
    # Sequences and optional values have no element type, and no ValueInfoProto of a tensor.
    untyped = [name for name in crossing if not graph.elem_type(name)]
    if untyped:
        raise ConfigError(
            f"the cut goes through {untyped[0]!r}, which is no tensor; cut in front of it"
            " or behind it",
        )


def _split(
    graph: Graph, front: set[Node], tail: Sequence[Node], crossing: Sequence[str]
) -> list[ModelProto]:
    """Return the models of the nodes before and after the cut."""
    early = list[ValueInfoProto]()
    late = list[ValueInfoProto]()
    for value in graph.outputs:
        # An output that is an input of the model, too, has no producer, and stays with the first
        # part.
        if graph.producer(value.name) in tail:
            late.append(value)
        else:
            early.append(value)
    read = _read_by(tail)
    # Tail nodes may read inputs of the model directly, such as the size of the image.
    still_read = [value for value in graph.fed if value.name in read]
    cut_values = [_value(graph, name) for name in crossing]
    # A tensor at the cut that is an output of the model, too, is declared once.
    declared = {value.name for value in early}
    added = [value for value in cut_values if value.name not in declared]
    return [
        _part(graph, front, graph.fed, [*early, *added]),
        _part(graph, tail, [*still_read, *cut_values], late),
    ]


def _ends(graph: Graph, tensors: Sequence[str]) -> list[Node]:
    """Return the last nodes before the cut."""
    if tensors:
        return producers_of(graph, tensors)
    ends = graph.nodes_of(LAYERS)
    if not ends:
        raise ConfigError(
            "the model has no Conv, Gemm or MatMul to cut behind; name the tensors to"
            " cut at",
        )
    return ends


def _read_by(nodes: Iterable[Node]) -> set[str]:
    """Return the tensors that nodes or their bodies read."""
    return {name for node in nodes for name in node.reads}


def _value(graph: Graph, name: str) -> ValueInfoProto:
    """Return the declaration of a tensor at the cut, with its type and shape."""
    return helper.make_tensor_value_info(name, graph.elem_type(name), graph.shape(name))


def _part(
    graph: Graph,
    nodes: Iterable[Node],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
) -> ModelProto:
    """Return a model of a subset of the nodes."""
    # A copy of the whole model keeps initializers, opsets and metadata.
    kept, model = {node.name for node in nodes}, graph.to_model()
    chosen = [node for node in model.graph.node if node.name in kept]
    del model.graph.node[:], model.graph.input[:], model.graph.output[:]
    model.graph.node.extend(chosen)
    model.graph.input.extend(inputs)
    model.graph.output.extend(outputs)
    part = Graph(model, store=graph.store)
    # Initializers of the other part go, so that weights are stored once.
    part.drop_unused()
    return part.to_model()


def _same(graph: Graph, original: ModelProto, parts: Sequence[ModelProto]) -> bool:
    """Compare both parts with the original model on a random sample.

    A 16-bit model is run in float32. onnxruntime rounds tensors at the cut to 16 bits, but does
    not round between nodes inside a model.

    Returns:
        False if the model runs on no random input.

    Raises:
        ModelError: the parts compute other values than the model.
    """
    # Without tensors of 16 bits, upcast_to_float32 returns the same object, and the original is the
    # reference.
    plain = inlined(original)
    wide = upcast_to_float32(plain, graph.store)[0]
    whole = Reference(original if wide is plain else wide)
    sample = random_sample(graph if wide is plain else Graph.of(wide), whole)
    if sample is None:
        return False
    # Outputs of random operators are not repeatable, and cannot be compared.
    expected, known = whole.repeatable(sample), dict(sample)
    for part in parts:
        wide_part = upcast_to_float32(part, graph.store)[0]
        # The first part adds its outputs to ``known``, from which the second one reads.
        inputs = {
            value.name: known[value.name]
            for value in wide_part.graph.input
            if value.name in known
        }
        known |= Reference(wide_part).outputs(inputs)
    for name, value in expected.items():
        if not agree(value, known[name]):
            raise ModelError(
                f"the two parts compute another {name!r} than the whole; this is a"
                " defect",
            )
    return True
