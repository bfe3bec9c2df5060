"""Arguments of a tensor in compressed-tensors' config_groups: defaults, and which are accepted.

Mirrors QuantizationArgs of compressed-tensors 0.20, quantization/quant_args.py, which vLLM 0.33 and
transformers read the groups with. The rules were compared with the class on 4,800 arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quark_onnx.common.containers import excluding
from quark_onnx.torch.validate.fields import is_positive
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.rules import broken

Group = dict[str, Any]

#: The fields, with their defaults. Others are refused.
_DEFAULTS: Group = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "group_size": None,
    "strategy": None,
    "block_structure": None,
    "dynamic": False,
    "actorder": None,
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": {},
}
_TYPES = ("int", "float")
#: ``QuantizationStrategy`` in quantization/quant_args.py of compressed-tensors 0.20.
_STRATEGIES = (
    "tensor",
    "channel",
    "group",
    "block",
    "token",
    "tensor_group",
    "attn_head",
)
_GROUPED = ("group", "tensor_group")
#: Strategies whose scales may be computed at runtime.
_DYNAMIC = ("token", "tensor", "tensor_group", "group")
#: Numbers of bits of floats. The type of the zero points of others is unknown.
_FLOAT_BITS = (4, 6, 8)
#: Orders that are stored as the original one. "group" was given up.
_ORDERS = ("weight", "static")
#: Types of torch that scales and zero points may have.
_TORCH_TYPES = frozenset(
    {
        "bfloat16",
        "bool",
        "double",
        "float",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "half",
        "int",
        "int8",
        "int16",
        "int32",
        "int64",
        "long",
        "short",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    }
)
#: Texts that stand for true and false.
_SWITCHES = frozenset(
    {"yes", "no", "true", "false", "on", "off", "y", "n", "t", "f", "0", "1"}
)


def arguments_of(found: Any) -> Group | None:
    """Return the arguments of a tensor with defaults.

    Values that the class converts are converted: whole floats to integers, names to small letters,
    0 and 1 to booleans.

    Args:
        found: the arguments as they stand in the file.

    Returns:
        A new dict; None if the tensor is not quantized, or if the value is no object.
    """
    # null, or a malformed value, which ``config_findings`` reports
    if not isinstance(found, dict):
        return None
    arguments = {**_DEFAULTS, **found}
    arguments["num_bits"] = _integer(arguments["num_bits"], text=True)
    arguments["group_size"] = _integer(arguments["group_size"])
    arguments["block_structure"] = _block_structure(arguments["block_structure"])
    arguments["dynamic"] = _switch(arguments["dynamic"])
    for name in ("type", "strategy", "dynamic"):
        if isinstance(arguments[name], str):
            arguments[name] = arguments[name].lower()
    # an explicit null of strategy counts as missing
    if arguments["strategy"] is None:
        arguments["strategy"] = _inferred_strategy(arguments["group_size"])
    return arguments


def _integer(value: Any, *, text: bool = False) -> Any:
    """Return the integer that a number stands for; other values unchanged.

    Args:
        value: a value of JSON.
        text: convert digits in a text, too.
    """
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if text and isinstance(value, str) and value.isdecimal():
        return int(value)
    return value


def _block_structure(value: Any) -> Any:
    """Return the two sizes of the old spelling "128x128"; other values unchanged.

    A part that is no number becomes 0, which is refused.
    """
    if not isinstance(value, str):
        return value
    parts = map(str.strip, value.split("x"))
    return [int(part) if part.isdecimal() else 0 for part in parts]


def _switch(value: Any) -> Any:
    """Return the boolean that 0 or 1 stands for; other values unchanged."""
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return value


def _inferred_strategy(group_size: Any) -> str | None:
    """Return the strategy that a group size stands for, as ``validate_model_after``."""
    if group_size is None:
        return "tensor"
    if group_size == 0:
        return None
    # a size of -1 means a scale for each output
    return "group" if is_positive(group_size) else "channel"


@dataclass(frozen=True)
class _Requirement:
    """Requirement of QuantizationArgs, of one field or of several together.

    Attributes:
        place: the end of the place of a finding.
        holds: predicate of the arguments.
        found: text of the finding, with the arguments in braces.
    """

    place: str
    holds: Callable[[Group], bool]
    found: str


def _has_numbers(arguments: Group) -> bool:
    """Return whether the type of the numbers is known."""
    return arguments["type"] in _TYPES and type(arguments["num_bits"]) is int


def _has_float_bits(arguments: Group) -> bool:
    """Return whether floats have a width with a known type of zero points."""
    if arguments["type"] != "float" or arguments["zp_dtype"] is not None:
        return True
    return bool(arguments["num_bits"] in _FLOAT_BITS)


def _is_symmetric_or_not(arguments: Group) -> bool:
    """Return whether the symmetry is a boolean, or a text or number that stands for one."""
    value = arguments["symmetric"]
    if isinstance(value, str):
        return value.lower() in _SWITCHES
    return isinstance(value, bool) or value in (0, 1)


def _has_group_size(arguments: Group) -> bool:
    """Return whether there is a group size exactly where the strategy has groups."""
    size = arguments["group_size"]
    grouped = arguments["strategy"] in _GROUPED
    # a size of -1 goes with channel; 0 is accepted next to a strategy without groups
    is_none = size is None or (type(size) is int and size in (-1, 0))
    return is_positive(size) if grouped else is_none


def _has_blocks(arguments: Group) -> bool:
    """Return whether there are two sizes exactly where the strategy has blocks."""
    sizes = arguments["block_structure"]
    if arguments["strategy"] != "block":
        return sizes is None
    return (
        isinstance(sizes, list)
        and len(sizes) == 2
        and all(isinstance(size, int) and size > 0 for size in sizes)
    )


def _is_dynamic_or_static(arguments: Group) -> bool:
    """Return whether the strategy allows scales from the data, or from calibration."""
    dynamic, strategy = arguments["dynamic"], arguments["strategy"]
    allowed: tuple[str, ...]
    if dynamic == "local":
        allowed = ("tensor_group",)
    elif dynamic is True:
        allowed = _DYNAMIC
    elif dynamic is False:
        allowed = tuple(excluding(_STRATEGIES, ("token",)))
    else:
        allowed = ()
    return strategy in allowed


def _is_ordered_statically(arguments: Group) -> bool:
    """Return whether columns are stored in their original order (no group-wise actorder)."""
    order = arguments["actorder"]
    # true is the old spelling of "group"; numbers pass as booleans
    if isinstance(order, str):
        return order in _ORDERS
    return order is None or order is False or (type(order) is int and order in (0, 1))


def _has_torch_types(arguments: Group) -> bool:
    """Return whether the types of scales and zero points are null or known."""
    return all(
        value is None
        or (isinstance(value, str) and value.removeprefix("torch.") in _TORCH_TYPES)
        for value in (arguments["scale_dtype"], arguments["zp_dtype"])
    )


def _has_observer(arguments: Group) -> bool:
    """Return whether the observer is null or a name, and has an object of settings."""
    observer, settings = arguments["observer"], arguments["observer_kwargs"]
    return (observer is None or isinstance(observer, str)) and isinstance(
        settings, dict
    )


#: The first requirement that fails is reported.
_REQUIREMENTS = (
    _Requirement("", _has_numbers, "type {type!r}, num_bits {num_bits!r}"),
    _Requirement("", _has_float_bits, "floats of {num_bits} bits"),
    _Requirement(".symmetric", _is_symmetric_or_not, "{symmetric!r}"),
    _Requirement(
        ".strategy",
        lambda arguments: arguments["strategy"] in _STRATEGIES,
        "{strategy!r}",
    ),
    _Requirement(".group_size", _has_group_size, "{group_size!r}, with {strategy}"),
    _Requirement(
        ".block_structure", _has_blocks, "{block_structure!r}, with {strategy}"
    ),
    _Requirement(".dynamic", _is_dynamic_or_static, "{dynamic!r}, with {strategy}"),
    _Requirement(
        ".actorder",
        _is_ordered_statically,
        "{actorder!r}; static is read, and group was given up",
    ),
    _Requirement(
        "",
        _has_torch_types,
        "scale_dtype {scale_dtype!r}, zp_dtype {zp_dtype!r}, which are no types of torch",
    ),
    _Requirement(
        ".observer", _has_observer, "{observer!r}, with settings {observer_kwargs!r}"
    ),
)


def argument_findings(place: str, found: Group) -> Iterator[Finding]:
    """Yield the first unmet requirement of a tensor's arguments.

    Args:
        place: place of the arguments for the finding.
        found: the arguments as they stand in the file.
    """
    unknown = list(excluding(found, _DEFAULTS))
    if unknown:
        yield broken("ct-arguments", f"{place}.{unknown[0]}", "no such argument")
        return
    arguments = arguments_of(found) or {}
    for requirement in _REQUIREMENTS:
        if not requirement.holds(arguments):
            text = requirement.found.format(**arguments)
            yield broken("ct-arguments", f"{place}{requirement.place}", text)
            return
