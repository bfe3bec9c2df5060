"""Arguments of a tensor in compressed-tensors' config_groups: defaults, and which are accepted.

Mirrors QuantizationArgs of compressed-tensors 0.20, quantization/quant_args.py, which vLLM 0.33 and
transformers read the groups with. The rules were compared with the class on 4,800 arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
#: Scales of tokens are always computed at runtime.
_STATIC = tuple(strategy for strategy in _STRATEGIES if strategy != "token")
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


def arguments_of(entries: Any) -> Group | None:
    """Return the arguments of a tensor with defaults.

    Values that the class converts are converted: whole floats to integers, names to small letters,
    0 and 1 to booleans.

    Args:
        entries: the arguments as they stand in the file.

    Returns:
        A new dict; None if the tensor is not quantized, or if the value is no object.
    """
    # null, or a malformed value, which ``config_findings`` reports
    if not isinstance(entries, dict):
        return None
    arguments = {**_DEFAULTS, **entries}
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
    """Return the integer that a number or digits stand for; other values unchanged."""
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
    sizes = [size.strip() for size in value.split("x")]
    return [int(size) if size.isdecimal() else 0 for size in sizes]


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


def _strategies_for(dynamic: object) -> tuple[str, ...]:
    """Return the strategies for scales from the data (true, "local"), or from calibration."""
    if dynamic == "local":
        return ("tensor_group",)
    if dynamic is True:
        return _DYNAMIC
    return _STATIC if dynamic is False else ()


def _is_torch_type(value: object) -> bool:
    """Return whether the type of scales or zero points is null or known."""
    is_known = isinstance(value, str) and value.removeprefix("torch.") in _TORCH_TYPES
    return value is None or is_known


def _requirements(arguments: Group) -> list[tuple[str, bool, str]]:
    """Return the requirements of QuantizationArgs in their order.

    Returns:
        Triples: the argument, empty for several together; whether the requirement holds; and the
        text of the finding.
    """
    kind, bits = arguments["type"], arguments["num_bits"]
    strategy, size = arguments["strategy"], arguments["group_size"]
    scale_type, zero_type = arguments["scale_dtype"], arguments["zp_dtype"]
    observer, settings = arguments["observer"], arguments["observer_kwargs"]
    # the type of the zero points of other floats is unknown
    is_float_known = kind != "float" or zero_type is not None or bits in _FLOAT_BITS
    symmetric = arguments["symmetric"]
    is_switch = isinstance(symmetric, bool) or symmetric in (0, 1)
    if isinstance(symmetric, str):
        is_switch = symmetric.lower() in _SWITCHES
    # a size of -1 goes with channel; 0 is accepted next to a strategy without groups
    is_size = size is None or (type(size) is int and size in (-1, 0))
    if strategy in _GROUPED:
        is_size = is_positive(size)
    blocks = arguments["block_structure"]
    is_blocks = blocks is None
    if strategy == "block":
        is_pair = isinstance(blocks, list) and len(blocks) == 2
        is_blocks = is_pair and all(
            isinstance(rows, int) and rows > 0 for rows in blocks
        )
    order = arguments["actorder"]
    # true is the old spelling of "group"; numbers pass as booleans
    is_zero_or_one = type(order) is int and order in (0, 1)
    is_static = order is None or order is False or is_zero_or_one
    if isinstance(order, str):
        is_static = order in _ORDERS
    is_observer = isinstance(observer, str | None) and isinstance(settings, dict)
    return [
        (
            "",
            kind in _TYPES and type(bits) is int,
            f"type {kind!r}, num_bits {bits!r}",
        ),
        ("", is_float_known, f"floats of {bits} bits"),
        ("symmetric", is_switch, f"{symmetric!r}"),
        ("strategy", strategy in _STRATEGIES, f"{strategy!r}"),
        ("group_size", is_size, f"{size!r}, with {strategy}"),
        ("block_structure", is_blocks, f"{blocks!r}, with {strategy}"),
        (
            "dynamic",
            strategy in _strategies_for(arguments["dynamic"]),
            f"{arguments['dynamic']!r}, with {strategy}",
        ),
        ("actorder", is_static, f"{order!r}; static is read, and group was given up"),
        (
            "",
            _is_torch_type(scale_type) and _is_torch_type(zero_type),
            f"scale_dtype {scale_type!r}, zp_dtype {zero_type!r}, which are no types of"
            " torch",
        ),
        ("observer", is_observer, f"{observer!r}, with settings {settings!r}"),
    ]


def argument_findings(place: str, entries: Group) -> Iterator[Finding]:
    """Yield the first unmet requirement of a tensor's arguments.

    Args:
        place: place of the arguments for the finding.
        entries: the arguments as they stand in the file.
    """
    unknown = [value for value in entries if value not in _DEFAULTS]
    if unknown:
        yield broken("ct-arguments", f"{place}.{unknown[0]}", "no such argument")
        return
    for argument, holds, text in _requirements(arguments_of(entries) or {}):
        if not holds:
            where = f"{place}.{argument}" if argument else place
            yield broken("ct-arguments", where, text)
            return
