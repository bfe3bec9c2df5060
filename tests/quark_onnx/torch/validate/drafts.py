"""Checkpoints of a tiny Llama in the layouts of several tools, made of zeros, to be written whole
or broken.
"""

from __future__ import annotations

import json
import math
import struct
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Entry = tuple[str, tuple[int, ...]]
BYTES = {
    "BOOL": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "I32": 4,
    "I64": 8,
}

#: 1/128, and 1 in float16.
SCALES = {"F32": struct.pack("<f", 2**-7), "BF16": b"\x00\x3c", "F16": b"\x00\x3c"}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
#: (out, in) of the Linear layers of a block.
SIZES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}
LINEARS = {
    f"model.layers.{n}.{name}": size for n in range(2) for name, size in SIZES.items()
}


@dataclass
class Draft:
    """A checkpoint that is not written yet.

    Attributes:
        config: ``config.json``.
        tensors: type and shape of each.
        scalars: values of single float32 numbers that are no zeros, and no usual scales.
    """

    config: dict[str, Any]
    tensors: dict[str, Entry]
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def copy(self) -> Draft:
        return deepcopy(self)

    def rename(self, old: str, new: str) -> None:
        self.tensors = {
            name.replace(old, new): entry for name, entry in self.tensors.items()
        }

    def drop(self, end: str) -> None:
        self.tensors = {
            name: entry
            for name, entry in self.tensors.items()
            if not name.endswith(end)
        }

    def change(self, end: str, entry: Entry) -> None:
        assert any(name.endswith(end) for name in self.tensors)
        self.tensors = {
            name: entry if name.endswith(end) else old
            for name, old in self.tensors.items()
        }

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        write_safetensors(folder / "model.safetensors", self.tensors, self.scalars)
        return folder

    def write_in_two(self, folder: Path) -> Path:
        """In two files with an index."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        names = sorted(self.tensors)
        weight_map = {}
        for number, part in enumerate(
            (names[: len(names) // 2], names[len(names) // 2 :]), 1
        ):
            file = f"model-0000{number}-of-00002.safetensors"
            write_safetensors(
                folder / file, {name: self.tensors[name] for name in part}, self.scalars
            )
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index), encoding="utf-8"
        )
        return folder


def write_safetensors(
    file: Path, tensors: dict[str, Entry], scalars: dict[str, float]
) -> None:
    """By the format's description, with no help of the package that is tested."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    values = b""
    for name, (dtype, shape) in tensors.items():
        count = math.prod(shape)
        data = (
            struct.pack("<f", scalars[name])
            if name in scalars
            else bytes(count * BYTES[dtype])
        )
        if (
            dtype in SCALES
            and name not in scalars
            and "scale" in name.rpartition(".")[2]
        ):
            data = SCALES[dtype] * count
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(values), len(values) + len(data)],
        }
        values += data
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + values)


def plain() -> Draft:
    """The model itself, in bfloat16."""
    tensors: dict[str, Entry] = {
        f"{name}.weight": ("BF16", size) for name, size in LINEARS.items()
    }
    for n in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{n}.{norm}.weight"] = ("BF16", (32,))
    tensors |= {
        "model.embed_tokens.weight": ("BF16", (40, 32)),
        "model.norm.weight": ("BF16", (32,)),
    }
    tensors["lm_head.weight"] = ("BF16", (40, 32))
    return Draft(deepcopy(CONFIG), tensors)


def spec(dtype: str, qscheme: str, observer: str, **changes: Any) -> dict[str, Any]:
    """A tensor's specification with all the keys that amd-quark writes."""
    return {
        "dtype": dtype,
        "qscheme": qscheme,
        "is_dynamic": False,
        "symmetric": True,
        "ch_axis": None,
        "group_size": None,
        "block_size": None,
        "observer_cls": observer,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
        **changes,
    }


