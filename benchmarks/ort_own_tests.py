"""Run onnxruntime's own quantization tests against ``quark_onnx.compat_onnxruntime``.

    python benchmarks/ort_own_tests.py path/to/onnxruntime

The tests are those of a checkout of onnxruntime, which is not part of this project; nothing is fetched. They run twice
in a temporary folder: as they are, and with the package name replaced. Of those that pass as they are, the rest must be
in ``DIFFERENT``, with the reason; for these the accuracy of both results is printed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "onnxruntime/test/python/quantization"
#: How many have to pass.
LEAST = 250

_RANGE = "the range of Sigmoid and Softmax is known, [0, 1]; onnxruntime measures it, and clips other data"
_INTEGER = "more is computed on codes: onnxruntime leaves an operator float whose input nobody has quantized"
_NAMES = "the operator reads codes, under the name that the test takes for that of the float tensor"
_LATER = "the results of an operator that only moves values are moved as codes, with one pair behind them"
_CLIP = "Clip or Relu is done by saturation, or stays float where its output was zero throughout calibration"
#: Tests that pass with onnxruntime and not with this package, by the end of their names, and why that is right.
DIFFERENT: dict[str, str] = {}


def run(folder: Path, notes: Path | None = None) -> dict[str, bool]:
    """Run all tests of a folder; whether each passed. Those that were skipped are left out."""
    report = folder / "report.xml"
    plugins = ["-p", "benchmarks._ort_compare"] if notes else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"ORT_COMPARE_NOTES": str(notes)} if notes else {}
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *plugins, f"--junitxml={report}", "."]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False
    )
    found: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        kinds = {child.tag for child in case}
        if "skipped" not in kinds:
            found[name] = found.get(name, True) and not kinds & {"failure", "error"}
    return found


def copy(source: Path, folder: Path, *, replace: bool) -> None:
    """Copy the tests, with the package name replaced or not."""
    folder.mkdir()
    for path in source.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if replace:
            text = re.sub(r"onnxruntime\.quantization", "quark_onnx.compat_onnxruntime", text)
            text = text.replace(
                "from onnxruntime import quantization", "from quark_onnx import compat_onnxruntime as quantization"
            )
        (folder / path.name).write_text(text, encoding="utf-8")


def accuracy(notes: Path) -> dict[str, tuple[float, float]]:
    """The least accuracy of this package and of onnxruntime in each test, in decibels."""
    found = defaultdict(list)
    for line in notes.read_text(encoding="utf-8").splitlines() if notes.exists() else ():
        entry = json.loads(line)
        path, *names = entry["test"].split("::")
        found[".".join([path.removesuffix(".py"), *names])].append((entry["ours"], entry["theirs"]))
    return {name: min(pairs) for name, pairs in found.items()}


def main(arguments: list[str]) -> int:
    """Compare; the exit status is 1 where a test fails that is not in the list."""
    source = Path(arguments[0], TESTS) if arguments else None
    if source is None or not source.is_dir():
        print(f"skipped: give the path of a checkout of onnxruntime, with {TESTS} in it")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(source, folder / "theirs", replace=False)
        copy(source, folder / "ours", replace=True)
        before, after = run(folder / "theirs"), run(folder / "ours", folder / "notes.jsonl")
        measured = accuracy(folder / "notes.jsonl")
    passing = sorted(test for test, passed in before.items() if passed)
    kept = [test for test in passing if after.get(test)]
    print(f"{len(kept)} of the {len(passing)} tests pass that pass with onnxruntime itself\n")
    unknown = []
    for test in (test for test in passing if not after.get(test)):
        reason = next((why for end, why in DIFFERENT.items() if test.endswith(end)), "")
        unknown += [] if reason else [test]
        pair = "ours {:.2f} dB, onnxruntime {:.2f} dB".format(*measured[test]) if test in measured else "no numbers"
        print(f"{test}\n    {reason or 'NOT IN THE LIST'}\n    {pair}")
    return 1 if unknown or len(kept) < LEAST else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
