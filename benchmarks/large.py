"""Weight-only quantization: speed against copying the file, and peak memory.

    python benchmarks/large.py [--megabytes 21 59 197 348 1000 3000]
        [--presets INT4 UINT4 W8] [--folder DIR]

The model is a stack of square matrix products with random weights: 4 MB each in a model file below
half a gigabyte, 64 MB each beside the model file above. Copying the files is the floor, measured in
the same run; every measurement is a process of its own, whose memory is that above its imports. The
result is loaded and run. No data is needed beside the disk space: about twice the size of the
model. The exit code is 1 where a run takes more than twice the larger of model and result, in MB of
its own memory. Twice the result alone is no mark: about 20 MB do not depend on the model, so that
results of up to 10 MB exceed it (column "times the result").
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from _memory import PrivatePeak
from _results import Store, add_arguments, table
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data

SIZES = [21, 59, 197, 348, 1000, 3000]  # MB
#: Bytes from which weights lie beside the model file.
LARGE = 500_000_000
#: Times the memory of the larger of model and result.
MOST = 2.0

MEASURED = """
import json, sys, time
import onnxruntime
from quark_onnx import quantize_weights
sys.path.insert(0, {here!r})
from _memory import peak_mb
print(flush=True)
input()
start, cpu = time.perf_counter(), time.process_time()
quantize_weights({model!r}, {preset!r}, {output!r})
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, peak_mb()]))
"""


def write(folder: Path, size: float) -> Path:
    """A model of so many bytes; of a large one, no more than one weight is in memory at a time."""
    width = 4096 if size > LARGE else 1024
    layers = round(size / (width * width * 4))
    model, data = folder / "model.onnx", folder / "model.onnx.data"
    nodes, weights, generator = [], [], np.random.default_rng(0)
    with data.open("wb") as file:
        for place in range(layers):
            tensor = TensorProto(
                name=f"w{place}",
                data_type=TensorProto.FLOAT,
                dims=[width, width],
                raw_data=b"-",
            )
            offset = file.tell()
            file.write(
                (
                    generator.standard_normal((width, width), np.float32) / width**0.5
                ).tobytes()
            )
            set_external_data(tensor, data.name, offset, file.tell() - offset)
            tensor.ClearField("raw_data")
            weights.append(tensor)
            nodes.append(
                helper.make_node(
                    "MatMul", [f"t{place}", f"w{place}"], [f"t{place + 1}"]
                )
            )
    ends = [
        helper.make_tensor_value_info(f"t{n}", TensorProto.FLOAT, ["N", width])
        for n in (0, layers)
    ]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], weights)
    onnx.save_model(
        helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
        ),
        str(model),
    )
    if size <= LARGE:
        whole = onnx.load(model)
        data.unlink()
        onnx.save_model(whole, str(model))
    return model


def copied(folder: Path) -> float:
    """Seconds that copying the model's files takes."""
    target = folder.with_name("copy")
    start = time.perf_counter()
    shutil.copytree(folder, target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def quantized(model: Path, preset: str) -> dict[str, float]:
    """Seconds, processor seconds, peak MB of the process's own memory above its imports and of all
    with mapped files, and the bytes of the result.
    """
    output = model.parent.with_name("out") / "q.onnx"
    here = str(Path(__file__).parent)
    program = MEASURED.format(
        here=here, model=str(model), preset=preset, output=str(output)
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()  # everything is imported
        watch = PrivatePeak(process.pid)
        print(file=process.stdin, flush=True)
        seconds, cpu, peak = json.loads(process.stdout.readlines()[-1])
    size = sum(path.stat().st_size for path in output.parent.iterdir())
    shutil.rmtree(output.parent)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "private_mb": watch.mb - watch.start,
        "peak_mb": peak,
        "result": size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", nargs="+", type=float, default=SIZES)
    parser.add_argument("--presets", nargs="+", default=["INT4", "UINT4", "W8"])
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the models are made (default: the temporary folder)",
    )
    add_arguments(parser, "out")
    arguments = parser.parse_args()
    store, rows, missed = Store(arguments.out / "large.json"), [], 0
    for megabytes in arguments.megabytes:
        with TemporaryDirectory(dir=arguments.folder) as folder:
            (Path(folder) / "in").mkdir()
            model = write(Path(folder) / "in", megabytes * 1e6)
            size = sum(path.stat().st_size for path in model.parent.iterdir())
            floor = copied(model.parent)
            for preset in arguments.presets:
                values = quantized(model, preset)
                values |= {"bytes": size, "copy": floor}
                seconds, after = values["seconds"], values["result"]
                own = values["private_mb"] * 2**20
                met = own <= MOST * max(size, after)  # NaN is a miss
                missed += not met
                store.put(f"{megabytes:g} MB {preset}", values)
                rows.append(
                    [
                        f"{megabytes:g} MB, {preset}",
                        f"{size / floor / 1e6:.0f}",
                        f"{size / seconds / 1e6:.0f}",
                        f"{seconds / floor:.1f}",
                        f"{values['cpu_seconds']:.1f}",
                        f"{after / 1e6:.0f}",
                        f"{values['peak_mb']:.0f}",
                        f"{own / 1e6:.0f}",
                        f"{own / after:.1f}",
                        f"{own / max(size, after):.2f}",
                        "met" if met else "MISSED",
                    ]
                )
                print(*rows[-1], file=sys.stderr, flush=True)
    text = table(
        [
            "model",
            "copy MB/s",
            "MB/s",
            "times the copy",
            "CPU s",
            "result MB",
            "peak with mapped files",
            "own MB",
            "times the result",
            "times the larger",
            f"<= {MOST:g}",
        ],
        rows,
    )
    print(text)
    (arguments.out / "large.md").write_text(
        f"# Weight-only quantization\n\n{text}\n", encoding="utf-8"
    )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
