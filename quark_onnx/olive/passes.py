"""Passes with the parameters of Olive's passes that quantize with this package."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
from olive.common.config_utils import validate_config
from olive.data.config import DataConfig
from olive.hardware.constants import ExecutionProvider
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.onnx.common import (
    get_external_data_config,
    model_proto_to_olive_model,
)
from olive.passes.onnx.quantization import (
    OnnxDynamicQuantization,
    OnnxStaticQuantization,
)
from olive.passes.pass_config import PassConfigParam
from olive.passes.quark_quantizer.quark_quantization import QuarkQuantization

from quark_onnx.api import quantize, quantize_dynamic, quantize_static
from quark_onnx.common.errors import ConfigError
from quark_onnx.olive.translate import (
    Parameters,
    amd_draft,
    dynamic_arguments,
    native_config,
    static_arguments,
)
from quark_onnx.onnx.run import run

logger = logging.getLogger(__name__)


def _native(default: str | None) -> dict[str, PassConfigParam]:
    """Return the parameter for a configuration of this package."""
    description = (
        "Configuration of quark_onnx: the name of a preset (XINT8, A8W8, INT4, ...), a"
        " YAML file, or settings."
    )
    return {
        "quark_config": PassConfigParam(
            type_=str | dict,
            default_value=default,
            description=description,
        ),
    }


class QuarkOnnxStaticQuantization(OnnxStaticQuantization):
    """Pass that quantizes with scales from calibration data.

    The parameters are those of OnnxStaticQuantization. ``quark_config`` replaces formats,
    calibration method and extra options, for example ``"XINT8"`` for the NPU.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        # None leaves the parameters of Olive's pass in force.
        return {**super()._default_config(accelerator_spec), **_native(None)}

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        parameters = config.model_dump()
        # Opened before the quantization, so that a wrong data_config is an error at once.
        reader = _reader(parameters, model)
        if reader is None:
            raise ConfigError(
                "static quantization needs data_config, the calibration data",
            )
        # An attribute that another pass of Olive leaves for OnnxStaticQuantization.
        if (model.model_attributes or {}).get("mixed_precision_overrides"):
            logger.warning(
                "mixed_precision_overrides of the model have no effect: use"
                " tensor_quant_overrides",
            )

        def write(output: str) -> None:
            if parameters["quark_config"] is not None:
                settings = native_config(parameters, model.model_path)
                quantize(model.model_path, reader, settings, output)
            else:
                provider = self.accelerator_spec.execution_provider
                qnn = provider == ExecutionProvider.QNNExecutionProvider
                arguments = static_arguments(
                    parameters, model.model_path, reader, qnn=qnn
                )
                quantize_static(**arguments, model_output=output)

        return _written(model, parameters, output_model_path, write)


class QuarkOnnxDynamicQuantization(OnnxDynamicQuantization):
    """Pass that quantizes weights statically and activations dynamically.

    The parameters are those of OnnxDynamicQuantization.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        return {**super()._default_config(accelerator_spec), **_native(None)}

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        parameters = config.model_dump()

        def write(output: str) -> None:
            if parameters["quark_config"] is not None:
                settings = native_config(parameters, model.model_path)
                quantize_dynamic(model.model_path, settings, output)
            else:
                arguments = dynamic_arguments(parameters, model.model_path)
                quantize_dynamic(**arguments, model_output=output)

        return _written(model, parameters, output_model_path, write)


class QuarkOnnxWeightOnlyQuantization(Pass):
    """Pass that quantizes weights only; the default ``quark_config`` is ``"INT4"``."""

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        lists = {
            "op_types_to_quantize": "Operator types to quantize; None for all.",
            "op_types_to_exclude": (
                "Operator types that stay float; without effect with"
                " op_types_to_quantize."
            ),
            "nodes_to_quantize": "Names of nodes to quantize; None for all.",
            "nodes_to_exclude": "Names of nodes that stay float.",
        }
        data = PassConfigParam(
            type_=DataConfig | dict,
            default_value=None,
            description=(
                "Calibration data, for optimizers that read data: GPTQ, AdaRound,"
                " AdaQuant."
            ),
        )
        return {
            **_native("INT4"),
            **{
                name: PassConfigParam(type_=list, default_value=None, description=text)
                for name, text in lists.items()
            },
            "data_config": data,
            **get_external_data_config(),
        }

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        parameters = config.model_dump()
        # Any preset serves: its format of activations is dropped.
        weights = native_config(parameters, model.model_path).with_(activation=None)

        def write(output: str) -> None:
            quantize(model.model_path, _reader(parameters, model), weights, output)

        return _written(model, parameters, output_model_path, write)


class QuarkOnnxQuantization(QuarkQuantization):
    """Pass that quantizes an ONNX model.

    The parameters are those of QuarkQuantization. Parameters for torch have no effect.
    """

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        # Olive's pass quantizes PyTorch models, too.
        if not isinstance(model, ONNXModelHandler):
            raise ConfigError(
                f"the model is a {type(model).__name__}; this pass quantizes ONNX"
                " models. For PyTorch language models use the command quark-onnx llm",
            )
        parameters = config.model_dump()
        reader = _reader(parameters, model)
        # Olive's pass quantizes with random data where it has none.
        draft = amd_draft(parameters, random=reader is None)

        def write(output: str) -> None:
            run(draft, model.model_path, reader, output)

        return _written(model, parameters, output_model_path, write)


def _reader(parameters: Mapping[str, Any], model: Any) -> Any:
    """Open Olive's reader of the calibration data; return None without data_config."""
    if not parameters.get("data_config"):
        return None
    # A dictionary, or a DataConfig already.
    config = validate_config(parameters["data_config"], DataConfig)
    container = config.to_data_container()
    return container.create_calibration_dataloader(
        model_path=model.model_path,
        io_config=model.io_config,
    )


def _written(
    model: Any,
    parameters: Parameters,
    output: str,
    write: Callable[[str], None],
) -> Any:
    """Write a model to a temporary folder, and save it with Olive's parameters.

    Args:
        model: the float model, whose file name is kept.
        write: writes the quantized model to a path.
    """
    path = resolve_onnx_path(output, Path(model.model_path).name)
    # Olive decides on external data by its own parameters: the model is written once more by Olive.
    with tempfile.TemporaryDirectory(prefix="quark_onnx_olive") as folder:
        temporary = Path(folder) / Path(path).name
        write(str(temporary))
        quantized = onnx.load(temporary)
    return model_proto_to_olive_model(quantized, path, dict(parameters))
