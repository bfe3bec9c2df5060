"""Checks of compressed-tensors checkpoints: config_groups, schemes and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quark_onnx.common.containers import present_values
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.compressed_arguments import (
    Group,
    argument_findings,
    arguments_of,
)
from quark_onnx.torch.validate.compressed_groups import (
    GroupsInTransformers,
    GroupsInVllm,
    groups_in_vllm,
    groups_of,
    ignored,
    is_of_attention,
)
from quark_onnx.torch.validate.fields import (
    NO_KEY_OR_NULL,
    QUANTIZATION,
    Conditions,
    FieldCheck,
    field_findings,
    is_given,
    is_object,
    is_set,
    is_unset,
    meets,
    one_of,
)
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.fp8_blocks import block_findings
from quark_onnx.torch.validate.global_scales import global_scale_findings
from quark_onnx.torch.validate.header import FLOATS, Tensor, integers_of
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.modules import (
    Module,
    excluded_findings,
    fused,
    included_findings,
    partial_findings,
    shards,
    size_of,
)
from quark_onnx.torch.validate.packed_outputs import (
    PackedOutputs,
    packed_output_findings,
)
from quark_onnx.torch.validate.quark_config import is_glob
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import (
    SCALAR,
    SCALE,
    Shape,
    Slot,
    Slots,
    ceil_div,
    floats,
    name_list_findings,
    quantized_findings,
)

#: Formats whose weights compressed-tensors 0.20 decodes to bfloat16.
#: Their decompressors name bfloat16 themselves, and ignore the dtype of the model.
_DECODED_TO_BFLOAT16 = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
#: ``CompressionFormat`` in config/base.py of compressed-tensors 0.20, without the legacy formats
#: of sparse weights, which no class decodes.
FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    *_DECODED_TO_BFLOAT16,
)
#: Formats in which vLLM looks for quantized activations.
_ACTIVATIONS = (
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
)
#: Keys of the arguments of a group.
_TENSORS = ("weights", "input_activations", "output_activations")
#: An empty object gives no layer a scheme.
_GROUPS_CHECK = FieldCheck(
    "ct-groups",
    "config_groups",
    lambda groups: bool(object_of(groups)),
    "it is {config_groups!r}",
    absent="it is None",
)
_FORMAT_CHECK = FieldCheck(
    "ct-format",
    "format",
    lambda form: isinstance(form, str | None),
    "{format!r}",
)
#: ``_validate_attention_scheme`` in quantization/lifecycle/initialize.py of compressed-tensors.
_ATTENTION_CHECKS = (
    FieldCheck("ct-attention", "weights", lambda weights: weights is None),
    FieldCheck(
        "ct-attention",
        "input_activations",
        is_object,
        absent=NO_KEY_OR_NULL,
    ),
    FieldCheck("ct-attention", "output_activations", lambda outputs: outputs is None),
)
#: The format is optional in compressed-tensors.
_FORMAT_IN_VLLM_CHECK = FieldCheck(
    "ct-format",
    "format",
    is_given,
    absent=NO_KEY_OR_NULL,
)


def vllm_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration, for vLLM."""
    entries = checkpoint.quantization
    yield from _config_findings(entries)
    for place, group in groups_in_vllm(entries):
        yield from _group_findings(entries, place, group)
        # vLLM reads the arguments of the weights of every group
        if not isinstance(group.get("weights"), dict):
            yield broken("ct-groups", place, "it lacks the object weights")


