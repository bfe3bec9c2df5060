"""Export of a float module to ONNX, with calibration data by input names."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from calibrators.readers.open import CalibrationData, RandomData, open_reader
from calibrators.readers.samples import LABEL_KEYS, is_array
from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError, DataError, QuarkError
from quark_onnx.torch.calibration.block_stream import Sample, inference
from quark_onnx.torch.exports.onnx.trace import (
    Axes,
    Batch,
    Flat,
    axes_of,
    named,
    save_trace,
)
from quark_onnx.torch.exports.onnx.verify import verify

#: The supported range of opsets.
_LEAST_OPSET = 18
_GREATEST_OPSET = 23


@contextmanager
def exported(
    module: nn.Module,
    example_inputs: Sample,
    data: CalibrationData,
    *,
    dynamic: bool | Axes,
    opset: int,
) -> Iterator[tuple[Path, Any]]:
    """Yield the path of a temporary float ONNX model, and the data by input names.

    Args:
        module: as for ``quantize_module``.
        example_inputs: as for ``quantize_module``.
        data: as for ``quantize_module``.
        dynamic: as for ``quantize_module``.
        opset: as for ``quantize_module``.

    Raises:
        ConfigError: the module is no ``nn.Module``, or the opset or an axis is wrong.
        DataError: the module does not run on the example inputs.
        ModelError: torch cannot export the module, or the outputs of onnxruntime differ.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"module is a {type(module).__name__}; it must be a torch.nn.Module",
        )
    # isinstance would accept True as an int.
    if type(opset) is not int or not _LEAST_OPSET <= opset <= _GREATEST_OPSET:
        raise ConfigError(
            f"opset is {opset!r}; torch exports opsets {_LEAST_OPSET} to"
            f" {_GREATEST_OPSET}",
        )
    # torch.compile wraps the module.
    module = _float32(getattr(module, "_orig_mod", module))
    batch = named(module, example_inputs).in_type(torch.float32)
    axes = axes_of(batch, dynamic)
    signature = _Signature(
        tuple(inspect.signature(module.forward).parameters),
        tuple(batch.tensors),
    )
    name = f"{type(module).__name__}.onnx"
    with ScratchFolder(Path(tempfile.gettempdir()), name) as folder:
        path = folder / name
        with inference(module):
            flat = _run(module, batch)
            save_trace(flat, batch, axes, path, opset=opset)
            # Outputs are compared before the quantizer sees the model.
            verify(path, flat, batch, axes, torch.float32)
        yield path, signature.named(data)


def _float32(module: nn.Module) -> nn.Module:
    """Return the module with float32 weights on the CPU; copy it only if needed."""
    tensors = (*module.parameters(), *module.buffers())
    if all(_is_exported_as_is(tensor) for tensor in tensors):
        return module
    # The caller's module must not be changed.
    return copy.deepcopy(module).to("cpu", torch.float32)


def _is_exported_as_is(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the CPU, and no float of another type than float32."""
    if tensor.device.type != "cpu":
        return False
    return tensor.dtype == torch.float32 or not tensor.is_floating_point()


def _run(module: nn.Module, batch: Batch) -> Flat:
    """Run the module on the example inputs to find its outputs."""
    try:
        return Flat(module, batch)
    except QuarkError:  # some of them are a ValueError
        raise
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        given = ", ".join([*batch.tensors, *batch.others])
        raise DataError(
            f"{type(module).__name__} does not run on the example inputs ({given}):"
            f" {error}; give a tensor, a tuple of arguments or a dict of keyword"
            " arguments of forward",
        ) from error


@dataclass(frozen=True)
class _Signature:
    """Parameters of ``forward``, and the subset with tensors: the inputs of the ONNX model."""

    parameters: tuple[str, ...]
    inputs: tuple[str, ...]

    def named(self, data: CalibrationData) -> Any:
        """Return calibration data with each batch by input names, whose rows are samples.

        Data that holds no batches is returned as it is.
        """
        if (
            # Data of these types has names already, or is no collection of batches.
            isinstance(data, Mapping | RandomData | str)
            or is_array(data)
            or hasattr(data, "get_next")
        ):
            return data
        if not isinstance(data, Iterable):
            return data  # a path, None, or a mistake that the quantizer reports
        # A DataLoader, whose batches may have labels after the inputs.
        labelled = hasattr(data, "dataset") and hasattr(data, "batch_size")
        name = partial(self._batch, labelled=labelled)
        batches: Iterable[Any]
        # An iterator is consumed once, so batches are named one by one.
        if isinstance(data, Iterator):
            batches = map(name, data)
        elif isinstance(data, list | tuple):
            batches = [name(batch) for batch in data]
        else:
            # Other iterables may be read several times.
            batches = _Batches(data, name)
        return partial(open_reader, batches, batches=True)

    def _batch(self, batch: Any, *, labelled: bool) -> Any:
        """Return a batch by input names, with its labels; a single tensor stays as it is.

        Args:
            batch: a mapping, a sequence in the order of the parameters, or a tensor.
            labelled: whether the batch is of a DataLoader, and further values may be labels.

        Raises:
            DataError: the batch has more values than ``forward`` has parameters, or a tensor for
                a parameter without one in the example inputs.
        """
        if isinstance(batch, Mapping):
            given = dict(batch)
        elif (
            isinstance(batch, Sequence)
            and not isinstance(batch, str)
            # Fewer values than inputs: this is one tensor, not one for each input.
            and len(batch) >= len(self.inputs)
        ):
            given = dict(zip(self.parameters, batch, strict=False))
            # In a DataLoader, labels stand where the forward has optional parameters, too.
            others = batch[len(self.inputs if labelled else self.parameters) :]
            labels = list(filter(_is_label, others))
            if len(labels) < len(others) and not labelled:
                raise DataError(
                    f"a batch holds {len(batch)} values, but forward takes"
                    f" {', '.join(self.parameters)}",
                )
            if labels:
                given[LABEL_KEYS[0]] = labels[0]
        else:
            return _readable(batch)
        # Other entries of a DataLoader are dropped.
        if labelled:
            wanted = [
                *self.inputs,
                *(key for key in LABEL_KEYS if _is_label(given.get(key))),
            ]
            return {name: _readable(given[name]) for name in wanted if name in given}
        constants = self._constants
        self._check_left_out(given)
        return {
            name: _readable(value)
            for name, value in given.items()
            if name not in constants
        }

    @property
    def _constants(self) -> set[str]:
        """Parameters without a tensor: constants of the ONNX model, and no labels."""
        return set(self.parameters) - set(self.inputs) - set(LABEL_KEYS)

    def _check_left_out(self, given: Mapping[str, Any]) -> None:
        """Raise DataError for a tensor that would become a constant of the ONNX model."""
        for name in sorted(self._constants & set(given)):
            if isinstance(given[name], torch.Tensor):
                raise DataError(
                    f"the data has a tensor for {name!r}, but example_inputs have none;"
                    " add it there",
                )


@dataclass(frozen=True)
class _Batches:
    """Iterable of batches with named tensors."""

    data: Iterable[Any]
    name: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.name, self.data)

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]  # raises the TypeError that says so where there is no length


def _is_label(value: Any) -> bool:
    """Return whether a value is a class, or the classes of a batch."""
    if isinstance(value, torch.Tensor):
        whole = not (value.is_floating_point() or value.is_complex())
        return whole and value.dtype != torch.bool and value.ndim < 2
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _readable(value: Any) -> Any:
    """Return a tensor that numpy can read; numpy has no bfloat16."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value
