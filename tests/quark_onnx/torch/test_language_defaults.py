"""Layers that stay float at the defaults, in files and in memory, and parameters that transformers
stores elsewhere.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from quark_onnx.cli import main
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import Writer
from quark_onnx.torch.models.checkpoint_names import DiskNames
from quark_onnx.torch.models.heads import usually_float
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.models.structure import blocks_of, layers_of
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import config_for
from tests.torch_models import saved

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
SCRIPT = ROOT / "examples/torch/language_modeling/llm_ptq/quantize_quark.py"
pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the benchmarks are not part of this distribution"
)

#: Options of the command line, and which layers of LLaVA they quantize beside those of the blocks,
#: or leave float.
OPTIONS: dict[str, tuple[list[str], Callable[[str, bool], bool]]] = {
    "the defaults": ([], lambda name, usual: not usual),
    "exclude adds": (
        ["--exclude", "*.down_proj"],
        lambda name, usual: not usual and "down_proj" not in name,
    ),
    "each exclude adds": (
        ["--exclude", "*.down_proj", "--exclude", "*.0.self_attn.*"],
        lambda name, usual: (
            not usual and "down_proj" not in name and ".0.self_attn." not in name
        ),
    ),
    "a head that is named": (
        ["--layer", "lm_head=uint4_wo_32"],
        lambda name, usual: not usual or name == "lm_head",
    ),
    "a tower that is named": (
        ["--layer", "*vision_tower*mlp*=uint4_wo_32"],
        lambda name, usual: not usual or ("vision_tower" in name and "mlp" in name),
    ),
    "a glob that matches language, too": (
        ["--layer", "*k_proj=uint4_wo_32"],
        lambda name, usual: not usual,
    ),
}
#: Families with a part that has more weights than the decoder, its layers in the configuration, and
#: the decoder.
TOWERS = {
    "llava": ("vision_config.num_hidden_layers", "model.language_model.layers"),
    "gemma3": ("vision_config.num_hidden_layers", "model.language_model.layers"),
    "mistral3": ("vision_config.num_hidden_layers", "model.language_model.layers"),
    "qwen2_5_vl": ("vision_config.depth", "model.language_model.layers"),
    "qwen3_vl": ("vision_config.depth", "model.language_model.layers"),
    "whisper": ("encoder_layers", "model.decoder.layers"),
    "bart": ("encoder_layers", "model.decoder.layers"),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_tiny_models")


def quantized_of(folder: Path) -> set[str]:
    """The names of the layers that are quantized in a checkpoint."""
    return {
        name
        for name, each in load_checkpoint(folder).named_modules()
        if isinstance(each, QuantizedLayer)
    }


@pytest.mark.parametrize("options", OPTIONS)
def test_options_add_to_the_layers_that_stay_float(
    options: str, tiny: Any, tmp_path: Path
) -> None:
    """Heads and all that reads no text stay float at the defaults. ``--exclude`` adds to them,
    however often it is given, and replaces none; only a ``--layer`` that matches such layers alone
    asks for them.
    """
    given, expected = OPTIONS[options]
    model = tiny.tiny_model("llava")
    source, output = saved(model, tmp_path / "model"), tmp_path / "out"
    assert (
        main(
            [
                "llm",
                "ptq",
                str(source),
                "-o",
                str(output),
                "--scheme",
                "int4_wo_32",
                "--quiet",
                *given,
            ]
        )
        == 0
    )
    usual = {
        name
        for name in layers_of(model)
        if not name.startswith("model.language_model.layers.")
    }
    assert {"lm_head", "model.multi_modal_projector.linear_1"} < usual
    assert quantized_of(output) == {
        name for name in layers_of(model) if expected(name, name in usual)
    }


@pytest.mark.slow
def test_the_script_leaves_the_same_layers_float(tiny: Any, tmp_path: Path) -> None:
    """The script with AMD Quark's options has the same defaults for a family without a template."""
    model = tiny.tiny_model("llava")
    source, output = saved(model, tmp_path / "model"), tmp_path / "out"
    options = [
        "--model_dir",
        source,
        "--output_dir",
        output,
        "--quant_scheme",
        "int4_wo_32",
        "--skip_evaluation",
    ]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    language = {
        name
        for name in layers_of(model)
        if name.startswith("model.language_model.layers.")
    }
    assert quantized_of(output) == language


