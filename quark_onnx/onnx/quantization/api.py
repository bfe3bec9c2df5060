"""ModelQuantizer: quantize an ONNX model by a configuration, as AMD Quark does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto

from calibrators.readers.open import CalibrationData
from quark_onnx.common.errors import DataNotFoundError
from quark_onnx.config.checks import require
from quark_onnx.onnx.algorithm import AlgoConfig
from quark_onnx.onnx.calibration.data_readers import PathDataReader
from quark_onnx.onnx.quantization.config.config import (
    Config,
    QConfig,
    QuantizationConfig,
)
from quark_onnx.onnx.run import handed_back, run

logger = logging.getLogger(__name__)


class ModelQuantizer:
    """Quantizer of models by a configuration.

    Args:
        config: the configuration.

    Raises:
        ConfigError: the argument is no configuration.
    """

    def __init__(self, config: Config | QConfig | QuantizationConfig) -> None:
        # Presets by name come in the older wrapper, see QConfig.get_default_config.
        given = config.global_quant_config if isinstance(config, Config) else config
        require(
            isinstance(given, QConfig | QuantizationConfig),
            "config",
            config,
            "a QConfig or a Config",
        )
        self.config: QConfig | QuantizationConfig = given

    def quantize_model(
        self,
        model_input: str | Path | ModelProto,
        model_output: str | Path | None = None,
        calibration_data_reader: CalibrationData | None = None,
        calibration_data_path: str | Path | None = None,
        algorithms: Sequence[AlgoConfig] | None = None,
    ) -> ModelProto | None:
        """Quantize a model.

        Args:
            model_input: path of the float model, or a ModelProto, which is not changed.
            model_output: path of the result; None to return the result.
            calibration_data_reader: calibration data, with ``get_next``.
            calibration_data_path: a folder of .npy files, with a folder for each input if there are
                several.
            algorithms: algorithms of the older configuration; a QConfig has ``algo_config``.

        Returns:
            The quantized model if ``model_output`` is None, otherwise None.

        Raises:
            QuarkError: the model, the data or a setting is wrong; no file is written.
        """
        if isinstance(self.config, QConfig):
            if algorithms:
                logger.warning(
                    "algorithms has no effect with a QConfig: pass them as its algo_config",
                )
            draft = self.config.draft()
        else:
            draft = self.config.draft(algorithms or ())
        data = choose_data(model_input, calibration_data_reader, calibration_data_path)
        result = run(draft, model_input, data, model_output)
        return handed_back(result, model_output)


def choose_data(
    model: str | Path | ModelProto,
    reader: CalibrationData | None,
    path: str | Path | None,
) -> CalibrationData | None:
    """Return the reader, or a reader of the files at the path.

    Args:
        model: the float model.
        reader: the reader; None to read the path.
        path: a folder of .npy files.

    Raises:
        DataNotFoundError: the path has no data.
    """
    if reader is not None:
        if path is not None:
            logger.warning(
                "calibration_data_path has no effect: there is a calibration_data_reader",
            )
        return reader
    if path is None:
        return None
    if not Path(path).exists():
        raise DataNotFoundError(f"calibration_data_path: {path} does not exist")
    # The reader opens files as they are needed, but lists them now: a wrong path is an error at
    # once.
    return PathDataReader(model, str(path))
