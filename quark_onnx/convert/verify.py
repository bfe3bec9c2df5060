"""Compare a model before and after a conversion on random input."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property, partial

from onnx import ModelProto, TensorProto, ValueInfoProto

from quark_onnx.common.errors import AccuracyError, ModelError, raise_crash
from quark_onnx.common.wording import counted
from quark_onnx.convert.base import Conversion
from quark_onnx.files.half_precision import HALVES, cast_interface, upcast_to_float32
from quark_onnx.graph import Graph
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.report import OutputError, measure
from quark_onnx.report.shapes import require_same_shapes, sized_by_data
from quark_onnx.running.function_bodies import with_bodies
from quark_onnx.running.run import Reference, Sample, agree

logger = logging.getLogger(__name__)


class Stage:
    """A model between two conversions, run by onnxruntime's CPU provider.

    It runs without graph optimizations, which round differently. Samples of 16-bit inputs are
    float32 all the same. Types without kernels, such as bfloat16, are computed in float32 and
    rounded.
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
        # The functions of a converted model may be for another opset.
        bare.set_functions([])
        model = with_bodies(bare.to_model())
        try:
            wide = _wide_interface(model)
            reference = Reference(wide, optimize=False, what="the model")
            reference.session  # noqa: B018  (whether it opens is the question)
        # Without kernels for the 16-bit type, the model is computed in float32, and rounded per
        # tensor.
        except ModelError as error:
            raise_crash(error)
            rounded = _rounded(model, self.graph)
            if rounded is model:
                raise
            reference = Reference(rounded, optimize=False, what="the model")
            reference.session  # noqa: B018
        return reference

    @property
    def loads(self) -> bool:
        """Whether onnxruntime can load the model.

        Raises:
            ModelError: its process ended.
        """
        try:
            self.reference  # noqa: B018
        except ModelError as error:
            raise_crash(error)
            logger.debug("%s", error)
            return False
        return True

    def sample(self, other: Stage) -> Sample | None:
        """Return random inputs for both stages; None unless onnxruntime loads both."""
        if self.loads and other.loads:
            return random_sample(Graph.of(self.reference.model), other.reference)
        return None


def _rounded(model: ModelProto, graph: Graph) -> ModelProto:
    """Return a model with 16-bit tensors computed in float32 and rounded.

    Without such tensors, the model is returned uncopied.

    Args:
        graph: a graph of the model, whose store takes large constants.
    """
    wide, _ = upcast_to_float32(model, graph.store)
    if wide is model:
        return model
    result = Graph.of(wide, graph.store)
    # The original types, as ``wide`` has none of them.
    kinds = Graph.of(model, graph.store)
    for node in list(result.nodes):
        for index, name in enumerate(node.outputs):
            if kinds.elem_type(name) in HALVES:
                computed = result.fresh(f"{name}_computed")
                narrow = result.fresh(f"{name}_rounded")
                result.set_output(node, index, computed)
                result.add("Cast", [computed], [narrow], to=kinds.elem_type(name))
                result.add("Cast", [narrow], [name], to=int(TensorProto.FLOAT))
    return result.to_model()


def _wide_interface(model: ModelProto) -> ModelProto:
    """Return a model with float32 inputs and outputs in place of float16 ones.

    Without such inputs and outputs, the model is returned uncopied.
    """
    inputs = _float16_values(model.graph.input)
    outputs = _float16_values(model.graph.output)
    if inputs or outputs:
        # Samples are float32. bfloat16 has no kernels, see ``_rounded``.
        return cast_interface(model, inputs, outputs, TensorProto.FLOAT16)
    return model


def _float16_values(values: Iterable[ValueInfoProto]) -> dict[str, int]:
    """Return the element type FLOAT by the name of each float16 tensor among declarations."""
    return {
        value.name: int(TensorProto.FLOAT)
        for value in values
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16
    }


def verify(conversion: Conversion, before: Stage, after: Stage) -> list[OutputError]:
    """Return the error of each output on a random sample.

    Without a sample on which the model runs, warn and return none.

    Args:
        conversion: the conversion; its ``keeps`` decides whether outputs must be equal.
        before: the model before the conversion.
        after: the converted model.

    Raises:
        AccuracyError: a conversion that should keep the function changed an output.
        ModelError: onnxruntime could load the model, but not the result; or an output has another
            shape.
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
    outputs = after.reference.outputs(sample)
    errors = measure(before.reference.session, after.reference.session, [sample])
    if conversion.keeps == "exactly":
        # Outputs that differ from run to run (random operators) are not compared.
        for name, expected in before.reference.repeatable(sample).items():
            if not agree(expected, outputs.get(name)):
                changed = {error.name: error for error in errors}[name]
                far = ""
                if changed.sqnr is not None:
                    far = f": it has {changed.sqnr:.1f} dB SQNR"
                raise AccuracyError(
                    f"{conversion.name} changes output {name!r}{far}; nothing was"
                    " written",
                )
    require_same_shapes(errors, partial(sized_by_data, before.reference.model))
    for output_error in errors:
        # Infinities and NaN count in neither SQNR nor differences.
        if output_error.broken:
            where = (
                f"output {output_error.name!r} has "
                f"{counted(output_error.broken, 'value')} finite in one of the models alone"
            )
            logger.warning("%s: %s, on random input", conversion.name, where)
    return errors
