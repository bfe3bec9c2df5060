"""Modules without a file are imported, run and typed like others."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module, reload

import pytest

from quark_onnx.common.aliases import ALIASES
from tests.architecture.test_tables import ROOT, script
from tests.cases import loop_over


@loop_over("path", tuple(ALIASES))
def test_names_are_those_of_the_module_that_defines_them(path: str) -> None:
    if path.startswith("quark_onnx.torch.quantization"):
        pytest.importorskip("torch")
    module = import_module(path)
    for home, names in ALIASES[path].items():
        for name in names.split():
            value = getattr(module, name)
            assert value is getattr(import_module(home), name)
            if isinstance(value, type):
                assert pickle.loads(pickle.dumps(value)) == value


def test_a_package_that_is_loaded_again_has_one_finder() -> None:
    finders = len(sys.meta_path)
    reload(import_module("quark_onnx.compat_onnxruntime"))
    assert len(sys.meta_path) == finders


def test_stubs_are_those_of_the_table() -> None:
    expected = script("stubs").stubs()
    stubs = {path: path.read_text("utf-8") for path in ROOT.glob("quark_onnx/**/*.pyi")}
    assert stubs == expected, "run: python scripts/stubs.py"


@pytest.mark.parametrize("module", ["preprocess", "static_quantize_runner"])
def test_commands_of_onnxruntime_run(module: str) -> None:
    command = [sys.executable, "-m", f"quark_onnx.compat_onnxruntime.{module}", "-h"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("usage: ") and "--input" in run.stdout
