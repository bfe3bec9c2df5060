"""llm ptq ends with a verdict: sizes, divergence on held-out text, the worst layers, advice."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quark_onnx.cli.dispatch import main
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.scheme_clients import weight_bits
from quark_onnx.torch.pipelines import verdict as module
from quark_onnx.torch.pipelines.file_to_file import Writing
from quark_onnx.torch.pipelines.ptq import Text, ptq
from quark_onnx.torch.validate import validate
from tests.answers import check_described
from tests.torch_models import llama, logits, made, saved, tokens, with_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(6)).numpy())
    return saved(made(llama()), tmp_path / "float")


def test_figures_are_those_of_both_models(source: Path, tmp_path: Path) -> None:
    text = Text(str(tmp_path / "tokens.npy"), 4, 12)
    config = config_for("uint4_wo_32")
    found = ptq(
        source, text, config, tmp_path / "out", progress=False, verdict=True
    ).verdict
    assert found is not None
    # four windows to calibrate on; the two behind them are held out
    held_out = torch.cat(tokens(6)[4:])
    pair = [
        logits(load_checkpoint(folder), held_out)[:, :-1].double().log_softmax(-1)
        for folder in (source, tmp_path / "out")
    ]
    divergence = (pair[0].exp() * (pair[0] - pair[1])).sum(-1).mean()
    wanted = held_out[:, 1:, None]
    perplexities = [float(-each.gather(2, wanted).mean()) for each in pair]
    assert found.tokens == held_out.numel()
    assert found.divergence == pytest.approx(float(divergence), rel=1e-6)
    assert (found.perplexity_before, found.perplexity_after) == pytest.approx(
        tuple(np.exp(perplexities)), rel=1e-6
    )
    after = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safe*"))
    assert found.bytes_after == after
    assert found.bits == pytest.approx(8 * after / found.weights)


@pytest.mark.parametrize("layout", ["quark", "compressed-tensors", "awq"])
def test_bits_of_all_and_of_quantized_layers(layout: str, tmp_path: Path) -> None:
    model = made(llama(hidden_size=128, intermediate_size=256), torch.bfloat16)
    source = saved(model, tmp_path / "float")
    found = ptq(
        source,
        None,
        config_for("uint4_wo_32"),
        tmp_path / "out",
        writing=Writing(layout=layout),
        progress=False,
        verdict=True,
    ).verdict
    assert found is not None and found.quantized_bits is not None
    # compressed-tensors stores two numbers for the shape of each weight
    assert found.quantized_bits == pytest.approx(weight_bits("uint4_wo_32"), rel=0.002)
    assert found.bits > found.quantized_bits
    assert found.sentence().count("bits per weight of all layers") == 1
    assert f"{found.quantized_bits:.2f} of the quantized layers" in found.sentence()


def verdict_of(source: Path, out: Path, config: Any) -> Any:
    """The verdict on a checkpoint that is quantized without data."""
    return ptq(source, None, config, out, progress=False, verdict=True).verdict


@pytest.mark.parametrize("first", ["int4_wo_32", "uint4_wo_32", "mxfp4", "ptpc_fp8"])
def test_bits_of_a_checkpoint_that_is_quantized_again(
    first: str, tmp_path: Path
) -> None:
    """The weights of packed codes count, and not the words that hold them."""
    model = made(llama(hidden_size=128, intermediate_size=256), torch.bfloat16)
    source = saved(model, tmp_path / "float")
    ptq(source, None, config_for(first), tmp_path / "once", progress=False)
    again = verdict_of(tmp_path / "once", tmp_path / "twice", config_for("mxfp4"))
    direct = verdict_of(source, tmp_path / "direct", config_for("mxfp4"))
    assert again.quantized_bits == direct.quantized_bits == weight_bits("mxfp4")


@pytest.mark.parametrize("tied", [False, True])
def test_bits_of_a_quantized_head(tied: bool, tmp_path: Path) -> None:
    """A tied head has no tensor of its own in the float files, and counts as well."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 4096}
    model = made(llama(tie_word_embeddings=tied, **sizes), torch.bfloat16)
    source = saved(model, tmp_path / "float")
    layers = (("lm_head", "int8_per_channel"),)
    config = config_for("int4_wo_64", layers=layers, exclude=())
    found = verdict_of(source, tmp_path / "out", config)
    head, blocks = 128 * 4096, 2 * (128 * 128 * 3 + 3 * 128 * 256)
    wanted = (8 * head + weight_bits("int4_wo_64") * blocks) / (head + blocks)
    # one scale of 16 bits and a zero point for each of the head's outputs
    assert found.quantized_bits == pytest.approx(wanted, rel=0.03)


