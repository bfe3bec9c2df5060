"""ptq, and the command line above it: what is said beforehand, what is done once, what it cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.cli import main
from quark_onnx.torch.checkpoints import float_checkpoint
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.models.heads import heads_of
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.estimate import Estimate
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import Text, config_for, ptq
from tests import torch_families
from tests.torch_models import VOCABULARY, llama, logits, made, saved, tokens


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(6)).numpy())
    return saved(made(llama()), tmp_path / "source")


def test_ptq_says_what_it_takes_and_what_it_cost(source: Path, tmp_path: Path) -> None:
    text, said = (
        Text(str(tmp_path / "tokens.npy"), 4, 12),
        list[tuple[Estimate, bool]](),
    )

    def announced(expected: Estimate) -> None:
        said.append((expected, (tmp_path / "out").exists()))

    found = ptq(
        source,
        text,
        config_for("int8"),
        tmp_path / "out",
        evaluate=text,
        progress=False,
        announce=announced,
    )
    assert said == [(found.estimate, False)]
    assert (
        found.before and found.after and 0 < abs(found.after / found.before - 1) < 0.5
    )
    written = sum(
        file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")
    )
    assert found.estimate.disk == pytest.approx(written, rel=0.15)


def test_the_command_makes_the_model_once_and_says_beforehand_what_it_takes(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made_ones = list[Any]()
    make = float_checkpoint.skeleton_of

    def counted(*given: Any, **named: Any) -> Any:
        made_ones.append(make(*given, **named))
        return made_ones[-1]

    monkeypatch.setattr(float_checkpoint, "skeleton_of", counted)
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "fp8",
    ]
    command += [
        "--data",
        str(tmp_path / "tokens.npy"),
        "--samples",
        "6",
        "--length",
        "12",
        "--no-verdict",  # which loads the float model once more
    ]
    assert main(command) == 0
    assert len(made_ones) == 1
    captured = capsys.readouterr()
    # What the process holds already counts, so the unit is not known: this one has run other tests.
    assert re.match(
        r"quark-onnx: quantization takes about [1-9][\d.]* [MG]iB of memory, \d+ MiB"
        r" of disk\n",
        captured.err,
    )
    assert "14 layers are quantized, 2 stay float" in captured.out
    command[4] = str(tmp_path / "quiet")
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_model_that_was_handed_over_is_made_anew(source: Path) -> None:
    opened = FloatCheckpoint(source)
    assert FloatCheckpoint.of(opened) is opened
    first = opened.model
    assert opened.model is first and opened.heads == ("lm_head",)
    assert opened.take_model() is first and opened.model is not first
    for scheme in ("int4_wo_32", "fp8"):
        data = tokens() if scheme == "fp8" else None
        report = quantize_checkpoint(
            opened, data, config_for(scheme), source.parent / scheme, progress=False
        )
        assert len(report.quantized) == 14


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_heads_have_the_names_of_their_model(family: str) -> None:
    assert heads_of(made(torch_families.config_of(family))) == (
        torch_families.head_of(family),
    )


@pytest.mark.parametrize("family", ["chatglm3", "qwen", "grok1"])
def test_code_that_a_model_brings_along_is_run_if_the_user_trusts_it(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(6)).numpy())
    model = made(torch_families.config_of(family))
    source, out = saved(model, tmp_path / "source"), tmp_path / "out"
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(out),
        "--scheme",
        "uint4_wo_32",
        "--algorithm",
        "awq",
        "gptq",
    ]
    command += [
        "--data",
        str(tmp_path / "tokens.npy"),
        "--samples",
        "6",
        "--length",
        "12",
    ]
    assert main(command) == 2 and not out.exists()
    assert "--trust-code" in capsys.readouterr().err
    assert (
        main(
            [
                *command,
                "--trust-code",
                "--evaluate",
                str(tmp_path / "tokens.npy"),
                "--quiet",
            ]
        )
        == 0
    )
    loaded = load_checkpoint(out, trust_code=True)
    layers = {
        name
        for name, module in loaded.named_modules()
        if isinstance(module, QuantizedLayer)
    }
    head = torch_families.head_of(family)
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert layers == {
        name for name in linear if name != head and not name.endswith("moe_block.gate")
    }
    before, after = logits(model, tokens()[0]), logits(loaded, tokens()[0])
    assert 1e-4 < float((after - before).norm() / before.norm()) < 0.6


@pytest.mark.parametrize("odd", [VOCABULARY, -1])
@pytest.mark.parametrize("option", ["--data", "--evaluate"])
def test_token_ids_of_another_model(
    option: str,
    odd: int,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = torch.cat(tokens(6)).numpy()
    ids[2, 3] = odd
    np.save(tmp_path / "odd.npy", ids)
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "fp8",
        "--length",
        "12",
        "--quiet",
    ]
    for name in ("--data", "--evaluate"):
        command += [
            name,
            str(tmp_path / ("odd.npy" if name == option else "tokens.npy")),
        ]
    assert main([*command, "--samples", "6"]) == 2
    assert (
        f"odd.npy has the token id {odd}, but those of the model are 0 to 95"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option",
    [
        ["--kv-cache", "fp8-rope"],
        ["--attention", "fp8"],
        ["--layer", "*down_proj=fp8"],
        ["--scheme", "fp8"],
    ],
    ids=" ".join,
)
def test_the_option_that_asks_for_data(
    option: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "uint4_wo_32",
        *option,
    ]
    assert main(command) == 2
    assert (
        f"{' '.join(option)} has scales that only data can tell; give --data"
        in capsys.readouterr().err
    )


def test_windows_that_foretell_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "uint4_wo_32",
        "--length",
        "1",
    ]
    assert main([*command, "--evaluate", str(tmp_path / "tokens.npy"), "--quiet"]) == 2
    assert (
        "windows of 1 token have nothing to foresee" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        (
            "qwen3",
            {"kv_cache": "fp8"},
            [
                "use --kv-cache fp8-rope for this model: model.layers.0.self_attn.k_proj is"
            ],
        ),
        ("qwen3", {"kv_cache": "fp8-rope"}, []),
        (
            "qwen3",
            {"kv_cache": "fp8-rope", "attention": "fp8"},
            ["q_proj is normalized before attention reads it"],
        ),
        ("llama3", {"kv_cache": "fp8", "attention": "fp8"}, []),
        (
            "llama3",
            {"attention": "fp8"},
            ["vLLM refuses rounded queries where keys and values are not rounded"],
        ),
        (
            "llama3",
            {"kv_cache": "fp8", "exclude": ("lm_head", "model.layers.0.*")},
            [
                "k_proj stays float, and what it computes (2 layers of keys and values"
                " do): vLLM keeps that in fp8"
            ],
        ),
        ("llama3", {"exclude": ("lm_head", "model.layers.0.*")}, []),
    ],
    ids=str,
)
def test_what_clients_round_elsewhere_is_noted(
    family: str, settings: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    source, config = (
        saved(made(torch_families.config_of(family)), tmp_path / "s"),
        config_for("fp8", **settings),
    )
    for report in (
        quantize_checkpoint(source, tokens(), config, tmp_path / "out", progress=False),
        quantize_model(
            made(torch_families.config_of(family)), tokens(), config, progress=False
        ),
    ):
        assert len(report.notes) == len(told), report.notes
        assert all(text in note for text, note in zip(told, report.notes, strict=True))
