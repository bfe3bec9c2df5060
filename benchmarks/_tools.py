"""The quantizers under comparison behind one call: `quantize(model, samples, setting, output)`.

Each is a `Tool` that knows which settings it can express, and the name and version its results are
kept by.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from _data import Feeds, Samples
from _settings import Setting

PEER = Path(__file__).parent / "peers" / "amd_quark.py"
NNCF_PEER = PEER.with_name("nncf_peer.py")


class Tool(Protocol):
    """A quantizer. `source` changes when results may change although `version` does not."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def source(self) -> str: ...

    def canonical(self, setting: Setting) -> Setting | None:
        """The explicit spelling of a setting, None where the tool does not offer it."""

    def quantize(
        self, model: Path, samples: Samples, setting: Setting, output: Path
    ) -> None:
        """Write the quantized model to `output`."""


#: Folders that `quantize` does not use: pages, and what lies above it in the layers of imports, as
#: analyses, other ways to call it, and other flows (tests/architecture/test_layers.py).
UNUSED = frozenset(
    {
        "analysis",
        "cli",
        "compat_onnxruntime",
        "npu",
        "olive",
        "onnx",
        "page",
        "torch",
    }
)


def _code(file: Path) -> str:
    """Return the syntax tree of a file without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


class Ours:
    """quark_onnx, called the way its README shows.

    Args:
        target: where the files are measured; empty for files of no target.
        verdict: whether files are judged.
    """

    name = "ours"

    def __init__(self, target: str = "cpu", *, verdict: bool = True) -> None:
        self.target = target
        # Another checkout may lack the argument.
        self._arguments = {} if verdict else {"verdict": False}

    @cached_property
    def version(self) -> str:
        import quark_onnx

        return str(getattr(quark_onnx, "__version__", "0"))

    @cached_property
    def source(self) -> str:
        """Hash the code that `quantize` uses."""
        return self._hashed(UNUSED)

    @cached_property
    def source_of_npu(self) -> str:
        """Hash the code that `npu.deploy` uses."""
        return self._hashed(UNUSED - {"npu"})

    @staticmethod
    def _hashed(without: frozenset[str]) -> str:
        """Hash the code of the library without docstrings, comments and layout.

        Args:
            without: names of folders that are left out.
        """
        import calibrators
        import quark_onnx

        roots = [
            Path(str(module.__file__)).parent for module in (calibrators, quark_onnx)
        ]
        files = sorted(
            file
            for root in roots
            for file in root.rglob("*.py")
            if without.isdisjoint(file.relative_to(root).parts)
        )
        text = "".join(_code(file) for file in files)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def config(self, setting: Setting) -> Any:
        from quark_onnx import QConfig

        changes = {"calibrator": setting.calibrator} if setting.calibrator else {}
        granularity = (
            {} if setting.per_channel is None else {"per_channel": setting.per_channel}
        )
        config = QConfig.of(setting.preset).with_(**changes, **granularity)
        return config.with_(target=self.target) if self.target else config

    def canonical(self, setting: Setting) -> Setting:
        return next(
            (s for s in setting.spelled() if self.config(s) == self.config(setting)),
            setting,
        )

    def quantize(
        self, model: Path, samples: Samples, setting: Setting, output: Path
    ) -> None:
        from quark_onnx import quantize_static

        if setting.recipe:
            from quark_onnx.recipes import choose

            config = choose(model, self.target).config.with_(target=self.target)
        else:
            config = self.config(setting)
        quantize_static(model, samples, config, output, **self._arguments)


@dataclass(frozen=True)
class OnnxRuntime:
    """onnxruntime.quantization.quantize_static after quant_pre_process, as its documentation
    advises.

    With `exclude_tail`, nodes that no Conv, Gemm or MatMul follows (detection decoding) are
    excluded by hand.
    """

    exclude_tail: bool = False
    preprocess: bool = True
    source = ""

    @property
    def name(self) -> str:
        return "onnxruntime, tail excluded" if self.exclude_tail else "onnxruntime"

    @property
    def version(self) -> str:
        import onnxruntime

        return str(onnxruntime.__version__)

    def canonical(self, setting: Setting) -> Setting | None:
        offered = (
            setting.calibrator in ("minmax", "percentile", "entropy")
            and setting.preset != "XINT8"
        )
        return setting if offered else None

    def quantize(
        self, model: Path, samples: Samples, setting: Setting, output: Path
    ) -> None:
        from onnxruntime.quantization import (
            CalibrationMethod,
            QuantFormat,
            QuantType,
            quantize_static,
        )

        kinds = {
            "A8W8": (QuantType.QUInt8, QuantType.QInt8),
            "S8S8": (QuantType.QInt8, QuantType.QInt8),
            "U8U8": (QuantType.QUInt8, QuantType.QUInt8),
            "A16W8": (QuantType.QUInt16, QuantType.QInt8),
            "S16S8": (QuantType.QInt16, QuantType.QInt8),
            "INT16": (QuantType.QInt16, QuantType.QInt16),
            "A8W4": (QuantType.QUInt8, QuantType.QInt4),
            "A16W4": (QuantType.QUInt16, QuantType.QInt4),
        }
        activation, weight = kinds[setting.preset]
        methods = {
            "minmax": CalibrationMethod.MinMax,
            "percentile": CalibrationMethod.Percentile,
            "entropy": CalibrationMethod.Entropy,
        }
        options: dict[str, bool | int] = {
            "WeightSymmetric": setting.preset != "U8U8",
            "ActivationSymmetric": setting.preset in ("S8S8", "S16S8", "INT16"),
        }
        if setting.calibrator != "minmax" and _shapes_vary(samples):
            options["CalibStridedMinMax"] = (
                1  # its histograms cannot stack samples of several shapes
            )
        with TemporaryDirectory() as folder, _quiet():
            prepared = (
                _prepare(model, Path(folder), setting) if self.preprocess else model
            )
            quantize_static(
                prepared,
                output,
                _reader(samples),
                quant_format=QuantFormat.QDQ,
                per_channel=bool(setting.per_channel),
                activation_type=activation,
                weight_type=weight,
                calibrate_method=methods[str(setting.calibrator)],
                extra_options=options,
                nodes_to_exclude=tail(prepared) if self.exclude_tail else None,
            )


@dataclass(frozen=True)
class AmdQuark:
    """amd-quark, run by the Python of its own virtual environment (it pins an older onnx and needs
    torch).
    """

    python: Path
    name = "amd-quark"
    source = ""

    @cached_property
    def version(self) -> str:
        return str(self._run("--version")["version"])

    def canonical(self, setting: Setting) -> Setting | None:
        return (
            setting
            if setting
            in (Setting("XINT8"), Setting("S8S8", "percentile", per_channel=False))
            else None
        )

    def quantize(
        self, model: Path, samples: Samples, setting: Setting, output: Path
    ) -> None:
        self.measure(model, samples, setting, output)

    def measure(
        self,
        model: Path,
        samples: Samples,
        setting: Setting,
        output: Path,
        *algorithms: str,
    ) -> dict[str, Any]:
        """Quantize, and return the seconds and the peak memory in MB that it took."""
        preset = "XINT8" if setting.preset == "XINT8" else "A8W8"
        folder = samples.files[0].parent
        return self._run(
            str(model), str(folder), str(output), preset, str(len(samples)), *algorithms
        )

    def _run(self, *arguments: str) -> dict[str, Any]:
        return _run_peer(self.name, self.python, PEER, *arguments)


@dataclass(frozen=True)
class Nncf:
    """NNCF at its defaults, run by the Python of its own virtual environment."""

    python: Path
    name = "nncf"
    source = ""

    @cached_property
    def version(self) -> str:
        return str(_run_peer(self.name, self.python, NNCF_PEER, "--version")["version"])

    def canonical(self, setting: Setting) -> Setting | None:
        """Return the preset whose types NNCF's default has: defaults beside defaults."""
        return setting if setting == Setting("A8W8") else None

    def quantize(
        self, model: Path, samples: Samples, setting: Setting, output: Path
    ) -> None:
        folder = str(samples.files[0].parent)
        paths = (str(model), folder, str(output))
        _run_peer(self.name, self.python, NNCF_PEER, *paths)


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Let the command line name the environments of amd-quark and NNCF."""
    for tool in ("amd-quark", "NNCF"):
        parser.add_argument(
            f"--{tool.lower()}-python",
            type=Path,
            help=f"the Python of an environment with {tool}",
        )


def _run_peer(name: str, python: Path, script: Path, *arguments: str) -> dict[str, Any]:
    """Run a script by another Python; return the JSON of the last line that it prints."""
    command = [str(python), str(script), *arguments]
    with TemporaryDirectory() as folder:  # tools leave files in the current folder
        done = subprocess.run(command, cwd=folder, text=True, capture_output=True)
    if done.returncode:
        # The error itself: a traceback names the folders of this machine.
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{name} failed: {lines[-1][:400]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def tail(model: Path) -> list[str]:
    """Names of the nodes that no Conv, Gemm or MatMul follows and that are none themselves.

    Only what stands behind the last of them on every path: for a detector, the decoding of its
    heads.
    """
    import onnx

    nodes = onnx.load(model, load_external_data=False).graph.node
    needed: set[str] = set()
    names: list[str] = []
    for node in reversed(nodes):  # ONNX nodes are in topological order
        if node.op_type in (
            "Conv",
            "ConvTranspose",
            "Gemm",
            "MatMul",
        ) or needed.intersection(node.output):
            needed.update(node.input)
        else:
            names.append(node.name)
    return names


def _prepare(model: Path, folder: Path, setting: Setting) -> Path:
    """The model after onnxruntime's pre-processing, raised to opset 13 where scales per channel
    need it.
    """
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    loaded = onnx.load(model)
    opset = next(
        entry.version
        for entry in loaded.opset_import
        if entry.domain in ("", "ai.onnx")
    )
    if setting.per_channel and opset < 13:
        model = folder / "raised.onnx"
        onnx.save(onnx.version_converter.convert_version(loaded, 13), model)
    model, prepared = model.resolve(), folder.resolve() / "prepared.onnx"
    try:
        # where it fails, onnxruntime writes the model and its weights into the working directory
        with _inside(folder):
            quant_pre_process(model, prepared)
    except Exception:  # symbolic shape inference fails on some models, or lacks sympy
        quant_pre_process(model, prepared, skip_symbolic_shape=True)
    named = onnx.load(prepared)
    for i, node in enumerate(named.graph.node):
        node.name = node.name or f"{node.op_type}_unnamed_{i}"
    onnx.save(named, prepared)
    return prepared


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Make a folder the working directory for a while (contextlib.chdir of Python 3.11)."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _shapes_vary(samples: Samples) -> bool:
    return (
        len(
            {
                tuple((name, array.shape) for name, array in feeds.items())
                for feeds in samples
            }
        )
        > 1
    )


def _reader(samples: Samples) -> Any:
    """The samples as onnxruntime's CalibrationDataReader, with what its strided calibration asks
    for.
    """
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.iterator: Iterator[Feeds] = iter(samples)
            self.left = len(samples)

        def __len__(self) -> int:
            return len(samples)

        def set_range(self, start_index: int, end_index: int) -> None:
            self.left = (
                end_index - start_index
            )  # ranges come in order, so the iterator goes on

        def get_next(self) -> Feeds | None:
            self.left -= 1
            return next(self.iterator, None) if self.left >= 0 else None

    return Reader()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what onnxruntime's quantizer prints and warns while it works."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