@pytest.mark.parametrize("family", TOWERS)
def test_the_decoder_is_found_where_another_part_has_more_weights(
    family: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are those of the decoder that transformers names, not of the list with most
    weights: a tower or an encoder may be several times as large.
    """
    depth, decoder = TOWERS[family]
    monkeypatch.setitem(
        tiny.SETTINGS, family, tiny.SETTINGS.get(family, {}) | {depth: 12}
    )
    with torch.device("meta"):
        model = tiny.tiny_model(family)
    lists = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.ModuleList)
    }
    sizes = {
        name: sum(weight.numel() for weight in each.parameters())
        for name, each in lists.items()
    }
    assert max(sizes, key=lambda name: sizes[name]) != decoder
    assert list(blocks_of(model)) == [
        f"{decoder}.{index}" for index in range(len(lists[decoder]))
    ]


@pytest.mark.parametrize(
    "family", ["llava", "gemma3", "qwen2_5_vl", "gemma4_text", "whisper", "t5", "bart"]
)
@pytest.mark.parametrize(
    "recipe", [("fp8", ()), ("uint4_wo_32", ("gptq",))], ids=["fp8", "gptq"]
)
def test_a_model_in_memory_becomes_what_its_files_become(
    family: str, recipe: tuple[str, tuple[str, ...]], tiny: Any, tmp_path: Path
) -> None:
    """quantize_model and quantize_checkpoint quantize the same layers to the same codes, with the
    same notes, where layers lie outside of the blocks, too; the defaults are those of
    ``usually_float`` for both.
    """
    name, algorithms = recipe
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    assert usually_float(model) == FloatCheckpoint(source).usually_float()
    config = config_for(name, exclude=usually_float(model)).with_(algorithms=algorithms)
    from_files = quantize_checkpoint(
        source, data, config, tmp_path / "out", progress=False
    )
    in_memory = quantize_model(model, data, config, progress=False)
    assert set(in_memory.quantized) == set(from_files.quantized)
    assert in_memory.kept == from_files.kept
    assert in_memory.notes == from_files.notes
    reopened = load_checkpoint(tmp_path / "out")
    for layer in in_memory.quantized:
        for key, tensor in model.get_submodule(layer).state_dict().items():
            assert torch.equal(
                tensor, reopened.get_submodule(layer).state_dict()[key]
            ), f"{layer}.{key}"


@pytest.mark.parametrize(
    "recipe", [("fp8", ()), ("uint4_wo_32", ("gptq",)), ("mxfp4", ())], ids=str
)
@pytest.mark.parametrize("family", ["olmo_hybrid", "marian"])
def test_what_transformers_saved_is_read_and_written_so_that_it_loads(
    family: str, recipe: tuple[str, tuple[str, ...]], tiny: Any, tmp_path: Path
) -> None:
    """transformers may store a parameter under another name, split or joined, or compute it and not
    save it at all. Whatever it saved is found, and what is written loads again: float parameters to
    the bit, quantized ones near the logits of the float model. No note says that a tensor is
    missing.
    """
    name, algorithms = recipe
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    config = config_for(name, exclude=FloatCheckpoint(source).usually_float()).with_(
        algorithms=algorithms
    )
    report = quantize_checkpoint(source, data, config, tmp_path / "out", progress=False)
    reopened = load_checkpoint(tmp_path / "out")
    assert report.quantized
    floats = {
        key: each
        for key, each in model.named_parameters()
        if key.rpartition(".")[0] not in report.quantized
    }
    assert floats
    found = dict(reopened.named_parameters()) | dict(reopened.named_buffers())
    assert not [note for note in report.notes if "no tensor" in note]
    for key, tensor in floats.items():
        assert torch.equal(found[key], tensor), key
    with torch.no_grad():
        expected, computed = (
            tiny.logits_of(each(**data[0])) for each in (model, reopened)
        )
    assert (
        0
        < float((computed - expected).norm() / expected.norm())
        < {"fp8": 0.3, "uint4_wo_32": 0.6}.get(name, 1.2)
    )


def test_two_tensors_of_one_name_are_an_error(tmp_path: Path) -> None:
    """A file with two tensors of one name cannot be read: the second is refused by name, and
    nothing is left behind.
    """
    with (
        pytest.raises(ModelError, match=r"two tensors of the name a\.weight"),
        Writer(tmp_path / "out") as writer,
    ):
        writer.add("a.weight", torch.ones(2))
        writer.add("a.weight", torch.zeros(2))
    assert not list(tmp_path.iterdir())


class _Mixture(torch.nn.Module):
    """A model whose checkpoints have single experts without a gate, as transformers converts
    Nemotron's.
    """

    base_model_prefix = "model"


def test_experts_without_a_gate_keep_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In files, the layers of an expert have the names that the conversions of its family have for
    each side.
    """
    from transformers import conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    sides = [
        WeightConverter(
            source_patterns=f"mixer.experts.*.{side}_proj.weight",
            target_patterns=f"mixer.experts.{side}_proj",
            operations=[MergeModulelist(dim=0)],
        )
        for side in ("up", "down")
    ]
    for mapping in (sides, sides[::-1]):
        monkeypatch.setattr(
            conversion_mapping,
            "get_model_conversion_mapping",
            lambda *_, own=mapping, **__: own,
        )
        names = DiskNames(_Mixture())
        for side in ("up", "down"):
            name = f"model.layers.0.mixer.experts.3.{side}_proj.weight"
            assert names(name) == name
