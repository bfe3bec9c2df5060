"""vLLM's own loader takes what is exported here, tensor by tensor, where it is installed.

The validator says the same.

No GPU is needed: vLLM makes the parameters of a model and loads them, and computes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.layouts import LAYOUTS
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.ptq import config_for
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
#: Families whose loaders in vLLM do not find the scales of keys and values that AMD Quark's layout
#: has.
LOST: dict[str, dict[str, Any]] = {
    "qwen2_moe": FAMILIES["qwen2_moe"],
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _BASE | {"head_dim": 32}),
    **dict.fromkeys(("cohere", "stablelm"), _BASE | {"pad_token_id": 0}),
    "opt": _BASE | {"ffn_dim": 256, "word_embed_proj_dim": 128},
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
        name: saved(
            made(AutoConfig.for_model(name, **settings), torch.bfloat16), root / name
        )
        for name, settings in (FAMILIES | LOST).items()
    }


def agreed(folder: Path, *, cached: bool = False) -> bool:
    """Whether vLLM loads a checkpoint as it is; the validator says the same."""
    verdict = validate(folder, "vllm")
    try:
        model = vllm_model.built(folder)
        found = vllm_model.load(model, folder, cached=cached)
        if cached:
            vllm_model.prepare_cache(model, folder)
    except (
        ValueError,
        RuntimeError,
        AttributeError,
        LookupError,
        AssertionError,
    ) as error:
        found = [repr(error)]
        assert not verdict.loads, found
    assert verdict.right is not bool(found), (found, verdict.text())
    return not found


def exported(
    source: Path,
    output: Path,
    scheme: str,
    data: Any = None,
    layout: str = "quark",
    **settings: Any,
) -> Path:
    method = settings.pop("pack_method", "reorder")
    writing = Writing(layout=layout, pack_method=method)
    data = tokens(6, 24) if data is None else data
    quantize_checkpoint(
        source,
        data,
        config_for(scheme, **settings),
        output,
        writing=writing,
        progress=False,
    )
    return output


#: Schemes of AMD Quark that vLLM 0.33 has nothing for.
_REFUSED = {
    "int4_wo_per_channel",
    "uint4_wo_per_channel",
    "int4_wa_64",
    "uint4_int8",
    "bf16",
    "fp16",
}
_REFUSED |= {"amdfp4", "amdfp4_g32", "int4_fp8"}  # int4_fp8 is for experts alone
_REFUSED |= {name for name in SCHEMES if name.startswith(("int3_", "uint2_", "uint3_"))}


@pytest.mark.parametrize(
    "scheme", [name for name in SCHEMES if name not in ("mx6", "mx9", "bfp16")]
)
def test_schemes(scheme: str, floats: dict[str, Path], tmp_path: Path) -> None:
    assert agreed(exported(floats["llama"], tmp_path / "out", scheme)) is (
        scheme not in _REFUSED
    )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
@pytest.mark.parametrize(
    "scheme", ["fp8", "int8_per_channel", "uint4_wo_64", "mxfp4", "mxfp4_fp8", "nvfp4"]
)
def test_families(
    family: str, scheme: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    assert agreed(exported(floats[family], tmp_path / "out", scheme))


_LLAMA4 = _BASE | {
    "intermediate_size_mlp": 256,
    "head_dim": 32,
    "num_local_experts": 4,
    "moe_layers": [0, 1],
}


@pytest.mark.parametrize("scheme", ["fp8", "ptpc_fp8", "mxfp4", "int4_wo_32"])
def test_outputs_that_are_reordered(scheme: str, tmp_path: Path) -> None:
    """Llama 4: the loader gives outputs of queries and keys the order of vLLM's rotation, and takes
    rows for them.
    """
    source = saved(
        made(AutoConfig.for_model("llama4_text", **_LLAMA4), torch.bfloat16),
        tmp_path / "source",
    )
    assert agreed(exported(source, tmp_path / "out", scheme)) is (
        scheme != "int4_wo_32"
    )
    if scheme == "int4_wo_32":
        assert agreed(
            exported(
                source, tmp_path / "float", scheme, exclude=("lm_head", "*self_attn*")
            )
        )
        assert agreed(
            exported(
                source, tmp_path / "fp8", scheme, layers=(("*self_attn*", "ptpc_fp8"),)
            )
        )


@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_128"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_nibbles_in_order(
    family: str, scheme: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    assert agreed(
        exported(floats[family], tmp_path / "out", scheme, pack_method="order")
    )


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("cache", ["fp8", "fp8-rope"])
def test_keys_and_values(
    family: str, cache: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    assert agreed(
        exported(floats[family], tmp_path / "out", "fp8", kv_cache=cache), cached=True
    )


@pytest.mark.parametrize("family", LOST)
def test_keys_and_values_that_are_not_found(
    family: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    assert not agreed(
        exported(floats[family], tmp_path / "quark", "fp8", kv_cache="fp8"), cached=True
    )
    assert agreed(
        exported(floats[family], tmp_path / "fp8", "fp8", kv_cache="fp8", layout="fp8"),
        cached=True,
    )


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "layers", [("*self_attn*", "mxfp4"), ("*layers.0.self_attn*", "ptpc_fp8")], ids=str
)
def test_attention_of_another_scheme(
    family: str, layers: Any, floats: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"kv_cache": "fp8-rope", "attention": "fp8", "layers": (layers,)}
    assert agreed(
        exported(floats[family], tmp_path / "out", "fp8", **settings), cached=True
    )


_K, _V = (f"model.layers.1.self_attn.{side}_proj.output_scale" for side in "kv")


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in (_K, _V) for value in (None, math.nan)),
        *({_K: value} for value in (0.0, -1.0, 0.5)),
        {"model.layers.1.self_attn.prob_output_zero_point": 0.0},
        {"model.norm.weight": None},
        {"model.layers.0.post_attention_layernorm.weight": None},
        {"model.layers.0.self_attn.q_proj.": None},
        {"model.embed_tokens.weight": None},
        {"model.norm.weight": 1.0},
    ],
    ids=str,
)
def test_what_is_lost_or_no_scale(
    change: dict[str, float | None], floats: dict[str, Path], tmp_path: Path
) -> None:
    out = exported(
        floats["llama"], tmp_path / "out", "fp8", kv_cache="fp8", attention="fp8"
    )
    file = out / "model.safetensors"
    held = load_file(file)
    for place, value in change.items():
        held = {
            name: tensor for name, tensor in held.items() if not name.startswith(place)
        }
        held |= (
            {} if value is None else {place: torch.tensor(value, dtype=torch.bfloat16)}
        )
    save_file(held, file, {"format": "pt"})
    assert agreed(out, cached=True) is (change == {_K: 0.5})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *(
            ("llama", {key: None})
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "vocab_size",
            )
        ),
        ("llama", {"num_hidden_layers": None}),
        ("mixtral", {"num_local_experts": 8}),
        ("qwen2_moe", {"num_experts": 8}),
        ("qwen3_moe", {"num_local_experts": 8}),
    ],
    ids=str,
)
def test_sizes_that_are_not_told(
    family: str, change: dict[str, Any], floats: dict[str, Path], tmp_path: Path
) -> None:
    out = exported(floats[family], tmp_path / "out", "ptpc_fp8")
    content = json.loads((out / "config.json").read_text(encoding="utf-8")) | change
    content = {
        key: value
        for key, value in content.items()
        if key not in change or value is not None
    }
    (out / "config.json").write_text(json.dumps(content), encoding="utf-8")
    assert not agreed(out)


_ATTENTION = "model.layers.0.self_attn."


@pytest.mark.parametrize("layout", ["quark", "compressed-tensors", "fp8"])
@pytest.mark.parametrize(
    "end",
    [
        "prob_scale",
        "prob_output_scale",
        "k_scale",
        "o_proj.output_scale",
        "attn.q_scale",
    ],
)
def test_scales_that_attention_has_or_lacks(
    layout: str, end: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    out = exported(
        floats["llama"], tmp_path / "out", "fp8", kv_cache="fp8", layout=layout
    )
    file = out / "model.safetensors"
    save_file(
        load_file(file) | {_ATTENTION + end: torch.tensor(0.5)}, file, {"format": "pt"}
    )
    found = end in ("k_scale", "attn.q_scale") or (
        end == "prob_output_scale" and layout != "compressed-tensors"
    )
    assert agreed(out, cached=True) is found


@pytest.mark.parametrize("layout", ["quark", "fp8"])
def test_the_names_of_other_tools(
    layout: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    out = exported(
        floats["llama"], tmp_path / "out", "fp8", kv_cache="fp8", layout=layout
    )
    file = out / "model.safetensors"
    names = {f"{side}_proj.output_scale": f"{side}_proj.{side}_scale" for side in "kv"}
    names |= {
        f"self_attn.{side}_scale": f"self_attn.{side}_proj.{side}_scale"
        for side in "kv"
    }
    held = load_file(file)
    for old, new in names.items():
        held = {name.replace(old, new): tensor for name, tensor in held.items()}
    save_file(held, file, {"format": "pt"})
    assert agreed(out, cached=True)


@pytest.mark.parametrize("scheme", ["fp8", "uint4_wo_32"])
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj", "lm_head"]
)
@pytest.mark.parametrize("rank", [1, 3])
def test_weights_that_are_no_matrices(
    rank: int, name: str, scheme: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    out = exported(floats["llama"], tmp_path / "out", scheme)
    file, key = out / "model.safetensors", f"{name}.weight"
    held = load_file(file)
    save_file(
        held | {key: held[key].reshape(-1)[:2] if rank == 1 else held[key][None]},
        file,
        {"format": "pt"},
    )
    assert not agreed(out)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["fp8", "int8", "mxfp4_fp8", "nvfp4"])
def test_experts_that_saw_no_data(
    family: str, scheme: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM would take 1.0 for the input scale of such an expert, and the greatest for all of them."""  # noqa: E501
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
def test_mixed(
    family: str, scheme: str, settings: Any, floats: dict[str, Path], tmp_path: Path
) -> None:
    out = exported(floats[family], tmp_path / "out", scheme, **settings)
    assert agreed(out, cached="kv_cache" in settings)


