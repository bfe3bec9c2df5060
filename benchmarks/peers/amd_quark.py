"""Run amd-quark on one model.

Executed by the Python of amd-quark's own virtual environment, on its own.

    python amd_quark.py MODEL SAMPLES_FOLDER OUTPUT {XINT8|A8W8} COUNT [ALGORITHM ...]
    python amd_quark.py --version

SAMPLES_FOLDER holds one .npz file a sample; with COUNT above their number they repeat. An ALGORITHM
is cle, bias, adaround:ITERATIONS or adaquant:ITERATIONS. The last line printed is JSON: the seconds
that quantize_model took, the peak resident memory in MB, the version.
"""

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path


def peak_mb():
    """Peak resident memory of this process image (ru_maxrss would include the process that started
    it).
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return (
            next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
            / 1024
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def algorithm(text):
    """The configuration of an algorithm; all settings but the iterations are the defaults."""
    import quark.onnx as quark

    name, _, iterations = text.partition(":")
    if name in ("cle", "bias"):
        return {"cle": quark.CLEConfig, "bias": quark.BiasCorrectionConfig}[name]()
    kind = {"adaround": quark.AdaRoundConfig, "adaquant": quark.AdaQuantConfig}[name]
    return kind(num_iterations=int(iterations))


def quantize(model, folder, output, preset, count, algorithms):
    import numpy as np
    import quark.onnx as quark
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.files, self.at = sorted(Path(folder).glob("*.npz")), 0

        def get_next(self):
            if self.at == count:
                return None
            with np.load(self.files[self.at % len(self.files)]) as arrays:
                self.at += 1
                return {name: arrays[name] for name in arrays.files}

        def rewind(self):
            self.at = 0

    config = {"XINT8": quark.XINT8_QCONFIG, "A8W8": quark.A8W8_QCONFIG}[preset]
    config.algo_config = [algorithm(text) for text in algorithms]
    start, cpu = time.perf_counter(), time.process_time()
    quark.ModelQuantizer(config).quantize_model(model, output, Reader())
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak_mb()}


if __name__ == "__main__":
    report = {"version": version("amd-quark")}
    if sys.argv[1:] != ["--version"]:
        model, folder, output, preset, count, *algorithms = sys.argv[1:]
        report.update(quantize(model, folder, output, preset, int(count), algorithms))
        if not Path(
            output
        ).exists():  # it logs some failures and returns as if all were well
            sys.exit("no output was written")
    print("\n" + json.dumps(report))
