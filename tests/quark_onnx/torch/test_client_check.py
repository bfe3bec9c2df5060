"""Clients that would refuse a checkpoint are named before it is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from quark_onnx.cli.dispatch import main
from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import LAYOUTS, layout_named
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.client_check import planned_checkpoint, refusals
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.checkpoint import read
from quark_onnx.torch.validate.clients import findings_of
from tests import torch_families
from tests.torch_models import llama, made, saved, tokens


def check_plan(source: Path, output: Path, config: TorchConfig, layout: str) -> None:
    """Compare the plan of a checkpoint with what is written."""
    opened = FloatCheckpoint(source)
    planned = planned_checkpoint(opened, config, layout_named(layout))
    quantize_checkpoint(
        source,
        tokens(),
        config,
        output,
        writing=Writing(layout=layout),
        progress=False,
    )
    written = read(output)
    assert planned.config == written.config
    found = {
        name: (tensor.dtype, tensor.shape) for name, tensor in planned.tensors.items()
    }
    assert found == {
        name: (tensor.dtype, tensor.shape) for name, tensor in written.tensors.items()
    }
    for client in ("vllm", "transformers"):
        rules = [
            {each.rule for each in findings_of(checkpoint, client)}
            for checkpoint in (planned, written)
        ]
        # values are not known before: scales of the KV cache that are all alike are none
        assert rules[0] - {"kv-scales-one"} == rules[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More outputs than are quantized for the plan, and no whole number of blocks."""
    config = llama(hidden_size=64, intermediate_size=416, attention_bias=True)
    folder = tmp_path_factory.mktemp("llama")
    return saved(made(config, torch.bfloat16), folder / "source")


@pytest.mark.parametrize("name", SCHEMES)
def test_the_plan_is_what_is_written(name: str, source: Path, tmp_path: Path) -> None:
    """A layout that refuses the plan refuses the run as well."""
    for layout in LAYOUTS:
        try:
            check_plan(source, tmp_path / layout, config_for(name), layout)
        except ConfigError:
            with pytest.raises(ConfigError):
                quantize_checkpoint(
                    source,
                    tokens(),
                    config_for(name),
                    tmp_path / f"{layout}-again",
                    writing=Writing(layout=layout),
                    progress=False,
                )


@pytest.mark.parametrize("layout", ["quark", "compressed-tensors"])
def test_the_plan_with_a_cache(layout: str, source: Path, tmp_path: Path) -> None:
    config = config_for("fp8", kv_cache="fp8")
    check_plan(source, tmp_path / "out", config, layout)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3_moe", "llama3.2", "opt"])
def test_the_plan_of_a_family(family: str, tmp_path: Path) -> None:
    model = made(torch_families.config_of(family))
    source = saved(model, tmp_path / "source")
    config = config_for("fp8", exclude=(torch_families.head_of(family),))
    check_plan(source, tmp_path / "out", config, "quark")


def test_fused_layers_of_two_schemes(source: Path) -> None:
    """vLLM fuses q, k and v; the layers, the reason and the cure are named."""
    config = config_for("int4_wo_32", layers=(("*.q_proj", "fp8"),))
    found = refusals(FloatCheckpoint(source), config, layout_named("quark"))
    assert [each.findings[0].rule for each in found] == ["quark-shards-differ"]
    text = str(found[0])
    assert "vLLM 0.33.0 refuses" in text and "give q, k, v" in text
    assert "model.layers.0.self_attn.{q_proj,k_proj,v_proj}" in text
    assert (
        refusals(FloatCheckpoint(source), config_for("fp8"), layout_named("quark"))
        == []
    )


def test_another_layout_is_named_if_a_client_reads_it(source: Path) -> None:
    opened = FloatCheckpoint(source)
    found = refusals(opened, config_for("int3_wo_32"), layout_named("quark"))
    layout = "--layout compressed-tensors"
    assert found and all(layout in each.alternatives for each in found)
    found = refusals(opened, config_for("amdfp4"), layout_named("quark"))
    assert found and not found[0].alternatives and "--layout" not in str(found[0])


