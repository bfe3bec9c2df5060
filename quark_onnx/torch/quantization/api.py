"""ModelQuantizer: quantize a model by a QConfig, as AMD Quark does."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quark_onnx.errors import ConfigError
from quark_onnx.torch.files import quantize_checkpoint
from quark_onnx.torch.quantization.config.config import QConfig
from quark_onnx.torch.quantize import quantize_model
from quark_onnx.torch.report import TorchReport

logger = logging.getLogger(__name__)


class ModelQuantizer:
    """Quantizes models by one configuration.

    Args:
        config: how.
        multi_device: False; a model is quantized where it is.
    """

    def __init__(self, config: QConfig, multi_device: bool = False) -> None:
        if not isinstance(config, QConfig):
            raise ConfigError(f"config is {config!r}; it must be a QConfig")
        if multi_device:
            raise ConfigError("multi_device is set; a model is quantized where it is, leave it out")
        self.config = config

    def quantize_model(self, model: Any, dataloader: Iterable[Any] | None = None) -> Any:
        """Quantize a model in place.

        Args:
            model: any module.
            dataloader: batches: tensors, dicts of keywords or lists of arguments; needed only where scales of
                activations are to be found.

        Returns:
            The same model.

        Raises:
            ConfigError: a name of the configuration matches no layer, or an algorithm is not available.
            DataError: data is needed and missing, or the model cannot be run on it.
        """
        config = self.config.torch_config()
        _log(quantize_model(model, config, dataloader))
        model.quantized_by = config  # what export_safetensors writes into the checkpoint
        return model

    @staticmethod
    def freeze(model: Any, quantize: bool | None = None) -> Any:
        """The model as it is: layers hold codes as soon as they are quantized, whatever ``quantize`` says."""
        return model

    def direct_quantize_checkpoint(self, pretrained_model_path: Path | str, save_path: Path | str) -> None:
        """Quantize a checkpoint into another folder, a block at a time; only without scales that data would tell.

        Raises:
            ConfigError: the folder is taken, or a name of the configuration matches no layer.
            DataError: there are scales that only data can tell.
            ModelError: a file is missing or damaged.
        """
        _log(quantize_checkpoint(pretrained_model_path, save_path, self.config.torch_config()))


def _log(report: TorchReport) -> None:
    for note in report.notes:
        logger.warning("%s", note)
    logger.info("quantization is done: %d layers are quantized, %d stay float", len(report.quantized), len(report.kept))
