"""Number formats as targets call them, and why a target does not take one."""

from __future__ import annotations

from quark_onnx.config import QConfig
from quark_onnx.config.spec import QuantizationSpec
from quark_onnx.dtypes import Integer
from quark_onnx.targets.target import Target

_CUSTOMARY = {"bfloat16": "BF16", "float16": "FP16"}
#: What to do about the formats that the compiler for BF16 makes by itself.
_OWN = (
    "bfloat16 and BFP16 are made of the float model by its compiler: quark-onnx npu"
    " deploy --preset BF16 ships that"
)


def format_of(config: QConfig) -> str:
    """The number format that a configuration makes, as targets call it.

    >>> [format_of(QConfig.of(name)) for name in ("XINT8", "S8S8", "A16W8", "BF16", "MX9_INT8", "W8", "DYNAMIC")]
    ['XINT8', 'A8W8', 'A16W8', 'BF16', 'MX9_INT8', 'W8', 'dynamic A8W8']
    """  # noqa: E501
    activation, weight = config.activation, config.weight
    if (
        activation is None
        or weight is None
        or (_is_integer(activation) and _is_integer(weight))
    ):
        if (
            activation is not None
            and weight is not None
            and activation.pow2
            and weight.pow2
        ):
            return "XINT8"
        parts = [
            f"{letter}{spec.dtype.bits}"
            for letter, spec in (("A", activation), ("W", weight))
            if spec is not None
        ]
        dynamic = activation is not None and activation.dynamic
        return f"{'dynamic ' * dynamic}{''.join(parts) or 'float'}"
    names = [
        _CUSTOMARY.get(spec.dtype.name, spec.dtype.name.upper())
        for spec in (activation, weight)
    ]
    return "_".join(dict.fromkeys(names))


def _is_integer(spec: QuantizationSpec) -> bool:
    return isinstance(spec.dtype, Integer)


def unfit(target: Target, config: QConfig) -> str:
    """Why a device does not take a model that is quantized so; empty if it does."""
    if format_of(config) == "BF16" and "BF16" in target.presets:
        return (
            f"{target.name} refuses tensors of the type bfloat16, which this model has"
            f" to show their error; {_OWN}"
        )
    return refusal(target, config)


def refusal(target: Target, config: QConfig) -> str:
    """Why a device does not take what a configuration makes, and what to do; empty if it does."""
    if config.bias == "int16" and target.integer_engine:
        return f"{target.name} does not take biases of 16 bits; leave out bias"
    found = format_of(config)
    if found in target.presets:
        return ""
    own = f"; {_OWN}" if "BF16" in target.presets and found.startswith("BF") else ""
    return (
        f"config is {found}, but {target.name} ({target.summary}) takes"
        f" {', '.join(target.presets)}{own}"
    )
