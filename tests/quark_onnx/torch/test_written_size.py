"""Sizes of quantized checkpoints follow from shapes, before anything is quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import layout_named
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader, size_of_files
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.scheme_clients import LAYOUT_NAMES, SCHEME_CLIENTS
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.written_size import written_bytes, written_tensors
from tests.torch_models import llama, made, saved, tokens

#: More rows than the predictor quantizes, in no multiple of its period.
WIDE = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4}
#: Scheme and layout of every client of ``llm search`` that reads checkpoints, with one size of
#: groups for each format.
PAIRS = sorted(
    {
        (name, layout)
        for name, clients in SCHEME_CLIENTS.items()
        for layouts in clients.values()
        for layout in layouts
        if layout in LAYOUT_NAMES and not name.endswith(("_wo_64", "_wo_128"))
    }
)


def check_prediction(
    source: Path, output: Path, scheme: str, layout: str, exclude: tuple[str, ...] = ()
) -> None:
    """Compare names, types and shapes with those in the files, and the sizes."""
    opened = FloatCheckpoint(source)
    config = config_for(scheme, exclude=(*opened.usually_float(), *exclude))
    found = written_tensors(opened, config, layout_named(layout))
    size = written_bytes(opened, config, layout_named(layout))
    quantize_checkpoint(
        source, tokens(), config, output, writing=Writing(layout=layout), progress=False
    )
    written = CheckpointReader(output)
    assert {
        name: (TYPES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in found.items()
    } == {name: (each.dtype, each.shape) for name, each in written.tensors.items()}
    # the header is padded to eight bytes, and its offsets have other digits in another order
    assert size == pytest.approx(size_of_files(written), abs=8 + 4 * len(found))


@pytest.mark.parametrize(("scheme", "layout"), PAIRS)
def test_the_predicted_tensors_are_written(
    scheme: str, layout: str, tmp_path: Path
) -> None:
    """The tensors of every scheme in every layout are known before the run."""
    model = made(llama(num_hidden_layers=1, **WIDE), torch.bfloat16)
    source = saved(model, tmp_path / "source")
    check_prediction(source, tmp_path / "out", scheme, layout)


def test_a_layout_that_refuses_a_layer_has_no_size(tmp_path: Path) -> None:
    """Blocks of 128 do not fill the 448 inputs of a layer, which the layout oga demands."""
    source = FloatCheckpoint(saved(made(llama(**WIDE)), tmp_path / "source"))
    config = config_for("uint4_wo_128", exclude=source.usually_float())
    with pytest.raises(
        ConfigError, match=r"down_proj has 448 inputs, which blocks of 128"
    ):
        written_bytes(source, config, layout_named("oga"))


#: Tied heads, transposed layers with biases, stacks of experts, and layers of other names.
FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "llama", "tie_word_embeddings": True, **WIDE},
    "gpt2": {"n_embd": 128, "n_layer": 1, "n_head": 4},
    "mixtral": {"num_local_experts": 4, **WIDE},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        **WIDE,
    },
    "jetmoe": {"kv_channels": 32, "num_local_experts": 4, **WIDE},
}


@pytest.mark.parametrize("scheme", ["uint4_wo_32", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, scheme: str, tmp_path: Path) -> None:
    """A tensor that is tied, stacked or converted is predicted as the writer stores it."""
    settings = {"model_type": family, **FAMILIES[family]}
    base = {"num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 96}
    config = _config(**base | settings)
    source = saved(made(config, torch.bfloat16), tmp_path / "source")
    check_prediction(source, tmp_path / "out", scheme, "quark")


def pickled(model: Any, folder: Path) -> Path:
    """Return a checkpoint in torch's own format, with tensors in float64."""
    saved(model, folder)
    (folder / "model.safetensors").unlink()
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def coded(model: Any, folder: Path) -> Path:
    """Return a checkpoint of 4-bit codes, which are decoded."""
    source = saved(model, folder.with_name("float"))
    config = config_for("int4_wo_32", exclude=FloatCheckpoint(source).usually_float())
    writing = Writing(layout="compressed-tensors")
    quantize_checkpoint(source, None, config, folder, writing=writing, progress=False)
    return folder


@pytest.mark.parametrize("source_of", [pickled, coded])
def test_float_layers_have_the_type_in_which_they_are_read(
    source_of: Any, tmp_path: Path
) -> None:
    """Files of a source may hold other types, or no safetensors headers at all."""
    model = made(llama(num_hidden_layers=1, **WIDE), torch.bfloat16)
    source = source_of(model, tmp_path / "source")
    check_prediction(
        source, tmp_path / "out", "int4_wo_32", "quark", exclude=("*q_proj",)
    )


def _config(model_type: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **settings)
