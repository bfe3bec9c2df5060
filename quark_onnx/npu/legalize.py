"""legalize: say what a model says in the words that the compiler of a Ryzen AI processor takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from calibrators.shown import printable
from quark_onnx.errors import ModelError
from quark_onnx.graph import Graph, channels_last, fixed, inlined
from quark_onnx.graph.channels import LAST
from quark_onnx.graph.io import load, loaded, staged
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.graph.shapes import is_static
from quark_onnx.passes import CANONICALIZE, CLEANING, LEGALIZING, fold_shapes, fuse_gelu
from quark_onnx.registry import TARGETS
from quark_onnx.steps import (
    Reference,
    Sample,
    destination,
    keeps_weights_beside,
    lower_opset,
    random_sample,
    rewritten,
)
from quark_onnx.steps.run import agree, run


@dataclass(frozen=True)
class Legalized:
    """A model in other words.

    Attributes:
        model: it computes what the given one computes on inputs of the fixed shapes.
        notes: what was rewritten, and what was rolled back because the outputs had changed.
    """

    model: ModelProto
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(map(printable, self.notes or ("nothing was to be rewritten",)))


def legalize(
    model: str | Path | ModelProto,
    target: str = "npu",
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    output: str | Path | None = None,
    nhwc: bool = False,
) -> Legalized:
    """Rewrite a model, float or with Q/DQ pairs of any tool, without changing what it computes.

    Shapes become static (a batch without one becomes 1), attributes are written out, layers get
    parameters of their own; a float model also loses Split, ReduceMean over images,
    BatchNormalization and averages over large images. Each step is checked by running the model,
    and rolled back if outputs change.

    Args:
        shapes: sizes of dynamic dimensions, by the name of an input.
        output: where the result is written, through a file that is verified first.
        nhwc: inputs and outputs of four axes get their channels last, as images come from a camera
            or decoder.

    Raises:
        ConfigError: there is no such target or input, or the output cannot be written.
        ModelError: the model cannot be read, or runs on no random input of these shapes, so that
            nothing could be verified.

    >>> from onnx import parser
    >>> text = '''<ir_version: 9, opset_import: ["": 17]> g (float[N,3,8,8] x) => (float[N,3] y)
    ...     { y = ReduceMean <axes = [2, 3], keepdims = 0> (x) }'''
    >>> print(legalize(parser.parse_model(text)))
    input 'x' has the shape [1, 3, 8, 8]
    mean_to_pool: 1
    """
    TARGETS[target]
    place = destination(model, output)
    original = load(model)
    graph, notes = fixed(Graph.of(inlined(original)), shapes)
    reference = Reference(original)
    sample = random_sample(graph, reference)
    if sample is None:
        open_ = [
            value.name
            for value in graph.inputs
            if not is_static(graph.shape(value.name))
        ]
        hint = (
            f"give the shapes of {', '.join(open_)}"
            if open_
            else "its inputs may have to mean something"
        )
        raise ModelError(
            f"the model runs on no random input, so that nothing can be verified; {hint}",
        )
    quantized = any(node.op_type in QUANTIZE | DEQUANTIZE for node in graph.nodes)
    passes = (
        (fold_shapes, *CLEANING, fuse_gelu, *CANONICALIZE) if quantized else LEGALIZING
    )
    graph, done = rewritten(graph, passes, reference, sample)
    graph, lowered = lower_opset(graph, target, reference, sample)
    turned = list[str]()
    if nhwc:
        graph, turned, sample = _channels_last(graph, reference, sample)
    result = graph.to_model()
    if place is not None:
        with staged(
            result,
            place,
            external=keeps_weights_beside(model, place),
        ) as written:
            Reference(result, written).outputs(sample)
    return Legalized(
        loaded(result),
        (
            *notes,
            *done,
            *lowered,
            *(f"{name!r} has its channels last" for name in turned),
        ),
    )


def _channels_last(
    graph: Graph,
    reference: Reference,
    sample: Sample,
) -> tuple[Graph, list[str], Sample]:
    """The graph with another interface, what has its channels last, and a sample for it.

    Raises:
        ModelError: it computes something else.
    """
    result, names = channels_last(graph)
    turned = {
        name: value.transpose(LAST) if name in names else value
        for name, value in sample.items()
    }
    wanted, found = reference.repeatable(sample), run(result.to_model(), turned)
    for name, value in wanted.items():
        if not agree(value.transpose(LAST) if name in names else value, found[name]):
            raise ModelError(
                f"with its channels last the model computes another {name!r}; leave them first",
            )
    return result, names, turned
