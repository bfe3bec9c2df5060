"""Run NNCF's post-training quantization of ONNX models.

Executed by the Python of NNCF's own virtual environment, on its own.

    python nncf_peer.py MODEL SAMPLES_FOLDER OUTPUT
    python nncf_peer.py --version

SAMPLES_FOLDER holds one .npz file a sample. All options are NNCF's defaults but the number of
samples, which is that of the folder. A model of an older opset is converted to opset 13 first, as
onnxruntime's is: NNCF quantizes nothing below opset 10, and has no scales per channel below 13. The
last line printed is JSON: the seconds that quantize took, and the version.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

OPSET = 13


def loaded(model):
    """Return the model, at opset 13 at least."""
    import onnx

    found = onnx.load(model)
    opset = next(
        entry.version for entry in found.opset_import if entry.domain in ("", "ai.onnx")
    )
    if opset >= OPSET:
        return found
    converted = onnx.version_converter.convert_version(found, OPSET)
    # NNCF reads the first entry, whichever domain it is of
    del converted.opset_import[:]
    converted.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    return converted


def quantize(model, folder, output):
    import nncf
    import numpy as np
    import onnx

    files = sorted(Path(folder).glob("*.npz"))

    def feeds(file):
        with np.load(file) as arrays:
            return {name: arrays[name] for name in arrays.files}

    float_model = loaded(model)
    start = time.perf_counter()
    dataset = nncf.Dataset(files, feeds)
    quantized = nncf.quantize(float_model, dataset, subset_size=len(files))
    seconds = time.perf_counter() - start
    onnx.save(quantized, output)
    return {"seconds": seconds}


if __name__ == "__main__":
    report = {"version": version("nncf")}
    if sys.argv[1:] != ["--version"]:
        report.update(quantize(*sys.argv[1:]))
    print("\n" + json.dumps(report))
