"""legalize: rewrite a model with operators that the NPU compiler supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.onnx_runtime.tensors import loaded
from quark_onnx.check.inlined import inlined
from quark_onnx.check.static_shapes import fixed
from quark_onnx.common.errors import ModelError
from quark_onnx.config.checks import require
from quark_onnx.files.io import load, staged
from quark_onnx.graph import Graph, channels_last
from quark_onnx.graph.channels import LAST
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.npu.support import KINDS
from quark_onnx.page.blocks import Block, Notes
from quark_onnx.page.reported import Reported
from quark_onnx.passes import CANONICALIZE, CLEANING, LEGALIZING, fold_shapes, fuse_gelu
from quark_onnx.planning.opsets import lower_opset
from quark_onnx.planning.prepare import passes_for, settled
from quark_onnx.running.run import Reference, Sample, agree, run
from quark_onnx.targets.target import npu_of
from quark_onnx.writing.destination import destination, keeps_weights_beside


@dataclass(frozen=True, repr=False)
class Legalized(Reported):
    """A rewritten model.

    Attributes:
        model: a model with the original outputs on inputs of the fixed shapes.
        notes: rewrites, and rewrites that were rolled back because they changed the outputs.
    """

    model: ModelProto
    notes: tuple[str, ...]

    def blocks(self) -> list[Block]:
        """Return the rewrites as blocks."""
        return [Notes("Rewrites", self.notes or ["none was necessary"], "rewrites")]

    def to_dict(self) -> dict[str, Any]:
        """Return the rewrites as plain values, without the model."""
        return {"notes": list(self.notes)}


def legalize(  # noqa: PLR0913
    model: str | Path | ModelProto,
    target: str = "npu",
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    kind: str = "",
    output: str | Path | None = None,
    nhwc: bool = False,
) -> Legalized:
    """Rewrite a model for a processor without changing its outputs.

    Shapes become static (a batch without a size becomes 1), attributes become explicit, and layers
    get parameters of their own. A float model also loses Split, ReduceMean over images,
    BatchNormalization and averages over large images. Each step is verified by running the model,
    and rolled back if the outputs change.

    Args:
        model: a path or a model, float or with Q/DQ pairs of any tool.
        target: name of the target.
        shapes: sizes of dynamic dimensions, by the name of an input.
        kind: number format that the model will get, as for ``preflight``; empty if unknown.
            HardSwish stays where a HardSigmoid in its place would run on the CPU.
        output: path where the result is written, through a file that is verified first.
        nhwc: True to put the channels of four-dimensional inputs and outputs last, as cameras and
            decoders deliver images.

    Returns:
        The rewritten model, and the rewrites.

    Raises:
        ConfigError: the target or an input is unknown, or the output cannot be written.
        ModelError: the model cannot be read, or runs on no random input of these shapes, so that
            no step could be verified.

    >>> from onnx import parser
    >>> text = '''<ir_version: 9, opset_import: ["": 17]> g (float[N,3,8,8] x) => (float[N,3] y)
    ...     { y = ReduceMean <axes = [2, 3], keepdims = 0> (x) }'''
    >>> print(legalize(parser.parse_model(text)))
    rewrites  input 'x' has the shape [1, 3, 8, 8]
              mean_to_pool: 1
    """
    # An unknown target raises ConfigError before any work.
    row = npu_of(target)
    require(kind in ("", *KINDS), "kind", kind, f"one of: {', '.join(KINDS)}")
    path = destination(model, output)
    original = load(model)
    graph, notes = fixed(Graph.of(inlined(original)), shapes or {})
    reference = Reference(original)
    # Values of a random sample verify each rewrite; calibration data is not needed.
    sample = random_sample(graph, reference)
    if sample is None:
        # Sizes other than the batch stay open unless ``shapes`` has them.
        open_inputs = [
            value.name
            for value in graph.inputs
            if not graph.has_static_shape(value.name)
        ]
        hint = "its inputs may have to mean something"
        if open_inputs:
            hint = f"give the shapes of {', '.join(open_inputs)}"
        raise ModelError(
            f"the model runs on no random input, so that nothing can be verified; {hint}",
        )
    # The scales of a quantized model belong to the results of its operators, which stay.
    if graph.nodes_of_type(QUANTIZE | DEQUANTIZE):
        passes = (fold_shapes, *CLEANING, fuse_gelu, *CANONICALIZE)
    else:
        passes = passes_for(row, kind, LEGALIZING)
    graph, done = settled(graph, passes, reference, sample)
    # The opset is lowered for the operators that remain.
    before = graph
    graph, lowered = lower_opset(graph, target, reference, sample)
    if graph is not before:
        graph, again = settled(graph, passes, reference, sample)
        lowered += again
    # Sizes that have become constants determine those of the outputs.
    graph, sized = fixed(graph)
    turned = list[str]()
    if nhwc:
        graph, turned, sample = _channels_last(graph, reference, sample)
    result = graph.to_model()
    # The written file is opened and run before it replaces the destination.
    if path is not None:
        external = keeps_weights_beside(model, path)
        with staged(result, path, external=external) as written:
            Reference(result, written).outputs(sample)
    return Legalized(
        loaded(result),
        (
            *notes,
            *done,
            *lowered,
            *sized,
            *(f"{name!r} has its channels last" for name in turned),
        ),
    )


def _channels_last(
    graph: Graph, reference: Reference, sample: Sample
) -> tuple[Graph, list[str], Sample]:
    """Put the channels of inputs and outputs last, and transpose the sample.

    Returns:
        The graph, notes on the changed tensors, and the sample.

    Raises:
        ModelError: the graph computes other values.
    """
    result, names = channels_last(graph)
    turned = {
        name: value.transpose(LAST) if name in names else value
        for name, value in sample.items()
    }
    # The reference computes in the original layout, so that the comparison transposes.
    expected, outputs = reference.repeatable(sample), run(result.to_model(), turned)
    for name, value in expected.items():
        if not agree(value.transpose(LAST) if name in names else value, outputs[name]):
            raise ModelError(
                f"with its channels last the model computes another {name!r}; leave them first",
            )
    return result, names, turned
