"""Scales of keys, values and probabilities in AMD Quark's layout, as vLLM's loaders look for them, and take them."""

from __future__ import annotations

from collections.abc import Iterator

from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, Tensor, values_of
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.quark_config import QuarkConfig
from quark_onnx.torch.validate.rules import broken

#: Classes ...ForCausalLM whose loaders make ``qkv_proj`` of ``k_proj`` before they look for scales of the cache.
_STACKED = frozenset(
    {
        *("Afmoe", "Apertus", "Arcee", "Cohere", "Cohere2", "Cohere2Moe", "Cwm", "DeciLM", "Exaone", "Exaone4"),
        *("ExaoneMoE", "ExaoneMoe", "FalconH1", "GPTBigCode", "GPTJ", "GPTNeoX", "Gemma", "Gemma2", "Gemma3", "Glm"),
        *("HunYuanDenseV1", "HyperCLOVAX", "Jais2", "Jamba", "Nanbeige", "Nemotron", "NemotronH", "NemotronHPuzzle"),
        *("OPT", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Orion", "Phi", "PhiMoE", "Qwen2Moe", "Rnj1", "SeedOss"),
        *("SmolLM3", "Solar", "StableLm", "Starcoder2", "Step1", "Transformers", "VaultGemma", "Zamba2"),
    }
)
_FUSED, _SIDES = ("qkv_proj", "query_key_value", "Wqkv"), ("q_proj", "k_proj", "v_proj")


def cache_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """What vLLM refuses or misreads in scales of its cache and its attention."""
    yield from _name_findings(checkpoint)
    for name, module in checkpoint.modules.items():
        for end in module.tensors:
            if end.startswith("prob_output_") and end != "prob_output_scale":
                yield broken("tensor-unknown", f"{name}.{end}", f"{module.tensors[end]}, which attention does not have")
    layers = [
        module for module in checkpoint.modules.values() if module.is_linear and module.last in ("k_proj", "v_proj")
    ]
    for parent in dict.fromkeys(module.name.rpartition(".")[0] for module in layers):
        yield from _pair_findings(checkpoint, config, parent)


def _name_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    classes = checkpoint.config.get("architectures")
    own = str(next(iter(classes), "")) if isinstance(classes, list) else ""
    stacked = own.removesuffix("ForCausalLM") in _STACKED
    lost = [
        f"{name}.output_scale"
        for name, module in checkpoint.modules.items()
        if "output_scale" in module.tensors and (module.last in _FUSED or (stacked and module.last in _SIDES))
    ]
    if lost:
        yield broken("kv-scales-loader", lost[0], f"the loader of {own} does not find {len(lost)} scales called so")


def _pair_findings(checkpoint: Checkpoint, config: QuarkConfig, parent: str) -> Iterator[Finding]:
    """vLLM takes 1.0 where both are missing, and that of keys for both where it is alone; it must be more than 0."""
    keys, values = (_scale(checkpoint, parent, side) for side in "kv")
    places = [f"{parent}.{side}_proj.output_scale" for side in "kv"]
    if keys is None and values is None:
        for side, place in zip("kv", places, strict=True):
            module = checkpoint.modules.get(f"{parent}.{side}_proj")
            if module is not None and config.is_cached(module):
                yield broken("kv-scales-missing", place, "there is no such tensor; 1.0 is taken")
    elif keys is None:
        yield broken("kv-scales-missing", places[0], "there is one for values alone, and no fp8 cache is made", REFUSED)
    elif values is None and not keys.name.endswith("kv_scale"):
        yield broken("kv-scales-missing", places[1], "there is no such tensor; that of keys is taken", WRONG)
    if keys is not None and (found := _number(keys)) is not None and not found > 0:
        yield broken("scale-value", keys.name, f"it is {found:g}, and no fp8 cache is made", REFUSED)


def _scale(checkpoint: Checkpoint, parent: str, side: str) -> Tensor | None:
    """The scale of keys or values, under any of the names that are looked for."""
    nothing = Module(parent, {})
    own = (
        (f"{parent}.{side}_proj", "output_scale"),
        *((name, f"{side}_scale") for name in (f"{parent}.{side}_proj", parent, f"{parent}.attn")),
        *([(parent, "kv_scale")] if side == "k" else []),
    )
    found = (checkpoint.modules.get(name, nothing).tensors.get(end) for name, end in own)
    return next((tensor for tensor in found if tensor is not None), None)


def _number(tensor: Tensor) -> float | None:
    return float(values_of(tensor)[0]) if tensor.count == 1 and tensor.dtype in FLOATS else None
