"""Effects of the supported extra options on a draft."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators import CalibrationError, LayerwisePercentile, MinMSE
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import QuantizationSpec, TensorOverride
from quark_onnx.config.checks import require_known, require_one_of
from quark_onnx.files.io import load
from quark_onnx.onnx.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    GPTQConfig,
)
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.translation import listed, narrowed, pairs_of_ends
from quark_onnx.onnxruntime_spelling.request import name_of

logger = logging.getLogger(__name__)

#: Changes a draft by the value of an option.
Apply = Callable[[Draft, Any], None]


def setter(attribute: str) -> Apply:
    """Return an effect that sets an attribute of the draft.

    Args:
        attribute: name of the attribute.
    """
    return lambda draft, value: setattr(draft, attribute, value)


def activation_symmetric(draft: Draft, value: object) -> None:
    """Set a fixed or a variable zero point of activations."""
    spec = draft.activation
    # Formats without a scale, such as bfloat16 and block formats, have no such setting.
    if spec is not None and spec.dtype.scaled:
        draft.activation = spec.with_(symmetric=value)


def names_setter(attribute: str) -> Apply:
    """Return an effect that sets a list of names; a single name is a list of one.

    Args:
        attribute: name of the attribute.
    """
    return lambda draft, value: setattr(draft, attribute, listed(value, attribute))


def weight_symmetric(draft: Draft, value: object) -> None:
    """Set a fixed or a variable zero point of weights; only the first omits the least code."""
    spec = draft.weight
    if spec is not None and spec.dtype.scaled:
        draft.weight = narrowed(spec.with_(symmetric=value, narrow=False))


def calibrator_setter(kind: type[Any], setting: str) -> Apply:
    """Return an effect that changes a calibrator of a class.

    Args:
        kind: class of the calibrator.
        setting: name of the setting.
    """

    def apply(draft: Draft, value: object) -> None:
        # An option of another method is no mistake: one dictionary may serve several methods.
        spec = draft.activation
        if spec is None or not isinstance(spec.calibrator, kind):
            logger.info(
                "the option for %s has no effect: another calibration method is chosen",
                kind.__name__,
            )
            return
        try:
            draft.activation = spec.with_(
                calibrator=replace(spec.calibrator, **{setting: value}),
            )
        except CalibrationError as error:
            raise ConfigError(f"extra option for {kind.__name__}: {error}") from error

    return apply


def algorithm_setter(kind: type[Any], parameter: str) -> Apply:
    """Return an effect that changes an algorithm of a class.

    Args:
        kind: class of the algorithm.
        parameter: name of the parameter.
    """

    def apply(draft: Draft, value: object) -> None:
        # The algorithms are copies that belong to the draft: presets stay unchanged.
        for algorithm in draft.algorithms:
            if isinstance(algorithm, kind):
                setattr(algorithm, parameter, value)

    return apply


def shapes(draft: Draft, text: str) -> None:
    """Set input shapes by name; output shapes follow."""
    draft.shapes = parse_shapes(text)


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Parse shapes by name.

    Args:
        text: names and shapes.

    Raises:
        ConfigError: the text is malformed.

    >>> parse_shapes("input:[1,3,224,224];mask:[1]")
    {'input': (1, 3, 224, 224), 'mask': (1,)}
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, text.split(";")):
        # The last colon: names of tensors may have colons, as "input:0" of TensorFlow.
        name, colon, sizes = entry.strip().rpartition(":")
        try:
            shapes[name] = tuple(
                int(size) for size in sizes.strip("[] ").split(",") if size.strip()
            )
        except ValueError as error:
            raise ConfigError(
                f"{entry!r} is no shape; write name:[1,3,224,224]",
            ) from error
        if not colon or not name:
            raise ConfigError(f"{entry!r} is no shape; write name:[1,3,224,224]")
    return shapes


def input_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    model: str | Path | ModelProto,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of inputs, without the shapes of outputs.

    Args:
        shapes: shapes by the names of inputs and outputs.
        model: the model with these inputs and outputs.
    """
    # AMD's scripts list shapes of outputs as well; shape inference finds them.
    outputs = {output.name for output in load(model).graph.output}
    return {name: shape for name, shape in shapes.items() if name not in outputs}


