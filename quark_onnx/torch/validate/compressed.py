"""Checks of compressed-tensors checkpoints: config_groups, schemes and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, Tensor
from quark_onnx.torch.validate.json_values import object_of, strings_of
from quark_onnx.torch.validate.modules import Module, fused, size_of
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
    size_findings,
    slot_findings,
)

FORMATS = (
    *(
        "dense",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "pack-quantized",
        "mixed-precision",
    ),
    *(
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp6-pack-quantized",
        "mxfp8-quantized",
    ),
)
#: Formats whose weights compressed-tensors 0.20 decodes to bfloat16.
_DECODED_TO_BFLOAT16 = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
_ACTIVATIONS = (
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
)
_STRATEGIES = (
    "tensor",
    "channel",
    "group",
    "block",
    "token",
    "tensor_group",
    "attn_head",
)
_HERE = "quantization_config"

Group = dict[str, Any]


def config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:  # noqa: C901
    """Yield errors in the configuration, for any client."""
    entries = checkpoint.quantization
    groups = entries.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield broken("ct-groups", f"{_HERE}.config_groups", f"it is {groups!r}")
    sparsity = entries.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("targets"):
        yield broken(
            "ct-sparsity",
            f"{_HERE}.sparsity_config",
            f"it targets {sparsity['targets']}",
        )
    for place, group in _groups(entries):
        if not isinstance(group.get("targets"), list) or not isinstance(
            group.get("weights"),
            dict,
        ):
            yield broken(
                "ct-groups",
                place,
                "it lacks the list targets or the object weights",
            )
            continue
        form = entries.get("format") if group.get("format") is None else group["format"]
        if not isinstance(form, str) or form not in FORMATS:
            yield broken("ct-format", f"{place}.format", repr(form))
        for key in ("weights", "input_activations", "output_activations"):
            if isinstance(group.get(key), dict):
                yield from _argument_findings(f"{place}.{key}", group[key])
    yield from name_list_findings(entries, "ignore")
    if not isinstance(entries.get("format"), str | None):
        yield broken("ct-format", f"{_HERE}.format", repr(entries["format"]))
    for name in _ignored(entries):
        if is_glob(name):
            yield broken(
                "exclude-pattern",
                f"{_HERE}.ignore",
                f"{name!r} is no exact name",
            )


def vllm_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the schemes of the layers, for vLLM."""
    entries = checkpoint.quantization
    if entries.get("format") is None:
        yield broken(
            "ct-format",
            f"{_HERE}.format",
            "there is no such key, or it is null",
        )
    if entries.get("ignore", []) is None:
        yield broken("malformed", f"{_HERE}.ignore", "null, and not a list of names")
    seen = set[tuple[str, bool]]()
    for name, modules in fused(checkpoint.modules):
        out = [_ignores(entries, module.name) for module in modules]
        if any(out) and not all(out) and not modules[0].experts:
            yield broken(
                "shards-excluded",
                name,
                f"{sum(out)} of {len(out)} are ignored",
            )
    for module in checkpoint.modules.values():
        found = group_of(entries, module)
        if (
            found is None
            or not module.is_linear
            or (found[0], bool(module.experts)) in seen
        ):
            continue
        seen.add((found[0], bool(module.experts)))
        if module.experts and _is_static_int8(
            _arguments(found[1].get("input_activations")),
        ):
            yield broken(
                "ct-scheme",
                module.name,
                f"{_describe(found[1])}: experts have no static integers",
            )
        elif not scheme_in_vllm(
            found[1],
            found[1].get("format") or entries.get("format"),
        ):
            yield broken("ct-scheme", found[0], _describe(found[1]))


