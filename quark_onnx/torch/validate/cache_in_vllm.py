"""Scales of keys, values and probabilities in AMD Quark's layout, for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, Tensor, values_of
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.quark_config import QuarkConfig
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import FUSED, SCALE, slot_findings

#: Classes ...ForCausalLM whose loaders rename ``k_proj`` to ``qkv_proj`` before looking for scales
#: of the cache.
_STACKED = frozenset(
    {
        *(
            "Afmoe",
            "Apertus",
            "Arcee",
            "Cohere",
            "Cohere2",
            "Cohere2Moe",
            "Cwm",
            "DeciLM",
            "Exaone",
            "Exaone4",
        ),
        *(
            "ExaoneMoE",
            "ExaoneMoe",
            "FalconH1",
            "GPTBigCode",
            "GPTJ",
            "GPTNeoX",
            "Gemma",
            "Gemma2",
            "Gemma3",
            "Glm",
        ),
        *(
            "HunYuanDenseV1",
            "HyperCLOVAX",
            "Jais2",
            "Jamba",
            "Nanbeige",
            "Nemotron",
            "NemotronH",
            "NemotronHPuzzle",
        ),
        *(
            "OPT",
            "Olmo",
            "Olmo2",
            "Olmo3",
            "Olmoe",
            "Orion",
            "Phi",
            "PhiMoE",
            "Qwen2Moe",
            "Rnj1",
            "SeedOss",
        ),
        *(
            "SmolLM3",
            "Solar",
            "StableLm",
            "Starcoder2",
            "Step1",
            "Transformers",
            "VaultGemma",
            "Zamba2",
        ),
    },
)
_SIDES = ("q_proj", "k_proj", "v_proj")


def cache_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """Yield errors of vLLM in the scales of its KV cache and its attention."""
    yield from _name_findings(checkpoint)
    for name, module in checkpoint.modules.items():
        for end in module.tensors:
            if end.startswith("prob_output_") and end != "prob_output_scale":
                yield broken(
                    "tensor-unknown",
                    f"{name}.{end}",
                    f"{module.tensors[end]}, which attention does not have",
                )
    for parent, modules in _attentions(checkpoint):
        yield from _pair_findings(
            checkpoint,
            parent,
            [config.is_cached(module) for module in modules],
        )


def static_cache_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the scales of a cache that is fp8 as a whole by configuration."""
    scheme = checkpoint.quantization.get("kv_cache_scheme")
    if checkpoint.method == "compressed-tensors":
        if scheme is not None and not _is_fp8(scheme):
            yield broken(
                "ct-cache",
                "quantization_config.kv_cache_scheme",
                repr(scheme),
            )
            return
        lost = [
            f"{name}.output_scale"
            for name, each in checkpoint.modules.items()
            if "output_scale" in each.tensors
        ]
        if lost:
            yield broken(
                "kv-scales-loader",
                lost[0],
                f"no loader finds the {len(lost)} scales that are called so",
            )
    dynamic = isinstance(scheme, dict) and bool(scheme.get("dynamic"))
    by_heads = isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"
    for parent, modules in _attentions(checkpoint):
        yield from _pair_findings(
            checkpoint,
            parent,
            [scheme is not None and not dynamic for _ in modules],
        )
        for side in "kv" if not by_heads else "":
            tensor = _scale(checkpoint, parent, side)
            if tensor is not None:
                owner, _, end = tensor.name.rpartition(".")
                yield from slot_findings(Module(owner, {end: tensor}), {end: SCALE})


def _is_fp8(scheme: Any) -> bool:
    """Return whether vLLM creates a cache for a scheme of compressed-tensors."""
    if not isinstance(scheme, dict):
        return False
    kind = scheme.get("num_bits"), scheme.get("type"), scheme.get("symmetric")
    return kind == (8, "float", True) and scheme.get("strategy") in (
        "tensor",
        "attn_head",
    )


def _attentions(checkpoint: Checkpoint) -> Iterator[tuple[str, list[Module]]]:
    """Yield attention modules with their layers for keys and values."""
    found = dict[str, list[Module]]()
    for module in checkpoint.modules.values():
        if module.is_linear and module.last in ("k_proj", "v_proj"):
            found.setdefault(module.name.rpartition(".")[0], []).append(module)
    yield from found.items()


def _name_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    classes = checkpoint.config.get("architectures")
    own = str(next(iter(classes), "")) if isinstance(classes, list) else ""
    stacked = own.removesuffix("ForCausalLM") in _STACKED
    lost = [
        f"{name}.output_scale"
        for name, module in checkpoint.modules.items()
        if "output_scale" in module.tensors
        and (module.last in FUSED or (stacked and module.last in _SIDES))
    ]
    if lost:
        yield broken(
            "kv-scales-loader",
            lost[0],
            f"the loader of {own} does not find {len(lost)} scales called so",
        )


def _pair_findings(
    checkpoint: Checkpoint,
    parent: str,
    cached: list[bool],
) -> Iterator[Finding]:
    """Yield errors in the pair of key and value scales of an attention module.

    vLLM takes 1.0 if both scales are missing, and the key scale for both if the value scale is
    missing. A scale must be greater than 0.
    """
    keys, values = (_scale(checkpoint, parent, side) for side in "kv")
    places = [f"{parent}.{side}_proj.output_scale" for side in "kv"]
    apart = (
        checkpoint.method == "compressed-tensors"
    )  # which has separate scales, initialized to 1.0
    if keys is None and values is None:
        for place, own in zip(places, cached, strict=False):
            if own:
                yield broken(
                    "kv-scales-missing",
                    place,
                    "there is no such tensor; 1.0 is taken",
                )
    elif keys is None:
        taken, severity = "no fp8 cache is made", REFUSED
        if apart:
            taken, severity = "1.0 is taken", WRONG
        text = f"there is one for values alone, and {taken}"
        yield broken("kv-scales-missing", places[0], text, severity)
    elif values is None and not keys.name.endswith("kv_scale"):
        text = f"there is no such tensor; {'1.0' if apart else 'that of keys'} is taken"
        yield broken("kv-scales-missing", places[1], text, WRONG)
    if (
        keys is not None
        and not apart
        and (found := _number(keys)) is not None
        and not found > 0
    ):
        yield broken(
            "scale-value",
            keys.name,
            f"it is {found:g}, and no fp8 cache is made",
            REFUSED,
        )


def _scale(checkpoint: Checkpoint, parent: str, side: str) -> Tensor | None:
    """Return the scale of keys or values, under any name that vLLM looks for."""
    nothing = Module(parent, {})
    own = (
        (f"{parent}.{side}_proj", "output_scale"),
        *(
            (name, f"{side}_scale")
            for name in (f"{parent}.{side}_proj", parent, f"{parent}.attn")
        ),
        *([(parent, "kv_scale")] if side == "k" else []),
    )
    found = (
        checkpoint.modules.get(name, nothing).tensors.get(end) for name, end in own
    )
    return next((tensor for tensor in found if tensor is not None), None)


def _number(tensor: Tensor) -> float | None:
    if tensor.count != 1 or tensor.dtype not in FLOATS:
        return None
    return float(values_of(tensor)[0])
