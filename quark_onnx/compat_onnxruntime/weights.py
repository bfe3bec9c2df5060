"""MatMulNBitsQuantizer: weights of 2, 4 and 8 bits in blocks.

The configurations of the algorithms are onnxruntime's.
"""

from __future__ import annotations

import logging
from typing import Any

import onnx
from onnxruntime.quantization import matmul_nbits_quantizer as _theirs
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.quant_utils import QuantFormat

from quark_onnx.api import quantize
from quark_onnx.check.inlined import inlined
from quark_onnx.config import QConfig, QuantizationSpec, TensorOverride
from quark_onnx.dtypes import INT4, INT8
from quark_onnx.graph.node import nested_nodes
from quark_onnx.onnxruntime_spelling import CallError
from quark_onnx.optimizers import GPTQ

logger = logging.getLogger(__name__)

#: onnxruntime's parameters after the model, with their defaults.
_DEFAULTS: dict[str, Any] = {
    "bits": 4,
    "block_size": 128,
    "is_symmetric": False,
    "accuracy_level": None,
    "nodes_to_exclude": None,
    "nodes_to_include": None,
    "quant_format": QuantFormat.QOperator,
    "op_types_to_quantize": None,
    "quant_axes": None,
    "channel_wised_quantize": False,
    "algo_config": None,
}
#: Tables that no operator looks up in blocks.
_ROWS = QuantizationSpec(INT8, per_channel=True, narrow=True)


class MatMulNBitsQuantizer:
    """Quantizer of the constant weights of MatMul and Gather.

    Attributes:
        model: an ONNXModel, quantized by ``process``.
        algo_config: configuration of the algorithm, by default built from the other arguments.
    """

    def __init__(self, model: Any, *arguments: Any, **keywords: Any) -> None:
        given = dict(zip(_DEFAULTS, arguments, strict=False)) | keywords
        for name in given:
            if name not in _DEFAULTS:
                raise TypeError(f"MatMulNBitsQuantizer has no argument {name!r}")
        settings = _DEFAULTS | given
        # A path is kept: ``quantize`` reads the file itself, with its external data.
        self.model_path = (
            str(model) if not isinstance(model, onnx.ModelProto | ONNXModel) else None
        )
        loaded = onnx.load(self.model_path) if self.model_path else model
        self.model = loaded if isinstance(loaded, ONNXModel) else ONNXModel(loaded)
        # Scripts read and set the attributes that onnxruntime's class has.
        for name, value in settings.items():
            setattr(self, name, value)
        # Attributes of the configuration override those of the quantizer below.
        if settings["algo_config"] is None:
            apart = ("nodes_to_exclude", "nodes_to_include", "algo_config")
            self.algo_config = _theirs.DefaultWeightOnlyQuantConfig(
                **{
                    name: value for name, value in settings.items() if name not in apart
                },
            )
        self._settings = settings

    def process(self) -> None:
        """Quantize the model in place; without nodes to quantize, it stays what it is."""
        config, data = self._config()
        nodes = nested_nodes(inlined(self.model.model).graph.node)
        if {node.op_type for node in nodes}.isdisjoint(config.op_types):
            logger.warning(
                "the model has no operator of type %s: nothing is quantized",
                " or ".join(config.op_types),
            )
            return
        quantized = quantize(self.model_path or self.model.model, data, config).model
        self.model = ONNXModel(quantized)

    def _config(self) -> tuple[QConfig, Any]:
        algo, settings = self.algo_config, self._settings
        weight, optimizers, data = _weight(algo, settings)
        # MatMul alone is onnxruntime's default.
        types = set(algo.op_types_to_quantize or ("MatMul",))
        written = algo.quant_format.name
        nodes = list(self.model.model.graph.node)
        named = settings["nodes_to_include"] or ()
        # Nodes that are named are quantized in addition to those of the types.
        chosen = types | {node.op_type for node in nodes if node.name in named}
        changes: dict[str, Any] = {
            "form": "operators" if written == "QOperator" else "qdq",
            "op_types": tuple(sorted(chosen)),
            # A later pass may quantize what an earlier one left float.
            "keep_existing": True,
        }
        if "Gather" in chosen:
            # GatherBlockQuantized has 4 bits. Blocks of others would be dequantized with the whole
            # table in each run, whereas bytes with a scale per row are looked up.
            in_blocks = weight.block_size and weight.dtype.bits == INT4.bits
            changes["embedding"] = weight if in_blocks else _ROWS
        # A number of bits per node, which onnxruntime names by node, this package by weight.
        customized = getattr(algo, "customized_weight_config", None) or {}
        overrides = tuple(
            TensorOverride(
                node.input[1],
                dtype=_dtype(customized[node.name]["bits"], weight.symmetric),
            )
            for node in nodes
            if node.name in customized and "bits" in customized[node.name]
        )
        present = {node.name for node in nodes}
        excluded = set(settings["nodes_to_exclude"] or ())
        # Sorted, as a set has a different order in each run.
        for name in sorted({*named, *excluded} - present):
            logger.warning("no node of the model is called %r", name)
        excluded |= {
            node.name
            for node in nodes
            if node.op_type in chosen - types and node.name not in named
        }
        level = getattr(algo, "accuracy_level", None) or settings["accuracy_level"]
        changes |= {"accuracy_level": int(level or 0)}
        changes |= {
            "exclude": tuple(sorted(excluded & present)),
            "tensors": overrides,
            "optimizers": optimizers,
        }
        return QConfig(None, weight, **changes), data


def _weight(
    algo: Any,
    settings: dict[str, Any],
) -> tuple[QuantizationSpec, tuple[Any, ...], Any]:
    """Return the weights' specification, the optimizers, and their data.

    Raises:
        CallError: the algorithm is not supported; the message names the alternative.
    """
    name = algo.algorithm
    bits = getattr(algo, "bits", settings["bits"])
    block_size = getattr(algo, "block_size", settings["block_size"])
    symmetric = bool(getattr(algo, "is_symmetric", settings["is_symmetric"]))
    dtype = _dtype(bits, symmetric)
    # One scale per output channel instead of blocks.
    if getattr(algo, "channel_wised_quantize", settings["channel_wised_quantize"]):
        return (
            QuantizationSpec(dtype, symmetric=symmetric, per_channel=True),
            (),
            None,
        )
    spec = QuantizationSpec(dtype, symmetric=symmetric, block_size=block_size)
    if name in ("DEFAULT", "RTN", "k_quant"):
        # k_quant has a solver of its own in onnxruntime, which this package lacks.
        if name == "k_quant":
            logger.warning(
                "k_quant: blocks are solved for by rounding to nearest, or choose HQQ",
            )
        return spec, (), None
    if name == "HQQ":
        # HQQ optimizes the zero points, which symmetric weights do not have.
        dtype = _dtype(bits, False)
        return spec.with_(dtype=dtype, symmetric=False, solver="hqq"), (), None
    if name == "GPTQ":
        if algo.calibration_data_reader is None:
            raise CallError("GPTQ needs a calibration_data_reader")
        # percdamp: damping as a share of the mean diagonal of the Hessian; actorder: columns in the
        # order of its diagonal.
        gptq = GPTQ(damping=algo.percdamp, act_order=bool(algo.actorder))
        return spec, (gptq,), algo.calibration_data_reader
    raise CallError(
        f"the algorithm {name!r} is not known; known: DEFAULT, RTN, k_quant, HQQ, GPTQ",
    )


def _dtype(bits: int, symmetric: bool) -> str:
    return f"{'int' if symmetric else 'uint'}{bits}"
