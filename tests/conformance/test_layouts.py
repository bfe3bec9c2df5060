"""What every registered checkpoint layout promises: a written model comes back as it was."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.layouts import (
    LAYOUTS,
    check_config,
    layout_named,
    read_layout,
)
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.cases import loop_over
from tests.torch_models import llama, logits, made, tokens

HELD = [
    (name, scheme)
    for name, layout in LAYOUTS.items()
    for scheme in SCHEMES
    if not layout().refusal(SCHEMES[scheme])
]
every_layout = pytest.mark.parametrize("name", LAYOUTS)


def config_of(layout: str, scheme: str) -> TorchConfig:
    config = TorchConfig(SCHEMES[scheme], exclude=("lm_head",))
    return layout_named(layout).adapted(config)


@cache
def model_with(config: TorchConfig) -> Any:
    """A quantized model of one block; rows are whole groups of every scheme."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    model = made(llama(**sizes))
    quantize_model(model, tokens(), config, progress=False)
    return model


def first_scheme(layout: str) -> str:
    return next(scheme for name, scheme in HELD if name == layout)


def layers_of(model: Any) -> dict[str, QuantizedLayer]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def check_equal_weights(layer: QuantizedLayer, found: Any, scheme: str) -> None:
    expected = layer.quantized.dequantize()
    # compressed-tensors has the inverse of the global scale of NVFP4
    tolerance = 3e-7 if scheme == "nvfp4" else 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


# Tensors


@pytest.mark.parametrize(("name", "scheme"), HELD)
def test_stored_tensors_are_the_weight(name: str, scheme: str) -> None:
    layout = layout_named(name)
    config = config_of(name, scheme)
    layers = layers_of(model_with(config))
    specs = {key: layer.spec for key, layer in layers.items()}
    read, reader = read_layout(layout.quantization_config(specs, ["lm_head"], config))
    assert layers
    for key, layer in layers.items():
        assert layer.quantized is not None
        parts = layout.tensors(layer, key)
        again = layout.tensors(layer, key)
        assert parts.keys() == again.keys()
        assert all(raw(parts[end]) == raw(again[end]) for end in parts)
        stored = {end: parts[end] for end in parts if end in layout.parts}
        spec = read.spec_of(key, layer.origin)
        dtype = layer.quantized.dtype
        restored = reader.restored(stored, spec, layer.shape, dtype)
        check_equal_weights(layer, restored.dequantize(), scheme)


# Folders


@every_layout
def test_a_written_model_is_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    scheme = first_scheme(name)
    config = config_of(name, scheme)
    model = model_with(config)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    write_checkpoint(model, config, tmp_path / "out", layout=name)
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    loaded = load_checkpoint(tmp_path / "out")
    layers = layers_of(loaded)
    assert layers.keys() == layers_of(model).keys()
    for key, layer in layers_of(model).items():
        check_equal_weights(layer, layers[key].quantized.dequantize(), scheme)
    assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))


@every_layout
def test_the_configuration_names_the_layout(name: str, tmp_path: Path) -> None:
    config = config_of(name, first_scheme(name))
    write_checkpoint(model_with(config), config, tmp_path / "out", layout=name)
    text = (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    found = json.loads(text)["quantization_config"]
    assert found["quant_method"] == LAYOUTS[name].method
    read, layout = read_layout(found)
    assert layout.method == LAYOUTS[name].method
    assert read.default.weight is not None


@every_layout
def test_the_next_folder_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    config = config_of(name, first_scheme(name))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        write_checkpoint(model_with(config), config, folder, layout=name)
    one, two = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in folders
    )
    assert one == two
    assert sorted(tmp_path.iterdir()) == folders, "nothing is left beside them"


class _FullDisk:
    """A tokenizer that cannot be written; it is the last part of a checkpoint."""

    def save_pretrained(self, folder: Path) -> None:
        raise OSError(28, "No space left on device")


@every_layout
def test_a_failure_leaves_no_folder(name: str, tmp_path: Path) -> None:
    config = config_of(name, first_scheme(name))
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(
            model_with(config),
            config,
            tmp_path / "out",
            layout=name,
            tokenizer=_FullDisk(),  # type: ignore[arg-type]
        )
    assert list(tmp_path.iterdir()) == []


@every_layout
def test_a_folder_with_files_is_left_alone(name: str, tmp_path: Path) -> None:
    config = config_of(name, first_scheme(name))
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="empty"):
        write_checkpoint(model_with(config), config, tmp_path, layout=name)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# What it does not hold


@loop_over("scheme", {scheme: scheme for scheme in SCHEMES})
@every_layout
def test_a_scheme_without_a_place_is_refused(name: str, scheme: str) -> None:
    if (name, scheme) in HELD:
        return
    config = TorchConfig(SCHEMES[scheme], exclude=("lm_head",))
    with pytest.raises(
        ConfigError, match=f"no place in a checkpoint of the layout '{name}': "
    ) as error:
        check_config(layout_named(name), config)
    others = [other for other, held in HELD if held == scheme]
    message = str(error.value)
    assert all(other in message for other in others)


@every_layout
def test_settings_of_another_layout_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="pack_method is 'sideways'"):
        layout_named(name, pack_method="sideways")
    with pytest.raises(ConfigError, match="weight_format is 'imagined'"):
        layout_named(name, weight_format="imagined")


# The table


@every_layout
def test_it_has_a_name_and_a_description(name: str) -> None:
    layout = LAYOUTS[name]
    assert layout.name == name and type(layout_named(name)) is layout
    assert layout.method and layout.parts
    assert (inspect.getdoc(layout) or "").partition("\n")[0].endswith(".")


def test_the_schemes_without_any_layout_are_those_of_blocks_with_one_exponent() -> None:
    assert set(SCHEMES) - {scheme for _, scheme in HELD} == {"bfp16", "mx6", "mx9"}


def test_an_unknown_name_finds_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown layout 'awk'; did you mean 'awq'"):
        layout_named("awk")
    with pytest.raises(ConfigError, match="quant_method is 'nobodys'; this reads "):
        read_layout({"quant_method": "nobodys"})
