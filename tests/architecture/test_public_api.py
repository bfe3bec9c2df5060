"""``__all__`` is the public interface of each package, and importing a package is cheap."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from types import ModuleType

import pytest

import calibrators
import quark_onnx
import quark_onnx.torch


@pytest.mark.parametrize(
    "package", [calibrators, quark_onnx], ids=lambda package: package.__name__
)
def test_all_is_the_public_interface(package: ModuleType) -> None:
    public = {
        n
        for n, v in vars(package).items()
        if not n.startswith("_") and not isinstance(v, ModuleType)
    }
    assert public == set(package.__all__)
    assert package.__all__ == sorted(
        package.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert all(getattr(package, name).__doc__ for name in package.__all__)


def test_torch_offers_its_own_names_apart_from_those_of_amd_quark() -> None:
    names = quark_onnx.torch
    assert names.__all__ == [*names.NATIVE, *names.AMD_QUARK]
    assert not set(names.NATIVE) & set(names.AMD_QUARK)
    mirrors = ("export.", "pruning.", "quantization.", "utils.")
    assert all(home.startswith(mirrors) for home, _ in names.AMD_QUARK.values())
    assert not any(home.startswith(mirrors) for home, _ in names.NATIVE.values())


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        (quark_onnx.quantize_static, ["model", "data", "config", "output"]),
        (quark_onnx.quantize_dynamic, ["model", "config", "output"]),
    ],
)
def test_help_shows_the_parameters(call: object, parameters: list[str]) -> None:
    signature = inspect.signature(call)  # type: ignore[arg-type]
    assert list(signature.parameters)[: len(parameters)] == parameters
    assert "data" not in parameters or "data" in pydoc.render_doc(call)


def test_importing_loads_no_framework(capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import sys, time
start = time.perf_counter()
import quark_onnx
import quark_onnx.torch
print(f"{time.perf_counter() - start:.2f}", *sorted({"torch", "transformers", "tqdm", "PIL"} & set(sys.modules)))
"""  # noqa: E501
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    seconds, *loaded = run.stdout.split()
    with capsys.disabled():
        print(f" import quark_onnx: {seconds} s ", end="")
    assert loaded == [] and run.stderr == ""
