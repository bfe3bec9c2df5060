"""Scales of keys, values and probabilities, for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from operator import attrgetter

from quark_onnx.common.containers import grouped_by
from quark_onnx.torch.runtime.safetensors_header import StoredTensor, single_value
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.compressed import unread_outputs_in_vllm
from quark_onnx.torch.validate.fields import QUANTIZATION, meets, object_of, one_of
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.layer_checks import FUSED, SCALE, slot_findings
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.quark_config import QuarkConfig
from quark_onnx.torch.validate.rules import broken

#: Classes ...ForCausalLM whose loaders rename ``k_proj`` to ``qkv_proj`` before looking for scales
#: of the cache.
_STACKED = frozenset(
    {
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
    }
)
#: Names of the norm of keys next to their projection: of Qwen 3, and of Phi.
_KEY_NORMS = ("k_norm", "k_layernorm")
#: Projections whose scales a renaming loader loses.
_SIDES = ("q_proj", "k_proj", "v_proj")
#: Schemes of compressed-tensors for which vLLM creates a cache.
_FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": one_of("tensor", "attn_head"),
}


def cache_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """Yield errors of vLLM in the scales of its KV cache, in AMD Quark's layout."""
    name = checkpoint.architecture
    # no mapper of vLLM has the output of a fused projection
    unfound: tuple[str, ...] = FUSED
    if name.removesuffix("ForCausalLM") in _STACKED:
        unfound = (*FUSED, *_SIDES)
    scaled = checkpoint.modules_with("output_scale").values()
    lost = [module.name for module in scaled if module.last in unfound]
    if lost:
        text = f"the loader of {name} does not find {len(lost)} scales called so"
        yield broken("kv-scales-loader", f"{lost[0]}.output_scale", text)
    for module in checkpoint.modules.values():
        for end, tensor in module.tensors.items():
            # vLLM maps prob_output_scale to attn.prob_scale, and finds no parameter for a zero
            # point
            if end.startswith("prob_output_") and end != "prob_output_scale":
                text = f"{tensor}, which attention does not have"
                yield broken("tensor-unknown", f"{module.name}.{end}", text)
    for parent, modules in _attentions(checkpoint).items():
        cached = [config.is_cached(module) for module in modules]
        yield from _pair_findings(checkpoint, parent, cached)
    yield from _norm_findings(checkpoint)


def _norm_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales of keys that were measured before a norm, and are used after it."""
    if checkpoint.quantization.get("kv_cache_post_rope"):
        return
    for parent in _attentions(checkpoint):
        keys = _scale(checkpoint, parent, "k")
        norms = [
            name for name in _KEY_NORMS if f"{parent}.{name}" in checkpoint.modules
        ]
        if keys is not None and norms:
            text = f"{parent}.{norms[0]} normalizes keys after their scale was measured"
            yield broken("kv-scales-norm", keys.name, text)


def static_cache_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the scales of a cache that is fp8 as a whole by configuration."""
    scheme = checkpoint.quantization.get("kv_cache_scheme")
    # native fp8 has a string such as "static" here, which vLLM does not read
    if checkpoint.method == "compressed-tensors":
        if scheme is not None and not meets(object_of(scheme), _FP8_CACHE):
            # without a cache in vLLM its scales mean nothing
            yield broken("ct-cache", f"{QUANTIZATION}.kv_cache_scheme", repr(scheme))
            return
        # the mapper of CompressedTensorsConfig has k_scale and v_scale, not output_scale
        names = unread_outputs_in_vllm(checkpoint)
        if names:
            text = f"no loader finds the {len(names)} scales that are called so"
            yield broken("kv-scales-loader", f"{names[0]}.output_scale", text)
    # dynamic scales are computed at runtime
    has_scales = scheme is not None and not object_of(scheme).get("dynamic")
    for parent, modules in _attentions(checkpoint).items():
        yield from _pair_findings(checkpoint, parent, [has_scales for _ in modules])
        # a cache by heads has a scale for each head
        # ``KVCacheScaleParameter`` takes one value; attn_head has a loader of its own
        if object_of(scheme).get("strategy") == "attn_head":
            continue
        for tensor in (
            _scale(checkpoint, parent, "k"),
            _scale(checkpoint, parent, "v"),
        ):
            if tensor is not None:
                # a module with this tensor alone, so that no other tensor is found unknown
                owner, _, end = tensor.name.rpartition(".")
                yield from slot_findings(Module(owner, {end: tensor}), {end: SCALE})


def _attentions(checkpoint: Checkpoint) -> dict[str, list[Module]]:
    """Return the layers for keys and values by the name of their attention module."""
    layers = [
        module for module in checkpoint.linears if module.last in ("k_proj", "v_proj")
    ]
    return grouped_by(layers, attrgetter("parent"))


def _pair_findings(
    checkpoint: Checkpoint, parent: str, cached: list[bool]
) -> Iterator[Finding]:
    """Yield errors in the pair of key and value scales of an attention module.

    vLLM takes 1.0 if both scales are missing, and the key scale for both if the value scale is
    missing. A scale must be greater than 0. The scales of compressed-tensors are separate
    parameters, initialized to 1.0 (vllm/model_executor/layers/quantization/kv_cache.py of 0.33).

    Args:
        parent: name of the attention module.
        cached: whether the configuration quantizes keys, and values.
    """
    keys = _scale(checkpoint, parent, "k")
    values = _scale(checkpoint, parent, "v")
    places = [f"{parent}.{side}_proj.output_scale" for side in "kv"]
    is_separate = checkpoint.method == "compressed-tensors"
    if keys is None and values is None:
        # only a cache that the configuration quantizes should have scales
        for place in compress(places, cached):
            text = "there is no such tensor; 1.0 is taken"
            yield broken("kv-scales-missing", place, text)
    elif keys is None:
        outcome = "1.0 is taken" if is_separate else "no fp8 cache is made"
        text = f"there is one for values alone, and {outcome}"
        severity = WRONG if is_separate else REFUSED
        yield broken("kv-scales-missing", places[0], text, severity)
    # kv_scale is the old name for a scale of both
    elif values is None and not keys.name.endswith("kv_scale"):
        outcome = "1.0 is taken" if is_separate else "that of keys is taken"
        text = f"there is no such tensor; {outcome}"
        yield broken("kv-scales-missing", places[1], text, WRONG)
    if keys is None or is_separate:
        return
    # ``assert layer.k_scale > 0.0`` in ``BaseKVCacheMethod``, written so that NaN is found as well
    value = single_value(keys)
    if value is not None and not value > 0:
        text = f"it is {value:g}, and no fp8 cache is made"
        yield broken("scale-value", keys.name, text, REFUSED)


def _scale(checkpoint: Checkpoint, parent: str, side: str) -> StoredTensor | None:
    """Return the scale of keys or values, under any name that vLLM looks for."""
    # the order decides only which tensor a finding names
    names = [
        f"{parent}.{side}_proj.output_scale",
        f"{parent}.{side}_proj.{side}_scale",
        f"{parent}.{side}_scale",
        f"{parent}.attn.{side}_scale",
    ]
    if side == "k":
        names.append(f"{parent}.kv_scale")
    tensors = map(checkpoint.tensor_today, names)
    return next((tensor for tensor in tensors if tensor is not None), None)