def test_worst_layers(source: Path, tmp_path: Path) -> None:
    worst = "model.layers.1.mlp.up_proj"
    config = config_for("int8_per_channel", layers=((worst, "uint2_wo_32"),))
    found = ptq(
        source, None, config, tmp_path / "out", progress=False, verdict=True
    ).verdict
    assert found is not None and len(found.worst) == 3
    assert found.worst[0][0] == worst
    model, quantized = load_checkpoint(source), load_checkpoint(tmp_path / "out")
    inputs: list[Any] = []
    model.get_submodule(worst).register_forward_hook(
        lambda _, given, output: inputs.append((given[0], output))
    )
    assert found.text == "that the float model has written" and found.tokens == 4 * 64
    logits(model, tokens()[0])
    x, y = inputs[0]
    error = (quantized.get_submodule(worst)(x) - y).square().mean() / y.square().mean()
    assert found.worst[0][1] == pytest.approx(float(error), rel=0.5)  # on other text
    assert found.worst[0][1] > 10 * found.worst[1][1]
    gate = worst.replace("up_proj", "gate_proj")  # runtimes fuse the two
    assert found.options == f"--layer {gate}=ptpc_fp8 --layer {worst}=ptpc_fp8"
    assert found.lines()[-1].startswith(f"try       {found.options}: ")


