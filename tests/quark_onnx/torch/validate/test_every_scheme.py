"""The verdict on a checkpoint for transformers is what transformers does with it, for every scheme
that can be written.

A verdict is a claim about another library, so it is tried on that library: load the folder and run
it on a few tokens.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest
import torch

from quark_onnx.common.errors import QuarkError
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.validate import Validation, validate
from tests.quark_onnx.torch.test_clients import peer
from tests.quark_onnx.torch.test_layouts_clients import needs, written
from tests.torch_models import tokens

DTYPES = ("float32", "bfloat16", "float16")
#: One scheme of each way of storing weights; the others differ in sizes alone.
KINDS = (
    "fp8",
    "ptpc_fp8",
    "int8",
    "int8_per_channel",
    "int4_wo_32",
    "int4_wa_64",
    "uint4_wo_32",
    "uint4_int8",
    "int3_wo_32",
    "uint2_wo_64",
    "mxfp4",
    "mxfp4_weight_only",
    "mxfp8",
    "nvfp4",
)
#: Load and run each folder; print one word for each.
CLIENT = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
words = {}
for folder in sys.argv[1:]:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", output_loading_info=True)
        with torch.no_grad():
            finite = bool(model.eval()(torch.load(folder + "/tokens.pt")).logits.isfinite().all())
        words[folder] = "loads but wrong" if info["missing_keys"] or not finite else "loads"
    except Exception:
        words[folder] = "refused"
print(json.dumps(words))
"""  # noqa: E501


def expected(verdict: Validation) -> str:
    """The word of a verdict; a folder that needs an option to load does not load without it."""
    needs_option = any(finding.rule == "ct-zero-points" for finding in verdict.findings)
    return "refused" if needs_option else verdict.word


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_tensors(
    dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs("compressed_tensors", "accelerate")
    transformers = pytest.importorskip("transformers")
    caplog.set_level(logging.CRITICAL)
    said, done = dict[str, str](), dict[str, str]()
    for name in KINDS:
        folder = tmp_path / name
        written(folder, name, "compressed-tensors", dtype)
        said[name] = expected(validate(folder, "transformers"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, device_map="cpu"
                ).eval()
                with torch.no_grad():
                    model(tokens()[0])
                done[name] = "loads"
            except (RuntimeError, ValueError):
                done[name] = "refused"
    assert said == done


@pytest.mark.slow
def test_amd_quark(tmp_path: Path) -> None:
    said = dict[str, str]()
    for name in SCHEMES:
        for dtype in ("float32", "bfloat16"):
            folder = tmp_path / f"{name} {dtype}"
            try:
                written(folder, name, "quark", dtype)
            except QuarkError as error:  # no layout has a place for it
                assert "has no place" in str(error)
                continue
            said[str(folder)] = validate(folder, "transformers").word
    done = peer(CLIENT, *said)
    assert said == done, json.dumps(
        {name: (said[name], done[name]) for name in said if said[name] != done[name]}
    )