def transformers_config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the configuration, for transformers."""
    entries = checkpoint.quantization
    yield from _config_findings(entries)
    for place, group in groups_of(entries):
        yield from _group_findings(entries, place, group)
        if is_of_attention(group):
            yield from field_findings(group, place, _ATTENTION_CHECKS)


def _config_findings(entries: dict[str, Any]) -> Iterator[Finding]:
    """Yield errors outside of the groups, for any client."""
    yield from field_findings(entries, QUANTIZATION, [_GROUPS_CHECK])
    # vLLM raises only if sparsity_config has targets (``_parse_sparsity_config``)
    targets = object_of(entries.get("sparsity_config")).get("targets")
    if targets:
        yield broken(
            "ct-sparsity", f"{QUANTIZATION}.sparsity_config", f"it targets {targets}"
        )
    yield from name_list_findings(entries, "ignore")
    yield from field_findings(entries, QUANTIZATION, [_FORMAT_CHECK])
    for name in filter(is_glob, ignored(entries)):
        yield broken(
            "exclude-pattern", f"{QUANTIZATION}.ignore", f"{name!r} is no exact name"
        )


def _group_findings(
    entries: dict[str, Any],
    place: str,
    group: Group,
) -> Iterator[Finding]:
    """Yield errors in the keys of a group and in the arguments of its tensors.

    Args:
        entries: the quantization_config.
        place: place of the group for findings, as ``groups_of`` yields.
        group: an entry of config_groups, as it stands in the file.

    Yields:
        For a group without targets one finding alone.
    """
    if not isinstance(group.get("targets"), list):
        yield broken("ct-groups", place, "it lacks the list targets")
        return
    # null means the same as a missing format: that of the checkpoint holds
    form = present_values(group).get("format", entries.get("format"))
    if form not in FORMATS:
        yield broken("ct-format", f"{place}.format", repr(form))
    for key in _TENSORS:
        # null stands for a tensor that is not quantized
        if isinstance(group.get(key), dict):
            yield from argument_findings(f"{place}.{key}", group[key])
        elif group.get(key) is not None:
            yield broken("ct-arguments", f"{place}.{key}", repr(group[key]))


def vllm_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the schemes of the layers, for vLLM.

    Args:
        checkpoint: a checkpoint whose groups ``vllm_config_findings`` has accepted.

    Yields:
        Malformed entries, fused layers that are ignored in part or differ in global scales, and
        groups without a scheme: one finding for each group, and one more if the group has experts.
    """
    entries = checkpoint.quantization
    yield from field_findings(entries, QUANTIZATION, [_FORMAT_IN_VLLM_CHECK])
    # vLLM iterates over ignore, and fails for null; a missing key means no exceptions
    if entries.get("ignore", []) is None:
        yield broken(
            "malformed", f"{QUANTIZATION}.ignore", "null, and not a list of names"
        )
    # vLLM asks for each part of a fused layer, and refuses a layer that is ignored in part
    groups = GroupsInVllm(checkpoint)
    for name, modules in shards(checkpoint.modules):
        out = list(map(groups.ignores, modules))
        yield from partial_findings(name, out, "ignored")
    yield from _expert_findings(checkpoint, groups)
    yield from block_findings(checkpoint, partial(_rows_of_blocks, groups))
    yield from packed_output_findings(checkpoint, partial(_packed_zero_points, groups))
    # these scales are reciprocals: the greatest one of inputs clips those of the others
    yield from global_scale_findings(
        checkpoint, "weight_global_scale", "input_global_scale"
    )
    first = dict[tuple[str, bool], tuple[Module, Group]]()
    for module in checkpoint.linears:
        found = groups.of(module)
        if found is not None:
            place, group = found
            # experts have classes of their own, all other layers of a group share a scheme
            first.setdefault((place, bool(module.experts)), (module, group))
    for (place, _), (module, group) in first.items():
        yield from _scheme_findings(entries, module, place, group)


def _rows_of_blocks(groups: GroupsInVllm, module: Module) -> object:
    """Return the number of outputs of the blocks of a layer; None if it has no blocks."""
    _, group = groups.of(module) or ("", {})
    blocks = object_of(arguments_of(group.get("weights"))).get("block_structure")
    return blocks and blocks[0]


def _packed_zero_points(groups: GroupsInVllm, module: Module) -> PackedOutputs | None:
    """Return the packed zero points of a layer; None for a layer without.

    Args:
        groups: the groups of the layers.
        module: a quantized layer.
    """
    _, group = groups.of(module) or ("", {})
    arguments = object_of(arguments_of(group.get("weights")))
    packed = module.tensors.get("weight_packed")
    # integers alone have zero points, and weights along the inputs fill int32 of their own
    if packed is None or not meets(arguments, {"type": "int", "symmetric": is_unset}):
        return None
    return PackedOutputs(packed.shape[0], arguments["num_bits"], "zero points")