def transformers_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors of compressed-tensors in transformers, in the tested releases."""
    for place, group in _groups(checkpoint.quantization):
        weight = _arguments(group.get("weights"))
        form = group.get("format") or checkpoint.quantization.get("format")
        if weight is not None and not weight["symmetric"] and form == "pack-quantized":
            yield broken("ct-zero-points", f"{place}.weights.symmetric", "false")
        dtype = checkpoint.dtype
        if (
            weight is not None
            and form in _DECODED_TO_BFLOAT16
            and dtype not in ("bfloat16", "")
        ):
            yield broken(
                "ct-bfloat16",
                f"{place}.format",
                f"{form!r}, and the model is {dtype}",
            )


def layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the tensors of the layers, for any client."""
    entries = checkpoint.quantization
    for module in checkpoint.modules.values():
        if not module.is_linear and not (module.is_head and module.is_quantized):
            continue
        found = group_of(entries, module)
        weight = module.weight
        if found is None or weight is None:
            if module.is_quantized:
                yield broken(
                    "excluded-quantized",
                    module.name,
                    f"no group is for it, and its weight is {weight}",
                )
            continue
        if not module.is_quantized:
            severity = WRONG if "weight" in slot_names(found[1]) else REFUSED
            if not module.is_router:
                yield broken(
                    "float-included",
                    module.name,
                    f"its weight is {weight}, not {_describe(found[1])}",
                    severity,
                )
            continue
        size, slots = slots_of(found[1], weight)
        group = found[1]["weights"].get("group_size")
        if type(group) is int and group > 0 and size[1] % group:
            yield broken(
                "group-divides",
                module.name,
                f"groups of {group}, and {size[1]} inputs",
            )
            continue
        yield from size_findings(
            module,
            size,
            size_of(module.name, checkpoint.text_config),
        )
        yield from slot_findings(module, {**slots, **_kv_slots(entries, module)})


