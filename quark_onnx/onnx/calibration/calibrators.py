"""Calibrators with AMD Quark's names; their ranges are ``TensorsData`` of onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrators import CalibrationError, Calibrator, MinMax, Statistic
from calibrators.base import range_of
from calibrators.onnx_runtime.control_flow import Observation
from calibrators.onnx_runtime.runner import collect
from quark_onnx.common.errors import ConfigError, DataError, data_errors
from quark_onnx.config import QuantizationSpec
from quark_onnx.config.checks import require_one_of
from quark_onnx.files.io import load
from quark_onnx.onnx.legacy import METHODS
from quark_onnx.onnx.translation import dtype_of
from quark_onnx.onnxruntime_spelling.request import name_of

#: Extra options of a quantization -> AMD's names of a calibrator's settings.
_OPTIONS = {
    "CalibTensorRangeSymmetric": "symmetric",
    "CalibMovingAverage": "moving_average",
    "CalibMovingAverageConstant": "averaging_constant",
    "Percentile": "percentile",
}
#: AMD's names of settings -> fields of calibrators.
_FIELDS = {
    "moving_average": "moving_average",
    "averaging_constant": "constant",
    "percentile": "percentile",
}
#: Methods whose ranges have the same magnitude on both sides by default, as in AMD Quark.
_SYMMETRIC = ("Percentile", "LayerWisePercentile")
_POWERS_OF_TWO = [name for name, (_, pow2) in METHODS.items() if pow2]
_FLOATS = [name for name, (_, pow2) in METHODS.items() if not pow2]


class CalibraterBase:
    """Calibrator of the activations of a model.

    ``collect_data`` may be called several times; ``compute_data`` returns the ranges.

    Args:
        model_path: path of the float model, or a ModelProto.
        op_types_to_calibrate: operator types whose inputs and outputs are observed; None for all.
        augmented_model_path: without effect, as no model is written.
        symmetric: widen each range to the same magnitude on both sides.
        use_external_data_format: without effect, as no model is written.
        per_channel: must be False; activations have one range.
        calibrator: the method; MinMax if None.
        spec: the number format for which the method chooses a range.
    """

    def __init__(  # noqa: PLR0913  onnxruntime's arguments
        self,
        model_path: str | Path | ModelProto,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | Path = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        per_channel: bool = False,
        *,
        calibrator: Calibrator | None = None,
        spec: QuantizationSpec | None = None,
    ) -> None:
        if per_channel:
            raise ConfigError(
                "per_channel is True; activations have one range per tensor, leave it out"
            )
        self.symmetric = symmetric
        self._model = load(model_path)
        self._grid = (spec or QuantizationSpec("int8")).grid
        self._calibrator: Calibrator = calibrator or MinMax()
        self._tensors = _activations(self._model, op_types_to_calibrate)
        self._statistics: dict[str, Statistic] = {}

    def collect_data(self, data_reader: Any) -> None:
        """Run the model on all samples of a reader, and add them to the statistics.

        Raises:
            DataError: the reader has no sample, or a sample does not fit the model.
        """
        self.collect_samples(iter(data_reader.get_next, None))

    def collect_samples(self, data: Iterable[Mapping[str, Any]]) -> None:
        """Run the model on samples, and add them to the statistics.

        Raises:
            DataError: there is no sample, or a sample does not fit the model.
        """
        samples = list(data)
        if not samples:
            raise DataError("the calibration data reader has no sample; rewind it")
        observed = [Observation(name, self._calibrator) for name in self._tensors]
        with data_errors():
            statistics = collect(self._model, observed, samples)
        for name, statistic in zip(self._tensors, statistics, strict=True):
            if name in self._statistics:
                self._statistics[name].merge(statistic)
            else:
                self._statistics[name] = statistic

    def compute_data(self) -> Any:
        """Return the ranges of the float tensors as onnxruntime's ``TensorsData``.

        Raises:
            DataError: no data was collected.
        """
        if not self._statistics:
            raise DataError("there are no ranges yet; call collect_data first")
        ranges = {}
        for name, statistic in self._statistics.items():
            # Tensors that are not float, or never had a value, have an empty statistic.
            if statistic.lo.size:
                ends = range_of(self._calibrator, statistic, self._grid)
                ranges[name] = (float(ends.lo[0]), float(ends.hi[0]))
        if self.symmetric:
            reach = {name: max(-low, high) for name, (low, high) in ranges.items()}
            ranges = {name: (-high, high) for name, high in reach.items()}
        return _tensors_data(ranges)


class MinMaxCalibrater(CalibraterBase):
    """Calibrator of the least and the greatest value.

    Args:
        model_path: path of the float model, or a ModelProto.
        op_types_to_calibrate: operator types whose inputs and outputs are observed; None for all.
        augmented_model_path: without effect, as no model is written.
        symmetric: widen each range to the same magnitude on both sides.
        use_external_data_format: without effect, as no model is written.
        moving_average: average the extremes of samples exponentially.
        averaging_constant: weight of a new sample in the average.
        max_intermediate_outputs: without effect, as one sample is in memory at a time.
        per_channel: must be False; activations have one range.
    """

    def __init__(  # noqa: PLR0913  onnxruntime's arguments
        self,
        model_path: str | Path | ModelProto,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | Path = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        moving_average: bool = False,
        averaging_constant: float = 0.01,
        max_intermediate_outputs: int | None = None,
        per_channel: bool = False,
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            augmented_model_path,
            symmetric,
            use_external_data_format,
            per_channel,
            calibrator=MinMax(moving_average, averaging_constant),
        )


def create_calibrator_power_of_two(  # noqa: PLR0913  AMD's arguments
    model_input: str | Path | ModelProto,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | Path = "augmented_model.onnx",
    activation_type: Any = "QInt8",
    calibrate_method: Any = "NonOverflow",
    use_external_data_format: bool = False,
    execution_providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> CalibraterBase:
    """Return a calibrator for scales that are powers of two.

    The arguments are those of ``run_calibration``, but for the extra options ``symmetric``,
    ``moving_average``, ``averaging_constant`` and ``percentile``.
    """
    require_one_of("calibrate_method", name_of(calibrate_method), _POWERS_OF_TWO)
    return _created(
        model_input,
        op_types_to_calibrate,
        activation_type,
        calibrate_method,
        extra_options or {},
    )


def create_calibrator_float_scale(  # noqa: PLR0913  AMD's arguments
    model_input: str | Path | ModelProto,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | Path = "augmented_model.onnx",
    activation_type: Any = "QInt8",
    calibrate_method: Any = "MinMax",
    use_external_data_format: bool = False,
    execution_providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> CalibraterBase:
    """Return a calibrator for float scales.

    The arguments are those of ``create_calibrator_power_of_two``.
    """
    require_one_of("calibrate_method", name_of(calibrate_method), _FLOATS)
    return _created(
        model_input,
        op_types_to_calibrate,
        activation_type,
        calibrate_method,
        extra_options or {},
    )


def run_calibration(  # noqa: PLR0913  AMD's arguments
    model_input: str | Path | ModelProto,
    data_reader: Any,
    op_types_to_calibrate: Sequence[str] | None = None,
    activation_type: Any = "QInt8",
    calibrate_method: Any = "MinMax",
    use_external_data_format: bool = False,
    execution_providers: Sequence[str] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Any:
    """Calibrate a model, and return the ranges as onnxruntime's ``TensorsData``.

    Args:
        model_input: path of the float model, or a ModelProto.
        data_reader: reader of the calibration data, read to its end.
        op_types_to_calibrate: operator types whose inputs and outputs are observed; None for all.
        activation_type: the number format.
        calibrate_method: the method, a member of one of AMD's enumerations or its name.
        use_external_data_format: without effect, as no model is written.
        execution_providers: without effect; ``quark_onnx.use_provider`` chooses a provider.
        extra_options: ``CalibDataSize``, ``CalibTensorRangeSymmetric`` and settings of the method.

    Raises:
        ConfigError: the method or a setting is unknown.
        DataError: the reader has no sample, or a sample does not fit the model.
    """
    options = extra_options or {}
    require_one_of("calibrate_method", name_of(calibrate_method), METHODS)
    settings = {_OPTIONS[name]: options[name] for name in _OPTIONS if name in options}
    calibrator = _created(
        model_input, op_types_to_calibrate, activation_type, calibrate_method, settings
    )
    limit = options.get("CalibDataSize")
    calibrator.collect_samples(islice(iter(data_reader.get_next, None), limit))
    return calibrator.compute_data()


def calibrate_model(  # noqa: PLR0913  AMD's arguments
    model_input: str | Path | ModelProto,
    data_reader: Any,
    op_types_to_calibrate: Sequence[str] | None = None,
    activation_type: Any = "QInt8",
    calibrate_method: Any = "MinMax",
    use_external_data_format: bool = False,
    execution_providers: Sequence[str] | None = None,
    quantized_tensor_type: Mapping[str, Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> Any:
    """Calibrate a model; see ``run_calibration``.

    Raises:
        ConfigError: ``quantized_tensor_type`` is set.
    """
    if quantized_tensor_type:
        raise ConfigError(
            "quantized_tensor_type is set; formats of single tensors are those of"
            " TensorQuantOverrides of a quantization"
        )
    return run_calibration(
        model_input,
        data_reader,
        op_types_to_calibrate,
        activation_type,
        calibrate_method,
        extra_options=extra_options,
    )


def fake_calibration(model_input: str | Path | ModelProto) -> Any:
    """Return the range [0, 1] for each activation, for formats that need no calibration."""
    model = load(model_input)
    return _tensors_data(dict.fromkeys(_activations(model, None), (0.0, 1.0)))


def write_calibration_table(calibration_cache: Any, dir: str | Path = ".") -> None:
    """Write ranges as onnxruntime's files ``calibration.{json,flatbuffers,cache}``.

    Args:
        calibration_cache: the ranges, a ``TensorsData``.
        dir: the folder.
    """
    from onnxruntime.quantization.quant_utils import write_calibration_table as write

    write(calibration_cache, str(dir))


def _created(
    model: str | Path | ModelProto,
    op_types: Sequence[str] | None,
    activation_type: Any,
    method: Any,
    settings: Mapping[str, Any],
) -> CalibraterBase:
    """Return the calibrator of a method, with settings by AMD's names."""
    kind, pow2 = METHODS[name_of(method)]
    calibrator: Any = kind()
    known = {field.name for field in fields(calibrator)}
    # An option of another method is no mistake: one dictionary may serve several methods.
    changes = {
        _FIELDS[name]: value
        for name, value in settings.items()
        if _FIELDS.get(name) in known
    }
    try:
        calibrator = replace(calibrator, **changes)
    except CalibrationError as error:
        raise ConfigError(f"extra_options for {kind.__name__}: {error}") from error
    # Scales that are powers of two come without a zero point.
    spec = QuantizationSpec(dtype_of(activation_type, {}), symmetric=pow2, pow2=pow2)
    symmetric = bool(settings.get("symmetric", name_of(method) in _SYMMETRIC))
    return CalibraterBase(
        model, op_types, symmetric=symmetric, calibrator=calibrator, spec=spec
    )


def _activations(model: ModelProto, op_types: Sequence[str] | None) -> list[str]:
    """Return the tensors at the nodes of some types that no initializer holds."""
    constants = {tensor.name for tensor in model.graph.initializer}
    tensors = dict.fromkeys(
        name
        for node in model.graph.node
        if not op_types or node.op_type in op_types
        for name in (*node.input, *node.output)
    )
    return [name for name in tensors if name and name not in constants]


def _tensors_data(ranges: Mapping[str, tuple[float, float]]) -> Any:
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData

    arrays = {
        name: (np.array(low, np.float32), np.array(high, np.float32))
        for name, (low, high) in ranges.items()
    }
    return TensorsData(CalibrationMethod.MinMax, arrays)
