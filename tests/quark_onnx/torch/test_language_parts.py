"""Families of transformers from file to file: their language part is quantized, and nothing else
unless asked for.
"""

from __future__ import annotations

import importlib
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from quark_onnx.cli import main
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.structure import blocks_of
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import config_for
from tests.torch_models import llama, made, saved, tokens

if TYPE_CHECKING:
    from quark_onnx.torch.pipelines.report import TorchReport

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the benchmarks are not part of this distribution"
)

#: By model type: what the names of quantized layers begin with.
FAMILIES: dict[str, tuple[str, ...]] = {
    "gemma3": ("model.language_model.layers.",),
    "qwen2_vl": ("model.language_model.layers.",),
    "qwen2_5_vl": ("model.language_model.layers.",),
    "qwen3_vl": ("model.language_model.layers.",),
    "mistral3": ("model.language_model.layers.",),
    "llava": ("model.language_model.layers.",),
    "llama4": ("language_model.model.layers.",),
    "gemma4_text": ("model.layers.", "model.per_layer_model_projection"),
    "whisper": ("model.encoder.layers.", "model.decoder.layers."),
    "t5": ("encoder.block.", "decoder.block."),
    "bart": ("model.encoder.layers.", "model.decoder.layers."),
}
#: The greatest finite number of float8_e4m3fn.
FP8_MAX = 448.0


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_tiny_models")


def quantized(source: Path, config: TorchConfig, data: Any) -> tuple[Path, TorchReport]:
    output = source.parent / "out"
    return output, quantize_checkpoint(source, data, config, output, progress=False)


def greatest_inputs(model: Any, data: list[dict[str, Any]]) -> dict[str, float]:
    """The greatest magnitude that each linear layer of a float model reads, recorded by hooks."""
    found = dict[str, float]()

    def hook(name: str) -> Any:
        def record(module: Any, args: tuple[Any, ...]) -> None:
            found[name] = max(found.get(name, 0.0), float(args[0].abs().max()))

        return record

    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear)
    }
    hooks = [
        each.register_forward_pre_hook(hook(name)) for name, each in layers.items()
    ]
    with torch.no_grad():
        for batch in data:
            model(**batch, use_cache=False)
    for each in hooks:
        each.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_of_the_language_part(
    family: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the defaults, fp8 quantizes the language part alone, wherever its layers lie: those
    outside of the list of blocks are measured like the others. Towers, projectors and heads keep
    their bits, and the result runs.
    """
    # transformers 5.24 runs Llama4ForConditionalGeneration only if the output of its language model
    # has this field
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    usual = FloatCheckpoint(source).usually_float()
    output, report = quantized(source, config_for("fp8", exclude=usual), data)
    assert report.quantized and all(
        name.startswith(FAMILIES[family]) for name in report.quantized
    )
    for start in FAMILIES[family]:
        assert any(name.startswith(start) for name in report.quantized)
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(output / "model.safetensors"),
    )
    codes = {
        key for key, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn
    }
    assert len(codes) == len(report.quantized)
    for key in before.keys() & after.keys() - codes:
        assert torch.equal(before[key], after[key]), key
    assert not {key for key in before.keys() - after.keys() if ".experts." not in key}
    # Experts share the greatest scale of their block.
    greatest = {
        name: each
        for name, each in greatest_inputs(model, data).items()
        if ".experts." not in name
    }
    reopened = load_checkpoint(output)
    measured = {
        name: each
        for name, each in reopened.named_modules()
        if name in report.quantized and name in greatest
    }
    assert measured
    for name, layer in measured.items():
        assert float(layer.input.scale) == pytest.approx(
            greatest[name] / FP8_MAX, rel=1e-3
        ), name
    with torch.no_grad():
        expected, found = (
            tiny.logits_of(each(**data[0])) for each in (model, reopened)
        )
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize(
    "family",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "git", "speech_to_text"],
)
def test_blocks_are_those_of_the_decoder(family: str, tiny: Any) -> None:
    """The blocks are the decoder's, even where a tower or an encoder has a list with as many
    weights, or more.
    """
    model = tiny.tiny_model(family)
    blocks = blocks_of(model)
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    own = sum(
        each.numel()
        for block in blocks.values()
        for each in block.parameters()
        if each.ndim > 1
    )
    greatest = max(
        sum(each.numel() for each in found.parameters() if each.ndim > 1)
        for found in lists
    )
    assert greatest >= own, "the family shows nothing"
    assert not any(
        word in next(iter(blocks))
        for word in ("vision", "visual", "image", "encoder.layers.0.conv")
    )
    head = model.get_output_embeddings()
    reached = set[str]()
    hooks = [
        block.register_forward_hook(lambda *_, name=name: reached.add(name))
        for name, block in blocks.items()
    ]
    with torch.no_grad():
        logits = tiny.logits_of(model(**tiny.samples(model)[0]))
    for hook in hooks:
        hook.remove()
    assert reached == set(blocks) and logits.shape[-1] == head.weight.shape[0]


#: By case: options, the globs of layers that stay float, and those of layers that are quantized.
OPTIONS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "nothing": ([], ["lm_head"], ["*.down_proj", "*.q_proj"]),
    "exclude": (["--exclude", "*.down_proj"], ["lm_head", "*.down_proj"], ["*.q_proj"]),
    "exclude the head": (["--exclude", "lm_head"], ["lm_head"], ["*.q_proj"]),
    "layer": (["--layer", "lm_head=mxfp4"], [], ["lm_head", "*.q_proj"]),
    "layer by a glob": (["--layer", "*_head=mxfp6_e2m3"], [], ["lm_head", "*.q_proj"]),
    "layers, the head among them": (
        ["--layer", "*=mxfp6_e2m3"],
        ["lm_head"],
        ["*.q_proj"],
    ),
    "both": (
        ["--layer", "lm_head=mxfp4", "--exclude", "lm_head"],
        ["lm_head"],
        ["*.q_proj"],
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_exclude_adds_to_the_defaults(
    case: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``--exclude`` adds to what stays float at the defaults. ``--layer`` asks for layers that
    usually stay float where its glob matches no others.
    """
    options, floats, quantized_ones = OPTIONS[case]
    source = saved(made(llama()), tmp_path / "model")
    output = tmp_path / "out"
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(output),
        "--scheme",
        "mxfp4",
        "--json",
        *options,
    ]
    assert main(command) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    for glob in floats:
        assert not [name for name in found["quantized"] if fnmatchcase(name, glob)]
    for glob in quantized_ones:
        assert [name for name in found["quantized"] if fnmatchcase(name, glob)]
    after = load_file(output / "model.safetensors")
    for name in [
        name
        for name in found["float"]
        if any(fnmatchcase(name, glob) for glob in floats)
    ]:
        assert after[f"{name}.weight"].is_floating_point()