def schemes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the number formats of every quantized layer."""
    for module in checkpoint.modules.values():
        found = group_of(checkpoint.quantization, module)
        if module.is_linear and module.is_quantized and found is not None:
            yield _describe(found[1])


def group_of(entries: dict[str, Any], module: Module) -> tuple[str, Group] | None:
    """Return the group of a layer with its place; None if the layer is ignored.

    A target with the layer's name has priority over a class name.
    """
    if _ignores(entries, module.name):
        return None
    groups = [
        (place, group)
        for place, group in _groups(entries)
        if isinstance(group.get("targets"), list)
    ]
    whole = [
        (place, group)
        for place, group in groups
        if isinstance(group.get("weights"), dict)
    ]
    for names in ((module.name,), ("Linear",)):
        for place, group in whole:
            if any(
                isinstance(target, str) and _matches(name, target)
                for target in group["targets"]
                for name in names
            ):
                return place, group
    return None


def scheme_in_vllm(group: Group, form: str | None) -> str:  # noqa: PLR0911
    """Return the name of the scheme that vLLM 0.33 chooses; empty if unsupported."""
    weight, inputs = (
        _arguments(group.get("weights")),
        _arguments(group.get("input_activations")),
    )
    assert weight is not None
    kind = (
        weight["type"],
        weight["num_bits"],
        weight["strategy"],
        weight["group_size"],
    )
    if _is_nvfp4(weight):
        return "nvfp4" if inputs is None or _is_nvfp4(inputs) else ""
    if kind == ("float", 4, "group", 32) and weight["symmetric"]:
        return "mxfp4"
    if (
        kind == ("float", 8, "group", 32)
        and weight["symmetric"]
        and "uint8" in str(weight.get("scale_dtype"))
    ):
        return "mxfp8"
    if (
        inputs is not None
        and kind[:3] == ("int", 4, "group")
        and weight["symmetric"]
        and not weight["dynamic"]
    ):
        tokens = (inputs["type"], inputs["num_bits"], inputs["strategy"]) == (
            "float",
            8,
            "token",
        )
        if tokens and inputs["symmetric"] and inputs["dynamic"]:
            return "int4 a8 in fp8, on GPUs of capability 9.0 alone"
    grouped, static = weight["strategy"] in ("channel", "group"), not weight["dynamic"]
    output = _arguments(group.get("output_activations"))
    whole = weight["type"] == "int" and static and grouped
    if (
        whole
        and form in ("pack-quantized", "int-quantized")
        and _is_static_int8(inputs)
        and _is_static_int8(output)
    ):
        return "int8 around"
    if (
        whole
        and form == "pack-quantized"
        and inputs is not None
        and inputs["type"] == "int"
    ):
        moving = (
            inputs["dynamic"]
            and inputs["symmetric"]
            and inputs["strategy"] in ("token", "group")
        )
        if moving and inputs["num_bits"] in (4, 8):
            return f"int{weight['num_bits']} a{inputs['num_bits']}"
    if grouped and inputs is None and static and form == "pack-quantized":
        return f"int{weight['num_bits']}" if 2 <= weight["num_bits"] <= 8 else ""
    return _activation_scheme(weight, inputs) if form in _ACTIVATIONS else ""


def slots_of(group: Group, weight: Tensor) -> tuple[Shape, Slots]:
    """Return a layer's (out, in) by its weight's shape, and required tensors."""
    arguments, inputs = (
        _arguments(group["weights"]),
        _arguments(group.get("input_activations")),
    )
    assert arguments is not None
    bits, kind, strategy = (
        arguments["num_bits"],
        arguments["type"],
        arguments["strategy"],
    )
    rows, columns = weight.shape
    if kind == "float" and bits == 4:
        into, size = columns * 2, arguments["group_size"] or 16
        two = strategy == "tensor_group"
        slots = {
            "weight_packed": Slot(("U8",), ((rows, columns),)),
            "weight_scale": Slot(
                ("F8_E4M3",) if two else ("U8", "F8_E8M0"),
                ((rows, into // size),),
            ),
        }
        if two:
            slots["weight_global_scale"] = SCALE
        if two and inputs is not None:
            slots["input_global_scale"] = SCALE
        return (rows, into), slots
    if weight.name.endswith("weight_packed"):
        into = columns * 32 // bits
        groups = into // arguments["group_size"] if strategy == "group" else 1
        zeros = Slot(
            ("I32",),
            ((ceil_div(rows * bits, 32), groups),),
            needed=not arguments["symmetric"],
        )
        slots = {
            "weight_packed": Slot(("I32",), ((rows, columns),)),
            "weight_scale": floats((rows, groups)),
            "weight_shape": Slot(("I64", "I32"), ((2,),)),
            "weight_zero_point": zeros,
        }
        return (rows, into), {**slots, **_input_slots(inputs)}
    shapes: tuple[Shape, ...] = SCALAR
    if strategy == "channel":
        shapes = ((rows, 1),)
    elif strategy == "group":
        shapes = ((rows, columns // arguments["group_size"]),)
    elif strategy == "block":
        high, wide = arguments["block_structure"]
        shapes = ((ceil_div(rows, high), ceil_div(columns, wide)),)
    small = strategy == "group" and kind == "float"
    scale = Slot(("U8", "F8_E8M0", *FLOATS) if small else FLOATS, shapes)
    zeros = Slot(("I8",), shapes, needed=not arguments["symmetric"])
    stored = "F8_E4M3" if kind == "float" else "I8"
    return (rows, columns), {
        "weight": Slot((stored,), ((rows, columns),)),
        "weight_scale": scale,
        "weight_zero_point": zeros,
        **_input_slots(inputs),
    }


def slot_names(group: Group) -> tuple[str, ...]:
    """Return the names of the tensors with a layer's quantized values."""
    arguments = _arguments(group["weights"])
    assert arguments is not None
    packed = arguments["num_bits"] < 8 or group.get("format") == "pack-quantized"
    return ("weight_packed",) if packed else ("weight",)


def _input_slots(inputs: Group | None) -> dict[str, Slot]:
    if inputs is None or inputs["dynamic"]:
        return {}
    return {
        "input_scale": SCALE,
        "input_zero_point": Slot(("I8",), SCALAR, needed=not inputs["symmetric"]),
    }


def _kv_slots(entries: dict[str, Any], module: Module) -> Slots:
    cached = isinstance(entries.get("kv_cache_scheme"), dict) and module.last in (
        "k_proj",
        "v_proj",
        "q_proj",
    )
    if not cached:
        return {}
    optional = Slot(FLOATS, SCALAR, needed=False)
    return dict.fromkeys(("output_scale", "k_scale", "v_scale"), optional)


