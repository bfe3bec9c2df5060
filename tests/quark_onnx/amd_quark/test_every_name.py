"""All public names of AMD Quark 0.13 can be imported; those without a counterpart say so."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from quark_onnx.common import absent
from quark_onnx.common.errors import ConfigError
from tests.architecture.test_tables import script
from tests.cases import loop_over

FACTS = json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed"
)


def every_name_can_be_imported(module: str) -> None:
    path = module.replace("quark", "quark_onnx", 1)
    ours = import_module(path)
    assert [name for name in FACTS["names"][module] if not hasattr(ours, name)] == []
    # ``import a.b.c as name`` follows attributes, which a name of a package may hide.
    imported: dict[str, object] = {}
    exec(f"import {path} as found", imported)
    assert imported["found"] is ours


@loop_over("module", [name for name in FACTS["names"] if "quark.torch" not in name])
def test_every_name_for_onnx_can_be_imported(module: str) -> None:
    every_name_can_be_imported(module)


@needs_torch
@loop_over("module", [name for name in FACTS["names"] if "quark.torch" in name])
def test_every_name_for_torch_can_be_imported(module: str) -> None:
    every_name_can_be_imported(module)


def test_the_module_of_old_configurations_can_be_imported() -> None:
    legacy = import_module("quark_onnx.onnx.quantization.config.legacy")
    config = import_module("quark_onnx.onnx.quantization.config.config")
    assert legacy.QuantizationConfig is config.QuantizationConfig


@pytest.mark.skipif(find_spec("quark") is None, reason="amd-quark is not installed")
def test_the_names_are_those_of_the_installed_package() -> None:
    assert script("amd_names").names() == FACTS["names"]


@loop_over("names", {text.split()[0]: text for text in absent.WAYS.values()})
def test_a_name_without_a_counterpart_raises_at_its_first_use(names: str) -> None:
    for name in names.split():
        with pytest.raises(
            ConfigError, match=f"^{name} of AMD Quark does not exist here: "
        ):
            getattr(absent, name)("model", setting=1)
        with pytest.raises(
            AttributeError, match=f"^'from_float': {name} of AMD Quark does not exist"
        ):
            _ = getattr(absent, name).from_float


def test_absent_names_are_those_of_amd_quark() -> None:
    every = {name for names in FACTS["names"].values() for name in names}
    listed = {name for names in absent.WAYS.values() for name in names.split()}
    assert listed <= every


@needs_torch
def test_a_script_that_never_prunes_runs() -> None:
    from quark_onnx.torch import ModelPruner, ModelQuantizer

    assert not isinstance(object(), ModelPruner)
    assert ModelQuantizer.__name__ == "ModelQuantizer"
    with pytest.raises(ConfigError, match="ModelPruner of AMD Quark does not exist"):
        ModelPruner(object())
