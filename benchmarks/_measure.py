"""Time and peak memory of one method on one model, in a process of its own.

Both ends are here: `measure` starts this file as a program, which runs the method and prints what
it took. Imports are not timed, for no method. The peak is that of the process image, libraries
included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from _data import Samples
from _memory import peak_mb
from _settings import Setting
from _tools import AmdQuark, OnnxRuntime, Ours, Tool


@dataclass(frozen=True)
class Measurement:
    """Wall and processor seconds, peak resident memory; `error` instead where the method failed."""

    seconds: float = float("nan")
    cpu_seconds: float = float("nan")
    peak_mb: float = float("nan")
    error: str = ""


#: The checkout of this file.
CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Method:
    """A tool ('float' stands for plain inference) at a setting.

    `checkout` is the folder that quark_onnx is imported from. Of another checkout only the packages
    are used, by this file's public calls, so that both are measured alike.
    """

    tool: str
    setting: Setting
    amd_quark_python: Path | None = None
    checkout: Path = CHECKOUT

    def __str__(self) -> str:
        if self.tool == "float":
            return "float inference"
        return f"{self.tool} {self.setting.calibrator or self.setting.preset}"

    def measure(self, model: Path, samples: Path, count: int) -> Measurement:
        """Run on `count` samples of the folder (they repeat where it has fewer)."""
        if self.amd_quark_python:
            with TemporaryDirectory() as folder:
                try:
                    found = AmdQuark(self.amd_quark_python).measure(
                        model,
                        Samples(samples, count),
                        self.setting,
                        Path(folder) / "quantized.onnx",
                    )
                except RuntimeError as error:
                    return Measurement(error=str(error))
            return Measurement(found["seconds"], found["cpu_seconds"], found["peak_mb"])
        setting = [self.setting.preset, self.setting.calibrator or ""]
        command = [
            sys.executable,
            __file__,
            self.tool,
            *setting,
            str(model),
            str(samples),
            str(count),
        ]
        environment = os.environ | {"PYTHONPATH": str(self.checkout)}
        done = subprocess.run(command, text=True, capture_output=True, env=environment)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return Measurement(
                error="killed, out of memory?"
                if done.returncode == -9
                else lines[-1][:200]
            )
        return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def _infer(model: Path, samples: Samples) -> None:
    """The floor: every sample once through the float model in a default session."""
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(model), providers=["CPUExecutionProvider"]
    )
    for feeds in samples:
        session.run(None, feeds)


def _run(tool: str, setting: Setting, model: Path, samples: Samples) -> Measurement:
    import onnxruntime.quantization  # noqa: F401

    tools: dict[str, Tool] = {
        "ours": Ours(target=""),
        "ours without verdict": Ours(target="", verdict=False),
        "onnxruntime": OnnxRuntime(preprocess=False),
    }
    if tool.startswith("ours"):
        from quark_onnx import quantize_static  # noqa: F401
    with TemporaryDirectory() as folder:
        start, cpu = time.perf_counter(), time.process_time()
        if tool == "float":
            _infer(model, samples)
        else:
            tools[tool].quantize(
                model, samples, setting, Path(folder) / "quantized.onnx"
            )
        return Measurement(
            time.perf_counter() - start, time.process_time() - cpu, peak_mb()
        )


if __name__ == "__main__":
    tool, preset, calibrator, model, folder, count = sys.argv[1:]
    found = _run(
        tool,
        Setting(preset, calibrator or None),
        Path(model),
        Samples(Path(folder), int(count)),
    )
    print("\n" + json.dumps(asdict(found)))
