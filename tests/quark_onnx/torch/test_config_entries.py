"""Entries of wrong types in config.json: an error of the package names each, or it is readable."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.decoded import decoded_reader
from quark_onnx.torch.checkpoints.layouts import layout_named, read_layout
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import Attention, KVCache, TorchConfig

_WRONG: list[Any] = [
    *(None, True, 3, -1.5, "text"),
    *([1], [None], [[]], [{}]),
    *({"a": 1}, {"a": {}}),
]
#: An entry is left out.
_GONE = object()
_Path = tuple[Any, ...]


def _written(layout: str, name: str) -> dict[str, Any]:
    spec = scheme(name)
    config = TorchConfig(spec, exclude=("lm_head",))
    if layout == "quark":
        config = config.with_(
            layers=(("a", scheme("nvfp4")), ("b.*", scheme("amdfp4"))),
            types=(("Conv2d", scheme("int8")),),
            kv_cache=KVCache(TensorSpec("fp8e4m3")),
            attention=Attention(TensorSpec("fp8e4m3"), TensorSpec("fp8e4m3")),
        )
    layers = {"a": spec, "b": spec}
    return layout_named(layout).quantization_config(layers, ["lm_head"], config)


def _paths(entry: Any, path: _Path = ()) -> Iterator[_Path]:
    yield path
    if isinstance(entry, dict):
        members = list(entry.items())
    elif isinstance(entry, list):
        members = list(enumerate(entry))
    else:
        members = []
    for key, member in members:
        yield from _paths(member, (*path, key))


def _changed(config: Any, path: _Path, value: Any) -> Any:
    """Return a configuration with another value at a path, or without the entry."""
    if not path:
        return value
    key, *inner = path
    result = copy.copy(config)
    if value is _GONE and not inner:
        del result[key]
    else:
        result[key] = _changed(config[key], tuple(inner), value)
    return result


def _is_refused(config: Any) -> bool:
    try:
        read_layout(config)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("quark", "int4_wo_32"),
        ("compressed-tensors", "int4_wo_32"),
        ("compressed-tensors", "fp8"),
        ("compressed-tensors", "nvfp4"),
        ("awq", "uint4_wo_32"),
        ("fp8", "fp8"),
        ("finegrained-fp8", "fp8"),
        ("oga", "uint4_wo_32"),
    ],
)
def test_entries_of_wrong_types(layout: str, name: str) -> None:
    config = _written(layout, name)
    assert not _is_refused(config)
    paths = list(_paths(config))
    refused = 0
    for path in paths:
        # no other error escapes
        refused += sum(_is_refused(_changed(config, path, value)) for value in _WRONG)
        if path:
            refused += _is_refused(_changed(config, path, _GONE))
    # the whole, and quant_method
    assert refused >= 2 * len(_WRONG)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), [1], r"quantization_config is \[1\]; it must be an object"),
        (("export",), "text", "config: export is 'text'; it must be an object"),
        (("export", "min_kv_scale"), "1", "min_kv_scale is '1'; it must be a number"),
        (("export", "kv_cache_group"), "k", "kv_cache_group is 'k'; it must be a list"),
        (("exclude",), "lm_head", "exclude is 'lm_head'; it must be a list of names"),
        (("layer_quant_config",), [1], r"layer_quant_config is \[1\]; it must be an"),
        (("layer_quant_config", "a"), 3, "layer_quant_config 'a' is 3; it must be an"),
        (
            ("global_quant_config", "weight", "group_size"),
            None,
            "group_size of weight is None; it must be a whole number",
        ),
        (("global_quant_config", "weight"), 4, "weight is 4; it must be an object"),
    ],
)
def test_errors_name_the_entry(path: _Path, value: Any, message: str) -> None:
    config = _written("quark", "int4_wo_32")
    with pytest.raises(ConfigError, match=message):
        read_layout(_changed(config, path, value))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_method": ["fp8"]}, r"quantized already \(\['fp8'\]\)"),
        (
            {"quant_method": "fp8", "weight_block_size": "128"},
            "weight_block_size is '128'; it must be a pair of rows and columns",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, None]},
            "it must be a pair of rows and columns",
        ),
        ({"quant_method": "gptq", "bits": 4.0}, "bits is 4.0; 2, 4 and 8 are decoded"),
        ({"quant_method": "gptq", "bits": [4]}, r"bits is \[4\]; 2, 4 and 8"),
    ],
)
def test_decoding_names_the_entry(
    entry: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    text = json.dumps({"quantization_config": entry})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        decoded_reader(tmp_path, torch.float32)
