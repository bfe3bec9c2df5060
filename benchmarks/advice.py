"""Does the first advice after a quantization improve the model on test data?

    QUARK_ONNX_DATA=DIR python benchmarks/advice.py [--tasks mobilenetv2 ...] [--presets A8W8 ...]
        [--budget SECONDS] [--again] [--report]

Each real model is quantized with each preset. The advice is tried on request, whatever the verdict
says; its budget lets most changes be tried on a quiet machine. The first action is then applied,
and both models are judged by the metric of the task on the test data, which neither the calibration
nor the trials have seen. Where a preset has no action that helps, there is none to judge. `chance`
is the greatest difference of a metric that may be chance: one standard error of a share, or of a
rank correlation. The exit code is 1 if fewer than nine of ten first actions improve the metric, or
if one is worse by more than chance. Rows go to OUT/advice.json, the table to OUT/advice.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from _data import Samples, Task, digest, load, session_of
from _results import Row, Store, add_store_arguments, due, table

from quark_onnx import QConfig, quantize
from quark_onnx.analysis.advise import advise
from quark_onnx.report.verdict import changed

#: The tasks with their number of test samples.
TASKS = {
    "resnet20": 1000,
    "mobilenetv2": 900,
    "squeezenet": 900,
    "yolox_nano": 96,
    "ultraface": 96,
    "minilm-stsb": 1379,
    "minilm-sst2": 332,
}
PRESETS = ("A8W8", "XINT8", "INT4")
SAMPLES, BUDGET = 100, 60.0
LEAST_SHARE = 0.9


def chance(task: str, value: float) -> float:
    """Return one standard error of a metric, in its own unit (percent)."""
    share = min(max(value / 100.0, 0.0), 1.0)
    return float(100.0 * np.sqrt(share * (1.0 - share) / TASKS[task]))


def measured(task: Task, name: str, preset: str, budget: float) -> Row:
    """Return the metric before and after the first action."""
    config = QConfig.of(preset)
    with TemporaryDirectory() as folder:
        samples = Samples.write(task.calibration(SAMPLES), Path(folder) / "samples")
        file = Path(folder) / "quantized.onnx"
        start = perf_counter()
        result = quantize(task.path, samples, config, file)
        seconds = perf_counter() - start
        verdict = result.report.verdict
        assert verdict is not None
        start = perf_counter()
        steps = advise(task.path, samples, result, config, budget=budget)
        row: Row = {
            "band": verdict.band,
            "seconds": round(seconds, 1),
            "advice_seconds": round(perf_counter() - start, 1),
            "metric": task.metric,
            "before": round(float(task.evaluate(session_of(file))), 4),
            "actions": [[step.options, step.text] for step in steps],
        }
        helpful = [step for step in steps if step.gain is not None]
        if helpful:
            other = changed(config, helpful[0].options)
            quantize(task.path, samples, other, file)
            row["first"] = helpful[0].options
            row["gain"] = str(helpful[0].gain)
            row["after"] = round(float(task.evaluate(session_of(file))), 4)
            row["chance"] = round(chance(name, row["before"]), 4)
    return row


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    add_store_arguments(parser, list(TASKS))
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds of the trials of a row"
    )
    options = parser.parse_args()
    store = Store(options.out / "advice.json")
    for name in [] if options.report else options.tasks:
        task = load(name)
        for preset in options.presets:
            key = f"{name}/{preset}"
            tag = {"model": digest(task.path)}
            if due(store.rows().get(key), tag, again=options.again):
                row = tag | measured(task, name, preset, options.budget)
                store.put(key, row)
                outcome = f"{row['before']} -> {row.get('after', 'no action helps')}"
                print(key, row.get("first", ""), outcome, file=sys.stderr)
    rows = store.rows()
    text = report(rows)
    (options.out / "advice.md").write_text(text, encoding="utf-8")
    print(text)
    return int(not meets(rows))


def meets(rows: dict[str, Row]) -> bool:
    """Return whether the first actions keep what the advice promises."""
    judged = [row for row in rows.values() if "after" in row]
    better = _better(judged)
    harmful = any(row["after"] < row["before"] - row["chance"] for row in judged)
    return bool(judged) and better >= LEAST_SHARE * len(judged) and not harmful


def _better(rows: list[Row]) -> int:
    return sum(row["after"] > row["before"] for row in rows)


def report(rows: dict[str, Row]) -> str:
    """Return the table as Markdown."""
    lines = list[list[str]]()
    for key, row in rows.items():
        task, preset = key.split("/")
        after = f"{row['after']:.2f}" if "after" in row else "none helps"
        lines.append(
            [
                task,
                preset,
                row["band"],
                f"`{row['first']}`" if "first" in row else "",
                row.get("gain", ""),
                f"{row['before']:.2f}",
                after,
                f"{row['chance']:.2f}" if "chance" in row else "",
            ]
        )
    header = [
        "task",
        "preset",
        "verdict",
        "first action",
        "measured by the trial",
        "test before",
        "test after",
        "chance",
    ]
    judged = [row for row in rows.values() if "after" in row]
    given = [row for row in judged if row["band"] != "good"]
    worse = sum(row["after"] < row["before"] - row["chance"] for row in judged)
    return (
        "# First advice, on test data\n\n"
        f"{_better(judged)} of {len(judged)} first actions improve the metric on test data,"
        f" {_better(given)} of the {len(given)} where the verdict is not good; {worse} are"
        " worse by more than chance.\n\n"
        f"{table(header, lines)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
