"""The modules and names of onnxruntime.quantization are all there, and what quantizes is ours."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime.quantization as theirs
import pytest

import quark_onnx.compat_onnxruntime as ours
from quark_onnx.compat_onnxruntime.mirror import their_modules
from tests.cases import loop_over

MODULES = their_modules()
#: What quantizes.
OWN = {
    "quantize": ("quantize", "quantize_static", "quantize_dynamic"),
    "qdq_quantizer": ("QDQQuantizer",),
    "onnx_quantizer": ("ONNXQuantizer",),
    "matmul_nbits_quantizer": ("MatMulNBitsQuantizer",),
    "static_quantize_runner": ("main",),
}


@loop_over("name", ["", *MODULES])
def test_every_name_is_there(name: str) -> None:
    suffix = f".{name}" if name else ""
    mirrored = importlib.import_module(f"{ours.__name__}{suffix}")
    original = importlib.import_module(f"{theirs.__name__}{suffix}")
    for known in (known for known in vars(original) if not known.startswith("_")):
        found = getattr(mirrored, known)
        own = known in OWN.get(name or "quantize", ()) or (
            not name and known == "QDQQuantizer"
        )
        if own:
            assert found is not getattr(original, known)
        elif not inspect.ismodule(found) and known not in ("quantize", "annotations"):
            assert known in dir(mirrored)
    with pytest.raises(AttributeError):
        _ = mirrored.quantise_static


def test_modules_of_the_package_are_its_own() -> None:
    # ``quantize`` is the function, as in onnxruntime.
    names = [name for name in MODULES if name != "quantize"]
    lines = list[str]()
    for name in names:
        parent, _, child = f"{ours.__name__}.{name}".rpartition(".")
        lines += [f"from {parent} import {child} as found", "print(found.__name__)"]
    # A new process: a module that another test has imported hides what is handed through.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [f"{ours.__name__}.{name}" for name in names]


@loop_over("name", ["", *MODULES])
def test_a_star_imports_the_same_names(name: str) -> None:
    suffix = f".{name}" if name else ""
    mirrored, original = dict[str, Any](), dict[str, Any]()
    exec(f"from {ours.__name__}{suffix} import *", mirrored)
    exec(f"from {theirs.__name__}{suffix} import *", original)
    assert not original.keys() - mirrored.keys()
    module = importlib.import_module(f"{ours.__name__}{suffix}")
    for known in OWN.get(name or "quantize", ()):
        assert mirrored[known] is getattr(module, known)


def test_signatures_are_theirs() -> None:
    for name in ("quantize_static", "quantize_dynamic"):
        mine, expected = (
            inspect.signature(getattr(package, name)).parameters
            for package in (ours, theirs)
        )
        # An older onnxruntime has no calibration_cache_path, which comes last.
        assert [*mine][: len(expected)] == [*expected]
        assert all(mine[key].default == expected[key].default for key in expected)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="quant_config is a dict"):
        ours.quantize("m.onnx", str(tmp_path / "q.onnx"), {})
    with pytest.raises(TypeError, match="multiple values for argument 'model_input'"):
        ours.quantize_static("m", "q", model_input="m")  # type: ignore[misc]


def test_the_native_package_does_not_import_the_mirror() -> None:
    code = "import quark_onnx, sys; sys.exit('quark_onnx.compat_onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_enumerations_of_the_root_package_read_names() -> None:
    import quark_onnx

    assert (
        quark_onnx.QuantType.from_string("QUInt4").tensor_type
        == theirs.QuantType.QUInt4.tensor_type
    )
    assert [str(kind) for kind in quark_onnx.QuantFormat] == ["QOperator", "QDQ"]
    assert {kind.name: kind.value for kind in quark_onnx.QuantType} == {
        kind.name: kind.value for kind in theirs.QuantType
    }
    with pytest.raises(ValueError, match="'QInt7' is none of"):
        quark_onnx.QuantType.from_string("QInt7")
