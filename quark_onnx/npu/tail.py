"""Tail: the model that a bundle runs on the CPU after the processor's model.

A tail decodes boxes or sorts scores, for example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.session import open_session, outputs_of
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.graph import Graph
from quark_onnx.running.run import Reference, Sample


def try_tail(tail: ModelProto, front: ModelProto, sample: Sample) -> None:
    """Run the tail once on the outputs of the first model.

    Args:
        tail: the model that runs last.
        front: the model that runs first.
        sample: inputs of the first model.

    Raises:
        ConfigError: the inputs of the tail do not fit the outputs of the first model.
        ModelError: the tail cannot be run.
    """
    # Before the run, whose error of onnxruntime would not say which name is wrong.
    _check(tail, Graph.of(front))
    run_tail(tail, {**sample, **Reference(front).outputs(sample)})


def _check(tail: ModelProto, front: Graph) -> None:
    """Check the inputs of the tail.

    Raises:
        ConfigError: an input is neither an input nor an output of the first model, or the tail
            reads no output of the first model.
    """
    known = {
        value.name: value.type.tensor_type.elem_type
        for value in (*front.inputs, *front.outputs)
    }
    computed = [output.name for output in front.outputs]
    stored = {tensor.name for tensor in tail.graph.initializer}
    # Models of IR version 3 list their initializers as inputs.
    read = [value for value in tail.graph.input if value.name not in stored]
    for value in read:
        name, kind = value.name, value.type.tensor_type.elem_type
        if name not in known:
            raise ConfigError(
                f"the model behind reads {name!r}, but the one in front computes"
                f" {', '.join(computed)}; rename it",
            )
        if kind != known[name]:
            raise ConfigError(
                f"the model behind reads {name!r} as {_called(kind)}, but it is"
                f" {_called(known[name])}",
            )
    # A tail that reads inputs of the model alone has nothing to do with its results.
    if not any(value.name in computed for value in read):
        raise ConfigError(
            "the model behind reads no output of the one in front, which computes"
            f" {', '.join(computed)}",
        )


def _called(kind: int) -> str:
    """Return the name of a type.

    A file can hold any number as a type, and 0 if the value is no tensor.
    """
    if kind == TensorProto.UNDEFINED:
        return "no tensor of a known type"
    if kind in TensorProto.DataType.values():
        return TensorProto.DataType.Name(kind).lower()
    return f"type {kind}"


def run_tail(tail: ModelProto, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Run the tail once, and return its outputs by name.

    Args:
        tail: the model that runs last.
        arrays: inputs and outputs of the first model, by name.

    Raises:
        ModelError: the tail cannot be opened or run.
    """
    try:
        session = open_session(tail, what="the model behind")
        return outputs_of(session, arrays)
    except Exception as error:  # onnxruntime raises many unrelated types
        raise ModelError(
            f"the model behind cannot be run on what the one in front computes: {error}"
        ) from error