def percentiles(draft: Draft, candidates: Sequence[float]) -> None:
    """Set candidates of the layer-wise percentile, from the least to the greatest."""
    spec = draft.activation
    if spec is not None and isinstance(spec.calibrator, LayerwisePercentile):
        # The calibrator tries a geometric series between both ends, as many values as are given.
        count = max(len(candidates), 2)
        chosen = LayerwisePercentile(min(candidates), max(candidates), count)
        draft.activation = spec.with_(calibrator=chosen)


def weight_method(draft: Draft, method: object) -> None:
    if draft.weight is not None and name_of(method) == "MinMSE":
        # All other methods leave the weights at min-max, as AMD Quark does.
        draft.weight = draft.weight.with_(calibrator=MinMSE())


def npu(draft: Draft, wanted: object) -> None:
    draft.target = "npu" if wanted else ""


def weights_only(draft: Draft, wanted: object) -> None:
    if wanted:
        draft.activation = None


def samples(draft: Draft, count: int) -> None:
    draft.samples = int(count)


def resume(draft: Draft, path: str | Path | None) -> None:
    if path:
        draft.resume = str(Path(path).with_suffix(".resume"))


def matmul_nbits(draft: Draft, wanted: object) -> None:
    if wanted:
        # As AMD's MATMUL_NBITS: int4 in groups of 128 along the inputs, in the operator
        # MatMulNBits.
        draft.activation = None
        draft.weight = QuantizationSpec("int4", block_size=128)
        draft.form = "operators"
        draft.op_types = ("MatMul",)
        draft.op_types_setting = (
            "UseMatMulNBits, which quantizes MatMul alone: op_types"
        )


def matmul_nbits_parameters(draft: Draft, parameters: Mapping[str, Any]) -> None:
    """Set the parameters of block-wise weights, for UseMatMulNBits."""
    names = ("Algorithm", "GroupSize", "Symmetric", "Bits", "AccuracyLevel")
    _check_parameters("MatMulNBitsParams", parameters, names)
    # Without UseMatMulNBits the parameters describe an operator that is not written.
    if draft.form != "operators" or draft.weight is None:
        return
    algorithm = str(parameters.get("Algorithm", "DEFAULT")).upper()
    # HQQ optimizes the zero points.
    symmetric = bool(parameters.get("Symmetric", True)) and algorithm != "HQQ"
    bits = parameters.get("Bits", 4)
    draft.weight = QuantizationSpec(
        # Codes with a zero point are unsigned, as MatMulNBits stores them.
        f"int{bits}" if symmetric else f"uint{bits}",
        symmetric=symmetric,
        block_size=parameters.get("GroupSize", 128),
        solver="hqq" if algorithm == "HQQ" else "nearest",
    )
    if algorithm == "GPTQ":
        draft.algorithms.append(GPTQConfig())
    draft.accuracy_level = parameters.get("AccuracyLevel", 0)


def gptq_parameters(draft: Draft, parameters: Mapping[str, Any]) -> None:
    # AMD's keys of GPTQParams, and the fields of GPTQConfig.
    names = {
        "Bits": "bits",
        "BlockSize": "block_size",
        "GroupSize": "group_size",
        "PercDamp": "perc_damp",
        "ActOrder": "act_order",
        "PerChannel": "per_channel",
        "MSE": "mse",
        "WeightSymmetric": "weight_symmetric",
    }
    _check_parameters("GPTQParams", parameters, names)
    # Most of the fields have no effect here; a warning of GPTQConfig names those with other values.
    for name, value in parameters.items():
        algorithm_setter(GPTQConfig, names[name])(draft, value)


def _check_parameters(
    option: str, parameters: Iterable[str], known: Collection[str]
) -> None:
    """Raise ConfigError for the first parameter that an option does not have."""
    for parameter in parameters:
        require_known(parameter, known, f"{option} has no")


def algorithm_adder(kind: type[AlgoConfig]) -> Apply:
    """Return an effect that adds an algorithm of a class."""

    def apply(draft: Draft, wanted: object) -> None:
        if wanted:
            draft.algorithms.append(kind())

    return apply


# Keys of FastFinetune with capitals that no rule derives from the name of the field.
_FINETUNE = {"LRAdjust": "lr_adjust", "OutputQDQ": "output_qdq", "UseGDS": "use_gds"}


