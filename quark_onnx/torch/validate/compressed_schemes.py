"""Schemes of compressed-tensors: support in vLLM, and required tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark_onnx.torch.runtime.safetensors_header import (
    FLOATS,
    StoredTensor,
    integers_of,
)
from quark_onnx.torch.validate.compressed_arguments import Group, arguments_of
from quark_onnx.torch.validate.fields import (
    Conditions,
    is_set,
    is_unset,
    meets,
    object_of,
    one_of,
)
from quark_onnx.torch.validate.layer_checks import (
    SCALAR,
    SCALE,
    Shape,
    Slot,
    ceil_div,
    slot,
)
from quark_onnx.torch.validate.modules import Module

_INT8 = {"type": "int", "num_bits": 8}
_E4M3 = {"type": "float", "num_bits": 8}
#: ``dynamic`` may be false, null or missing for static scales, and true or "local" otherwise.
_STATIC = {"dynamic": is_unset}
_SYMMETRIC = {"symmetric": is_set}
STATIC_INT8 = {**_INT8, "strategy": "tensor", **_STATIC}
_DYNAMIC_TOKEN = {"strategy": "token", "dynamic": is_set}
_NVFP4 = {
    "type": "float",
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": 16,
    **_SYMMETRIC,
}
_BLOCKS_OF_32 = {"type": "float", "strategy": "group", "group_size": 32, **_SYMMETRIC}
_GROUPED = {"strategy": one_of("channel", "group"), **_STATIC}
_GROUPED_INTEGERS = {"type": "int", **_GROUPED}
#: Integers of 8 bits with two kinds of inputs; their type does not matter to vLLM.
_W8 = {
    "num_bits": 8,
    "type": lambda kind: kind != "float",
    "strategy": one_of("tensor", "channel"),
    **_SYMMETRIC,
    **_STATIC,
}


@dataclass(frozen=True)
class GroupScheme:
    """Scheme of vLLM for a group: what its class takes.

    Attributes:
        name: name in verdicts; settings of the weight and of the inputs can be named in braces.
        weight: conditions on the arguments of the weight.
        inputs: conditions on those of the inputs; None for weights alone, empty for any inputs.
        formats: formats of the group; empty for any.
        outputs: conditions on the arguments of the outputs; None where they are not looked at.
    """

    name: str
    weight: Conditions
    inputs: Conditions | None = None
    formats: tuple[str, ...] = ()
    outputs: Conditions | None = None

    def takes(self, group: Group, form: str | None) -> bool:
        """Return whether the scheme is for a group in a format.

        Args:
            group: an entry of config_groups.
            form: format of the group, or of the checkpoint if the group has none; None if neither
                has one.
        """
        # a scheme without formats looks at the arguments alone
        if self.formats and form not in self.formats:
            return False
        # the arguments have their defaults by now, as in QuantizationArgs
        weight = object_of(arguments_of(group.get("weights")))
        inputs = arguments_of(group.get("input_activations"))
        outputs = object_of(arguments_of(group.get("output_activations")))
        if self.inputs is None or inputs is None:
            # empty conditions are met by inputs that are not quantized, too
            takes_inputs = inputs is None and not self.inputs
        else:
            takes_inputs = meets(inputs, self.inputs)
        return (
            takes_inputs
            and meets(weight, self.weight)
            and meets(outputs, self.outputs or {})
        )


#: Name of the scheme of integers whose inputs and outputs are static int8.
INT8_AROUND = "int8 around"
#: Conditions that any inputs meet, also those that are not quantized.
_ANY: Conditions = {}
#: Formats in which vLLM looks for quantized activations.
_ACTIVATIONS = (
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
)
#: In the order of ``_get_scheme_from_parts`` in vllm/model_executor/layers/quantization/
#: compressed_tensors/compressed_tensors.py of vLLM 0.33: the first that takes a group is chosen.
SCHEMES = (
    # weights alone (W4A16), and weights with inputs of the same format (W4A4)
    GroupScheme("nvfp4", _NVFP4),
    GroupScheme("nvfp4", _NVFP4, _NVFP4),
    GroupScheme("mxfp4", {**_BLOCKS_OF_32, "num_bits": 4}, _ANY),
    GroupScheme(
        "mxfp8",
        {
            **_BLOCKS_OF_32,
            "num_bits": 8,
            "scale_dtype": lambda dtype: "uint8" in str(dtype),
        },
        _ANY,
    ),
    GroupScheme(
        "int4 a8 in fp8, on GPUs of capability 9.0 alone",
        {"type": "int", "num_bits": 4, "strategy": "group", **_SYMMETRIC, **_STATIC},
        {**_E4M3, **_DYNAMIC_TOKEN, **_SYMMETRIC},
    ),
    GroupScheme(
        INT8_AROUND,
        _GROUPED_INTEGERS,
        STATIC_INT8,
        ("pack-quantized", "int-quantized"),
        STATIC_INT8,
    ),
    GroupScheme(
        "int{weight[num_bits]} a{inputs[num_bits]}",
        _GROUPED_INTEGERS,
        {
            "type": "int",
            "num_bits": one_of(4, 8),
            "strategy": one_of("token", "group"),
            "dynamic": is_set,
            **_SYMMETRIC,
        },
        ("pack-quantized",),
    ),
    GroupScheme(
        "int{weight[num_bits]}",
        {**_GROUPED, "num_bits": lambda bits: 2 <= bits <= 8},
        None,
        ("pack-quantized",),
    ),
    # vLLM falls back to the weights alone where fp8 activations cannot be read
    GroupScheme(
        "fp8 {weight[strategy]}",
        {
            "type": "float",
            "strategy": one_of("tensor", "channel", "block"),
            **_SYMMETRIC,
            **_STATIC,
        },
        _ANY,
        _ACTIVATIONS,
    ),
    GroupScheme(
        "int8", _W8, {"num_bits": 8, "strategy": "tensor", **_STATIC}, _ACTIVATIONS
    ),
    GroupScheme("int8", _W8, {"num_bits": 8, **_DYNAMIC_TOKEN}, _ACTIVATIONS),
    GroupScheme(
        "int4 a8",
        {"num_bits": 4, "type": lambda kind: kind != "float", **_GROUPED, **_SYMMETRIC},
        {**_INT8, **_DYNAMIC_TOKEN},
        _ACTIVATIONS,
    ),
)


def scheme_in_vllm(group: Group, form: str | None) -> str:
    """Return the name of the scheme that vLLM 0.33 chooses; empty if unsupported.

    Args:
        group: an entry of config_groups.
        form: format of the group, or of the checkpoint if the group has none; None if neither has.
    """
    # vLLM tests in this order, and several schemes may take the same group
    for scheme in SCHEMES:
        if scheme.takes(group, form):
            return scheme.name.format(
                weight=arguments_of(group.get("weights")),
                inputs=arguments_of(group.get("input_activations")),
            )
    return ""


def form_of(entries: dict[str, Any], group: Group) -> str | None:
    """Return the format of a group, or else that of the checkpoint."""
    # vLLM and compressed-tensors prefer the format of the group
    return group.get("format") or entries.get("format")


def describe(group: Group) -> str:
    """Return the number formats of a group, such as "weight int4 group 128"."""
    parts = []
    for what, key in (("weight", "weights"), ("input", "input_activations")):
        arguments = arguments_of(group.get(key))
        if arguments is None:
            continue
        words = [what, f"{arguments['type']}{arguments['num_bits']}"]
        words.append(f"{arguments['strategy']}")
        if arguments["group_size"]:
            words.append(f"{arguments['group_size']}")
        if arguments["dynamic"]:
            words.append("dynamic")
        parts.append(" ".join(words))
    return ", ".join(parts)


def slots_of(
    group: Group, module: Module, demanded: Shape | None = None
) -> tuple[Shape, dict[str, Slot]]:
    """Return a layer's (out, in) by its weight's shape, and required tensors.

    Args:
        group: the group of the layer, with valid arguments of its weight.
        module: the layer; its weight is a matrix, packed or with a byte for each value.
        demanded: (out, in) by the configuration; None if unknown.

    Returns:
        (out, in) of the float weight, and the slots by tensor name.
    """
    arguments = object_of(arguments_of(group["weights"]))
    inputs = arguments_of(group.get("input_activations"))
    # fp4 is packed into uint8, two values in a byte, integers into int32
    if meets(arguments, {"type": "float", "num_bits": 4}):
        return _fp4_slots(arguments, inputs, module.matrix)
    if module.matrix.name.endswith("weight_packed"):
        size, slots = _packed_slots(arguments, module, demanded)
    else:
        size, slots = _byte_slots(arguments, module.matrix)
    # dynamic scales are computed at runtime, and are not stored
    if inputs is not None and not inputs["dynamic"]:
        needed = not inputs["symmetric"]
        slots["input_scale"] = SCALE
        slots["input_zero_point"] = slot("I8", *SCALAR, needed=needed)
    return size, slots


def _fp4_slots(
    arguments: Group, inputs: Group | None, weight: StoredTensor
) -> tuple[Shape, dict[str, Slot]]:
    """Return the slots of fp4: weight_packed is (out, in / 2)."""
    rows, columns = weight.shape
    # NVFP4 has groups of 16
    into, size = columns * 2, arguments["group_size"] or 16
    scales: Shape = (rows, into // size)
    slots = {
        "weight_packed": slot("U8", (rows, columns)),
        "weight_scale": slot(("U8", "F8_E8M0"), scales),
    }
    # NVFP4 has E4M3 scales below a global scale, MXFP4 has exponents (E8M0) alone
    if arguments["strategy"] == "tensor_group":
        slots["weight_scale"] = slot("F8_E4M3", scales)
        slots["weight_global_scale"] = SCALE
        if inputs is not None:
            slots["input_global_scale"] = SCALE
    return (rows, into), slots


def _packed_slots(
    arguments: Group, module: Module, demanded: Shape | None
) -> tuple[Shape, dict[str, Slot]]:
    """Return the slots of integers in int32: weight_packed is (out, ceil(in * bits / 32))."""
    rows, columns = module.matrix.shape
    into = _packed_inputs(arguments, module, demanded)
    bits, groups = arguments["num_bits"], 1
    if arguments["strategy"] == "group":
        groups = into // arguments["group_size"]
    # zero points are packed along the outputs, weights along the inputs
    zeros, needed = (ceil_div(rows * bits, 32), groups), not arguments["symmetric"]
    return (rows, into), {
        "weight_packed": slot("I32", (rows, columns)),
        "weight_scale": slot(FLOATS, (rows, groups)),
        # (out, in), without the padding of the last int32
        "weight_shape": slot(("I64", "I32"), (2,)),
        "weight_zero_point": slot("I32", zeros, needed=needed),
    }


def _packed_inputs(arguments: Group, module: Module, demanded: Shape | None) -> int:
    """Return the number of inputs of a packed layer, without the padding of the last int32."""
    candidates = list[int]()
    # weight_shape has the number itself, unless the checkpoint is not written yet
    if "weight_shape" in module.tensors:
        candidates += integers_of(module.tensors["weight_shape"])[1:]
    # groups are whole, and more than a padding
    if arguments["strategy"] == "group" and "weight_scale" in module.tensors:
        shape = module.tensors["weight_scale"].shape
        candidates.append(shape[-1] * arguments["group_size"] if shape else 0)
    if demanded is not None:
        candidates.append(demanded[1])
    columns = module.tensors["weight_packed"].shape[1]
    bits: int = arguments["num_bits"]
    for into in candidates:
        if ceil_div(into * bits, 32) == columns:
            return into
    # as many as fit
    return columns * 32 // bits


def _byte_slots(
    arguments: Group, weight: StoredTensor
) -> tuple[Shape, dict[str, Slot]]:
    """Return the slots of weights with a byte for each value."""
    rows, columns = weight.shape
    strategy, is_float = arguments["strategy"], arguments["type"] == "float"
    types: tuple[str, ...] = FLOATS
    shapes = SCALAR
    # compressed-tensors keeps the axis that was reduced: (out, 1), not (out,)
    if strategy == "channel":
        shapes = ((rows, 1),)
    elif strategy == "group":
        shapes = ((rows, columns // arguments["group_size"]),)
        # MXFP8 has exponents as scales, other fp8 in groups has floats
        types = ("U8", "F8_E8M0", *FLOATS) if is_float else FLOATS
    elif strategy == "block":
        high, wide = arguments["block_structure"]
        shapes = ((ceil_div(rows, high), ceil_div(columns, wide)),)
    return weight.shape, {
        "weight": slot("F8_E4M3" if is_float else "I8", weight.shape),
        "weight_scale": slot(types, *shapes),
        "weight_zero_point": slot("I8", *shapes, needed=not arguments["symmetric"]),
    }
