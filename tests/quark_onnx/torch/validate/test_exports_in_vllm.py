"""vLLM's own loader takes what is exported here, tensor by tensor, where it is installed; the validator says the same.

No GPU is needed: vLLM makes the parameters of a model and loads them, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quark_onnx.errors import ConfigError
from quark_onnx.torch.files import Writing, quantize_checkpoint
from quark_onnx.torch.layouts import LAYOUTS
from quark_onnx.torch.ptq import config_for
from quark_onnx.torch.schemes import SCHEMES
from quark_onnx.torch.validate import validate
from tests.quark_onnx.torch.validate import vllm_model
from tests.torch_models import VOCABULARY, made, saved, tokens

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), _BASE),
    "qwen3": _BASE | {"head_dim": 32},
    "mixtral": _BASE | {"num_local_experts": 4},
    "qwen2_moe": _BASE | _EXPERTS | {"shared_expert_intermediate_size": 128},
    "qwen3_moe": _BASE | _EXPERTS | {"head_dim": 32},
}
#: Few tokens, which most experts see nothing of.
_FEW = [torch.tensor([[5, 7]])]


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    with vllm_model.on_the_cpu():
        yield


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The float folder of each family."""
    root = tmp_path_factory.mktemp("float")
    return {
        name: saved(made(AutoConfig.for_model(name, **settings), torch.bfloat16), root / name)
        for name, settings in FAMILIES.items()
    }


def agreed(folder: Path, *, cached: bool = False) -> bool:
    """Whether vLLM loads a checkpoint as it is; the validator says the same."""
    verdict = validate(folder, "vllm")
    try:
        found = vllm_model.load(vllm_model.built(folder), folder, cached=cached)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, KeyError, AssertionError) as error:
        found = [repr(error)]
        assert not verdict.loads, found
    assert verdict.right is not bool(found), (found, verdict.text())
    return not found


def exported(source: Path, output: Path, scheme: str, data: Any = None, layout: str = "quark", **settings: Any) -> Path:
    method = settings.pop("pack_method", "reorder")
    writing = Writing(layout=layout, pack_method=method)
    data = tokens(6, 24) if data is None else data
    quantize_checkpoint(source, output, config_for(scheme, **settings), data, writing=writing, progress=False)
    return output


#: Schemes of AMD Quark that vLLM 0.33 has nothing for.
_REFUSED = {"int4_wo_per_channel", "uint4_wo_per_channel", "int4_wa_64", "uint4_int8", "bf16", "fp16"}
_REFUSED |= {name for name in SCHEMES if name.startswith(("int3_", "uint2_", "uint3_"))}


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in ("mx6", "mx9", "bfp16")])
def test_schemes(scheme: str, floats: dict[str, Path], tmp_path: Path) -> None:
    assert agreed(exported(floats["llama"], tmp_path / "out", scheme)) is (scheme not in _REFUSED)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
@pytest.mark.parametrize("scheme", ["fp8", "int8_per_channel", "uint4_wo_64", "mxfp4", "mxfp4_fp8", "nvfp4"])
def test_families(family: str, scheme: str, floats: dict[str, Path], tmp_path: Path) -> None:
    assert agreed(exported(floats[family], tmp_path / "out", scheme))


@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_128"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_nibbles_in_order(family: str, scheme: str, floats: dict[str, Path], tmp_path: Path) -> None:
    assert agreed(exported(floats[family], tmp_path / "out", scheme, pack_method="order"))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("cache", ["fp8", "fp8-rope"])
def test_keys_and_values(family: str, cache: str, floats: dict[str, Path], tmp_path: Path) -> None:
    assert agreed(exported(floats[family], tmp_path / "out", "fp8", kv_cache=cache), cached=True)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["fp8", "int8", "mxfp4_fp8", "nvfp4"])
def test_experts_that_saw_no_data(family: str, scheme: str, floats: dict[str, Path], tmp_path: Path) -> None:
    """vLLM would take 1.0 for the input scale of such an expert, and the greatest for all of them."""
    assert agreed(exported(floats[family], tmp_path / "out", scheme, _FEW))