#: Widths that 128 does not divide, and those that 64 does not divide either.
_WIDTHS = {"--scheme int4_wo_64": (192, 512), "--scheme int4_wo_32": (96, 160)}


@pytest.mark.parametrize("change", _WIDTHS)
def test_the_greatest_group_that_fits_is_named(change: str, tmp_path: Path) -> None:
    hidden, wide = _WIDTHS[change]
    sizes = {"hidden_size": hidden, "intermediate_size": wide}
    source = FloatCheckpoint(saved(made(llama(**sizes)), tmp_path / "float"))
    scheme = "int4_wo_128" if hidden > 128 else "int4_wo_64"
    (found,) = refusals(source, config_for(scheme), layout_named("quark"))
    assert found.findings[0].rule == "group-divides"
    assert found.alternatives == (change,) and f"; use {change}" in str(found)
    changed = config_for(change.split()[1])
    assert refusals(source, changed, layout_named("quark")) == []


def test_another_layout_with_another_group_is_named(tmp_path: Path) -> None:
    """Neither alone helps: 172 inputs have no groups, and vLLM's layout quark no channels."""
    source = saved(made(llama(intermediate_size=172)), tmp_path / "float")
    opened = FloatCheckpoint(source)
    found = refusals(opened, config_for("int4_wo_32"), layout_named("quark"))
    change = "--scheme int4_wo_per_channel --layout compressed-tensors"
    assert found and all(each.alternatives == (change,) for each in found)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"hidden_size": 192}, ["--scheme", "int4_wo_128"]),
        ({"intermediate_size": 172}, ["--scheme", "int4_wo_32"]),
        ({}, ["--scheme", "int4_wo_per_channel"]),
        ({}, ["--scheme", "int4_wo_32", "--layer", "lm_head=int8_per_channel"]),
        (
            {"hidden_size": 192},
            ["--scheme", "w_int4_per_group_sym", "--group-size=128"],
        ),
    ],
)
def test_what_a_client_refuses_is_not_called_good(
    settings: dict[str, int],
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line is a command whose checkpoint the client reads."""
    model = made(llama(**settings))
    for parameter in model.parameters():
        parameter.data *= 0.1  # a small divergence, which alone would be good
    source = saved(model, tmp_path / "float")
    out = tmp_path / "out"
    assert main(["llm", "ptq", str(source), "-o", str(out), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    (verdict,) = [line for line in lines if line.startswith("verdict   ")]
    assert verdict.startswith("verdict   poor: ") and "vLLM 0.33.0" in verdict
    assert "nothing is lost" in verdict and not validate(out, "vllm").right
    _, *words = shlex.split(lines[-1])
    assert main(words) == 0
    assert validate(out, "vllm").right
    assert "verdict   good: " in capsys.readouterr().out


@pytest.mark.parametrize("target", ["vllm-cuda", "ryzen-ai"])
def test_a_recipe_takes_the_greatest_group_that_fits(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 6}
    source = saved(made(llama(**sizes)), tmp_path / "float")
    out = tmp_path / "out"
    command = ["llm", "ptq", str(source), "-o", str(out), "--no-verdict"]
    assert main([*command, "--recipe", "fast", "--target", target]) == 0
    recipe = capsys.readouterr().out.splitlines()[1]
    assert "int4_wo_64 " in recipe and "int4_wo_128 does not fit" in recipe
    assert validate(out, "vllm").right


def test_the_command_warns_before_the_work(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["llm", "ptq", str(source), "-o", str(tmp_path / "out")]
    arguments += ["--no-verdict", "--scheme"]
    assert main([*arguments, "int3_wo_32"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "vLLM 0.33.0 refuses" in lines[0]
    assert "use --layout compressed-tensors" in lines[0]
    assert "takes about" in lines[1]
    assert main([*arguments, "int4_wo_32", "--overwrite"]) == 0
    assert "refuses" not in capsys.readouterr().err
