"""Values of scales of groups and blocks, in each layout and each type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quark_onnx.torch.runtime.safetensors_header import read_header
from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.finding import Validation
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import Draft

torch = pytest.importorskip("torch")
Q0 = "model.layers.0.self_attn.q_proj"
#: torch's names of the types of safetensors; U8 holds the exponents of MX formats.
TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "float8_e8m0fnu",
}
LAYOUTS: dict[str, tuple[Callable[[], Draft], str]] = {
    "quark int4": (lambda: drafts.quark("int4_wo_32"), "weight_scale"),
    "quark mxfp4": (lambda: drafts.quark("mxfp4"), "weight_scale"),
    "awq": (drafts.awq, "scales"),
    "gptq": (drafts.gptq, "scales"),
    "fp8": (lambda: drafts.fp8((16, 16)), "weight_scale_inv"),
    "compressed": (drafts.compressed, "weight_scale"),
    "nvfp4": (drafts.nvfp4, "weight_scale"),
}


def overwritten(folder: Path, name: str, values: bytes) -> None:
    """Write the first values of a tensor."""
    file = folder / "model.safetensors"
    start = read_header(file).tensors[name].start
    content = bytearray(file.read_bytes())
    content[start : start + len(values)] = values
    file.write_bytes(content)


def found_values(verdict: Validation) -> dict[str, str]:
    """What is found, by place."""
    assert {found.rule for found in verdict.findings} <= {"scale-value"}
    return {found.place: found.found for found in verdict.findings}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, value: float, tmp_path: Path) -> None:
    """A single value that is no number is found, with its tensor and file."""
    make, end = LAYOUTS[layout]
    draft, name = make(), f"{Q0}.{end}"
    folder = draft.write(tmp_path / "draft")
    dtype = getattr(torch, TYPES[draft.tensors[name][0]])
    written = torch.tensor([value]).to(dtype)
    overwritten(folder, name, bytes(written.view(torch.uint8).tolist()))
    found = found_values(validate(folder, "vllm"))
    if written.float().isfinite().all():
        assert found == {}
    else:
        (text,) = found.values()
        assert [*found] == [name]
        assert text.startswith("1 of ") and text.endswith("in model.safetensors")


@pytest.mark.parametrize("dtype", TYPES)
def test_all_values_of_a_type(dtype: str, tmp_path: Path) -> None:
    """As many are found as torch takes for NaN and infinite."""
    bits = torch.arange(2**16).to(torch.int32)
    if dtype == "F32":
        # the upper half of a float32 decides
        values = (bits << 16).view(torch.float32)
    elif dtype in ("F16", "BF16"):
        values = bits.to(torch.int16).view(getattr(torch, TYPES[dtype]))
    else:
        values = bits[:256].to(torch.uint8).view(getattr(torch, TYPES[dtype]))
    draft = drafts.plain()
    name = f"{Q0}.weight_scale"
    draft.tensors[name] = (dtype, (len(values) // 8, 8))
    folder = draft.write(tmp_path / "draft")
    overwritten(folder, name, values.view(torch.uint8).numpy().tobytes())
    texts = [f.found for f in validate(folder, "vllm").findings if f.place == name]
    wrong = int((~values.float().isfinite()).sum())
    assert texts == [
        f"{wrong} of {len(values)} are NaN or infinite, in model.safetensors"
    ]


def test_only_a_part_of_many_scales_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafts.awq()
    folder = draft.write(tmp_path / "draft")
    names = [name for name in draft.tensors if name.endswith(".scales")]
    for name in names:
        overwritten(folder, name, b"\x00\x7c")
    assert [*found_values(validate(folder, "vllm"))] == names
    size = 2 * sum(
        draft.tensors[name][1][0] * draft.tensors[name][1][1] for name in names
    )
    place = "quark_onnx.torch.validate.model._MOST_BYTES"
    monkeypatch.setattr(place, size // 2)
    assert [*found_values(validate(folder, "vllm"))] == names[::2]


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_global_scales_are_found_once(value: float, tmp_path: Path) -> None:
    """A scale that is no number is not compared with those of other layers."""
    draft = drafts.nvfp4()
    draft.scalars[f"{Q0}.weight_global_scale"] = value
    verdict = validate(draft.write(tmp_path / "draft"), "vllm")
    assert [*found_values(verdict)] == [f"{Q0}.weight_global_scale"]
