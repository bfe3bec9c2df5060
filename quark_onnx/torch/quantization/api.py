"""ModelQuantizer: quantize a model by a QConfig, as in AMD Quark."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quark_onnx.common.absent import (  # noqa: F401  names of AMD Quark
    from_float_and_dict,
    get_name_and_info,
)
from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.graph.quantize_graph import quantize_graph
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.torch.quantization.config.config import QConfig
from quark_onnx.torch.quantization.config.type import QuantizationMode, RuntimeOptions
from quark_onnx.torch.quantization.params import load_params as load_params

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

#: Final line of AMD Quark's output, which some scripts wait for.
COMPLETED = "[QUARK-INFO]: Model quantization has been completed."


class ModelQuantizer:
    """Quantizer of models by a configuration.

    Args:
        config: the configuration.
        multi_device: without effect; a model is quantized on its own devices.
    """

    def __init__(self, config: QConfig, multi_device: bool = False) -> None:
        require(isinstance(config, QConfig), "config", config, "a QConfig")
        if multi_device:
            logger.warning(
                "multi_device has no effect: a model is quantized where it is",
            )
        self.config = config

    def quantize_model(
        self,
        model: nn.Module,
        dataloader: Iterable[Any] | None = None,
    ) -> nn.Module:
        """Quantize a model, in place except in ``fx_graph_mode``.

        Args:
            model: any module; in ``fx_graph_mode`` an exported module
                (``torch.export.export(model, args).module()``), which is not changed.
            dataloader: batches: tensors, dicts of keywords or lists of arguments; needed only to
                calibrate activation scales.

        Returns:
            The same model; in ``fx_graph_mode`` a new one.

        Raises:
            ConfigError: a name of the configuration matches no layer, an algorithm is not
                available, or ``fx_graph_mode`` is set and the model is not exported.
            DataError: data is needed and missing, or the model cannot be run on it.
        """
        config = self.config.torch_config()
        # An exported module has calls in place of layers, and is rewritten as a graph.
        if self.config.mode is QuantizationMode.fx_graph_mode:
            model, report = quantize_graph(model, dataloader, config)
        else:
            report = quantize_model(model, dataloader, config)
        _log(report)
        # what write_checkpoint stores in the checkpoint
        cast(Any, model).quantized_by = config
        # On stdout, where AMD Quark prints the line, too.
        print(COMPLETED)
        return model

    @staticmethod
    def freeze(
        model: nn.Module,
        quantize: bool | None = None,
        runtime_options: RuntimeOptions | None = None,
    ) -> nn.Module:
        """Return the model unchanged, since quantized layers hold codes already.

        Args:
            model: a quantized model.
            quantize: without effect.
            runtime_options: without effect.
        """
        # AMD Quark freezes its fake quantization here; scripts call ``freeze`` before an export.
        return model

    def direct_quantize_checkpoint(
        self,
        pretrained_model_path: Path | str,
        save_path: Path | str,
    ) -> None:
        """Quantize a checkpoint into another folder, one block at a time.

        Args:
            pretrained_model_path: the float checkpoint.
            save_path: the output folder.

        Raises:
            ConfigError: the folder is not empty, or a name of the configuration matches no layer.
            DataError: a scale needs calibration data.
            ModelError: a file is missing or damaged.
        """
        # Weights are read from files; no code of the model is run, from which a graph could be
        # exported.
        if self.config.mode is QuantizationMode.fx_graph_mode:
            raise ConfigError(
                "quant_mode is 'fx_graph_mode'; a checkpoint has no graph, leave it out",
            )
        _log(
            quantize_checkpoint(
                pretrained_model_path,
                # No data: AMD's function has no argument for it, so that static activations raise a
                # DataError.
                None,
                self.config.torch_config(),
                save_path,
            ),
        )


def enable_native_inference(
    model: nn.Module, *, runtime_options: RuntimeOptions | None = None
) -> int:
    """Return 0, the number of layers that got one of AMD's kernels, with a warning.

    Layers compute what their codes say. Fast kernels are those of a runtime, such as vLLM, that
    loads the checkpoint.

    Args:
        model: a quantized model, which stays as it is.
        runtime_options: without effect.
    """
    logger.warning(
        "enable_native_inference has no effect: no kernels come with this package;"
        " export_safetensors writes a checkpoint for vLLM, which has them",
    )
    return 0


def disable_native_inference(model: nn.Module) -> int:
    """Return 0, the number of layers with one of AMD's kernels.

    Args:
        model: a quantized model, which stays as it is.
    """
    return 0


def _log(report: TorchReport) -> None:
    for note in report.notes:
        logger.warning("%s", note)
    logger.info("quantization is done: %s", report.headline)
