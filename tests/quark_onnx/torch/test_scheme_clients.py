"""The table of schemes and clients is what the validator and the exports find."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.common.errors import ConfigError, QuarkError
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.layouts import LAYOUTS
from quark_onnx.torch.config.algorithm_names import ALGORITHM_SETTINGS, check_algorithm
from quark_onnx.torch.config.client_releases import RELEASES, release
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.scheme_clients import (
    LAYOUT_NAMES,
    SCHEME_CLIENTS,
    weight_bits,
)
from quark_onnx.torch.config.schemes import SCHEMES, scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.exports.gguf.quantized_model import form_of
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.validate import validate
from tests.cases import loop_over
from tests.torch_models import llama, made, tokens


def test_names_are_complete() -> None:
    assert set(SCHEME_CLIENTS) == set(SCHEMES)
    assert tuple(LAYOUTS) == LAYOUT_NAMES
    assert {
        name: tuple(field.name for field in dataclasses.fields(ALGORITHMS[name]))
        for name in ALGORITHMS
    } == ALGORITHM_SETTINGS


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    model = made(llama(hidden_size=128, intermediate_size=256))
    config = TorchConfig(scheme(name), exclude=("lm_head",))
    quantize_model(model, tokens(), config, progress=False)
    found: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        folder = tmp_path / layout
        try:
            write_checkpoint(model, config, folder, layout=layout)
        except QuarkError as error:
            assert "place in" in str(error)
            continue
        for client in ("vllm", "transformers"):
            if validate(folder, client).word == "loads":
                found.setdefault(client, []).append(layout)
        # its model builder reads both, see benchmarks/results/llm_clients.md
        if layout in ("oga", "awq"):
            found.setdefault("onnxruntime-genai", []).insert(0, layout)
    table = SCHEME_CLIENTS[name]
    checkpoints = ("vllm", "transformers", "onnxruntime-genai")
    assert found == {key: list(table[key]) for key in checkpoints if key in table}


@loop_over("name", tuple(SCHEMES))
def test_gguf(name: str) -> None:
    weight = SCHEMES[name].weight
    assert weight is not None
    try:
        loads = weight.is_cast or bool(form_of(quantize(torch.ones(1, 256), weight)))
    except QuarkError:
        loads = False
    assert loads == ("llama.cpp" in SCHEME_CLIENTS[name])


def test_bits_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    from quark_onnx.torch.checkpoints.quark_tensors import stored

    weight = torch.randn(64, 1024, dtype=torch.bfloat16)
    for name, spec in SCHEMES.items():
        if "quark" not in SCHEME_CLIENTS[name].get("transformers", ()):
            continue
        assert spec.weight is not None
        parts = stored(quantize(weight, spec.weight)).values()
        bits = 8 * sum(part.nbytes for part in parts) / weight.numel()
        assert bits == pytest.approx(weight_bits(name), rel=0.01), name


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("int4", "int4_wo_128"),
        ("uint4", "uint4_wo_128"),
        ("w4a16", "int4_wo_128"),
        ("int8_wo", "int8"),
        ("fp4", "mxfp4"),
        ("fp9", "fp8"),
    ],
)
def test_near_miss_has_the_same_width(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{right}'"):
        scheme(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gptk", "unknown algorithm 'gptk'; did you mean 'gptq'"),
        ("svdquant", "'svdquant' is not offered: .* low-rank branch .*; choose awq"),
        ("OSTQuant:steps=2", "no scales are learned .*; choose rotation:trained=true"),
        ("spinquant:online_r1=true", "no setting 'online_r1': .*; choose r1=true"),
        ("gptq:damp=1", "gptq has no setting 'damp'; did you mean 'damping'"),
    ],
)
def test_wrong_algorithms(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_algorithm(text)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_caches_that_need_no_checkpoint(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {name}_per_token_head"):
        config_for("fp8", kv_cache=name)
    with pytest.raises(ConfigError, match="kv_cache is 'int6'; it must be one of"):
        config_for("fp8", kv_cache="int6")


MATRIX: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/llm_clients.json").read_text(
        encoding="utf-8"
    )
)
#: Names of clients in the matrix, by their name in the list of schemes. Our own loader reads more
#: than amd-quark does.
COLUMNS = {
    "vllm": ["vLLM"],
    "transformers": [
        "transformers and amd-quark",
        "transformers and compressed-tensors",
        "transformers and gptqmodel",
    ],
    "llama.cpp": ["llama.cpp"],
    "onnxruntime": ["onnxruntime"],
    "onnxruntime-genai": ["onnxruntime-genai"],
}


@loop_over("name", tuple(SCHEMES))
def test_list_of_schemes_is_what_clients_do(name: str) -> None:
    """benchmarks/llm_clients.py has run every client that could be installed."""
    for client, columns in COLUMNS.items():
        cells: dict[str, str] = {}
        for column in columns:
            for layout, result in MATRIX[name][column].items():
                if result["cell"] != "not run" and cells.get(layout) != "loads":
                    cells[layout] = result["cell"]
        listed = set(SCHEME_CLIENTS[name].get(client, ()))
        loads = {layout for layout, word in cells.items() if word == "loads"}
        assert loads == listed & set(cells), client


def test_releases_of_the_rules_are_those_that_were_run() -> None:
    """The names of rules and the results of the clients come from the same releases."""
    found = " ".join(MATRIX["versions"].values())
    for package in RELEASES.keys() - {"gguf"}:  # a package of this one
        assert release(package) in found
    assert f"gguf>={RELEASES['gguf']}" in (
        Path(__file__).parents[3] / "pyproject.toml"
    ).read_text(encoding="utf-8")
