"""quark-onnx list: every registered name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import pytest

from calibrators import CALIBRATORS
from quark_onnx.common.extras import pip_install
from quark_onnx.common.registry import (
    ALGORITHMS,
    CONVERSIONS,
    DTYPES,
    NPU_RECIPES,
    OPTIMIZERS,
    PRESETS,
    RECIPES,
    RULES,
    TARGETS,
)
from quark_onnx.config import from_dict
from quark_onnx.npu import Recipe
from quark_onnx.targets import Target
from quark_onnx.targets.target import npu_names
from quark_onnx.torch.config.schemes import SCHEMES

TORCH = find_spec("torch") is not None and find_spec("transformers") is not None

REGISTRIES: dict[str, Collection[str]] = {
    "presets": list(PRESETS),
    "operators": list(RULES),
    "formats": list(DTYPES),
    "matrix": list(DTYPES),
    "calibrators": list(CALIBRATORS),
    "optimizers": list(OPTIMIZERS),
    "schemes": list(SCHEMES),
    **({"algorithms": list(ALGORITHMS)} if TORCH else {}),
    "targets": list(TARGETS),
    "recipes": list(RECIPES),
    "npu-recipes": list(NPU_RECIPES),
    "conversions": list(CONVERSIONS),
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_one_kind(cli: Any, kind: str) -> None:
    finished = cli("list", kind)
    assert (finished.code, finished.err) == (0, "")
    title, header, *lines = finished.out.splitlines()
    rows = [line for line in lines if " is no target: " not in line]
    assert title == kind and len(lines) - len(rows) == (
        len(TARGETS.elsewhere) if kind == "targets" else 0
    )
    assert sorted(row.split()[0] for row in rows) == sorted(REGISTRIES[kind])
    second = re.search(r"\S {2,}(\S)", header)
    assert second is not None
    assert all(row[second.start(1) - 2 : second.start(1)] == "  " for row in rows)


def test_algorithms_need_torch(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name="torch")

    monkeypatch.setattr("quark_onnx.cli.torch_side.import_module", missing)
    line = f"torch is not installed; language models need it: {pip_install('llm')}"
    assert cli("list", "algorithms").error == line
    finished = cli("list")
    assert finished.code == 0
    assert re.search(r"^ *algorithms +0 +not installed$", finished.out, re.MULTILINE)
    assert cli("list", "--json").json["algorithms"] == []


@pytest.mark.skipif(not TORCH, reason="the section of algorithms needs torch")
def test_kinds(cli: Any) -> None:
    """Without a kind, a table of the kinds; all names would be many screens."""
    header, *rows, _, last = cli("list").out.splitlines()
    assert header.split() == ["kind", "names", "such", "as"]
    assert {row.split()[0]: int(row.split()[1]) for row in rows} == {
        kind: len(names) for kind, names in REGISTRIES.items()
    }
    assert last.endswith("quark-onnx list KIND")


def test_the_plug_in_of_a_name(cli: Any) -> None:
    mine = dataclasses.make_dataclass("Mine", [], frozen=True, namespace={})
    mine.__module__, mine.__doc__ = "my_quantization.calibrators", "Measure."
    OPTIMIZERS.add("mine", mine)
    try:
        assert "Measure. (from my_quantization)" in cli("list", "optimizers").out
    finally:
        OPTIMIZERS.contents.pop("mine")


@pytest.mark.skipif(not TORCH, reason="the section of algorithms needs torch")
def test_json(cli: Any) -> None:
    document = cli("list", "--json").json
    assert list(document) == ["schema", "command", *REGISTRIES]
    for kind, names in REGISTRIES.items():
        assert {row["name"] for row in document[kind]} == set(names)
    keys = {kind: list(document[kind][0]) for kind in REGISTRIES}
    assert keys == {
        "presets": ["name", "config", "targets"],
        "operators": ["name", "rule", "description"],
        "formats": ["name", "family", "bits", "min_opset", "block_size", "node"],
        "matrix": ["name", "ways"],
        "calibrators": ["name", "settings", "description"],
        "optimizers": ["name", "settings", "description"],
        "schemes": [
            "name",
            "weight",
            "activation",
            "weight_bits",
            "needs_data",
            "loaded_by",
        ],
        "algorithms": ["name", "settings", "description", "needs_data", "loaded_by"],
        "targets": [field.name for field in dataclasses.fields(Target)],
        "recipes": [field.name for field in dataclasses.fields(Recipe)],
        "npu-recipes": [field.name for field in dataclasses.fields(Recipe)],
        "conversions": ["name", "keeps_function", "description"],
    }
    assert all(
        row["description"]
        for row in document["operators"]
        + document["calibrators"]
        + document["conversions"]
    )
    for row in document["presets"]:
        assert from_dict(row["config"]) == PRESETS[row["name"]]
    taken = {row["name"]: row["targets"] for row in document["presets"]}
    assert (taken["XINT8"], taken["BF16"], taken["INT4"]) == (
        [*npu_names(), "cpu", "tensorrt"],
        ["stx", "krk", "cpu"],
        ["cpu", "web"],
    )
    conv = next(row for row in document["operators"] if row["name"] == "Conv")
    assert conv["rule"] == "quark_onnx.rules.conv"
    percentile = next(
        row for row in document["calibrators"] if row["name"] == "percentile"
    )
    assert percentile["settings"] == {"percentile": 99.999}


def test_unknown_kind(cli: Any) -> None:
    finished = cli("list", "preset")
    assert finished.code == 2
    assert "'preset'" in finished.error
    assert "presets" in finished.error
