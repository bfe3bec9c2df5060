"""What is said of vLLM is what vLLM's own code says, where it is installed: no GPU is needed to
choose a scheme.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from quark_onnx.torch.runtime.safetensors_header import StoredTensor
from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.checkpoint import Checkpoint, read
from quark_onnx.torch.validate.compressed import GroupsInVllm
from quark_onnx.torch.validate.compressed_schemes import (
    scheme_in_vllm as compressed_scheme,
)
from quark_onnx.torch.validate.compressed_schemes import slots_of as slots_of_group
from quark_onnx.torch.validate.layer_checks import slot_findings
from quark_onnx.torch.validate.modules import Module, fused_parts
from quark_onnx.torch.validate.native_fp8 import ExcludedInVllm
from quark_onnx.torch.validate.packed import SkippedInVllm
from quark_onnx.torch.validate.quark_config import QuarkConfig
from quark_onnx.torch.validate.quark_schemes import scheme_in_vllm, slots_of
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import (
    FP8,
    INT8,
    SCHEMES,
    TOKENS,
    Draft,
    layer,
)

LAYERS = "vllm.model_executor.layers"
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
#: What vLLM raises on purpose, and by accident, where it refuses a configuration.
REFUSALS = (
    ValueError,
    NotImplementedError,
    RuntimeError,
    AttributeError,
    TypeError,
    KeyError,
    AssertionError,
)


def module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"{LAYERS}.{name}", exc_type=ImportError)


def config_of(entries: dict[str, Any]) -> Any:
    config = module("quantization.quark.quark").QuarkConfig.from_config(
        deepcopy(entries)
    )
    config.packed_modules_mapping = FUSED
    return config


def load(draft: Draft) -> None:
    """Choose a method for all layers of the model, as vLLM does when it builds it.

    Raises if it refuses.
    """
    config = config_of(draft.quantization)
    linear = module("linear").LinearBase
    for number in range(2):
        for name in (
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        ):
            config.get_quant_method_target(f"model.layers.{number}.{name}", linear)
    module("quantization.quark.quark").QuarkKVCacheMethod.validate_kv_cache_config(
        config.kv_cache_config
    )


def varied() -> list[dict[str, Any]]:
    specs = [
        {**spec, **change}
        for pair in SCHEMES.values()
        for one in pair
        for spec in ([] if one is None else one if isinstance(one, list) else [one])
        for change in (
            {},
            {"is_dynamic": True},
            {"symmetric": None},
            {"symmetric": False},
            {"qscheme": "per_group", "group_size": 128},
            {"qscheme": "per_block", "block_size": [128, 128]},
            {
                "qscheme": "per_block",
                "block_size": [1, 32],
                "scale_type": "float8_e8m0fnu",
            },
            {"qscheme": "per_channel"},
            {"group_size": 16},
            {"group_size": "32"},
            {"dtype": "fp8_e4m3", "scale_format": "e8m0"},
            {"dtype": "uint8"},
        )
    ]
    unique = {repr(sorted(spec.items(), key=str)): spec for spec in specs}
    return [*unique.values()]


def test_schemes_of_quark() -> None:
    moe = module("quantization.quark.quark_moe").QuarkMoEMethod
    linear, experts = module("linear").LinearBase, module("fused_moe").RoutedExperts
    single = varied()
    singles: list[Any] = [*single, None, *([spec] for spec in single[::7])]
    pairs = [(weight, inputs) for weight, inputs in itertools.product(single, singles)]
    for weight, inputs in itertools.product(SCHEMES.values(), repeat=2):
        pairs += [(weight[0], inputs[1])]
    chosen = {True: 0, False: 0}
    config = config_of(drafts.quark().quantization)
    for weight, inputs in pairs:
        entries = layer(weight, inputs)
        config.quant_config = {
            **drafts.quark().quantization,
            "global_quant_config": entries,
        }
        for is_experts in (False, True):
            try:
                if is_experts:
                    found = (
                        moe.get_moe_method_target(
                            config, experts, "model.layers.0.mlp.experts"
                        )[2]
                        is not None
                    )
                else:
                    found = (
                        config.get_scheme_cls(linear, "model.layers.0.mlp.down_proj")[2]
                        is not None
                    )
            except REFUSALS:
                found = False
            assert bool(scheme_in_vllm(entries, "reorder", is_experts)[0]) is found, (
                weight,
                inputs,
                is_experts,
            )
            chosen[found] += 1
    assert min(chosen.values()) > 100


def edited(**changes: Any) -> Draft:
    draft = drafts.quark_kv() if changes.pop("cached", False) else drafts.quark()
    overrides = changes.pop("overrides", {})
    draft.quantization.update(changes)
    draft.quantization["layer_quant_config"].update(overrides)
    return draft


Q0 = "model.layers.0.self_attn.q_proj"
DRAFTS: dict[str, Draft] = {
    **{name: drafts.quark(name) for name in SCHEMES},
    "kv": drafts.quark_kv(),
    "attention": drafts.quark_attention(),
    "attention without cache": drafts.uncached(drafts.quark_attention()),
    "no export": edited(export=None),
    "no group": edited(export={"pack_method": "reorder"}),
    "null exclude": edited(exclude=None),
    "no layer types": edited(layer_type_quant_config=None),
    "no global": edited(global_quant_config=None),
    "one of three excluded": edited(exclude=["lm_head", Q0]),
    "pattern excludes one of three": edited(exclude=["lm_head", "re:.*q_proj"]),
    "k differs by a key": edited(overrides={"*k_proj": {**layer(FP8, FP8), "more": 1}}),
    "k differs by a scheme": edited(
        overrides={"model.layers.0.self_attn.k_proj": layer(FP8, TOKENS)}
    ),
    "another scheme for all of them": edited(
        overrides={"*self_attn*": layer(FP8, TOKENS)}
    ),
    "down differs": edited(
        overrides={"model.layers.0.mlp.down_proj": layer(FP8, TOKENS)}
    ),
    "down is impossible": edited(overrides={"*down_proj": layer(FP8, INT8)}),
    "output": edited(
        overrides={"*down_proj": {**layer(FP8, FP8), "output_tensors": FP8}}
    ),
    "cache without layers": edited(
        export={"kv_cache_group": ["*k_proj"], "pack_method": "reorder"}
    ),
    "cache in int8": edited(
        cached=True,
        overrides={
            name: {**layer(FP8, FP8), "output_tensors": INT8}
            for name in ("*k_proj", "*v_proj")
        },
    ),
    "cache of two kinds": edited(
        cached=True, overrides={"*v_proj": {**layer(FP8, FP8), "output_tensors": INT8}}
    ),
    "cache without outputs": edited(
        cached=True, overrides={"*v_proj": {"weight": FP8, "input_tensors": FP8}}
    ),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_configurations_of_quark(name: str, tmp_path: Path) -> None:
    module("quantization.quark.quark")
    draft = DRAFTS[name]
    try:
        load(draft)
        loads = True
    except REFUSALS:
        loads = False
    verdict = validate(draft.write(tmp_path / "draft"), "vllm")
    # of tensors vLLM knows nothing at this point
    of_tensors = ("tensor-", "scale-", "excluded-", "float-", "group-")
    said = [
        f
        for f in verdict.findings
        if f.severity == "refused" and not f.rule.startswith(of_tensors)
    ]
    assert (not said) is loads, verdict.text()


def test_schemes_of_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = module(
        "quantization.compressed_tensors.compressed_tensors"
    ).CompressedTensorsConfig
    monkeypatch.setattr(
        compressed, "_check_scheme_supported", staticmethod(lambda *_, **__: True)
    )  # by any GPU
    arguments = [
        {
            "num_bits": bits,
            "type": kind,
            "strategy": strategy,
            "symmetric": symmetric,
            "dynamic": dynamic,
            **extra,
        }
        for bits, kind, symmetric, dynamic in itertools.product(
            (4, 8), ("int", "float"), (True, False), (True, False)
        )
        for strategy, extra in (
            ("tensor", {}),
            ("channel", {}),
            ("token", {}),
            ("group", {"group_size": 32}),
            ("group", {"group_size": 128}),
            ("tensor_group", {"group_size": 16}),
            ("block", {"block_structure": [128, 128]}),
        )
    ]
    formats = (
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "nvfp4-pack-quantized",
        "mxfp8-quantized",
    )
    chosen = {True: 0, False: 0}
    for weights, inputs, form in itertools.product(
        arguments, [None, *arguments], formats
    ):
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        try:
            config = compressed.from_config(
                {
                    "format": form,
                    "config_groups": {"group_0": deepcopy(group)},
                    "ignore": [],
                }
            )
        except Exception:  # these arguments do not go together at all
            continue
        parts = config.target_scheme_map["Linear"]
        try:
            scheme = config._get_scheme_from_parts.__func__
            found = _accepts(config, scheme, parts)
        except (NotImplementedError, ValueError, AttributeError):
            found = False
        assert bool(compressed_scheme(group, form)) is found, (weights, inputs, form)
        chosen[found] += 1
    assert min(chosen.values()) > 50


class _Chosen(Exception):
    """A scheme is being made: which is all that is asked."""


def _accepts(config: Any, choose: Any, parts: dict[str, Any]) -> bool:
    """Whether a scheme is chosen; it is not made, for which a GPU would be asked."""
    namespace = choose.__globals__

    def chosen(*_: Any, **__: Any) -> None:
        raise _Chosen

    kept = {
        name: value
        for name, value in namespace.items()
        if name.startswith("CompressedTensorsW")
    }
    namespace.update(
        dict.fromkeys(
            kept,
            type("Scheme", (), {"__init__": chosen, "get_min_capability": lambda: 0}),
        )
    )
    try:
        choose(
            config,
            parts["weights"],
            parts["input_activations"],
            parts["output_activations"],
            parts["format"],
        )
    except _Chosen:
        return True
    finally:
        namespace.update(kept)
    return False


@pytest.mark.parametrize(
    "scheme", [name for name in SCHEMES if name not in drafts.REJECTED]
)
def test_tensors_of_quark(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes the parameters that the table of slots demands: names and shapes, of one layer
    that is not fused.
    """
    torch = pytest.importorskip("torch")
    linear = module("linear").LinearBase
    _without_gpu(monkeypatch)
    entries = drafts.quark(scheme).quantization
    config = config_of(entries)
    name, (out, into) = "model.layers.0.mlp.down_proj", (32, 64)
    weight_key, input_key, kind = config.get_scheme_cls(linear, name)
    chosen = config.init_scheme(
        kind, weight_key, input_key, 1, entries["global_quant_config"]["weight"]
    )
    made = torch.nn.Module()
    chosen.create_weights(
        layer=made,
        input_size=into,
        input_size_per_partition=into,
        output_partition_sizes=[out],
        output_size=out,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *_: None,
    )
    tensors = {
        part: StoredTensor(f"{name}.{part}", shape, dtype, Path())
        for part, (dtype, shape) in drafts.stored(scheme, out, into).items()
    }
    found = slots_of(
        entries["global_quant_config"], tensors["weight"], tensors["weight_scale"]
    )
    assert found is not None and found[0] == (out, into)
    parameters = {part: tuple(value.shape) for part, value in made.named_parameters()}
    assert parameters.keys() == found[1].keys()
    for part, slot in found[1].items():
        assert parameters[part] in slot.shapes, (part, parameters[part], slot)


