"""Calibration data as a stream of samples for the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from onnx import helper

from calibrators.readers.open import (
    Allowed,
    CalibrationData,
    InputSpec,
    Reader,
    open_reader,
)
from calibrators.shown import short
from quark_onnx.check.sizes import check_sizes
from quark_onnx.common.errors import DataError, ModelError, data_errors
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.nonfinite_inputs import allowed_nonfinite
from quark_onnx.running.run import Sample


def input_specs(graph: Graph, config: QConfig | None = None) -> list[InputSpec]:
    """Return name, type, shape and possible values of every input without a default.

    Args:
        graph: the float graph.
        config: the settings, which decide where NaN and infinity are allowed; None for the
            defaults.

    Returns:
        The specs in the order of the inputs, without initializers. The shape is None if unknown,
        and for sequences, maps and optionals.
    """
    # Inputs of a quantized model still need data.
    config = (config or QConfig()).with_(keep_existing=True)

    # Computed for the first sample with a non-finite value only: it needs a plan of the graph.
    @cache
    def allowed() -> dict[str, Allowed]:
        return allowed_nonfinite(graph, make_plan(graph, config))

    def accepted(name: str) -> Allowed:
        return allowed().get(name, "finite")

    specs = []
    for value in graph.inputs:
        # An input with an initializer has a default value: data need not give it.
        if value.name in graph.initializers:
            continue
        tensor = graph.is_tensor(value.name)
        shape = graph.shape(value.name) if tensor else None
        specs.append(
            InputSpec(
                value.name,
                _dtype_of(graph.elem_type(value.name)),
                shape,
                # few samples hold such values, and a plan takes long
                partial(accepted, value.name),
                tensor,
            ),
        )
    return specs


def _dtype_of(kind: int) -> np.dtype[Any] | None:
    """Return numpy's type for an ONNX type; None where the reader has to accept any array.

    Args:
        kind: a number of ``TensorProto.DataType``; 0 for no tensor.
    """
    # 0 stands for inputs without a tensor type: sequences, maps and optionals.
    if not kind:
        return None
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    except (KeyError, TypeError):
        return None


def reader_for(
    graph: Graph, data: CalibrationData | None, config: QConfig | None = None
) -> Reader:
    """Return the calibration data as a reader of checked samples.

    Args:
        graph: the float graph.
        data: the data; a ``partial`` of ``open_reader`` lacks only the inputs.
        config: the settings.

    Raises:
        DataError: the data is of another kind, or the first sample does not fit.
        ModelError: a tensor exceeds the size limit on the first sample.
    """
    if data is None:
        raise DataError(
            "no calibration data was given; pass an iterable of {input name: array}, a"
            " folder or a reader",
        )
    with data_errors():
        # A reader was opened for inputs that its user described, so that only names can be wrong.
        if isinstance(data, Reader):
            _check_names(graph, data)
            reader = data
        else:
            # A partial of open_reader holds a folder and options, and lacks the model's inputs.
            opening = data if isinstance(data, partial) else partial(open_reader, data)
            reader = opening(
                input_specs(graph, config), constants=frozenset(graph.initializers)
            )
        if _has_open_inputs(graph):
            check_sample(graph, reader.first())
    return reader


def check_sample(graph: Graph, sample: Mapping[str, Any]) -> None:
    """Check the sizes of a graph's tensors on a sample, of which only arrays have a shape.

    Args:
        graph: the graph of a model that passed ``check_model``.
        sample: inputs by name.

    Raises:
        ModelError: a tensor exceeds the size limit; see ``check_sizes``.
    """
    if not _has_open_inputs(graph):
        return
    shapes = {
        name: value.shape
        for name, value in sample.items()
        if isinstance(value, np.ndarray)
    }
    try:
        check_sizes(graph.outline(), shapes)
    except ModelError as error:
        raise ModelError(f"on a sample with the shapes {shapes}: {error}") from error


def _has_open_inputs(graph: Graph) -> bool:
    """Return whether sizes depend on a sample; ``check_model`` has checked all others."""
    return not all(graph.has_static_shape(value.name) for value in graph.inputs)


def _check_names(graph: Graph, reader: Reader) -> None:
    """Check the inputs that an opened reader was made for.

    Raises:
        DataError: the model has other inputs.
    """
    names = [value.name for value in graph.inputs]
    inputs = [name for name in names if name not in graph.initializers]
    # An input with an initializer has a default value, and may be missing.
    if not set(inputs) <= set(reader.names) <= set(names):
        raise DataError(
            f"the reader was opened for inputs {short(list(reader.names))}; the model has"
            f" {short(inputs)}: give open_reader an InputSpec with each of these names",
        )


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Return what to report of images that were left out; nothing for none.

    Args:
        left_out: the reasons by name.
    """
    if not left_out:
        return []
    reason = next(iter(left_out.values()))
    return [
        f"{counted(len(left_out), 'image is', 'images are')} left out, which cannot be decoded:"
        f" {reason}"
    ]


def first_sample(reader: Reader) -> Sample:
    """Return the first sample without consuming it.

    Raises:
        DataError: the data is empty, or the sample does not fit.
    """
    with data_errors():
        return reader.first()