FP8 = spec("fp8_e4m3", "per_tensor", "PerTensorMinMaxObserver")
_GROUP = {"ch_axis": -1, "group_size": 32}
_MX = {
    **_GROUP,
    "symmetric": None,
    "scale_format": "e8m0",
    "scale_calculation_mode": "even",
}
MXFP4 = spec("fp4", "per_group", "PerBlockMXObserver", **_MX)
INT8 = spec("int8", "per_tensor", "PerTensorMinMaxObserver")
INT4 = spec("int4", "per_group", "PerGroupMinMaxObserver", **_GROUP)
UINT4 = spec(
    "uint4", "per_group", "PerGroupMinMaxObserver", **{**_GROUP, "symmetric": False}
)
INT4_CHANNEL = spec("int4", "per_channel", "PerChannelMinMaxObserver", ch_axis=0)
_BLOCKS = spec(
    "fp4",
    "per_group",
    "PerBlockMXObserver",
    ch_axis=-1,
    group_size=16,
    symmetric=None,
    scale_format="float32",
    scale_type="float32",
)
_WHOLE = {**FP8, "is_scale_quant": True, "scale_type": "float32"}
PTPC = spec("fp8_e4m3", "per_channel", "PerChannelMinMaxObserver", ch_axis=0)
TOKENS = {**PTPC, "ch_axis": 1, "is_dynamic": True}
MXFP6 = {**MXFP4, "dtype": "fp6_e2m3"}

#: Specifications of weight and input of amd-quark's schemes, as the report of its exports has them.
SCHEMES: dict[str, tuple[Any, Any]] = {
    "fp8": (FP8, FP8),
    "ptpc_fp8": (PTPC, TOKENS),
    "int8": (INT8, INT8),
    "int4_wo_32": (INT4, None),
    "uint4_wo_32": (UINT4, None),
    "int4_wo_per_channel": (INT4_CHANNEL, None),
    "uint4_wo_per_channel": (
        {**INT4_CHANNEL, "dtype": "uint4", "symmetric": False},
        None,
    ),
    "int4_wa_32": (INT4, {**INT4, "is_dynamic": True}),
    "mxfp4": (MXFP4, {**MXFP4, "is_dynamic": True}),
    "mxfp4_weight_only": (MXFP4, None),
    "mxfp6_e2m3": (MXFP6, {**MXFP6, "is_dynamic": True}),
    "mxfp4_mxfp6_e2m3": (MXFP4, {**MXFP6, "is_dynamic": True}),
    "mxfp4_fp8": (MXFP4, FP8),
    "nvfp4": ([_BLOCKS, _WHOLE], [{**_BLOCKS, "is_dynamic": True}, _WHOLE]),
    "int4_fp8": (
        [{**FP8, "scale_type": "float32"}, {**INT4_CHANNEL, "scale_type": "float32"}],
        {**FP8, "is_dynamic": True},
    ),
    "amdfp4_g32": (
        {**MXFP4, "scale_format": "e5m3"},
        {**MXFP4, "scale_format": "e5m3", "is_dynamic": True},
    ),
}
#: What vLLM said of them: quark-torch, section 4.5.
REJECTED = (
    "int4_wo_per_channel",
    "uint4_wo_per_channel",
    "int4_wa_32",
    "int4_fp8",
    "amdfp4_g32",
)