def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are neither looked for nor made; there is one process."""
    sizes = {
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    }
    for name in ("vllm.model_executor.parameter", "vllm.distributed"):
        for function, value in sizes.items():
            monkeypatch.setattr(
                importlib.import_module(name), function, value, raising=False
            )
    for name in (
        "nvfp4",
        "ocp_mx",
        "w4a16_int4",
        "w4a8_mxfp4_fp8",
        "w8a8_fp8",
        "w8a8_int8",
    ):
        here = module(f"quantization.quark.schemes.quark_{name}")
        for function in vars(here):
            if function.startswith(
                ("init_", "choose_", "expose_", "get_current_vllm_config")
            ):
                monkeypatch.setattr(here, function, MagicMock())


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("awq", {name: value})
        for name, value in (
            ("bits", 4),
            ("bits", 8),
            ("bits", 3),
            ("zero_point", False),
        )
    ),
    *(
        ("gptq", {"bits": bits, "sym": sym})
        for bits in (2, 3, 4, 8)
        for sym in (True, False)
    ),
    *(("gptq", {"desc_act": True, "group_size": size}) for size in (-1, 32, 128)),
    *(
        ("fp8", {"activation_scheme": scheme})
        for scheme in ("static", "dynamic", "token")
    ),
    *(
        ("fp8", {"activation_scheme": scheme, "weight_block_size": [128, 128]})
        for scheme in ("static", "dynamic")
    ),
    ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [128]}),
    *(
        ("awq", {"drop": key})
        for key in (
            "bits",
            "group_size",
            "zero_point",
            "version",
            "modules_to_not_convert",
        )
    ),
    *(
        ("gptq", {"drop": key})
        for key in ("bits", "group_size", "desc_act", "sym", "lm_head")
    ),
    *(("fp8", {"drop": key}) for key in ("activation_scheme", "ignored_layers")),
]


@pytest.mark.parametrize(("layout", "settings"), SETTINGS, ids=str)
def test_configurations_of_others(
    layout: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    names = {
        "awq": ("auto_awq", "AutoAWQConfig"),
        "gptq": ("auto_gptq", "AutoGPTQConfig"),
        "fp8": ("fp8", "Fp8Config"),
    }
    config = getattr(module(f"quantization.{names[layout][0]}"), names[layout][1])
    draft = getattr(drafts, layout)()
    entries = draft.quantization
    entries.pop(settings.get("drop"), None)
    entries.update({key: value for key, value in settings.items() if key != "drop"})
    try:
        config.from_config(deepcopy(entries))
        loads = True
    except REFUSALS:
        loads = False
    verdict = validate(draft.write(tmp_path / "draft"), "vllm")
    assert (
        f"{layout}-config" not in {finding.rule for finding in verdict.findings}
    ) is loads, verdict.text()


@pytest.mark.parametrize(
    "kind",
    ["pack-quantized", "float-quantized", "int-quantized", "nvfp4-pack-quantized"],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_tensors_of_compressed_tensors(kind: str, symmetric: bool) -> None:
    """The library itself compresses a layer: names, types and shapes are those that the slots
    demand.
    """
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    if not symmetric and kind in ("float-quantized", "nvfp4-pack-quantized"):
        pytest.skip("floats are symmetric")
    float8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": symmetric}
    int4 = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": symmetric,
    }
    float4 = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    table = dict(
        zip(
            ("pack-quantized", "float-quantized", "int-quantized"),
            (int4, float8, int8),
            strict=True,
        )
    )
    weights = table.get(kind, float4)
    out, into = 32, 64
    groups = {"group": into // 32, "tensor_group": into // 16}.get(
        str(weights["strategy"]), 1
    )
    state = {"weight": torch.zeros(out, into), "weight_scale": torch.ones(out, groups)}
    if not symmetric:
        state["weight_zero_point"] = torch.zeros(out, groups, dtype=torch.int8)
    if weights is float4:
        state["weight_global_scale"] = torch.ones(1)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    made = BaseCompressor.get_value_from_registry(kind).compress(state, scheme)
    types = {
        torch.float8_e4m3fn: "F8_E4M3",
        torch.int8: "I8",
        torch.int32: "I32",
        torch.uint8: "U8",
    }
    types |= {torch.float32: "F32", torch.int64: "I64"}
    tensors = {
        name: StoredTensor(
            f"layer.{name}", tuple(value.shape), types[value.dtype], Path()
        )
        for name, value in made.items()
    }
    found = Module("layer", tensors)
    group = {"weights": weights, "format": kind}
    size, slots = slots_of_group(group, found, (out, into))
    assert size == (out, into)
    assert [str(finding) for finding in slot_findings(found, slots)] == []


#: Layers of vLLM's Llama, with those of the checkpoint that they are made of.
_PARTS = {
    "self_attn.qkv_proj": FUSED["qkv_proj"],
    "self_attn.o_proj": ["o_proj"],
    "mlp.gate_up_proj": FUSED["gate_up_proj"],
    "mlp.down_proj": ["down_proj"],
}
_ATTENTION0, _MLP0 = "model.layers.0.self_attn", "model.layers.0.mlp"
_ENTRIES = [
    *(f"{_ATTENTION0}.{name}" for name in ("q_proj", "k_proj", "v_proj", "qkv_proj")),
    *(f"{_MLP0}.{name}" for name in ("gate_proj", "up_proj", "gate_up_proj")),
    *(f"{_MLP0}.down_proj", _ATTENTION0, "v_proj", "up_proj", "proj", "lm_head"),
    *(
        "re:.*qkv_proj",
        "re:.*[qkv]_proj",
        "re:.*v_proj",
        "re:.*gate.*",
        "re:.*\\.up_proj",
    ),
]
_LISTS = [
    [],
    *([one] for one in _ENTRIES),
    *map(list, itertools.combinations(_ENTRIES, 2)),
]


def _ours(parts: list[str], is_out: Callable[[str], bool]) -> bool | None:
    """True if all parts of a layer are excluded, False if none is; None if some are."""
    found = set(map(is_out, parts))
    return found.pop() if len(found) == 1 else None


def _theirs(is_out: Callable[[], bool]) -> bool | None:
    """Whether vLLM excludes a layer; None where it refuses."""
    try:
        return is_out()
    except ValueError:
        return None


@pytest.mark.parametrize("layout", ["quark", "compressed-tensors", "fp8", "awq"])
def test_names_of_excluded_layers(layout: str, tmp_path: Path) -> None:
    """By their own names, those of fused layers, and patterns."""
    matching = module("quantization.utils.config_utils").find_matching_patterns
    skipped = module("quantization.utils.quant_utils").is_layer_skipped
    drafted = {
        "quark": drafts.quark(),
        "compressed-tensors": drafts.compressed(),
        "fp8": drafts.fp8(),
        "awq": drafts.awq(),
    }
    checkpoint = read(drafted[layout].write(tmp_path / "draft"))
    counts = dict.fromkeys((True, False, None), 0)
    for entries, (name, parts) in itertools.product(_LISTS, _PARTS.items()):
        layer_name = f"model.layers.0.{name}"
        parent = layer_name.rpartition(".")[0]
        checkpoint.quantization.update(
            dict.fromkeys(
                ("exclude", "ignore", "ignored_layers", "modules_to_not_convert"),
                entries,
            )
        )

        def ignored(entries: list[str] = entries, layer_name: str = layer_name) -> bool:
            if layout in ("fp8", "awq"):
                mode = {"fp8": "exact", "awq": "substring"}[layout]
                return bool(skipped(layer_name, entries, FUSED, match_mode=mode))
            found = [bool(each) for each in matching(layer_name, entries, FUSED)]
            if any(found) and not all(found):
                raise ValueError
            return all(found)

        theirs = _theirs(ignored)
        ours = _ours(
            [f"{parent}.{part}" for part in parts],
            lambda part: _is_out(checkpoint, layout, part),
        )
        assert ours is theirs, (entries, layer_name)
        counts[theirs] += 1
    assert min(counts.values()) > 10


def _is_out(checkpoint: Checkpoint, layout: str, name: str) -> bool:
    layer = checkpoint.modules[name]
    if layout == "compressed-tensors":
        return GroupsInVllm(checkpoint).ignores(layer)
    if layout == "fp8":
        return ExcludedInVllm(checkpoint).match(layer)
    if layout == "awq":
        return SkippedInVllm(checkpoint).match(layer)
    fused_name, _ = fused_parts(layer, checkpoint.modules)
    return QuarkConfig(checkpoint.quantization).excludes_in_vllm(layer, fused_name)


def test_targets_of_compressed_tensors(tmp_path: Path) -> None:
    """A name, the names of all parts of a fused layer, a class: vLLM takes the first it finds."""
    matched = module("quantization.compressed_tensors.utils").find_matched_target
    draft = drafts.compressed()
    checkpoint = read(draft.write(tmp_path / "draft"))
    weights = draft.quantization["config_groups"]["group_0"]["weights"]
    targets = [entry for entry in _ENTRIES if entry != "lm_head"]
    chosen = set[str | None]()
    for given in itertools.permutations([*targets, "Linear"], 2):
        config = checkpoint.quantization
        config["config_groups"] = {
            target: {"targets": [target], "weights": weights} for target in given
        }
        for name, parts in _PARTS.items():
            layer_name = f"model.layers.0.{name}"
            kind = "RowParallelLinear" if len(parts) == 1 else "QKVParallelLinear"
            theirs = matched(layer_name, type(kind, (), {})(), given, FUSED)
            for part in parts:
                layer = checkpoint.modules[f"{layer_name.rpartition('.')[0]}.{part}"]
                found = GroupsInVllm(checkpoint).of(layer)
                ours = None if found is None else found[1]["targets"][0]
                assert ours == theirs, (given, layer_name)
            chosen.add(theirs)
    assert len(chosen) >= 10