MIXED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "mxfp4", {"layers": (("*self_attn*", "fp8"),)}),
    ("llama", "mxfp4", {"layers": (("*down_proj", "fp8"),), "kv_cache": "fp8"}),
    ("llama", "fp8", {"exclude": ("lm_head", "model.layers.0.*")}),
    *(
        (family, scheme, settings)
        for family in ("mixtral", "qwen3_moe")
        for scheme, settings in (
            ("mxfp4", {"layers": (("*self_attn*", "fp8"),)}),
            ("fp8", {"layers": (("*experts*", "mxfp4"),)}),
            ("fp8", {"layers": (("*experts*_proj", "mxfp4"),)}),
            ("mxfp4", {"layers": (("model.layers.1.mlp.*", "fp8"),)}),
            ("fp8", {"exclude": ("lm_head", "*experts*")}),
            ("fp8", {"exclude": ("lm_head", "model.layers.0.*")}),
        )
    ),
]


@pytest.mark.parametrize(("family", "scheme", "settings"), MIXED, ids=str)
def test_mixed(family: str, scheme: str, settings: Any, floats: dict[str, Path], tmp_path: Path) -> None:
    out = exported(floats[family], tmp_path / "out", scheme, **settings)
    assert agreed(out, cached="kv_cache" in settings)


#: What vLLM refuses of layouts that are none of its own, or of mixtures in them.
_NOT_IN_VLLM = {("compressed-tensors", "int8"), ("awq", "int4_wo_per_channel")}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("quark", "oga")])
@pytest.mark.parametrize(
    "scheme",
    [
        *("fp8", "ptpc_fp8", "int8", "int8_per_channel", "int4_wo_32", "uint4_wo_128", "int4_wo_per_channel"),
        *("mxfp4", "mxfp4_weight_only", "mxfp8", "nvfp4"),
    ],
)
def test_layouts(scheme: str, layout: str, family: str, floats: dict[str, Path], tmp_path: Path) -> None:
    if layout == "compressed-tensors" and scheme == "int4_wo_per_channel" and family != "llama":
        pytest.skip("only with the Marlin kernels, which are not asked for here, vLLM has experts without groups")
    try:
        out = exported(floats[family], tmp_path / "out", scheme, layout=layout)
    except ConfigError:
        pytest.skip(f"{layout} has no place for {scheme}")
    refused = layout == "finegrained-fp8" or ((layout, scheme) in _NOT_IN_VLLM and family != "llama")
    assert agreed(out) is not refused


NAMES = {
    "as in memory": (".block_sparse_moe.", ".mlp."),
    "halves as in memory": (".w1.", ".gate_proj."),
    "another place for experts": (".experts.", ".specialists."),
    "norms": ("input_layernorm", "norm1"),
    "attention": (".self_attn.", ".attention."),
    "no prefix": ("model.", ""),
    "the embedding": ("embed_tokens", "wte"),
    "the last norm": ("model.norm.", "model.final_norm."),
    "as they are": ("", ""),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", NAMES)
def test_names(change: str, family: str, floats: dict[str, Path], tmp_path: Path) -> None:
    """Whatever tensors are called, the validator finds those that vLLM's loader does not."""
    out = exported(floats[family], tmp_path / "out", "ptpc_fp8")
    old, new = NAMES[change]
    file = out / "model.safetensors"
    held = {name.replace(old, new) if old else name: tensor for name, tensor in load_file(file).items()}
    changed = held.keys() != load_file(file).keys()
    save_file(held, file, {"format": "pt"})
    # the mappers of Mixtral and Mistral know both
    takes_both = change == "halves as in memory" or (family, change) == ("mistral", "attention")
    assert agreed(out) is (takes_both or not changed)


def test_a_scale_of_another_type_is_noticed(floats: dict[str, Path], tmp_path: Path) -> None:
    """This file has teeth: what vLLM would round, or leave as it was, is seen."""
    out = exported(floats["llama"], tmp_path / "out", "mxfp4")
    file, name = out / "model.safetensors", "model.layers.0.mlp.down_proj.weight_scale"
    held = load_file(file)
    save_file(held | {name: held[name].float() + 0.5}, file, {"format": "pt"})
    assert vllm_model.load(vllm_model.built(out), out) == ["torch.float32 becomes torch.uint8"]
    held.pop(name)
    save_file(held, file, {"format": "pt"})
    found = vllm_model.load(vllm_model.built(out), out)
    assert found == ["model.layers.0.mlp.down_proj.weight_scale stays empty"]
