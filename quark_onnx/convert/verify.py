"""Run a model before and after a conversion on random input, and compare."""

from __future__ import annotations

import logging
from functools import cached_property, partial

from onnx import ModelProto, TensorProto

from quark_onnx.convert.base import Conversion
from quark_onnx.errors import AccuracyError, ModelError
from quark_onnx.graph import HALVES, Graph, cast_interface, upcast_to_float32
from quark_onnx.report import OutputError, measure
from quark_onnx.report.shapes import require_same_shapes, sized_by_data
from quark_onnx.steps import Reference, Sample, random_sample, with_bodies
from quark_onnx.steps.run import agree

logger = logging.getLogger(__name__)


class Stage:
    """A model between two conversions, as the CPU provider of onnxruntime runs it.

    It runs as it is written, without graph optimizations, which round otherwise. Where inputs and
    outputs have 16 bits, samples are float32 all the same. What the provider has no kernels for, as
    bfloat16, is computed in float32 and rounded.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def reference(self) -> Reference:
        """The model with an open session.

        Raises:
            ModelError: onnxruntime cannot load it.
        """
        bare = self.graph.copy()
        bare.set_functions([])  # of a converted model they may be for another opset
        model = with_bodies(bare.to_model())
        try:
            reference = Reference(
                _wide_interface(model),
                optimize=False,
                what="the model",
            )
            reference.session  # noqa: B018  (whether it opens is the question)
        except ModelError:
            rounded = _rounded(model, self.graph)
            if rounded is model:
                raise
            reference = Reference(rounded, optimize=False, what="the model")
            reference.session  # noqa: B018
        return reference

    @property
    def loads(self) -> bool:
        """Whether onnxruntime can load it."""
        try:
            self.reference  # noqa: B018
        except ModelError as error:
            logger.debug("%s", error)
            return False
        return True

    def sample(self, other: Stage) -> Sample | None:
        """Random inputs that another stage runs on, of the shapes that this one has.

        None if none are found.
        """
        return (
            random_sample(Graph.of(self.reference.model), other.reference)
            if self.loads and other.loads
            else None
        )


def _rounded(model: ModelProto, graph: Graph) -> ModelProto:
    """A model that computes in float32 and rounds each result to the 16 bits that it had.

    Itself if none had.
    """
    wide, _ = upcast_to_float32(model, graph.store)
    if wide is model:
        return model
    result, kinds = Graph.of(wide, graph.store), Graph.of(model, graph.store)
    for node in list(result.nodes):
        for place, name in enumerate(node.outputs):
            if kinds.elem_type(name) in HALVES:
                computed, narrow = (
                    result.fresh(f"{name}_computed"),
                    result.fresh(f"{name}_rounded"),
                )
                result.set_output(node, place, computed)
                result.add("Cast", [computed], [narrow], to=kinds.elem_type(name))
                result.add("Cast", [narrow], [name], to=int(TensorProto.FLOAT))
    return result.to_model()


def _wide_interface(model: ModelProto) -> ModelProto:
    found = [
        {
            value.name: int(TensorProto.FLOAT)
            for value in values
            if value.type.tensor_type.elem_type == TensorProto.FLOAT16
        }
        for values in (model.graph.input, model.graph.output)
    ]
    return (
        cast_interface(model, found[0], found[1], TensorProto.FLOAT16)
        if any(found)
        else model
    )


def verify(conversion: Conversion, before: Stage, after: Stage) -> list[OutputError]:
    """The error of each output on a random sample.

    None if the model runs on none, which is a warning.

    Raises:
        AccuracyError: a conversion that keeps the function has changed an output.
        ModelError: onnxruntime could load the model, and cannot load what became of it; or an
            output has another shape.
    """
    if not before.loads:
        logger.warning(
            "%s: onnxruntime cannot load the model; nothing could be verified",
            conversion.name,
        )
        return []
    try:
        after.reference  # noqa: B018
    except ModelError as error:
        raise ModelError(
            f"{conversion.name} makes a model that does not load: {error}",
        ) from error
    sample = after.sample(before)
    if sample is None:
        logger.warning(
            "%s: the model runs on no random input; nothing could be verified",
            conversion.name,
        )
        return []
    found = after.reference.outputs(sample)
    errors = measure(before.reference.session, after.reference.session, [sample])
    if conversion.keeps == "exactly":
        for name, expected in before.reference.repeatable(sample).items():
            if not agree(expected, found.get(name)):
                [found_out] = [each for each in errors if each.name == name]
                far = (
                    f": it has {found_out.sqnr:.1f} dB SQNR"
                    if found_out.sqnr is not None
                    else ""
                )
                raise AccuracyError(
                    f"{conversion.name} changes output {name!r}{far}; nothing was"
                    " written",
                )
    require_same_shapes(errors, partial(sized_by_data, before.reference.model))
    for each in errors:
        if each.broken:
            where = (
                f"output {each.name!r} has {each.broken} values that are finite in one"
                " of the models alone"
            )
            logger.warning("%s: %s, on random input", conversion.name, where)
    return errors
