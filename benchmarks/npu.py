"""XINT8 for an NPU: what its rules cost, what optimizers make of it, and which rules the models of each tool break.

    QUARK_ONNX_DATA=... python benchmarks/npu.py [--models resnet20 ...] [--amd-quark-python VENV/bin/python]

All get the same 80 calibration samples, and one procedure judges them: the metric on the test set, and the
signal-to-noise ratio of the outputs on 20 samples that follow those of the calibration. What `quark_onnx.npu.check`
finds is counted by rule. The tables go to OUT/npu.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from _data import Samples, load, session_of
from _results import table
from _settings import Setting
from _tools import AmdQuark, OnnxRuntime

from quark_onnx import QConfig, compare, npu, quantize

MODELS = ("resnet20", "resnet44", "squeezenet", "mobilenetv2")
CALIBRATION, JUDGES, TARGET = 80, 20, "stx"
_BEST = ("cle:relu6=replace", "adaquant:iterations=200", "bias_correction")
_ROUNDED = ("cle:relu6=replace", "adaround:iterations=200", "bias_correction")

Quantize = Callable[[Path, Samples, Path], object]


@dataclass(frozen=True)
class Way:
    """A way to quantize.

    Attributes:
        tool, name: as in the tables.
        run: writes the model to a path.
    """

    tool: str
    name: str
    run: Quantize


def ours(name: str, preset: str = "XINT8", **changes: object) -> Way:
    def run(model: Path, samples: Samples, output: Path) -> object:
        return quantize(model, samples, QConfig.of(preset).with_(**changes), output)

    return Way("ours", name, run)


def ways(python: Path | None) -> Iterator[Way]:
    yield ours("XINT8")
    yield ours("XINT8, rules settled", target=TARGET)
    yield ours("XINT8, rules settled, cle+adaquant+bias", target=TARGET, optimizers=_BEST)
    yield ours("XINT8, rules settled, cle+adaround+bias", target=TARGET, optimizers=_ROUNDED)
    yield ours("A8W8, for the target", "A8W8", target=TARGET)
    runtime = OnnxRuntime()
    yield Way("onnxruntime", "A8W8 per tensor", lambda *a: runtime.quantize(a[0], a[1], _RUNTIME, a[2]))
    if python is not None:
        peer = AmdQuark(python)
        for name, more in (("XINT8", ()), ("XINT8, cle", ("cle",)), ("XINT8, cle+adaquant", ("cle", "adaquant:200"))):
            yield Way("amd-quark", name, lambda m, s, o, more=more: peer.measure(m, s, Setting("XINT8"), o, *more))


_RUNTIME = Setting("A8W8", "minmax", per_channel=False)


def measured(task: str, way: Way, samples: Samples, judges: list[dict[str, object]]) -> tuple[list[object], str]:
    """Metric and signal-to-noise ratio, and the findings by rule as text."""
    found = load(task)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "quantized.onnx"
        way.run(found.path, samples, output)
        value, ratio = float(found.evaluate(session_of(output))), compare(found.path, output, judges).sqnr
        findings = npu.check(output, TARGET, kind="" if "A8W8" in way.name else "XINT8").findings
    rules = Counter(finding.rule for finding in findings)
    return [f"{value:.2f}", f"{ratio:.1f}"], ", ".join(
        f"{rule} {count}" for rule, count in sorted(rules.items())
    ) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--amd-quark-python", type=Path, help="the Python of an environment with amd-quark")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rows, findings = list[list[object]](), list[list[object]]()
    for name in arguments.models:
        task = load(name)
        rows.append([name, "float", "", f"{task.float_value:.2f}", ""])
        with TemporaryDirectory() as folder:
            every = iter(task.calibration(CALIBRATION + JUDGES))
            samples = Samples.write(islice(every, CALIBRATION), Path(folder))
            judges = list(every)
            for way in ways(arguments.amd_quark_python):
                try:
                    figures, rules = measured(name, way, samples, judges)
                except Exception as error:  # a tool that fails is a result too
                    figures, rules = ["fails", ""], f"{type(error).__name__}: {str(error)[:80]}"
                rows.append([name, way.tool, way.name, *figures])
                findings.append([name, way.tool, way.name, rules])
                print(*rows[-1], rules, sep="  ", file=sys.stderr, flush=True)
    titles = {rule: npu.RULES[rule].title for rule in npu.RULES}
    text = "\n\n".join(
        [
            "# XINT8 for an NPU",
            f"`python benchmarks/npu.py`, {TARGET}, {CALIBRATION} calibration samples; SQNR in dB on {JUDGES} others.",
            table(["model", "tool", "how", "metric", "SQNR"], rows),
            "## Rules that are broken, and how often",
            table(["model", "tool", "how", "findings"], findings),
            "\n".join(f"- {rule}: {title}" for rule, title in titles.items()),
        ]
    )
    (arguments.out / "npu.md").write_text(text + "\n", encoding="utf-8")
    print(json.dumps({"rows": len(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
