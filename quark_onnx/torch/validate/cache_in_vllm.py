"""Scales of keys, values and probabilities in AMD Quark's layout, for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

from quark_onnx.common.containers import grouped_by, present, without
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.compressed import unread_outputs_in_vllm
from quark_onnx.torch.validate.fields import (
    QUANTIZATION,
    FieldCheck,
    field_findings,
    meets,
    one_of,
)
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
#: Projections whose scales a renaming loader loses.
_SIDES = ("q_proj", "k_proj", "v_proj")


def cache_findings(checkpoint: Checkpoint, config: QuarkConfig) -> Iterator[Finding]:
    """Yield errors of vLLM in the scales of its KV cache and its attention."""
    yield from _name_findings(checkpoint)
    for module in checkpoint.modules.values():
        for end, tensor in without(module.tensors, ["prob_output_scale"]).items():
            # vLLM maps prob_output_scale to attn.prob_scale, and finds no parameter for a zero
            # point
            if end.startswith("prob_output_"):
                text = f"{tensor}, which attention does not have"
                yield broken("tensor-unknown", f"{module.name}.{end}", text)
    for parent, modules in _attentions(checkpoint).items():
        cached = list(map(config.is_cached, modules))
        yield from _pair_findings(checkpoint, parent, cached)


def static_cache_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the scales of a cache that is fp8 as a whole by configuration."""
    # without a cache in vLLM its scales mean nothing
    problems = [*_scheme_findings(checkpoint)]
    yield from problems
    if problems:
        return
    yield from _unread_findings(checkpoint)
    scheme = checkpoint.quantization.get("kv_cache_scheme")
    # dynamic scales are computed at runtime; native fp8 has a string such as "static" here
    has_scales = scheme is not None and not object_of(scheme).get("dynamic")
    for parent, modules in _attentions(checkpoint).items():
        yield from _pair_findings(checkpoint, parent, [has_scales for _ in modules])
        # a cache by heads has a scale for each head
        # ``KVCacheScaleParameter`` takes one value; attn_head has a loader of its own
        if object_of(scheme).get("strategy") != "attn_head":
            yield from _scalar_findings(checkpoint, parent)


def _scheme_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a KV cache scheme without support in vLLM."""
    # vLLM does not read the kv_cache_scheme of native fp8
    if checkpoint.method == "compressed-tensors":
        entries = checkpoint.quantization
        yield from field_findings(entries, QUANTIZATION, [_CACHE_CHECK])


def _unread_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales of outputs that vLLM does not read in a checkpoint of compressed-tensors."""
    if checkpoint.method != "compressed-tensors":
        return
    # the mapper of CompressedTensorsConfig has k_scale and v_scale, not output_scale
    names = unread_outputs_in_vllm(checkpoint)
    if names:
        text = f"no loader finds the {len(names)} scales that are called so"
        yield broken("kv-scales-loader", f"{names[0]}.output_scale", text)


def _scalar_findings(checkpoint: Checkpoint, parent: str) -> Iterator[Finding]:
    """Yield non-scalar scales of keys or values."""
    for tensor in present(_scale(checkpoint, parent, side) for side in "kv"):
        # a module with this tensor alone, so that no other tensor is found unknown
        owner, _, end = tensor.name.rpartition(".")
        yield from slot_findings(Module(owner, {end: tensor}), {end: SCALE})


#: Schemes of compressed-tensors for which vLLM creates a cache.
_FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": one_of("tensor", "attn_head"),
}


def _is_cache_scheme(scheme: object) -> bool:
    """Return whether vLLM creates a cache for a scheme; null stands for none."""
    return scheme is None or meets(object_of(scheme), _FP8_CACHE)


_CACHE_CHECK = FieldCheck(
    "ct-cache",
    "kv_cache_scheme",
    _is_cache_scheme,
    "{kv_cache_scheme!r}",
)


def _attentions(checkpoint: Checkpoint) -> dict[str, list[Module]]:
    """Return the layers for keys and values by the name of their attention module."""
    layers = [
        module for module in checkpoint.linears if module.last in ("k_proj", "v_proj")
    ]
    return grouped_by(layers, attrgetter("parent"))


def _name_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield KV cache scales under names unknown to the loader of the model's class."""
    name = checkpoint.architecture
    # no mapper of vLLM has the output of a fused projection
    unfound: tuple[str, ...] = FUSED
    if name.removesuffix("ForCausalLM") in _STACKED:
        unfound = (*FUSED, *_SIDES)
    lost = list[str]()
    for module in checkpoint.modules_with("output_scale").values():
        if module.last in unfound:
            lost.append(f"{module.name}.output_scale")
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

    Args:
        checkpoint: the checkpoint.
        parent: name of the attention module.
        cached: whether the configuration quantizes keys, and values.
    """
    keys = _scale(checkpoint, parent, "k")
    values = _scale(checkpoint, parent, "v")
    places = [f"{parent}.{side}_proj.output_scale" for side in "kv"]
    missing = _MISSING_SCALES.get(checkpoint.method, _MISSING_SCALES["quark"])
    if keys is None and values is None:
        # vLLM takes 1.0 for both; only a cache that the configuration quantizes should have scales
        for place in compress(places, cached):
            yield broken("kv-scales-missing", place, _ONE)
    elif keys is None:
        text = f"there is one for values alone, and {missing.keys}"
        yield broken("kv-scales-missing", places[0], text, missing.severity_of_keys)
    # kv_scale is the old name for a scale of both
    elif values is None and not keys.name.endswith("kv_scale"):
        text = f"there is no such tensor; {missing.values}"
        yield broken("kv-scales-missing", places[1], text, WRONG)
    # compressed-tensors does not test the value
    if keys is not None and checkpoint.method != "compressed-tensors":
        yield from _key_scale_findings(keys)


@dataclass(frozen=True)
class _MissingScales:
    """Behaviour of vLLM without one of the two scales of a KV cache.

    Attributes:
        keys: what it does without the scale of keys.
        severity_of_keys: consequence of that.
        values: what it does without the scale of values.
    """

    keys: str
    severity_of_keys: str
    values: str


#: By layout: vllm/model_executor/layers/quantization/kv_cache.py of vLLM 0.33. The scales of
#: compressed-tensors are separate parameters, initialized to 1.0.
_MISSING_SCALES = {
    "quark": _MissingScales("no fp8 cache is made", REFUSED, "that of keys is taken"),
    "compressed-tensors": _MissingScales("1.0 is taken", WRONG, "1.0 is taken"),
}


def _key_scale_findings(scale: Tensor) -> Iterator[Finding]:
    """Yield a scale of keys that disables the fp8 cache of vLLM."""
    value = single_value(scale)
    # written so that NaN is found as well
    # ``assert layer.k_scale > 0.0`` in ``BaseKVCacheMethod``
    if value is not None and not value > 0:
        text = f"it is {value:g}, and no fp8 cache is made"
        yield broken("scale-value", scale.name, text, REFUSED)


def _scale(checkpoint: Checkpoint, parent: str, side: str) -> Tensor | None:
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
    return next(iter(present(map(checkpoint.tensor_today, names))), None)