def _expert_findings(
    checkpoint: Checkpoint,
    groups: GroupsInVllm,
) -> Iterator[Finding]:
    """Yield experts whose layers differ in their groups, or are ignored in part.

    Args:
        checkpoint: the checkpoint.
        groups: the groups of its layers.
    """
    for name, modules in fused(checkpoint.modules):
        # ``get_moe_method`` in compressed_tensors_moe.py compares the three layers of an expert
        found = list[list[object]]()
        for module in modules if modules[0].experts else ():
            _, group = groups.of(module) or ("", {})
            scheme: list[object] = [arguments_of(group.get(key)) for key in _TENSORS]
            scheme.append(_form(checkpoint.quantization, group))
            if scheme not in found:
                found.append(scheme)
        if len(found) > 1:
            text = f"its layers have {len(found)} schemes"
            yield broken("ct-scheme", name, text)


def _scheme_findings(
    entries: dict[str, Any],
    module: Module,
    place: str,
    group: Group,
) -> Iterator[Finding]:
    """Yield a group without a scheme in vLLM.

    Args:
        entries: the configuration.
        module: the first layer of the group.
        place: place of the group.
        group: the group.
    """
    # compressed_tensors_moe.py has no class for experts with static integer activations
    inputs = object_of(arguments_of(group.get("input_activations")))
    if module.experts and meets(inputs, _STATIC_INT8):
        text = f"{_describe(group)}: experts have no static integers"
        yield broken("ct-scheme", module.name, text)
    elif not scheme_in_vllm(group, _form(entries, group)):
        yield broken("ct-scheme", place, _describe(group))


def transformers_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of compressed-tensors in transformers, in the tested releases.

    Args:
        checkpoint: the checkpoint; a model without a dtype passes the check of the dtype.
    """
    dtype = checkpoint.dtype
    for place, group in groups_of(checkpoint.quantization):
        weight = arguments_of(group.get("weights"))
        # such a group quantizes activations alone
        if weight is None:
            continue
        form = _form(checkpoint.quantization, group)
        # decoding all weights while loading (dequantize=True) is a way around, hence only a warning
        if form == "pack-quantized" and not weight["symmetric"]:
            yield broken("ct-zero-points", f"{place}.weights.symmetric", "false")
        if form in _DECODED_TO_BFLOAT16 and dtype not in ("bfloat16", ""):
            text = f"{form!r}, and the model is {dtype}"
            yield broken("ct-bfloat16", f"{place}.format", text)


def vllm_layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the tensors of the layers, for vLLM."""
    return _layer_findings(checkpoint, GroupsInVllm(checkpoint))


def transformers_layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the tensors of the layers, for transformers."""
    return _layer_findings(checkpoint, GroupsInTransformers(checkpoint))


def _layer_findings(
    checkpoint: Checkpoint,
    groups: GroupsInVllm | GroupsInTransformers,
) -> Iterator[Finding]:
    """Yield errors in the tensors of the layers.

    Args:
        checkpoint: the checkpoint.
        groups: the groups of its layers in the client.
    """
    for module in checkpoint.layers:
        found = groups.of(module)
        if found is None:
            text = f"no group is for it, and its weight is {module.weight}"
            yield from excluded_findings(module, text)
        # the second item of the pair is the group
        elif module.is_quantized:
            yield from _tensor_findings(checkpoint, module, found[1])
        else:
            yield from _float_findings(module, found[1])


def _float_findings(module: Module, group: Group) -> Iterator[Finding]:
    """Yield a float layer of a group, unless it is a router.

    Args:
        module: the layer, with a float weight.
        group: the group that names the layer.
    """
    # a float weight is loaded where the scheme has a tensor of that name
    severity = WRONG if "weight" in slot_names(group) else REFUSED
    text = f"its weight is {module.weight}, not {_describe(group)}"
    yield from included_findings(module, text, severity)


def _tensor_findings(
    checkpoint: Checkpoint,
    module: Module,
    group: Group,
) -> Iterator[Finding]:
    """Yield errors in the tensors of a quantized layer.

    Args:
        checkpoint: the checkpoint.
        module: the layer; its weight is a matrix.
        group: the group of the layer, with valid arguments of its weight.
    """
    demanded = size_of(module.name, checkpoint.text_config)
    size, slots = slots_of(group, module, demanded)
    yield from quantized_findings(
        module,
        size,
        demanded,
        {
            **slots,
            **_output_slots(group),
            **_kv_slots(checkpoint.quantization, module),
        },
        group["weights"].get("group_size"),
    )


def schemes_in_vllm(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer in vLLM."""
    return _schemes(checkpoint, GroupsInVllm(checkpoint))


