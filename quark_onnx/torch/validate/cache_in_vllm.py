"""Scales of keys, values and probabilities in AMD Quark's layout, for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from quark_onnx.containers import present, without
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import QUANTIZATION, meets, one_of
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.header import Tensor, single_value
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.quark_config import QuarkConfig
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import FUSED, SCALE, slot_findings

#: Classes ...ForCausalLM whose loaders rename ``k_proj`` to ``qkv_proj`` before looking for scales
#: of the cache.
_STACKED = frozenset(
    (
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
        "HunYuanDenseV1",
        "HyperCLOVAX",
        "Jais2",
        "Jamba",
        "Nanbeige",
        "Nemotron",
        "NemotronH",
        "NemotronHPuzzle",
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
        "SmolLM3",
        "Solar",
        "StableLm",
        "Starcoder2",
        "Step1",
        "Transformers",
        "VaultGemma",
        "Zamba2",
    ),
)
_ONE = "there is no such tensor; 1.0 is taken"
_SIDES = ("q_proj", "k_proj", "v_proj")


def cache_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """Yield errors of vLLM in the scales of its KV cache and its attention."""
    yield from _name_findings(checkpoint)
    for module in checkpoint.modules.values():
        for end, tensor in without(module.tensors, ["prob_output_scale"]).items():
            if end.startswith("prob_output_"):
                text = f"{tensor}, which attention does not have"
                yield broken("tensor-unknown", f"{module.name}.{end}", text)
    for parent, modules in _attentions(checkpoint):
        cached = list(map(config.is_cached, modules))
        yield from _pair_findings(checkpoint, parent, cached)


def static_cache_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the scales of a cache that is fp8 as a whole by configuration."""
    scheme = checkpoint.quantization.get("kv_cache_scheme")
    if checkpoint.method == "compressed-tensors":
        if scheme is not None and not meets(object_of(scheme), _FP8_CACHE):
            place = f"{QUANTIZATION}.kv_cache_scheme"
            yield broken("ct-cache", place, repr(scheme))
            return
        lost = [*checkpoint.modules_with("output_scale")]
        if lost:
            text = f"no loader finds the {len(lost)} scales that are called so"
            yield broken("kv-scales-loader", f"{lost[0]}.output_scale", text)
    has_scales = scheme is not None and not object_of(scheme).get("dynamic")
    for parent, modules in _attentions(checkpoint):
        yield from _pair_findings(checkpoint, parent, [has_scales for _ in modules])
        # a cache by heads has a scale for each head
        if object_of(scheme).get("strategy") != "attn_head":
            yield from _scalar_findings(checkpoint, parent)


def _scalar_findings(checkpoint: Checkpoint, parent: str) -> Iterator[Finding]:
    for tensor in present(_scale(checkpoint, parent, side) for side in "kv"):
        owner, _, end = tensor.name.rpartition(".")
        yield from slot_findings(Module(owner, {end: tensor}), {end: SCALE})


#: Schemes of compressed-tensors for which vLLM creates a cache.
_FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": one_of("tensor", "attn_head"),
}


def _attentions(checkpoint: Checkpoint) -> Iterator[tuple[str, list[Module]]]:
    """Yield attention modules with their layers for keys and values."""
    found = dict[str, list[Module]]()
    for module in checkpoint.linears:
        if module.last in ("k_proj", "v_proj"):
            found.setdefault(module.parent, []).append(module)
    yield from found.items()


def _name_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    name = checkpoint.architecture
    unfound: tuple[str, ...] = FUSED
    if name.removesuffix("ForCausalLM") in _STACKED:
        unfound = (*FUSED, *_SIDES)
    lost = [
        f"{module.name}.output_scale"
        for module in checkpoint.modules_with("output_scale").values()
        if module.last in unfound
    ]
    if lost:
        text = f"the loader of {name} does not find {len(lost)} scales called so"
        yield broken("kv-scales-loader", lost[0], text)


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
    # compressed-tensors has separate scales, initialized to 1.0
    apart = checkpoint.method == "compressed-tensors"
    if keys is None and values is None:
        for place in compress(places, cached):
            yield broken("kv-scales-missing", place, _ONE)
    elif keys is None:
        taken, severity = "no fp8 cache is made", REFUSED
        if apart:
            taken, severity = "1.0 is taken", WRONG
        text = f"there is one for values alone, and {taken}"
        yield broken("kv-scales-missing", places[0], text, severity)
    elif values is None and not keys.name.endswith("kv_scale"):
        text = f"there is no such tensor; {'1.0' if apart else 'that of keys'} is taken"
        yield broken("kv-scales-missing", places[1], text, WRONG)
    if keys is not None and not apart:
        yield from _key_scale_findings(keys)


def _key_scale_findings(scale: Tensor) -> Iterator[Finding]:
    value = single_value(scale)
    # written so that NaN is found as well
    if value is not None and not value > 0:
        text = f"it is {value:g}, and no fp8 cache is made"
        yield broken("scale-value", scale.name, text, REFUSED)


def _scale(checkpoint: Checkpoint, parent: str, side: str) -> Tensor | None:
    """Return the scale of keys or values, under any name that vLLM looks for."""
    names = [
        f"{parent}.{side}_proj.output_scale",
        f"{parent}.{side}_proj.{side}_scale",
        f"{parent}.{side}_scale",
        f"{parent}.attn.{side}_scale",
    ]
    if side == "k":
        names.append(f"{parent}.kv_scale")
    return next(iter(present(map(checkpoint.tensor_today, names))), None)
