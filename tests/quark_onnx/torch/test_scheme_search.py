"""Recipes, and the search for schemes within a budget."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.cli.dispatch import main
from quark_onnx.common.errors import ConfigError, QuarkError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.config.algorithm_names import check_algorithm
from quark_onnx.torch.config.language_recipes import EFFORTS, RECIPES, recipe_for
from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS
from quark_onnx.torch.pipelines.ptq import Text
from quark_onnx.torch.pipelines.scheme_search import Candidate, Trial, search_schemes
from tests.answers import check_described
from tests.browser import check_alone, laid_out
from tests.torch_models import llama, made, saved, tokens

#: The client of each target of the recipes.
CLIENTS = {
    "vllm-mi300": "vllm",
    "vllm-cuda": "vllm",
    "llama.cpp": "llama.cpp",
    "ryzen-ai": "onnxruntime-genai",
    "cpu": "onnxruntime",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(10)).numpy())
    return saved(made(llama()), tmp_path / "float")


def test_recipes_are_for_clients_that_load_them() -> None:
    assert list(RECIPES) == list(CLIENTS)
    for target, efforts in RECIPES.items():
        assert tuple(efforts) == EFFORTS
        assert not efforts["fast"].algorithms and efforts["fast"].kv_cache is None
        for recipe in efforts.values():
            forms = SCHEME_CLIENTS[recipe.scheme][CLIENTS[target]]
            kinds = [each for each in recipe.exports if each != "hf_format"]
            assert (kinds[0] if kinds else recipe.layout) in forms
            assert recipe.reason
            for text in recipe.algorithms:
                check_algorithm(text)
    with pytest.raises(ConfigError, match="did you mean 'vllm-cuda'"):
        recipe_for("vllm-cudda", "fast")


def test_a_recipe_says_what_it_picked(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    command = ["llm", "ptq", str(source), "-o", str(tmp_path / "out")]
    assert main([*command, "--recipe", "fast", "--target", "vllm-mi300"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("recipe fast for vllm-mi300: --scheme ptpc_fp8 (MI300")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    weight = config["quantization_config"]["global_quant_config"]["weight"]
    assert weight["dtype"] == "fp8_e4m3" and weight["qscheme"] == "per_channel"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name a scheme with --scheme"),
        (["--recipe", "fast"], "--recipe and --target belong together"),
        (
            ["--target", "cpu", "--recipe", "fast", "--scheme", "fp8"],
            "--scheme is part",
        ),
        (["--target", "ryzen-ai", "--recipe", "balanced"], "awq learns from data"),
        (
            ["--target", "vllm-mi300", "--recipe", "balanced"],
            "--kv-cache fp8 has scales",
        ),
    ],
)
def test_wrong_recipes(
    options: list[str], message: str, source: Path, tmp_path: Path, capsys: Any
) -> None:
    command = ["llm", "ptq", str(source), "-o", str(tmp_path / "out"), *options]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_a_search_goes_on_and_finds_the_best(source: Path, tmp_path: Path) -> None:
    candidates = [
        Candidate("uint2_wo_32"),
        Candidate("int8_per_channel"),
        Candidate("uint4_wo_32"),
        Candidate("uint4_wo_32", ("gptq",)),
    ]
    text = Text(str(tmp_path / "tokens.npy"), 6, 12)
    told: list[Trial] = []

    def search(**settings: Any) -> Any:
        return search_schemes(
            FloatCheckpoint(source),
            candidates,
            text,
            tmp_path / "search.json",
            tell=told.append,
            **settings,
        )

    found = search(bits=32, seconds=1e-9)
    assert found.trials == () and found.untried == tuple(candidates)
    found = search(bits=32)
    assert found.untried == () and len(told) == 4
    assert [trial.error for trial in found.trials] == [""] * 4
    by_name = {trial.candidate: trial for trial in found.trials}
    assert by_name["uint2_wo_32"].bytes < by_name["uint4_wo_32"].bytes
    within = [trial for trial in found.trials if trial.bits <= 12]
    assert (
        str(search(bits=12).best) == min(within, key=lambda t: t.divergence).candidate
    )
    sizes = [trial.bytes for trial in found.pareto]
    losses = [trial.divergence for trial in found.pareto]
    assert sizes == sorted(sizes) and losses == sorted(losses, reverse=True)
    # trials of a search with more bits are known, and none is run again
    least = by_name["uint2_wo_32"].bits
    again = search(bits=least + 0.1)
    assert again.trials == found.trials and len(told) == 4
    assert str(again.best) == "uint2_wo_32"
    with pytest.raises(ConfigError, match="another search: its text differs"):
        search_schemes(
            FloatCheckpoint(source),
            candidates,
            Text(text.source, 5, 12),
            tmp_path / "search.json",
            bits=12,
        )


def test_what_does_not_fit_takes_no_time_of_others(
    source: Path, tmp_path: Path
) -> None:
    """The model has fewer inputs than groups of 128, as its shapes tell."""
    found = search_schemes(
        FloatCheckpoint(source),
        [Candidate("uint4_wo_128"), Candidate("uint4_wo_32")],
        Text(str(tmp_path / "tokens.npy"), 6, 12),
        tmp_path / "search.json",
        bits=32,
        seconds=1e-2,
    )
    assert [(trial.candidate, trial.error) for trial in found.trials] == [
        ("uint4_wo_32", "")
    ]
    assert found.best is not None
    assert [each.scheme for each in found.untried] == ["uint4_wo_128"]


def test_what_cannot_fit_is_not_tried(source: Path, tmp_path: Path) -> None:
    """Bits are those of the whole file, with float layers, and known before the first trial."""
    candidates = [Candidate(f"uint{bits}_wo_32") for bits in (4, 3, 2)]
    candidates += [Candidate("uint4_wo_32", ("gptq",))]
    journal, told = tmp_path / "search.json", list[Trial]()

    def search(bits: float) -> Any:
        text = Text(str(tmp_path / "tokens.npy"), 6, 12)
        opened = FloatCheckpoint(source)
        return search_schemes(
            opened, candidates, text, journal, bits=bits, tell=told.append
        )

    with pytest.raises(ConfigError, match="smallest is uint2_wo_32 with ") as caught:
        search(5)
    assert not journal.exists()
    least = re.search(r"--bits ([\d.]+) or more", str(caught.value))
    assert least is not None
    found = search(float(least[1]))
    assert [trial.candidate for trial in told] == ["uint2_wo_32"]
    assert found.untried == () and str(found.best) == "uint2_wo_32"
    assert float(least[1]) - 0.01 < found.trials[0].bits <= float(least[1])


@pytest.mark.parametrize(
    ("change", "device", "message"),
    [
        ({"source": "missing.npy"}, "cpu", "missing.npy"),
        ({"length": 10**6}, "cpu", "not enough for one window"),
        ({}, "nowhere", "device is 'nowhere'"),
    ],
)
def test_wrong_input_is_no_trial(
    change: dict[str, Any], device: str, message: str, source: Path, tmp_path: Path
) -> None:
    """The journal would keep the candidates as failed after the input is corrected."""
    text = replace(Text(str(tmp_path / "tokens.npy"), 6, 12), **change)
    journal = tmp_path / "search.json"
    with pytest.raises(QuarkError, match=message):
        search_schemes(
            FloatCheckpoint(source),
            [Candidate("fp8")],
            text,
            journal,
            bits=12,
            device=device,
        )
    assert not journal.exists()


def test_command(source: Path, tmp_path: Path, capsys: Any) -> None:
    command = ["llm", "search", str(source), "-o", str(tmp_path / "out")]
    command += ["--for", "onnxruntime-genai", "--data", str(tmp_path / "tokens.npy")]
    command += ["--samples", "6", "--length", "12", "--journal", str(tmp_path / "kept")]
    assert main([*command, "--bits", "5", "--quiet"]) == 2  # the head stays float
    assert "the smallest is" in capsys.readouterr().err
    assert main([*command, "--bits", "14", "--budget", "1/1000000"]) == 1
    assert "no candidate was tried" in capsys.readouterr().err
    assert main([*command, "--bits", "14", "--budget", "1s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_described(document)
    assert document["best"] in document["pareto"]
    page = tmp_path / "kept" / "search.html"
    check_alone(page.read_text(encoding="utf-8"))
    for width in (1280, 390):
        assert len(laid_out(page, width)["plots"]) == 1
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "quark"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "{}",
        '{"trials": 3}',
        '{"trials": [3]}',
        '{"trials": [{"candidate": "fp8", "more": 1}]}',
        '{"trials": [{"candidate": 3}]}',
        '{"trials": [{"candidate": "fp8", "bits": "a"}]}',
        '{"trials": [{"candidate": "fp8", "divergence": [1]}]}',
    ],
)
def test_a_damaged_journal_is_named(text: str, source: Path, tmp_path: Path) -> None:
    """A journal is a JSON object of trials; anything else is an error with its name."""
    journal = tmp_path / "search.json"
    journal.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"journal of a search .*search\.json"):
        search_schemes(
            FloatCheckpoint(source),
            [Candidate("fp8")],
            Text(str(tmp_path / "tokens.npy"), 6, 12),
            journal,
            bits=12,
        )
