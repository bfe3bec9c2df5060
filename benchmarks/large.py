"""Weight-only quantization of a large model: speed against copying the file, and peak memory.

    python benchmarks/large.py [--gigabytes 1 3] [--presets INT4 W8] [--folder DIR]

The model is a stack of square matrix products with random weights, 64 MB each, beside the model
file. Copying the files is the floor, measured in the same run; every measurement is a process of
its own. The result is loaded and run. No data is needed beside the disk space: about twice the size
of the model.
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
from _results import Store, add_arguments, table
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data

WIDTH = 4096
LAYER = WIDTH * WIDTH * 4

MEASURED = """
import json, sys, time
sys.path.insert(0, {here!r})
from _memory import PrivatePeak, peak_mb
from quark_onnx import quantize_weights
peak = PrivatePeak()
start = time.perf_counter()
quantize_weights({model!r}, {preset!r}, {output!r})
print(json.dumps([time.perf_counter() - start, peak.mb, peak_mb()]))
"""


def write(folder: Path, layers: int) -> Path:
    """A model of so many layers; no more than one weight is in memory at a time."""
    model, data = folder / "model.onnx", folder / "model.onnx.data"
    nodes, weights, generator = [], [], np.random.default_rng(0)
    with data.open("wb") as file:
        for place in range(layers):
            tensor = TensorProto(
                name=f"w{place}",
                data_type=TensorProto.FLOAT,
                dims=[WIDTH, WIDTH],
                raw_data=b"-",
            )
            offset = file.tell()
            file.write(
                (
                    generator.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
                ).tobytes()
            )
            set_external_data(tensor, data.name, offset, LAYER)
            tensor.ClearField("raw_data")
            weights.append(tensor)
            nodes.append(
                helper.make_node(
                    "MatMul", [f"t{place}", f"w{place}"], [f"t{place + 1}"]
                )
            )
    ends = [
        helper.make_tensor_value_info(f"t{n}", TensorProto.FLOAT, ["N", WIDTH])
        for n in (0, layers)
    ]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], weights)
    onnx.save_model(
        helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
        ),
        str(model),
    )
    return model


def copied(folder: Path) -> float:
    """Seconds that copying the model's files takes."""
    target = folder.with_name("copy")
    start = time.perf_counter()
    shutil.copytree(folder, target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def quantized(model: Path, preset: str) -> tuple[float, float, float, int]:
    """Seconds, peak MB of the process's own memory and with mapped files, and the bytes of the
    result.
    """
    output = model.parent.with_name("out") / "q.onnx"
    here = str(Path(__file__).parent)
    program = MEASURED.format(
        here=here, model=str(model), preset=preset, output=str(output)
    )
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True
    )
    seconds, private, peak = json.loads(done.stdout.splitlines()[-1])
    size = sum(path.stat().st_size for path in output.parent.iterdir())
    shutil.rmtree(output.parent)
    return seconds, private, peak, size


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--presets", nargs="+", default=["INT4", "W8"])
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the models are made (default: the temporary folder)",
    )
    add_arguments(parser, "out")
    arguments = parser.parse_args()
    store, rows = Store(arguments.out / "large.json"), []
    for gigabytes in arguments.gigabytes:
        with TemporaryDirectory(dir=arguments.folder) as folder:
            (Path(folder) / "in").mkdir()
            model = write(Path(folder) / "in", round(gigabytes * 1e9 / LAYER))
            size = sum(path.stat().st_size for path in model.parent.iterdir())
            floor = copied(model.parent)
            for preset in arguments.presets:
                seconds, private, peak, after = quantized(model, preset)
                values = {
                    "bytes": size,
                    "copy": floor,
                    "seconds": seconds,
                    "result": after,
                }
                values |= {"private_mb": private, "peak_mb": peak}
                store.put(f"{gigabytes:g} GB {preset}", values)
                speed = [
                    f"{size / floor / 1e6:.0f}",
                    f"{size / seconds / 1e6:.0f}",
                    f"{seconds / floor:.1f}",
                ]
                rows.append(
                    [
                        f"{gigabytes:g} GB, {preset}",
                        *speed,
                        f"{private:.0f}",
                        f"{peak:.0f}",
                        f"{after / 1e6:.0f}",
                    ]
                )
                print(*rows[-1], file=sys.stderr, flush=True)
    text = table(
        [
            "model",
            "copy MB/s",
            "MB/s",
            "times the copy",
            "own MB",
            "with mapped files",
            "result MB",
        ],
        rows,
    )
    print(text)
    (arguments.out / "large.md").write_text(
        f"# Weight-only quantization of large models\n\n{text}\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