def _activation_scheme(weight: Group, inputs: Group | None) -> str:
    wide = (
        weight["strategy"] in ("tensor", "channel", "block")
        and weight["symmetric"]
        and not weight["dynamic"]
    )
    if weight["type"] == "float":
        # fall back to the weights alone if activations cannot be read
        return f"fp8 {weight['strategy']}" if wide else ""
    if inputs is None or weight["dynamic"] or not weight["symmetric"]:
        return ""
    if weight["num_bits"] == inputs["num_bits"] == 8 and weight["strategy"] in (
        "tensor",
        "channel",
    ):
        static = inputs["strategy"] == "tensor" and not inputs["dynamic"]
        by_token = inputs["strategy"] == "token" and inputs["dynamic"]
        return "int8" if static or by_token else ""
    small = (
        weight["num_bits"] == 4
        and weight["strategy"] in ("group", "channel")
        and inputs["type"] == "int"
    )
    return (
        "int4 a8"
        if small
        and inputs["num_bits"] == 8
        and inputs["strategy"] == "token"
        and inputs["dynamic"]
        else ""
    )


def _is_nvfp4(found: Group) -> bool:
    kind = (found["type"], found["num_bits"], found["strategy"], found["group_size"])
    return kind == ("float", 4, "tensor_group", 16) and bool(found["symmetric"])


def _is_static_int8(found: Group | None) -> bool:
    return found is not None and (
        found["type"],
        found["num_bits"],
        found["strategy"],
        bool(found["dynamic"]),
    ) == (*("int", 8, "tensor", False),)


def _arguments(found: Any) -> Group | None:
    """Return QuantizationArgs with defaults."""
    if not isinstance(found, dict):
        return None
    size = found.get("group_size")
    guessed = "tensor" if size is None else "group" if size > 0 else "channel"
    defaults = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "dynamic": False,
    }
    return {**defaults, **found, "strategy": found.get("strategy") or guessed}


def _argument_findings(place: str, found: Group) -> Iterator[Finding]:
    arguments = _arguments(found)
    assert arguments is not None
    strategy, size, order = (
        arguments["strategy"],
        arguments["group_size"],
        arguments.get("actorder"),
    )
    if (
        arguments["type"] not in ("int", "float")
        or type(arguments["num_bits"]) is not int
    ):
        yield broken(
            "ct-arguments",
            place,
            f"type {arguments['type']!r}, num_bits {arguments['num_bits']!r}",
        )
    elif strategy not in _STRATEGIES:
        yield broken("ct-arguments", f"{place}.strategy", repr(strategy))
    elif (strategy in ("group", "tensor_group")) != (type(size) is int and size > 0):
        yield broken(
            "ct-arguments",
            f"{place}.group_size",
            f"{size!r}, with {strategy}",
        )
    elif strategy == "block" and not isinstance(arguments.get("block_structure"), list):
        yield broken(
            "ct-arguments",
            f"{place}.block_structure",
            f"{arguments.get('block_structure')!r}, with block",
        )
    elif strategy == "token" and not arguments["dynamic"]:
        yield broken("ct-arguments", f"{place}.dynamic", "token needs dynamic")
    elif order is True or str(order).lower() in ("group", "dynamic"):
        yield broken(
            "ct-arguments",
            f"{place}.actorder",
            f"{order!r}, which was given up; static is read",
        )


def _groups(entries: dict[str, Any]) -> Iterator[tuple[str, Group]]:
    for name, group in object_of(entries.get("config_groups")).items():
        if isinstance(group, dict):
            yield f"{_HERE}.config_groups.{name}", group


def _ignored(entries: dict[str, Any]) -> list[str]:
    return strings_of(entries.get("ignore"))


def _ignores(entries: dict[str, Any], name: str) -> bool:
    return any(_matches(name, pattern) for pattern in _ignored(entries))


def _matches(name: str, target: str) -> bool:
    try:
        return target == name or (
            target.startswith("re:") and re.match(target[3:], name) is not None
        )
    except re.error:
        return False


def _describe(group: Group) -> str:
    parts = []
    for what, key in (("weight", "weights"), ("input", "input_activations")):
        found = _arguments(group.get(key))
        if found is not None:
            part = f"{what} {found['type']}{found['num_bits']} {found['strategy']}"
            if found["group_size"]:
                part += f" {found['group_size']}"
            if found["dynamic"]:
                part += " dynamic"
            parts.append(part)
    return ", ".join(parts)