@pytest.mark.parametrize("algorithms", [(), ("gptq",)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_measured_where_it_is_asked_for(
    algorithms: tuple[str, ...], tied: bool, tmp_path: Path
) -> None:
    """A layer after the blocks has the scale of what the float model lets it read, in memory and
    from file to file.
    """
    model = made(llama(tie_word_embeddings=tied))
    data = [{"input_ids": each} for each in tokens()]
    source = saved(model, tmp_path / "model")
    expected = greatest_inputs(model, data)["lm_head"] / FP8_MAX
    config = TorchConfig(scheme("fp8"), algorithms=algorithms)
    output, report = quantized(source, config, data)
    assert "lm_head" in report.quantized
    quantize_model(model, data, config, progress=False)
    for each in (model, load_checkpoint(output)):
        assert float(each.lm_head.input.scale) == pytest.approx(expected, rel=1e-3)
    with torch.no_grad():
        assert torch.equal(
            model(**data[0]).logits, load_checkpoint(output)(**data[0]).logits
        )


def test_a_layer_outside_of_the_blocks_that_is_not_reached_stays_float(
    tiny: Any, tmp_path: Path
) -> None:
    """What the data does not reach has no scale: outside of the blocks it stays float, with a note
    that names it.
    """
    model = tiny.tiny_model("gemma3")
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    asked = "model.vision_tower.*.q_proj"
    usual = FloatCheckpoint(source).usually_float([asked])
    config = config_for("fp8", exclude=usual)
    output, report = quantized(source, config, data)
    towers = {name for name in report.kept if fnmatchcase(name, asked)}
    assert towers and not [name for name in report.quantized if "vision" in name]
    assert {
        note.partition(" ")[0] for note in report.notes if "stays float" in note
    } == towers
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(output / "model.safetensors"),
    )
    assert all(
        torch.equal(before[key], after[key]) for key in before if "vision" in key
    )
    in_memory = quantize_model(model, data, config, progress=False)
    assert set(in_memory.quantized) == set(report.quantized)
    listed = json.loads((output / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]["exclude"]
    for name in towers:  # files call towers otherwise
        assert any(each.endswith(name.partition("tower.")[2]) for each in listed)


@pytest.mark.parametrize("family", ["hrm_text", "xlm"])
def test_a_model_that_cannot_be_walked_is_measured_whole(
    family: str, tiny: Any, tmp_path: Path
) -> None:
    """A model that does not run its blocks once, one after the other, has the scales that it has in
    memory.
    """
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    config = config_for("fp8", exclude=FloatCheckpoint(source).usually_float())
    output, report = quantized(source, config, data)
    assert [
        note
        for note in report.notes
        if note.startswith("all weights were in memory at once: ")
    ]
    expected = {
        name: each / FP8_MAX for name, each in greatest_inputs(model, data).items()
    }
    reopened = load_checkpoint(output)
    assert report.quantized
    for name in report.quantized:
        assert float(reopened.get_submodule(name).input.scale) == pytest.approx(
            expected[name], rel=1e-3
        ), name
    with pytest.raises(ModelError, match=r"layers\.0|ffns\.1"):
        again = tmp_path / "again"
        quantize_checkpoint(
            source, data, config.with_(algorithms=("gptq",)), again, progress=False
        )


#: By model type: how transformers stores what the model has under other names.
STORED_OTHERWISE = {
    "olmo_hybrid": "three convolutions are joined",
    "hrm_text": "fused projections are split",
    "step3p7": "the attention of the vision tower is fused",
    "molmo2": "projections of unequal sizes are split",
    "inkling2_text": "the rows of stacked experts are interleaved",
    "camembert": "the head comes first, and is stored as the embedding",
}


@pytest.mark.parametrize("family", STORED_OTHERWISE)
def test_what_transformers_saves_is_read(
    family: str, tiny: Any, tmp_path: Path
) -> None:
    """Whatever names transformers gives to the tensors that it saves, each parameter is found: the
    float checkpoint computes the very logits of the model, and the quantized one has every tensor
    and loads again.
    """
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    checkpoint = FloatCheckpoint(source)
    output, report = quantized(
        source, config_for("fp8", exclude=checkpoint.usually_float()), data
    )
    assert not [note for note in report.notes if "no tensor" in note]
    with torch.no_grad():
        expected, read, found = (
            tiny.logits_of(each(**data[0]))
            for each in (model, load_checkpoint(source), load_checkpoint(output))
        )
    assert torch.equal(read, expected)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.3


def test_a_tower_that_is_asked_for_and_not_reached_stays_float(
    tiny: Any, tmp_path: Path
) -> None:
    """A layer outside of the blocks that the data does not reach stays float with a note.

    The model is not refused.
    """
    model = tiny.tiny_model("llava")
    source = saved(model, tmp_path / "model")
    output, report = quantized(source, config_for("fp8"), tiny.samples(model))
    tower = [
        name
        for name, each in model.named_modules()
        if "vision" in name and isinstance(each, torch.nn.Linear)
    ]
    assert tower and not any(name in report.quantized for name in tower)
    for name in tower:
        assert (
            f"{name} lies outside of the blocks, and was not run on the data: it stays float"
            in report.notes
        )
        assert name in report.kept
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(output / "model.safetensors"),
    )
    for key in (key for key in before if "vision" in key):
        assert torch.equal(before[key], after[key])


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("llama", "lm_head"),
        ("bert", "cls.predictions.transform.dense"),
        ("fsmt", "encoder"),
    ],
)
def test_layers_outside_of_the_blocks_are_measured(
    family: str, layer: str, tiny: Any, tmp_path: Path
) -> None:
    """A layer in front of the blocks or behind them gets the scale of what it reads in the float
    model.
    """
    model = tiny.tiny_model(family)
    data = tiny.samples(model)
    source = saved(model, tmp_path / "model")
    usually = FloatCheckpoint(source).usually_float()
    # the head of BERT has a layer of its own in front of the vocabulary
    exclude = [each for each in usually if "lm_head" not in each and "cls" not in each]
    output, report = quantized(
        source, TorchConfig(scheme("fp8"), exclude=tuple(exclude)), data
    )
    greatest = greatest_inputs(model, data)
    found = {
        name: each
        for name, each in load_checkpoint(output).named_modules()
        if name in report.quantized
    }
    outside = [name for name in found if layer in name]
    assert outside
    for name in outside:
        assert float(found[name].input.scale) == pytest.approx(
            greatest[name] / FP8_MAX, rel=1e-3
        ), name


def test_towers_have_no_cache(tiny: Any, tmp_path: Path) -> None:
    """A tower's keys and values, which stay float, are not noted: nobody caches them."""
    model = tiny.tiny_model("llava")
    source, data = saved(model, tmp_path / "model"), tiny.samples(model)
    usual = FloatCheckpoint(source).usually_float()
    config = config_for("fp8", kv_cache="fp8", exclude=usual)
    _, report = quantized(source, config, data)
    assert any(name.endswith("k_proj") for name in report.kept)
    assert not any("stays float" in note for note in report.notes)