#: What vLLM refuses of layouts that are none of its own, or of mixtures in them.
_NOT_IN_VLLM = {("compressed-tensors", "int8"), ("awq", "int4_wo_per_channel")}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name not in ("quark", "oga")]
)
@pytest.mark.parametrize(
    "scheme",
    [
        *(
            "fp8",
            "ptpc_fp8",
            "int8",
            "int8_per_channel",
            "int4_wo_32",
            "uint4_wo_128",
            "int4_wo_per_channel",
        ),
        *("mxfp4", "mxfp4_weight_only", "mxfp8", "nvfp4"),
    ],
)
def test_layouts(
    scheme: str, layout: str, family: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    if (
        layout == "compressed-tensors"
        and scheme == "int4_wo_per_channel"
        and family != "llama"
    ):
        pytest.skip(
            "only with the Marlin kernels, which are not asked for here, vLLM has"
            " experts without groups"
        )
    try:
        out = exported(floats[family], tmp_path / "out", scheme, layout=layout)
    except ConfigError:
        pytest.skip(f"{layout} has no place for {scheme}")
    refused = layout == "finegrained-fp8" or (
        (layout, scheme) in _NOT_IN_VLLM and family != "llama"
    )
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
def test_names(
    change: str, family: str, floats: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever tensors are called, the validator finds those that vLLM's loader does not."""
    out = exported(floats[family], tmp_path / "out", "ptpc_fp8")
    old, new = NAMES[change]
    file = out / "model.safetensors"
    held = {
        name.replace(old, new) if old else name: tensor
        for name, tensor in load_file(file).items()
    }
    changed = held.keys() != load_file(file).keys()
    save_file(held, file, {"format": "pt"})
    # the mappers of Mixtral and Mistral know both
    takes_both = change == "halves as in memory" or (family, change) == (
        "mistral",
        "attention",
    )
    assert agreed(out) is (takes_both or not changed)


def test_a_scale_of_another_type_is_noticed(
    floats: dict[str, Path], tmp_path: Path
) -> None:
    """This file has teeth: what vLLM would round, or leave as it was, is seen."""
    out = exported(floats["llama"], tmp_path / "out", "mxfp4")
    file, name = out / "model.safetensors", "model.layers.0.mlp.down_proj.weight_scale"
    held = load_file(file)
    save_file(held | {name: held[name].float() + 0.5}, file, {"format": "pt"})
    assert vllm_model.load(vllm_model.built(out), out) == [
        "torch.float32 becomes torch.uint8"
    ]
    held.pop(name)
    save_file(held, file, {"format": "pt"})
    found = vllm_model.load(vllm_model.built(out), out)
    assert found == ["model.layers.0.mlp.down_proj.weight_scale stays empty"]
