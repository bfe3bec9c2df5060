"""Settings of AMD Quark's scripts in this package's terms: names of nodes, number formats."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.config import QuantizationSpec
from quark_onnx.config.checks import require, require_one_of
from quark_onnx.dtypes import Integer
from quark_onnx.onnx.data_type import DATA_TYPES
from quark_onnx.onnx.spec import QTensorConfig, ScaleType
from quark_onnx.onnxruntime_spelling.request import name_of

#: Number formats by the names of AMD's and onnxruntime's types.
_TYPES = {
    "QInt4": "int4",
    "QUInt4": "uint4",
    "QInt8": "int8",
    "QUInt8": "uint8",
    "QInt16": "int16",
    "QUInt16": "uint16",
    "QInt32": "int32",
    "QUInt32": "uint32",
    "QFloat16": "float16",
    "QBFloat16": "bfloat16",
    "QFLOAT8E4M3FN": "fp8e4m3",
}
#: Microexponent formats by their bits for a block.
_MICROEXPONENTS = {11: "mx4", 13: "mx6", 16: "mx9"}
#: Microscaling formats by the type of their elements.
_ELEMENTS = {
    "fp8_e5m2": "mxfp8e5m2",
    "fp8_e4m3": "mxfp8e4m3",
    "fp6_e3m2": "mxfp6e3m2",
    "fp6_e2m3": "mxfp6e2m3",
    "fp4_e2m1": "mxfp4e2m1",
    "int8": "mxint8",
}


def pattern(name: str) -> str:
    """Translate a node name or AMD's regular expression (``^...``) into a pattern.

    Args:
        name: the name or the expression.

    >>> pattern("/head/conv"), pattern("^/head/.*")
    ('/head/conv', 're:^/head/.*')
    """
    # AMD Quark takes a name for an expression only with the anchor.
    if not name.startswith("^"):
        return name
    return f"re:{name}"


def listed(value: Any, where: str) -> list[Any]:
    """Return a setting of several entries as a list; a single name is a list of one.

    Args:
        value: the setting.
        where: name of the setting, for the message.

    Raises:
        ConfigError: the setting is no list.

    >>> listed("fc", "exclude"), listed(("a", "b"), "exclude")
    (['fc'], ['a', 'b'])
    """
    # A string is iterable, and would become a list of letters.
    if isinstance(value, str):
        return [value]
    require(isinstance(value, Collection), where, value, "a list")
    return list(value)


def single_names(selected: Sequence[Any]) -> list[str]:
    """Return the names and regular expressions in a script's selection.

    Args:
        selected: the selection.
    """
    return [entry for entry in selected if isinstance(entry, str)]


def pairs_of_ends(selected: Sequence[Any]) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Return the pairs of start and end nodes in a script's selection.

    A list of pairs counts as its pairs.

    Args:
        selected: the selection.

    Raises:
        ConfigError: an entry is neither a name nor a pair.
    """
    pairs: list[tuple[Sequence[str], Sequence[str]]] = []
    for entry in selected:
        if isinstance(entry, str):
            continue
        # Both forms occur: pairs next to names, and a list of pairs.
        if isinstance(entry, list) and all(isinstance(inner, tuple) for inner in entry):
            pairs += pairs_of_ends(entry)
            continue
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise ConfigError(
                f"{entry!r} selects no nodes; it must be a name or a pair ([start nodes],"
                " [end nodes])",
            )
        # A single node need not be put into a list.
        starts, ends = ([end] if isinstance(end, str) else list(end) for end in entry)
        pairs.append((starts, ends))
    return pairs


def narrowed(spec: QuantizationSpec) -> QuantizationSpec:
    """Omit the least code of symmetric weights with float scales, as onnxruntime does.

    Args:
        spec: specification of the weights.
    """
    # Without -128 the grid is symmetric: -127 to 127.
    signed = isinstance(spec.dtype, Integer) and spec.dtype.signed
    if signed and spec.symmetric and not spec.pow2:
        return spec.with_(narrow=True)
    return spec


def on_integer_engine(activation: QTensorConfig, weight: QTensorConfig) -> bool:
    """Return True for power-of-two scales of both activations and weights.

    AMD Quark then quantizes for the NPU's integer engine.

    Args:
        activation: configuration of activations.
        weight: configuration of weights.
    """
    return (
        activation.scale_type is ScaleType.PowerOf2
        and weight.scale_type is ScaleType.PowerOf2
    )


def dtype_of(kind: object, options: Mapping[str, Any]) -> str:
    """Return the number format of a quantization type.

    Block formats differ in their attributes.

    Args:
        kind: a member of an enumeration of types, its name, or the name of a data type.
        options: the extra options, with the attributes of block formats.

    Raises:
        ConfigError: the type is unknown.

    >>> dtype_of("QInt8", {}), dtype_of("Int8", {}), dtype_of("QMX", {"MXAttributes": {"element_dtype": "fp4_e2m1"}})
    ('int8', 'int8', 'mxfp4e2m1')
    """  # noqa: E501
    name = name_of(kind)
    # Names of the newer types come first: "Int8", not "QInt8".
    if name in DATA_TYPES:
        return DATA_TYPES[name].dtype
    if name in ("BFP", "MX"):  # names in the passes of Olive
        name = f"Q{name}"
    if name == "QBFP":
        attributes = options.get("BFPAttributes", {})
        # "to_bfp_prime" is AMD's name for microexponents, with the bits of a block's value as
        # width.
        if attributes.get("bfp_method", "to_bfp") == "to_bfp":
            return "bfp16"
        return _chosen(_MICROEXPONENTS, attributes.get("bit_width", 16), "bit_width")
    if name == "QMX":
        element = options.get("MXAttributes", {}).get("element_dtype", "int8")
        return _chosen(_ELEMENTS, element, "element_dtype")
    if name not in _TYPES:
        raise ConfigError(
            f"quantization type {name!r} is"
            f" unknown{nearest(name, [*_TYPES, 'QBFP', 'QMX'])}",
        )
    return _TYPES[name]


def _chosen(names: dict[Any, str], key: Any, attribute: str) -> str:
    require_one_of(attribute, key, names)
    return names[key]
