"""Exports of amd-quark 0.13 itself: what vLLM 0.33 and transformers 5.23 made of them is what is
said of them.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from quark_onnx.torch.validate import validate
from tests.quark_onnx.torch.validate.drafts import Entry, write_safetensors

VARIABLE = "QUARK_ONNX_DATA"
EXPORTS = Path(os.environ.get(VARIABLE, "")) / "golden" / "quark_exports"
pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get(VARIABLE) or not EXPORTS.is_dir(),
        reason=f"{VARIABLE} has no exports",
    ),
]
TYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}
#: The rules that are broken, for vLLM and for transformers: the report on the exports, sections 4.5
#: and 6.2.
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "fp8": (set(), set()),
    "fp8_kvfp8": (set(), set()),
    "int8": (set(), set()),
    "int4_wo_128": (set(), set()),
    "uint4_wo_128": (set(), set()),
    "uint4_wo_128_order": (set(), set()),
    "mxfp4_weight_only": (set(), set()),
    "family_qwen3_moe_fp8": (set(), {"quark-mixture"}),
    "family_mixtral_uint4_wo_128": (
        {"vllm-names"},
        {"quark-mixture"},
    ),  # the names that transformers has in memory
    "custom_fp8": (set(), {"fp8-names"}),
}


def prepared(name: str, folder: Path) -> Path:
    """The export; of those that were kept without weights, one of zeros."""
    source = EXPORTS / name
    if not source.is_dir():
        pytest.skip(f"{source} is not there")
    shutil.copy(source / "config.json", folder)
    if (source / "model.safetensors").is_file():
        shutil.copy(source / "model.safetensors", folder)
        return folder
    tensors: dict[str, Entry] = {}
    scalars = {}
    for line in (source / "tensors.tsv").read_text(encoding="utf-8").splitlines():
        tensor, dtype, shape = line.split("\t")
        if tensor.startswith("#"):
            continue
        tensors[tensor] = (TYPES[dtype], tuple(json.loads(shape)))
        if tensor.endswith("output_scale"):  # the values were not kept: any that differ
            tensors[tensor] = ("F32", ())
            scalars[tensor] = 0.5 + len(scalars)
    write_safetensors(folder / "model.safetensors", tensors, scalars)
    return folder


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("client", ["vllm", "transformers"])
def test_exports(name: str, client: str, tmp_path: Path) -> None:
    verdict = validate(prepared(name, tmp_path), client)
    assert {finding.rule for finding in verdict.findings} == EXPECTED[name][
        client == "transformers"
    ], verdict.text()


def test_the_float_model(tmp_path: Path) -> None:
    (source,) = (EXPORTS / "_base").iterdir()
    for client in ("vllm", "transformers"):
        assert validate(source, client).findings == ()
