"""Peak memory of quantize_static with many samples against few: calibration must stream, whatever
the method.

    QUARK_ONNX_DATA=DIR python benchmarks/memory.py [--many 256] [--few 8] [--methods 'ours*' ...]
    [--peers]

SqueezeNet at 224x224; every measurement is a process of its own; images repeat where the task has
fewer. The exit code is 1 when one of ours takes more than 1.1 times the memory.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from _data import Samples, load
from _measure import Method
from _results import Store, add_arguments, table
from _settings import CALIBRATORS, Setting

MOST = 1.1  # times the memory that few samples take


def methods(peers: bool) -> list[Method]:
    """Every calibrator of ours, XINT8, and on request those of onnxruntime."""
    ours = [Method("ours", Setting("A8W8", calibrator)) for calibrator in CALIBRATORS]
    theirs = [
        Method("onnxruntime", Setting("A8W8", calibrator))
        for calibrator in ("minmax", "entropy", "percentile")
    ]
    return [*ours, Method("ours", Setting("XINT8")), *(theirs if peers else [])]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--many", type=int, default=256)
    parser.add_argument("--few", type=int, default=8)
    parser.add_argument("--methods", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also onnxruntime's (its histograms need 10 GB)",
    )
    add_arguments(parser, "out")
    arguments = parser.parse_args()

    store, task, rows = Store(arguments.out / "memory.json"), load("squeezenet"), []
    with TemporaryDirectory() as folder:
        Samples.write(task.calibration(100), Path(folder))
        for method in methods(arguments.peers):
            if not any(fnmatch(str(method), pattern) for pattern in arguments.methods):
                continue
            few, many = (
                method.measure(task.path, Path(folder), n)
                for n in (arguments.few, arguments.many)
            )
            ratio = many.peak_mb / few.peak_mb
            error = few.error or many.error
            met = (
                "met" if ratio <= MOST else "MISSED"
            )  # NaN, after a failure, is a miss
            counts = {"few samples": arguments.few, "many samples": arguments.many}
            store.put(
                str(method),
                {**counts, "few": asdict(few), "many": asdict(many), "ratio": ratio},
            )
            verdict = error or (met if method.tool == "ours" else "")
            rows.append(
                [method, f"{few.peak_mb:.0f}", f"{many.peak_mb:.0f}", ratio, verdict]
            )
            print(*rows[-1], file=sys.stderr, flush=True)
    header = [
        "method",
        *(f"MB, {n} samples" for n in (arguments.few, arguments.many)),
        "ratio",
        f"<= {MOST}",
    ]
    text = table(header, rows)
    print(text)
    if arguments.methods == ["*"]:
        (arguments.out / "memory.md").write_text(
            f"# Peak memory, SqueezeNet at 224x224\n\n{text}\n"
        )
    return (
        0
        if all(row[-1] == "met" for row in rows if str(row[0]).startswith("ours"))
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
