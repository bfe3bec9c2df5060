"""Readers of calibration data with AMD Quark's names.

Each reader yields ``{input name: array}``, then None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from calibrators.readers.open import RandomData
from calibrators.readers.samples import InputSpec, Sample
from quark_onnx.common.errors import ConfigError, DataError, data_errors
from quark_onnx.files.io import load
from quark_onnx.graph import Graph
from quark_onnx.measuring.open_data import input_specs
from quark_onnx.onnxruntime_spelling import CalibrationDataReader

#: Error of a quantization without calibration data.
NO_DATA = (
    "there is no calibration data: pass calibration_data_reader or"
    " calibration_data_path, or set the extra option UseRandomData"
)


class RandomDataReader(CalibrationDataReader):
    """Reader of random samples, uniform in [0, 1) or in a given range.

    Args:
        model_input: path of the model, or a ModelProto.
        input_shape: shapes by input, for inputs with dynamic dimensions.
        input_data_range: (least, greatest) by input.
        samples: number of samples; AMD Quark yields a single sample.
    """

    def __init__(
        self,
        model_input: str | Path | ModelProto,
        input_shape: Mapping[str, Sequence[int]] | None = None,
        input_data_range: Mapping[str, Sequence[float]] | None = None,
        samples: int = 1,
    ) -> None:
        # Scripts give lists or arrays of two numbers.
        ranges = {
            name: (float(ends[0]), float(ends[1]))
            for name, ends in (input_data_range or {}).items()
        }
        shapes = dict(input_shape or {})
        self._data = RandomData(samples=samples, shapes=shapes, ranges=ranges)
        # Read at once: a wrong path is an error of the script's line that names it.
        self._inputs = _inputs(model_input)
        self._samples: Iterator[Sample] | None = None

    def get_next(self) -> dict[str, Any] | None:
        # Errors of calibrators become those of this package, which scripts catch.
        with data_errors():
            if self._samples is None:
                self._samples = self._data.draw(self._inputs)
            return next(self._samples, None)

    def rewind(self) -> None:
        """Start again with the first sample."""
        self._samples = None


class PathDataReader(CalibrationDataReader):
    """Reader of .npy files, in the order of their names.

    Args:
        model_input: path of the model, or a ModelProto.
        data_path: a folder of files for a model with a single input; with several inputs, a folder
            for each input with its name.
        input_shape: shape for the arrays of a single input; empty to keep their shape.
    """

    def __init__(
        self,
        model_input: str | Path | ModelProto,
        data_path: str | Path,
        input_shape: Sequence[int] = (),
    ) -> None:
        # With a single input, the files may lie in the folder itself.
        self._names = [spec.name for spec in _inputs(model_input)]
        self._files = {
            name: _files(Path(data_path), name, alone=len(self._names) == 1)
            for name in self._names
        }
        # Files pair up by position, in the order of their names.
        counts = {name: len(files) for name, files in self._files.items()}
        if len(set(counts.values())) != 1:
            raise DataError(
                f"{data_path}: the inputs have different numbers of files: {counts}",
            )
        self._shape = tuple(input_shape)
        self._next = 0

    def __len__(self) -> int:
        return len(self._files[self._names[0]])

    def get_next(self) -> dict[str, Any] | None:
        # None at the end, as onnxruntime defines; ``rewind`` starts again.
        if self._next == len(self):
            return None
        sample = {
            name: np.load(files[self._next], allow_pickle=False)
            for name, files in self._files.items()
        }
        self._next += 1
        if self._shape and len(sample) == 1:
            sample = {
                name: array.reshape(self._shape) for name, array in sample.items()
            }
        return sample

    def rewind(self) -> None:
        """Start again with the first sample."""
        self._next = 0


class CachedDataReader(CalibrationDataReader):
    """Reader that keeps the samples of another reader in memory.

    Args:
        dr: the other reader.
        data_size: maximum number of samples; None for all samples.
        convert_nchw_to_nhwc: True to transpose images of four axes, for a converted model.
        quantize_fp16: True to convert float32 arrays to float16.
    """

    def __init__(
        self,
        dr: Any,
        data_size: int | None = None,
        convert_nchw_to_nhwc: bool = False,
        quantize_fp16: bool = False,
    ) -> None:
        self._samples: list[dict[str, Any]] = []
        # islice with None reads to the end.
        for sample in islice(iter(dr.get_next, None), data_size):
            kept = {name: np.asarray(array) for name, array in sample.items()}
            if convert_nchw_to_nhwc:
                kept = {
                    name: (array.transpose(0, 2, 3, 1) if array.ndim == 4 else array)
                    for name, array in kept.items()
                }
            if quantize_fp16:
                kept = {name: _halved(array) for name, array in kept.items()}
            self._samples.append(kept)
        self._next = 0

    def __len__(self) -> int:
        return len(self._samples)

    def get_next(self) -> dict[str, Any] | None:
        if self._next == len(self._samples):
            return None
        self._next += 1
        return self._samples[self._next - 1]

    def reset_iter(self) -> None:
        """Start again with the first sample."""
        self._next = 0

    rewind = reset_iter


def get_data_reader(
    model_input: str | Path | ModelProto,
    calibration_data_reader: Any = None,
    calibration_data_path: str | Path | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the reader of a quantization: the given one, one of a folder, or a random one.

    Args:
        model_input: path of the model, or a ModelProto.
        calibration_data_reader: the reader; it takes precedence over the folder.
        calibration_data_path: folder for a ``PathDataReader``.
        extra_options: ``UseRandomData`` allows a ``RandomDataReader``, which takes
            ``RandomDataReaderInputShape`` and ``RandomDataReaderInputDataRange``.

    Raises:
        ConfigError: there is no data.
    """
    options = extra_options or {}
    if calibration_data_reader is not None:
        return calibration_data_reader
    if calibration_data_path is not None:
        return PathDataReader(model_input, calibration_data_path)
    if not options.get("UseRandomData"):
        raise ConfigError(NO_DATA)
    return RandomDataReader(
        model_input,
        options.get("RandomDataReaderInputShape"),
        options.get("RandomDataReaderInputDataRange"),
    )


def _halved(array: NDArray[Any]) -> NDArray[Any]:
    """Convert float32 arrays to float16; return other arrays unchanged."""
    if array.dtype != np.float32:
        return array
    return array.astype(np.float16)


def _inputs(model: str | Path | ModelProto) -> list[InputSpec]:
    """Return the inputs that a caller must feed."""
    graph = Graph.of(load(model))
    # Before IR version 4 every initializer is an input as well, which has a value already.
    return [spec for spec in input_specs(graph) if spec.name not in graph.initializers]


def _files(folder: Path, name: str, *, alone: bool) -> list[Path]:
    """Return the files of an input.

    Raises:
        DataError: the folder has no .npy file.
    """
    inner = folder / name
    # A folder with the name of the input is preferred, also for a single input.
    source = inner if inner.is_dir() or not alone else folder
    files = sorted(source.glob("*.npy"))
    if not files:
        raise DataError(f"{source}: there is no .npy file for the input {name!r}")
    return files
