"""Tracing with torch's exporter, with named inputs, outputs and dynamic axes."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from onnx import ModelProto
from torch import nn

from calibrators.scratch import ScratchFolder
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import (
    ConfigError,
    DataError,
    MissingDependency,
    ModelError,
)
from quark_onnx.files.io import load
from quark_onnx.torch.calibration.block_stream import Sample, call

#: Opset of the graphs: the first with 4-bit tensors and block scales.
OPSET = 21

Tensors = dict[str, Any]
Axes = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class Batch:
    """Arguments of a model.

    Attributes:
        tensors: tensors by the names of the model's parameters.
        others: arguments that are no tensors; the export keeps them as constants.
    """

    tensors: Tensors
    others: dict[str, Any]

    def in_type(self, dtype: torch.dtype) -> Batch:
        """Return a copy with floats in a dtype."""
        cast = dict(self.tensors)
        for name, value in self.tensors.items():
            # Token ids and masks stay integers.
            if value.is_floating_point():
                cast[name] = value.to(dtype)
        return Batch(cast, self.others)


def named(model: nn.Module, inputs: Sample) -> Batch:
    """Name the values of a batch by the model's parameters.

    Raises:
        DataError: the batch is neither a tensor, a mapping nor a sequence; or holds no tensor; or
            too many values.
    """
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs]
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        # Arguments without names take those of ``forward``.
        parameters = inspect.signature(model.forward).parameters
        if len(inputs) > len(parameters):
            raise DataError(
                f"inputs hold {len(inputs)} values, but the model takes"
                f" {', '.join(parameters)}",
            )
        inputs = dict(zip(parameters, inputs, strict=False))
    if not isinstance(inputs, Mapping):
        raise DataError(
            f"inputs are a {type(inputs).__name__}; a tensor, a dict or a list of"
            " tensors is needed",
        )
    tensors = {
        name: value.cpu()
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    if not tensors:
        raise DataError("inputs hold no tensor")
    # None is the default of a parameter, which the model sets itself.
    others = {
        name: value
        for name, value in inputs.items()
        if name not in tensors and value is not None
    }
    for name, value in others.items():
        if not isinstance(value, bool | int | float | str):
            raise DataError(
                f"input {name!r} is a {type(value).__name__}; tensors and plain values"
                " can be exported",
            )
    return Batch(tensors, others)


def axes_of(batch: Batch, dynamic: bool | Axes) -> dict[str, dict[int, str]]:
    """Return the dynamic axes of each input.

    Args:
        batch: the inputs.
        dynamic: the axes by input; True for the first axis ("batch"), and the second axis of token
            ids and masks ("sequence"); False for none.

    Raises:
        ConfigError: an axis belongs to no input.
    """
    if dynamic is True:
        return {name: _axes(tensor) for name, tensor in batch.tensors.items()}
    if dynamic is False:
        dynamic = {}
    for name, axes in dynamic.items():
        if name not in batch.tensors:
            raise ConfigError(
                f"dynamic names the input {name!r}; inputs are"
                f" {', '.join(batch.tensors)}",
            )
        for axis in axes:
            if not 0 <= axis < batch.tensors[name].ndim:
                raise ConfigError(
                    f"dynamic names axis {axis} of {name!r}, which has"
                    f" {batch.tensors[name].ndim}",
                )
    return {name: dict(dynamic.get(name, {})) for name in batch.tensors}


def _axes(tensor: torch.Tensor) -> dict[int, str]:
    """Return the axes of an input that are dynamic unless a user says otherwise."""
    if not tensor.ndim:
        return {}
    # Token ids or a mask.
    tokens = tensor.ndim == 2 and not tensor.is_floating_point()
    if tokens:
        return {0: "batch", 1: "sequence"}
    return {0: "batch"}


class Flat(nn.Module):
    """Model as a function from tensors to tensors.

    Args:
        model: the model.
        batch: example inputs.
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self._inputs, self._others = tuple(batch.tensors), batch.others
        # A run tells the names and the number of outputs.
        self.outputs = list(_flat(self._run(batch.tensors)))
        if not self.outputs:
            raise ModelError(f"the model {type(model).__name__} computes no tensor")

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Compute the model's outputs."""
        outputs = self._run(dict(zip(self._inputs, tensors, strict=True)))
        return tuple(_flat(outputs).values())

    def _run(self, tensors: Tensors) -> Any:
        return call(self.model, {**tensors, **self._others})


