"""Calls of onnxruntime's quantize_static and quantize_dynamic, translated."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrators import Entropy, MinMax, MinMSE
from quark_onnx.common.errors import nearest
from quark_onnx.config import QConfig, QuantizationSpec, TensorOverride
from quark_onnx.config.checks import refuse_first, require, require_known
from quark_onnx.config.qconfig import FOLLOWERS
from quark_onnx.dtypes import INT8
from quark_onnx.onnxruntime_spelling.cache import read_cache
from quark_onnx.onnxruntime_spelling.extension_points import (
    require_unchanged_registries,
)
from quark_onnx.onnxruntime_spelling.names import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
)
from quark_onnx.onnxruntime_spelling.options import calibrator_for
from quark_onnx.onnxruntime_spelling.request import (
    NARROW,
    CallError,
    Request,
    flag,
    format_of,
    logger,
    name_of,
    names,
)
from quark_onnx.onnxruntime_spelling.selection import choose
from quark_onnx.onnxruntime_spelling.table import apply


@dataclass(frozen=True)
class TranslatedCall:
    """A translated onnxruntime call.

    Attributes:
        cache: path where measured ranges are written; None to write no ranges.
        method: the calibration method.
    """

    model: Any
    data: Any
    config: QConfig
    output: Any
    external: bool
    cache: Path | None = None
    method: Any = None


def is_static_call(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return True for onnxruntime's keywords, or a data reader as third argument.

    Args:
        positional: positional arguments.
        keywords: keyword arguments.
    """
    return any(name in _STATIC.parameters for name in keywords) or (
        len(positional) > 2 and hasattr(positional[2], "get_next")
    )