def test_models_that_do_not_fit_are_not_compared(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available", lambda: 1 << 10)
    config = config_for("mxfp4_weight_only")
    found = ptq(
        source, None, config, tmp_path / "out", progress=False, verdict=True
    ).verdict
    assert found is not None and found.divergence is None
    assert "0.0 MiB are free" in found.skipped and found.bytes_after > 0
    assert len(found.lines()) == 3


def test_a_model_that_cannot_be_compared_is_written(
    source: Path, tmp_path: Path
) -> None:
    text = Text(str(tmp_path / "tokens.npy"), 4, 1)  # windows of one token
    config = config_for("uint4_wo_32")
    found = ptq(
        source, text, config, tmp_path / "out", progress=False, verdict=True
    ).verdict
    assert found is not None and found.divergence is None
    assert found.skipped == "there is no text of two tokens or more"
    assert (tmp_path / "out" / "config.json").exists()


def test_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["llm", "ptq", str(source), "-o", str(out), "--scheme", "uint2_wo_32"]
    command += ["--layout", "compressed-tensors"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    [verdict] = [line for line in lines if line.startswith("verdict   ")]
    assert "poor: 0.3 MiB before, 0.1 MiB after: 8.73 bits" in verdict
    assert "much is lost" in verdict
    # the algorithms need data, which this run has not
    learn = (
        "--algorithm awq gptq --data TOKENS.npy: learn scales and rounding from data"
    )
    assert lines[-1] == f"try       {learn}"
    command[4] = str(tmp_path / "gptq")
    data = ["--data", str(tmp_path / "tokens.npy"), "--samples", "4", "--length", "12"]
    assert main([*command, *data, "--algorithm", "gptq", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_described(document)
    found = document["verdict"]
    assert found["tokens"] == 24 and len(found["worst"]) == 3
    # the printed command runs, with another algorithm and the data of this one
    program, *words = shlex.split(found["command"])
    assert program == "quark-onnx" and words.count("--algorithm") == 1
    assert words[words.index("--algorithm") :][1:3] == ["gptaq", "autoround"]
    assert main(words) == 0
    outcomes = json.loads(capsys.readouterr().out)["algorithms"]
    assert {each["algorithm"] for each in outcomes} == {"gptaq", "autoround"}


def test_a_small_loss_leads_to_the_validation(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SMALL", 100.0)
    out = str(tmp_path / "out put")
    assert main(["llm", "ptq", str(source), "-o", out, "--scheme", "ptpc_fp8"]) == 0
    program, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert [program, *words] == [
        *("quark-onnx", "llm", "validate", out, "--for", "vllm"),
    ]
    assert main(words) == 0


def test_no_verdict(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["llm", "ptq", str(source), "-o", "", "--scheme", "uint2_wo_32"]
    command[4] = str(tmp_path / "none")
    assert main([*command, "--no-verdict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] is None


@pytest.mark.parametrize("algorithm", ["awq", "rotation:r1=true"])
def test_layers_with_other_inputs_are_not_compared(
    algorithm: str, source: Path, tmp_path: Path
) -> None:
    text = Text(str(tmp_path / "tokens.npy"), 4, 12)
    config = config_for("uint4_wo_32").with_(algorithms=(algorithm,))
    found = ptq(source, text, config, tmp_path / "out", progress=False, verdict=True)
    assert found.verdict is not None and found.verdict.worst == ()
    name = algorithm.partition(":")[0]
    expected = (
        f"          layers are not compared one by one: {name} changed their inputs"
    )
    assert expected in found.verdict.lines()


_WORST = "model.layers.1.mlp.down_proj"
_DATA = ["--data", "tokens.npy", "--samples", "4", "--length", "12"]
_LEARNED = ["--algorithm", "autoround:steps=1"]
_RUNS = {
    "8 bits": ["--scheme", "ptpc_fp8"],
    "8 bits, data": ["--scheme", "fp8", *_DATA],
    "8 bits, compressed": ["--scheme", "fp8", "--layout", "compressed-tensors", *_DATA],
    "fp8": ["--scheme", "fp8", "--layout", "fp8", *_DATA],
    "finegrained": ["--scheme", "fp8", "--layout", "finegrained-fp8", *_DATA],
    "integers": ["--scheme", "int8", *_DATA],
    "4 bits": ["--scheme", "uint4_wo_32", *_DATA, *_LEARNED],
    "a layer": [
        *("--scheme", "int8_per_channel", "--layer", f"{_WORST}=uint2_wo_32"),
        *("--layout", "compressed-tensors"),
    ],
    "awq": ["--scheme", "uint4_wo_32", "--layout", "awq", *_DATA, *_LEARNED],
    "gguf": ["--scheme", "uint4_wo_32", "--export", "gguf", *_DATA, *_LEARNED],
}


@pytest.mark.parametrize("run", _RUNS)
def test_the_command_runs_and_changes_a_layer(
    run: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # every loss leads to a change
    monkeypatch.setattr(module, "SMALL", -1.0)
    with_tokenizer(source)
    command = ["llm", "ptq", str(source), "-o", "out", "--json", *_RUNS[run]]
    assert main(command) == 0
    before = json.loads(capsys.readouterr().out)
    worst = before["verdict"]["worst"][0]["layer"]
    _, *words = shlex.split(before["verdict"]["command"])
    assert main(words) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["specs"].get(worst) != before["specs"][worst]
    if run not in ("finegrained", "gguf"):  # not for vLLM
        found = validate(tmp_path / "out", "vllm")
        assert found.right, str(found)


def test_layers_without_an_option_get_no_command(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "SMALL", -1.0)
    options = ["--scheme", "uint4_wo_32", "--layout", "oga", *_DATA, *_LEARNED]
    assert main(["llm", "ptq", str(source), "-o", "out", *options]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "try       more bits for all weights or a layer"


def test_the_validation_is_that_of_the_client(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "SMALL", 100.0)
    command = ["llm", "ptq", str(source), "-o", "out", *_RUNS["finegrained"]]
    assert main(command) == 0
    _, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words == ["llm", "validate", "out", "--for", "transformers"]
    assert main(words) == 0


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("with_text", [False, True])
def test_damaged_float_tensors_are_named(
    name: str, with_text: bool, source: Path, tmp_path: Path
) -> None:
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    text = Text(str(tmp_path / "tokens.npy"), 4, 12) if with_text else None
    config = config_for("uint4_wo_32")
    found = ptq(
        source, text, config, tmp_path / "out", progress=False, verdict=True
    ).verdict
    assert found is not None and found.divergence is None and not found.advice
    reason = "of the float model holds numbers that are infinite or none"
    assert found.skipped == f"{name} {reason}"


def test_a_float_model_that_overflows(source: Path, tmp_path: Path) -> None:
    model = made(llama(), torch.float16)
    with torch.no_grad():
        model.model.norm.weight.fill_(60000)
        model.lm_head.weight.fill_(50)
    saved(model, source)
    text = Text(str(tmp_path / "tokens.npy"), 4, 12)
    config = config_for("uint4_wo_32")
    found = ptq(
        source, text, config, tmp_path / "out", progress=False, verdict=True
    ).verdict
    assert found is not None and found.divergence is None
    assert "the float model overflows in torch.float16" in found.skipped


def test_the_size_is_that_of_the_file_that_stays(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint in the output, sizes are those of the exported file."""
    with_tokenizer(source)
    out = tmp_path / "out"
    command = ["llm", "ptq", str(source), "-o", str(out), "--json"]
    assert main([*command, "--recipe", "fast", "--target", "llama.cpp"]) == 0
    found = json.loads(capsys.readouterr().out)["verdict"]
    assert [file.name for file in out.iterdir()] == ["model.gguf"]
    assert found["bytes"]["after"] == (out / "model.gguf").stat().st_size
    assert found["quantized_bits"] is None


def test_a_text_has_one_perplexity(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "many.npy", torch.cat(tokens(20)).numpy())
    command = ["llm", "ptq", str(source), "-o", str(tmp_path / "out"), "--length", "12"]
    command += ["--scheme", "uint4_wo_32", "--evaluate", str(tmp_path / "many.npy")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.count("perplexity ") == 1 and "on all of the text" in out
    assert "lm_head: a head or another part stays float unless --layer names it" in out
    assert "model.embed_tokens: stays float unless --layer names it" in out


def test_a_glob_without_a_match_shows_a_whole_name(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["llm", "ptq", str(source), "-o", str(tmp_path / "out")]
    command += ["--scheme", "uint4_wo_32", "--exclude", "model.layers.9.*"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert (
        "such as 'model.layers.0.self_attn.q_proj', with numbers from 0 to 1" in error
    )