def fast_finetune(draft: Draft, parameters: Mapping[str, Any]) -> None:
    """Set the parameters of AdaRound or AdaQuant, if chosen."""
    # AMD's keys are the fields in camel case: NumIterations for num_iterations.
    names = {_camel(name): name for name in vars(AdaRoundConfig())} | _FINETUNE
    chosen = str(parameters.get("OptimAlgorithm", "adaround")).lower()
    kinds = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
    require_one_of("OptimAlgorithm", chosen, kinds)
    given = {
        name: value for name, value in parameters.items() if name != "OptimAlgorithm"
    }
    _check_parameters("FastFinetune", given, names)
    # The flag include_fast_ft adds AdaRound, with its defaults; the parameters may choose AdaQuant.
    for index, algorithm in enumerate(draft.algorithms):
        if isinstance(algorithm, AdaRoundConfig | AdaQuantConfig):
            draft.algorithms[index] = kinds[chosen](
                **{names[name]: value for name, value in given.items()},
            )


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def auto_mixed(draft: Draft, parameters: Mapping[str, Any]) -> None:
    names = {_camel(name): name for name in vars(AutoMixprecisionConfig())}
    names |= {"NoInputQDQShared": "no_input_qdq_shared"}
    _check_parameters("AutoMixprecision", parameters, names)
    # Without the flag include_auto_mp there is nothing to parametrize.
    for index, algorithm in enumerate(draft.algorithms):
        if isinstance(algorithm, AutoMixprecisionConfig):
            draft.algorithms[index] = AutoMixprecisionConfig(
                **{names[name]: value for name, value in parameters.items()},
            )


#: Attributes of block formats as AMD's operators have them by default.
_BLOCK_DEFAULTS = {
    "axis": 1,
    "rounding_mode": 2,
    "convert_to_bfloat_before_bfp": 0,
    "sub_block_shift_bits": 1,
}


def block_attributes(draft: Draft, attributes: Mapping[str, Any]) -> None:
    """Check the attributes of block formats; the format comes from the specifications.

    A warning names values that differ from AMD's defaults, which have no effect.
    """
    # Block size and element type belong to the format, which ``translation.dtype_of`` reads.
    for name, usual in _BLOCK_DEFAULTS.items():
        if name in attributes and attributes[name] != usual:
            logger.warning(
                "%s=%r has no effect here: blocks lie along the summed axis",
                name,
                attributes[name],
            )


def pair_for_weights(draft: Draft, wanted: object) -> None:
    """Keep weights in float with a Q/DQ pair, except formats without a scale."""
    # A format without a scale has no Q/DQ pair to write.
    if wanted and draft.weight is not None and draft.weight.dtype.scaled:
        draft.tensors.append(TensorOverride("*", stored=False))


def float_results(draft: Draft, names: object) -> None:
    """Keep results of some operators in float unless a consumer quantizes them."""
    draft.changes["float_results"] = tuple(listed(names, "float_results"))


def tensor_overrides(draft: Draft, overrides: Mapping[str, Any]) -> None:
    """Add overrides of single tensors."""
    draft.overridden.update(overrides)


def mixed_tensors(draft: Draft, tensors: Mapping[str, Any]) -> None:
    """Add the tensors of each quantization type."""
    # The form of TensorQuantOverrides: a list with one dictionary for a per-tensor setting.
    for kind, names in tensors.items():
        for name in listed(names, f"MixedPrecisionTensor[{kind}]"):
            draft.overridden[name] = [{"quant_type": kind}]


def quantize_bias(draft: Draft, wanted: object) -> None:
    """Keep biases in float, or quantize them in the configured format."""
    if not wanted:
        draft.bias = False
    # "int16" stays: QuantizeBias asks for codes of whatever width.
    elif not draft.bias:
        draft.bias = True


def int16_bias(draft: Draft, wanted: object) -> None:
    """Store biases in 16 bits, unless they stay float."""
    if wanted and draft.bias:
        draft.bias = "int16"


def subgraphs(draft: Draft, pairs: Iterable[Any]) -> None:
    """Keep the nodes between pairs of ends in float.

    Raises:
        ConfigError: an entry is no pair.
    """
    pairs = list(pairs)
    # Read here for the error, which names the option.
    pairs_of_ends(pairs)
    draft.exclude.extend(pairs)


def op_types(draft: Draft, names: object) -> None:
    draft.op_types = tuple(listed(names, "OpTypesToQuantize"))
    draft.op_types_setting = "OpTypesToQuantize"