def _flat(output: Any, name: str = "") -> dict[str, Any]:
    """Return the tensors of a nested output, named by key or index."""
    if isinstance(output, torch.Tensor):
        return {name or "output": output}
    if isinstance(output, Mapping):
        parts = {str(key): part for key, part in output.items()}
    elif isinstance(output, tuple | list):
        # Elements of a tuple are named by their indices.
        parts = {
            f"{name or 'output'}_{index}": part for index, part in enumerate(output)
        }
    else:
        # None and other values are no outputs of a graph.
        return {}
    tensors = dict[str, Any]()
    for part_name, part in parts.items():
        tensors |= _flat(part, part_name)
    return tensors


@contextmanager
def trace(
    flat: Flat,
    batch: Batch,
    axes: Mapping[str, Mapping[int, str]],
    near: Path,
) -> Iterator[ModelProto]:
    """Yield the float graph as ONNX, with large constants in temporary files.

    Args:
        flat: the model.
        batch: example inputs.
        axes: the dynamic axes.
        near: the output file; temporary files lie next to it until the context ends.

    Raises:
        MissingDependency: onnxscript is not installed, or torch is too old.
        ModelError: torch cannot export the model.
    """
    near.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(near.parent, near.name) as folder:
        path = folder / "traced.onnx"
        # In a second file, since protobuf ends at 2 GiB.
        save_trace(flat, batch, axes, path, external=True)
        yield inlined(load(path))


def save_trace(  # noqa: PLR0913
    flat: Flat,
    batch: Batch,
    axes: Mapping[str, Mapping[int, str]],
    path: Path,
    *,
    opset: int = OPSET,
    external: bool | None = None,
) -> None:
    """Write the float graph as ONNX.

    Args:
        flat: the model.
        batch: the inputs with which the model is traced.
        axes: the dynamic axes.
        path: the file.
        opset: opset of the graph; torch's exporter supports 18 and later.
        external: store weights in a second file; None only if protobuf cannot hold them.

    Raises:
        MissingDependency: onnxscript is not installed, or torch is too old.
        ModelError: torch cannot export the model.
    """
    example = tuple(
        _varied(tensor, axes[name]) for name, tensor in batch.tensors.items()
    )
    settings = {
        "input_names": [*batch.tensors],
        # ONNX needs different names for an input and an output.
        "output_names": [
            f"{name}_out" if name in batch.tensors else name for name in flat.outputs
        ],
        "opset_version": opset,
    }
    axes_of_inputs = [dict(axes[name]) for name in batch.tensors]
    program = _exported(flat, example, settings, axes_of_inputs)
    with _quiet():
        program.save(str(path), external_data=external)


def _exported(
    flat: Flat,
    example: tuple[Any, ...],
    settings: dict[str, Any],
    axes: list[dict[int, str]],
) -> Any:
    """Export the model with torch's exporter.

    Args:
        example: inputs in the order of the names.
        settings: names of inputs and outputs, and the opset.
        axes: dynamic axes of each input.

    Returns:
        The exporter's program.

    Raises:
        MissingDependency: onnxscript is not installed, or torch is too old.
        ModelError: torch cannot export the model.
    """
    if not hasattr(torch.onnx, "ops"):
        raise MissingDependency(
            f"torch {torch.__version__} cannot export models that onnxruntime runs;"
            " install torch>=2.8",
        )
    try:
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise MissingDependency(
            "the export to ONNX needs onnxscript; pip install onnxscript",
        ) from error
    # ``Flat`` has one variadic parameter, so that the shapes are one tuple.
    shapes = (tuple(axis or None for axis in axes),)
    try:
        with _quiet():
            return torch.onnx.export(
                flat,
                example,
                dynamo=True,
                verbose=False,
                dynamic_shapes=shapes if any(axes) else None,
                **settings,
            )
    except Exception as error:  # the exporter raises several unrelated types
        # The first cause tells more than the exporter's own error.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        asked = [
            f"{name} {named_axes}"
            for name, named_axes in zip(settings["input_names"], axes, strict=True)
            if named_axes
        ]
        hint = ""
        if asked:
            hint = f"; with dynamic axes ({', '.join(asked)}): give fewer by dynamic"
        raise ModelError(
            f"torch cannot export the model: {_first_lines(cause)}{hint}",
        ) from error


def _first_lines(error: BaseException) -> str:
    """Return the first lines of a message, which may be as long as the model."""
    text = str(error).strip() or type(error).__name__
    return "\n".join(text.splitlines()[:6])[:800]


def _varied(tensor: torch.Tensor, axes: Mapping[int, str]) -> Any:
    """Extend dynamic axes of size 1 to 2, since the exporter specializes size 1."""
    for axis in axes:
        if tensor.shape[axis] == 1:
            tensor = torch.cat([tensor, tensor], axis)
    return tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages and warnings of the exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
