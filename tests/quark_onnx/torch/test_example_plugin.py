"""The package of examples/plugin adds an algorithm for language models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endtoend.example_plugin import install, quark_onnx, with_path


@pytest.mark.slow
def test_the_algorithm_for_language_models(tmp_path: Path) -> None:
    installed = install(tmp_path)
    listed = quark_onnx(installed, "list", "algorithms").splitlines()
    assert "shrink" in {line.split()[0] for line in listed}
    code = """
from quark_onnx.torch.config.algorithm_names import check_algorithm
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import llama, made, tokens

check_algorithm("shrink:steps=10")
config = TorchConfig(SCHEMES["int4_wo_32"], algorithms=("shrink:steps=10",))
report = quantize_model(made(llama()), tokens(), config)
outcomes = [o for o in report.outcomes if o.algorithm == "shrink"]
assert outcomes and all(o.after <= o.before for o in outcomes)
assert any(o.after < o.before for o in outcomes)
"""
    finished = with_path(installed, "-c", code)
    assert finished.returncode == 0, finished.stderr