def schemes_in_transformers(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer in transformers."""
    return _schemes(checkpoint, GroupsInTransformers(checkpoint))


def _schemes(
    checkpoint: Checkpoint,
    groups: GroupsInVllm | GroupsInTransformers,
) -> Iterator[str]:
    """Yield the number formats of every quantized layer.

    Args:
        checkpoint: the checkpoint.
        groups: the groups of its layers in the client.

    Yields:
        Texts such as "weight int4 group 128"; layers without a group are left out.
    """
    for module in checkpoint.quantized_linears:
        found = groups.of(module)
        if found is not None:
            yield _describe(found[1])


_INT8 = {"type": "int", "num_bits": 8}
_E4M3 = {"type": "float", "num_bits": 8}
#: ``dynamic`` may be false, null or missing for static scales, and true or "local" otherwise.
_STATIC = {"dynamic": is_unset}
_SYMMETRIC = {"symmetric": is_set}
_STATIC_INT8 = {**_INT8, "strategy": "tensor", **_STATIC}
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
class Scheme:
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
        weight = arguments_of(group.get("weights"))
        return (
            # the arguments have their defaults by now, as in QuantizationArgs
            meets(object_of(weight), self.weight)
            and self._takes_inputs(arguments_of(group.get("input_activations")))
            and self._takes_outputs(arguments_of(group.get("output_activations")))
        )

    def _takes_inputs(self, inputs: Group | None) -> bool:
        if self.inputs is None or inputs is None:
            # empty conditions are met by inputs that are not quantized, too
            # None against None passes, and conditions pass without inputs only if they are empty
            return inputs is None and not self.inputs
        return meets(inputs, self.inputs)

    def _takes_outputs(self, outputs: Group | None) -> bool:
        return self.outputs is None or meets(object_of(outputs), self.outputs)


#: Name of the scheme of integers whose inputs and outputs are static int8.
_INT8_AROUND = "int8 around"
#: Conditions that any inputs meet, also those that are not quantized.
_ANY: Conditions = {}
#: In the order of ``_get_scheme_from_parts`` in vllm/model_executor/layers/quantization/
#: compressed_tensors/compressed_tensors.py of vLLM 0.33: the first that takes a group is chosen.
SCHEMES = (
    # weights alone (W4A16), and weights with inputs of the same format (W4A4)
    Scheme("nvfp4", _NVFP4),
    Scheme("nvfp4", _NVFP4, _NVFP4),
    Scheme("mxfp4", {**_BLOCKS_OF_32, "num_bits": 4}, _ANY),
    Scheme(
        "mxfp8",
        {
            **_BLOCKS_OF_32,
            "num_bits": 8,
            "scale_dtype": lambda dtype: "uint8" in str(dtype),
        },
        _ANY,
    ),
    Scheme(
        "int4 a8 in fp8, on GPUs of capability 9.0 alone",
        {"type": "int", "num_bits": 4, "strategy": "group", **_SYMMETRIC, **_STATIC},
        {**_E4M3, **_DYNAMIC_TOKEN, **_SYMMETRIC},
    ),
    Scheme(
        _INT8_AROUND,
        _GROUPED_INTEGERS,
        _STATIC_INT8,
        ("pack-quantized", "int-quantized"),
        _STATIC_INT8,
    ),
    Scheme(
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
    Scheme(
        "int{weight[num_bits]}",
        {**_GROUPED, "num_bits": lambda bits: 2 <= bits <= 8},
        None,
        ("pack-quantized",),
    ),
    # vLLM falls back to the weights alone where fp8 activations cannot be read
    Scheme(
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
    Scheme(
        "int8",
        _W8,
        {"num_bits": 8, "strategy": "tensor", **_STATIC},
        _ACTIVATIONS,
    ),
    Scheme("int8", _W8, {"num_bits": 8, **_DYNAMIC_TOKEN}, _ACTIVATIONS),
    Scheme(
        "int4 a8",
        {
            "num_bits": 4,
            "type": lambda kind: kind != "float",
            **_GROUPED,
            **_SYMMETRIC,
        },
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


def slots_of(
    group: Group,
    module: Module,
    demanded: Shape | None = None,
) -> tuple[Shape, Slots]:
    """Return a layer's (out, in) by its weight's shape, and required tensors.

    Args:
        group: the group of the layer, with valid arguments of its weight.
        module: the layer; its weight is a matrix, packed or with a byte for each value.
        demanded: (out, in) by the configuration; None if unknown.

    Returns:
        (out, in) of the float weight, and the slots by tensor name.
    """
    arguments = arguments_of(group["weights"])
    inputs = arguments_of(group.get("input_activations"))
    weight = module.weight
    assert arguments is not None
    assert weight is not None
    # fp4 is packed into uint8, two values in a byte, integers into int32
    if meets(arguments, {"type": "float", "num_bits": 4}):
        return _fp4_slots(arguments, inputs, weight)
    if weight.name.endswith("weight_packed"):
        into = _packed_inputs(arguments, module, demanded)
        return _packed_slots(arguments, inputs, weight, into)
    return _byte_slots(arguments, inputs, weight)


def _fp4_slots(
    arguments: Group,
    inputs: Group | None,
    weight: Tensor,
) -> tuple[Shape, Slots]:
    """Return the size and slots of fp4, of which a byte holds two.

    Args:
        arguments: arguments of the weight, with defaults.
        inputs: arguments of the inputs, with defaults; None for weights alone.
        weight: the packed weight, of shape (out, in / 2).

    Returns:
        (out, in), and the slots by tensor name.
    """
    rows, columns = weight.shape
    # weights are (out, in / 2); NVFP4 has groups of 16
    into, size = columns * 2, arguments["group_size"] or 16
    scale_types: tuple[str, ...] = ("U8", "F8_E8M0")
    global_scales = []
    # NVFP4 has E4M3 scales below a global scale, MXFP4 has exponents (E8M0) alone
    if arguments["strategy"] == "tensor_group":
        scale_types = ("F8_E4M3",)
        global_scales.append("weight_global_scale")
        if inputs is not None:
            global_scales.append("input_global_scale")
    return (rows, into), {
        "weight_packed": Slot(("U8",), ((rows, columns),)),
        "weight_scale": Slot(scale_types, ((rows, into // size),)),
        **dict.fromkeys(global_scales, SCALE),
    }


def _packed_inputs(
    arguments: Group,
    module: Module,
    demanded: Shape | None,
) -> int:
    """Return the number of inputs of a packed layer, without the padding of the last int32.

    Args:
        arguments: arguments of the weight, with defaults.
        module: the layer; its packed weight has the shape (out, ceil(in * bits / 32)).
        demanded: (out, in) by the configuration; None if unknown.
    """
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


def _packed_slots(
    arguments: Group,
    inputs: Group | None,
    weight: Tensor,
    into: int,
) -> tuple[Shape, Slots]:
    """Return the size and slots of integers packed in int32.

    Args:
        arguments: arguments of the weight, with defaults.
        inputs: arguments of the inputs, with defaults; None for weights alone.
        weight: the packed weight, of shape (out, ceil(in * bits / 32)).
        into: the number of inputs.

    Returns:
        (out, in), and the slots by tensor name.
    """
    rows, columns = weight.shape
    bits, groups = arguments["num_bits"], 1
    if arguments["strategy"] == "group":
        groups = into // arguments["group_size"]
    return (rows, into), {
        "weight_packed": Slot(("I32",), ((rows, columns),)),
        "weight_scale": floats((rows, groups)),
        # (out, in), without the padding of the last int32
        "weight_shape": Slot(("I64", "I32"), ((2,),)),
        # zero points are packed along the outputs, weights along the inputs
        "weight_zero_point": Slot(
            ("I32",),
            ((ceil_div(rows * bits, 32), groups),),
            needed=not arguments["symmetric"],
        ),
        **_input_slots(inputs),
    }


def _byte_slots(
    arguments: Group,
    inputs: Group | None,
    weight: Tensor,
) -> tuple[Shape, Slots]:
    """Return the size and slots of weights with a byte for each value.

    Args:
        arguments: arguments of the weight, with defaults.
        inputs: arguments of the inputs, with defaults; None for weights alone.
        weight: the stored weight, of shape (out, in).

    Returns:
        (out, in), and the slots by tensor name.
    """
    shapes = _scale_shapes(arguments, weight.shape)
    is_float = arguments["type"] == "float"
    scale_types: tuple[str, ...] = FLOATS
    # MXFP8 has exponents as scales, other fp8 in groups has floats
    if is_float and arguments["strategy"] == "group":
        scale_types = ("U8", "F8_E8M0", *FLOATS)
    return weight.shape, {
        "weight": Slot(("F8_E4M3" if is_float else "I8",), (weight.shape,)),
        "weight_scale": Slot(scale_types, shapes),
        "weight_zero_point": Slot(("I8",), shapes, needed=not arguments["symmetric"]),
        **_input_slots(inputs),
    }


def _scale_shapes(arguments: Group, shape: Shape) -> tuple[Shape, ...]:
    """Return the accepted shapes of the scales of a weight.

    Args:
        arguments: arguments of the weight, with defaults.
        shape: (out, in) of the weight.
    """
    rows, columns = shape
    strategy = arguments["strategy"]
    # compressed-tensors keeps the axis that was reduced: (out, 1), not (out,)
    if strategy == "channel":
        return ((rows, 1),)
    if strategy == "group":
        return ((rows, columns // arguments["group_size"]),)
    if strategy == "block":
        high, wide = arguments["block_structure"]
        return ((ceil_div(rows, high), ceil_div(columns, wide)),)
    return SCALAR


def slot_names(group: Group) -> tuple[str, ...]:
    """Return the names of the tensors with a layer's quantized values."""
    arguments = arguments_of(group["weights"])
    assert arguments is not None
    # 8-bit integers may be packed four in an int32
    packed = arguments["num_bits"] < 8 or group.get("format") == "pack-quantized"
    return ("weight_packed",) if packed else ("weight",)


def _input_slots(inputs: Group | None) -> dict[str, Slot]:
    """Return the slots of calibrated input scales; empty for dynamic inputs.

    Args:
        inputs: arguments of the inputs, with defaults; None for weights alone.
    """
    # dynamic scales are computed at runtime, and are not stored
    if inputs is None or inputs["dynamic"]:
        return {}
    return {
        "input_scale": SCALE,
        "input_zero_point": Slot(("I8",), SCALAR, needed=not inputs["symmetric"]),
    }


def _output_slots(group: Group) -> Slots:
    """Return the slots of calibrated output scales; empty without static outputs."""
    outputs = arguments_of(group.get("output_activations"))
    if outputs is None or outputs["dynamic"]:
        return {}
    # optional: most schemes of vLLM do not read them, which is a finding of ``cache_in_vllm``
    return {
        "output_scale": replace(SCALE, needed=False),
        "output_zero_point": Slot(("I8",), SCALAR, needed=False),
    }


def unread_outputs_in_vllm(checkpoint: Checkpoint) -> list[str]:
    """Return the names of layers whose output has a scale that vLLM's scheme does not read."""
    groups = GroupsInVllm(checkpoint)
    unread = list[str]()
    for name, module in checkpoint.modules_with("output_scale").items():
        _, group = groups.of(module) or ("", {})
        form = _form(checkpoint.quantization, group)
        if scheme_in_vllm(group, form) != _INT8_AROUND:
            unread.append(name)
    return unread


def _kv_slots(entries: dict[str, Any], module: Module) -> Slots:
    """Return the slots of the scales of the cache below queries, keys and values."""
    is_cached = isinstance(entries.get("kv_cache_scheme"), dict)
    if not is_cached or module.last not in ("k_proj", "v_proj", "q_proj"):
        return {}
    # missing scales are findings of ``cache_in_vllm``
    optional = Slot(FLOATS, SCALAR, needed=False)
    return dict.fromkeys(("output_scale", "k_scale", "v_scale"), optional)


def _form(entries: dict[str, Any], group: Group) -> str | None:
    """Return the format of a group, or else that of the checkpoint."""
    # vLLM and compressed-tensors prefer the format of the group
    return group.get("format") or entries.get("format")


def _describe(group: Group) -> str:
    """Return the number formats of a group in a few words."""
    parts = []
    for what, key in (("weight", "weights"), ("input", "input_activations")):
        arguments = arguments_of(group.get(key))
        if arguments is not None:
            parts.append(f"{what} {_words(arguments)}")
    return ", ".join(parts)


def _words(arguments: Group) -> str:
    """Return the number format of a tensor, such as "int4 group 128"."""
    text = f"{arguments['type']}{arguments['num_bits']} {arguments['strategy']}"
    if arguments["group_size"]:
        text += f" {arguments['group_size']}"
    if arguments["dynamic"]:
        text += " dynamic"
    return text