def stored(scheme: str, out: int, into: int) -> dict[str, Entry]:
    """The tensors of a layer: the table of section 4.3, for any size."""
    scale: Entry = ("F32", ())
    bytes_of_mx: dict[str, Entry] = {
        "weight": ("U8", (out, into // 2)),
        "weight_scale": ("U8", (out, into // 32)),
    }
    groups: dict[str, Entry] = {
        "weight": ("I32", (into, out // 8)),
        "weight_scale": ("BF16", (into // 32, out)),
        "weight_zero_point": ("I32", (into // 32, out // 8)),
    }
    channels: dict[str, Entry] = {
        "weight": ("I32", (out, into // 8)),
        "weight_scale": ("BF16", (out,)),
        "weight_zero_point": ("I32", (out // 8,)),
    }
    table: dict[str, dict[str, Entry]] = {
        "fp8": {
            "weight": ("F8_E4M3", (out, into)),
            "weight_scale": scale,
            "input_scale": scale,
        },
        "ptpc_fp8": {
            "weight": ("F8_E4M3", (out, into)),
            "weight_scale": ("BF16", (out,)),
        },
        "int8": {
            "weight": ("I8", (out, into)),
            "weight_scale": scale,
            "weight_zero_point": ("I8", ()),
            "input_scale": scale,
            "input_zero_point": ("I8", ()),
        },
        **dict.fromkeys(("int4_wo_32", "uint4_wo_32", "int4_wa_32"), groups),
        **dict.fromkeys(("int4_wo_per_channel", "uint4_wo_per_channel"), channels),
        **dict.fromkeys(
            ("mxfp4", "mxfp4_weight_only", "mxfp4_mxfp6_e2m3", "amdfp4_g32"),
            bytes_of_mx,
        ),
        "mxfp6_e2m3": {
            "weight": ("U8", (out, into * 3 // 4)),
            "weight_scale": ("U8", (out, into // 32)),
        },
        "mxfp4_fp8": {**bytes_of_mx, "input_scale": scale},
        "nvfp4": {
            "weight": ("U8", (out, into // 2)),
            "weight_scale": ("F8_E4M3", (out, into // 16)),
            "weight_scale_2": scale,
            "input_scale_2": scale,
        },
        "int4_fp8": {
            "weight": ("I32", (out, into // 8)),
            "weight_scale": scale,
            "weight_scale_2": ("F32", (out,)),
            "weight_zero_point_2": ("I32", (out // 8,)),
        },
    }
    return table[scheme]


def _replaced(draft: Draft, layers: dict[str, dict[str, Entry]]) -> Draft:
    for name, parts in layers.items():
        del draft.tensors[f"{name}.weight"]
        draft.tensors |= {f"{name}.{part}": entry for part, entry in parts.items()}
    return draft


def layer(weight: Any, inputs: Any) -> dict[str, Any]:
    """A layer's configuration."""
    specs = {"weight": deepcopy(weight), "input_tensors": deepcopy(inputs)}
    return {**specs, "output_tensors": None, "bias": None, "target_device": None}


def quark(scheme: str = "fp8") -> Draft:
    """As amd-quark 0.13 writes it."""
    draft = plain()
    draft.config["quantization_config"] = {
        "quant_method": "quark",
        "version": "0.13",
        "quant_mode": "eager_mode",
        "algo_config": None,
        "softmax_quant_spec": None,
        "exclude": ["lm_head"],
        "global_quant_config": layer(*SCHEMES[scheme]),
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }
    return _replaced(
        draft, {name: stored(scheme, *size) for name, size in LINEARS.items()}
    )


def quark_kv() -> Draft:
    """fp8 with an fp8 KV cache."""
    draft = quark("fp8")
    entries = draft.quantization
    patterns = ["*k_proj", "*v_proj"]
    entries["export"]["kv_cache_group"] = patterns
    for key in ("layer_quant_config", "kv_cache_quant_config"):
        entries[key] = {
            pattern: {**layer(FP8, FP8), "output_tensors": deepcopy(FP8)}
            for pattern in patterns
        }
    for number in range(2):
        for place, name in enumerate(("k_proj", "v_proj")):
            tensor = f"model.layers.{number}.self_attn.{name}.output_scale"
            draft.tensors[tensor] = ("F32", ())
            draft.scalars[tensor] = 0.25 + number + place
    return draft


def quark_attention() -> Draft:
    """And with fp8 attention: queries and probabilities."""
    draft = quark_kv()
    entries = draft.quantization
    entries["softmax_quant_spec"] = deepcopy(FP8)
    entries["layer_quant_config"]["*q_proj"] = {
        **layer(FP8, FP8),
        "output_tensors": deepcopy(FP8),
    }
    for number in range(2):
        for name in ("q_proj.output_scale", "prob_output_scale"):
            draft.tensors[f"model.layers.{number}.self_attn.{name}"] = ("F32", ())
    return draft


def uncached(draft: Draft) -> Draft:
    """Without what its KV cache needs."""
    entries = draft.quantization
    entries["export"]["kv_cache_group"] = []
    for pattern in ("*k_proj", "*v_proj"):
        del (
            entries["layer_quant_config"][pattern],
            entries["kv_cache_quant_config"][pattern],
        )
    for name in list(draft.scalars):
        del draft.tensors[name], draft.scalars[name]
    return draft


def mixture() -> Draft:
    """fp8, with two experts in place of the dense layers."""
    draft = quark("fp8")
    draft.config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 64,
    }
    for number in range(2):
        here = f"model.layers.{number}.mlp"
        for name in ("gate_proj", "up_proj", "down_proj"):
            for part in ("weight", "weight_scale", "input_scale"):
                entry = draft.tensors.pop(f"{here}.{name}.{part}")
                draft.tensors |= {
                    f"{here}.experts.{expert}.{name}.{part}": entry
                    for expert in range(2)
                }
        draft.tensors[f"{here}.gate.weight"] = ("BF16", (2, 32))
        draft.quantization["exclude"].append(f"{here}.gate")
    return draft


def awq() -> Draft:
    """As AutoAWQ writes it, in groups of 32."""
    draft = plain()
    draft.config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }

    def parts(out: int, into: int) -> dict[str, Entry]:
        return {
            "qweight": ("I32", (into, out // 8)),
            "qzeros": ("I32", (into // 32, out // 8)),
            "scales": ("F16", (into // 32, out)),
        }

    return _replaced(draft, {name: parts(*size) for name, size in LINEARS.items()})


def gptq() -> Draft:
    """As GPTQModel writes it, in groups of 32."""
    draft = plain()
    draft.config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }

    def parts(out: int, into: int) -> dict[str, Entry]:
        return {
            "qweight": ("I32", (into // 8, out)),
            "qzeros": ("I32", (into // 32, out // 8)),
            "scales": ("F16", (into // 32, out)),
            "g_idx": ("I32", (into,)),
        }

    return _replaced(draft, {name: parts(*size) for name, size in LINEARS.items()})


def fp8(block: tuple[int, int] | None = None) -> Draft:
    """Native fp8: a scale for each tensor and input, or for each block."""
    draft = plain()
    draft.config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static" if block is None else "dynamic",
        "ignored_layers": ["lm_head"],
        **({} if block is None else {"weight_block_size": list(block)}),
    }

    def parts(out: int, into: int) -> dict[str, Entry]:
        weight: dict[str, Entry] = {"weight": ("F8_E4M3", (out, into))}
        if block is None:
            return {**weight, "weight_scale": ("F32", ()), "input_scale": ("F32", ())}
        return {
            **weight,
            "weight_scale_inv": ("F32", (-(-out // block[0]), -(-into // block[1]))),
        }

    return _replaced(draft, {name: parts(*size) for name, size in LINEARS.items()})


def compressed(kind: str = "pack-quantized") -> Draft:
    """As llm-compressor writes it: W4A16 in groups, or FP8 with dynamic inputs."""
    draft = plain()
    packed = kind == "pack-quantized"
    four = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
    }
    eight = {
        "num_bits": 8,
        "type": "float",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }
    inputs = None if packed else {**eight, "strategy": "token", "dynamic": True}
    draft.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": four if packed else eight,
                "input_activations": inputs,
            }
        },
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }

    def parts(out: int, into: int) -> dict[str, Entry]:
        if packed:
            return {
                "weight_packed": ("I32", (out, into // 8)),
                "weight_scale": ("BF16", (out, into // 32)),
                "weight_shape": ("I64", (2,)),
            }
        return {"weight": ("F8_E4M3", (out, into)), "weight_scale": ("BF16", (out, 1))}

    return _replaced(draft, {name: parts(*size) for name, size in LINEARS.items()})


def nvfp4() -> Draft:
    """NVFP4 of llm-compressor, with local scales of inputs."""
    draft = compressed("nvfp4-pack-quantized")
    arguments = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    draft.quantization["config_groups"]["group_0"] |= {
        "weights": {**arguments, "dynamic": False},
        "input_activations": {**arguments, "dynamic": "local"},
    }
    for name, (out, into) in LINEARS.items():
        del draft.tensors[f"{name}.weight"]
        draft.tensors |= {
            f"{name}.weight_packed": ("U8", (out, into // 2)),
            f"{name}.weight_scale": ("F8_E4M3", (out, into // 16)),
            f"{name}.weight_global_scale": ("F32", (1,)),
            f"{name}.input_global_scale": ("F32", (1,)),
        }
    return draft


def with_cache(draft: Draft, scheme: Any) -> Draft:
    """And with scales of keys and values, as compressed-tensors and native fp8 call them."""
    draft.quantization["kv_cache_scheme"] = scheme
    for number in range(2):
        for place, side in enumerate("kv"):
            name = f"model.layers.{number}.self_attn.{side}_scale"
            draft.tensors[name] = ("F32", ())
            draft.scalars[name] = 0.25 + number + place
    return draft


def fp8_kv() -> Draft:
    """Native fp8 with an fp8 KV cache."""
    return with_cache(fp8(), "static")


def compressed_kv() -> Draft:
    """FP8 of llm-compressor with an fp8 KV cache."""
    kept = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    return with_cache(compressed("float-quantized"), kept)