def is_dynamic_call(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return True for onnxruntime's keywords, or a model path as second argument.

    Args:
        positional: positional arguments.
        keywords: keyword arguments.
    """
    # The second positional argument is this package's configuration, which may be a YAML file, or
    # onnxruntime's output path.
    second = positional[1] if len(positional) > 1 else None
    suffix = Path(second).suffix.lower() if isinstance(second, str | Path) else ""
    if suffix not in ("", ".yaml", ".yml"):
        return True
    return any(name in _DYNAMIC.parameters for name in keywords)


def translate_static(
    positional: tuple[Any, ...], keywords: Mapping[str, Any]
) -> TranslatedCall:
    """Translate a call of quantize_static to a model, data, a QConfig and an output.

    Args:
        positional: positional arguments.
        keywords: keyword arguments.

    Raises:
        ConfigError: an option is unknown, or not supported by this package.
    """
    a = _bound("quantize_static", _STATIC, positional, keywords)
    # A copy: callers reuse their dictionary.
    options = _options(a["extra_options"])
    form = _form(a["quant_format"])
    _check_types(a, form)
    # onnxruntime's default is None, which ``names`` makes an empty list.
    if set(names(a, "calibration_providers")) - {"CPUExecutionProvider"}:
        logger.warning(
            "calibration_providers is %s, but calibration runs on the CPU",
            a["calibration_providers"],
        )
    activation = QuantizationSpec(
        format_of(a["activation_type"]),
        # onnxruntime's default for static activations; ActivationSymmetric changes it below.
        symmetric=False,
        calibrator=calibrator_for(a["calibrate_method"], options),
    )
    data = a["calibration_data_reader"]
    request = Request(a, options, False, activation, _weight(a), data=data)
    # onnxruntime quantizes bodies only with EnableSubgraph, and accepts models that have Q/DQ
    # pairs.
    request.changes |= {"form": form, "bodies": False, "keep_existing": True}
    # Pairs stand where onnxruntime's quantizer places them, which other engines rely on.
    request.changes |= {"portable": True, "all_pairs": True}
    # QLinearGlobalAveragePool alone follows its input; QDQ pairs are placed around the operator.
    request.changes["follow_inputs"] = tuple(
        kind for kind in FOLLOWERS if request.operators or kind != "GlobalAveragePool"
    )
    choose(request)
    if isinstance(activation.calibrator, Entropy):
        # No sum averages the errors of clipped outputs. onnxruntime's method has as many bins as
        # codes by default, and clips nothing.
        outputs = [output.name for output in request.graph.outputs]
        request.tensors.append(TensorOverride(outputs, calibrator=MinMax()))
    # Before the options: a later override for a tensor takes precedence over an earlier one.
    cached = read_cache(request)
    apply(request)
    # After the options, whose WeightSymmetric would ask for zero points. Kernels read one zero
    # point for all channels, so that onnxruntime's quantizer ignores the option, too.
    if request.weight.per_channel:
        narrow = request.weight.dtype.name in NARROW
        request.weight = request.weight.with_(symmetric=True, narrow=narrow)
    # With a cache the ranges are known, and no reader is needed.
    if request.data is None and a["calibration_cache_path"] is not None and not cached:
        raise CallError(
            "calibration_data_reader is None, and calibration_cache_path has no ranges"
            f" for this call: {a['calibration_cache_path']}",
        )
    # A cache that was read is left as it is.
    if cached or a["calibration_cache_path"] is None:
        cache = None
    else:
        cache = Path(a["calibration_cache_path"])
    return _call(request, cache)


def translate_dynamic(
    positional: tuple[Any, ...], keywords: Mapping[str, Any]
) -> TranslatedCall:
    """Translate a call of quantize_dynamic, as ``translate_static`` does.

    Each run computes the scales of the activations.

    Args:
        positional: positional arguments.
        keywords: keyword arguments.
    """
    a = _bound("quantize_dynamic", _DYNAMIC, positional, keywords)
    dynamic = QConfig.of("DYNAMIC")
    assert dynamic.activation is not None
    options = _options(a["extra_options"])
    request = Request(a, options, True, dynamic.activation, _weight(a))
    request.changes |= {"form": "operators", "bodies": False, "keep_existing": True}
    request.changes["portable"] = True
    if request.weight.dtype.bits == INT8.bits:
        # all later nodes read a row, and no sum averages its errors out; a row on one side
        # of zero would waste half of the codes without a zero point
        rows = QuantizationSpec(INT8, per_channel=True, symmetric=False)
        request.changes["embedding"] = rows
    choose(request)
    apply(request)
    return _call(request)


def _call(request: Request, cache: Path | None = None) -> TranslatedCall:
    # Exclusions come from the arguments and from options.
    a, changes = request.arguments, dict(request.changes)
    exclude = (*changes.pop("exclude", ()), *request.exclude)
    if request.tensors:
        changes["tensors"] = tuple(request.tensors)
    config = QConfig(
        request.activation,
        request.weight,
        equalize=False,  # onnxruntime equalizes nothing
        exclude=tuple(dict.fromkeys(exclude)),
        **changes,
    )
    external = a["use_external_data_format"]
    # A path in the place of a flag is a shifted positional argument.
    require(
        isinstance(external, bool),
        "use_external_data_format",
        external,
        "True or False",
        CallError,
    )
    return TranslatedCall(
        a["model_input"],
        request.data,
        config,
        a["model_output"],
        external,
        cache,
        a.get("calibrate_method"),
    )


def _bound(
    function: str,
    signature: inspect.Signature,
    positional: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Mapping[str, Any]:
    require_unchanged_registries()
    for name in keywords:
        require_known(
            name, signature.parameters, f"{function} has no argument", CallError
        )
    try:
        # Unknown names are reported above, with the nearest one; here arguments are missing or
        # repeated.
        bound = signature.bind(*positional, **keywords)
    except TypeError as error:
        raise CallError(f"{function} in onnxruntime's spelling: {error}") from error
    bound.apply_defaults()
    return bound.arguments


def _options(given: Any) -> dict[str, Any]:
    is_dictionary = isinstance(given, Mapping | None)
    require(is_dictionary, "extra_options", given, "a dictionary", CallError)
    return dict(given or {})


def _weight(a: Mapping[str, Any]) -> QuantizationSpec:
    """Return the weights' specification.

    Signed formats are symmetric, and those of 8 and 16 bits omit the least code.
    """
    weight_type = format_of(a["weight_type"])
    symmetric = not weight_type.startswith("u")
    # onnxruntime's scale for 4 bits spans half a code more than the grid has. It clips the greatest
    # weights and rounds the others less. The search finds the best such scale.
    few = weight_type.endswith("int4")
    return QuantizationSpec(
        weight_type,
        symmetric=symmetric,
        calibrator=MinMSE() if few else MinMax(),
        narrow=weight_type in NARROW,
        per_channel=flag(a["per_channel"], "per_channel"),
        reduce_range=flag(a["reduce_range"], "reduce_range"),
    )


def _form(value: Any) -> str:
    """Return the form of the result; None means QDQ, as in onnxruntime."""
    # Enumerations of onnxruntime and of this package are compared by name.
    written = "QDQ" if value is None else name_of(value)
    known = QuantFormat.__members__
    wanted = f"QuantFormat.QDQ or QuantFormat.QOperator{nearest(written, known)}"
    require(written in known, "quant_format", value, wanted, CallError)
    return "qdq" if written == "QDQ" else "operators"


def _check_types(a: Mapping[str, Any], form: str) -> None:
    """Check that the activation type and the weight type go together.

    Raises:
        CallError: the combination is not supported.
    """
    activation, weight = format_of(a["activation_type"]), format_of(a["weight_type"])
    # onnxruntime's quantizer raises for these combinations, too.
    is_float8 = activation == "fp8e4m3"
    by_distribution = name_of(a["calibrate_method"]) == "Distribution"
    contradictions = (
        (
            is_float8 != (weight == "fp8e4m3"),
            f"activation_type is {activation} and weight_type {weight}; float8 is for"
            " both, or for none",
        ),
        (
            (activation, weight) == ("int8", "uint8"),
            "activation_type is int8 and weight_type uint8, of which onnxruntime has no"
            " products; choose others",
        ),
        (
            is_float8 and not by_distribution,
            "calibrate_method must be Distribution for float8, as onnxruntime has it",
        ),
        (
            # QLinearConv and its kin exist for 8 bits alone.
            form == "operators" and "16" in (activation[-2:], weight[-2:]),
            "16-bit types are written between Q/DQ pairs alone: use QuantFormat.QDQ",
        ),
    )
    refuse_first(contradictions, CallError)
    if by_distribution and not is_float8:
        logger.warning(
            "calibrate_method Distribution is for float8; ranges of integers are"
            " measured as with MinMax",
        )


def _signature(  # noqa: PLR0913
    model_input: Any,
    model_output: Any,
    calibration_data_reader: Any = None,
    quant_format: Any = QuantFormat.QDQ,
    op_types_to_quantize: Any = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: Any = QuantType.QInt8,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: Any = None,
    nodes_to_exclude: Any = None,
    use_external_data_format: bool = False,
    calibrate_method: Any = CalibrationMethod.MinMax,
    calibration_providers: Any = None,
    extra_options: Any = None,
    calibration_cache_path: Any = None,
) -> None:
    """Define onnxruntime's parameters and defaults."""


_STATIC = inspect.signature(_signature)
# Parameters that quantize_dynamic does not have.
_OF_STATIC = (
    "calibration_data_reader",
    "quant_format",
    "activation_type",
    "calibrate_method",
    "calibration_providers",
    "calibration_cache_path",
)
#: onnxruntime's signatures; both functions order their parameters alike.
_DYNAMIC = _STATIC.replace(
    parameters=[p for name, p in _STATIC.parameters.items() if name not in _OF_STATIC],
)
