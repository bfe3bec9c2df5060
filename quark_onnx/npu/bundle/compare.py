"""Compare what this machine computes with what was recorded when the bundle was made, and report
where the operators run and how fast: offloaded is not yet correct.

    python compare.py [--device auto|npu|cpu] [--least 20] [--runs 50] [--fresh]
                      [--data FOLDER --labels FILE.csv]

For each output of each shipped sample: the signal-to-noise ratio in dB, the greatest deviation, and
whether the greatest value is at the same place. Of a detector the boxes are matched with the
recorded ones, after postprocess.onnx where there is one. Then the latency; on the NPU the operators
by device as the engine reports them, and whether the forecast held; with labels the accuracy. The
exit code is 1 if the boxes of a detector differ (F1 below 0.9, or a mean overlap below 0.85) or,
without boxes, any ratio is below --least; if the NPU runs no operator; and 2 if there are no
samples.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from npu_engine import (
    REPORT,
    REPORT_VARIABLE,
    Counts,
    compared,
    counts_of_log,
    counts_of_report,
    logged,
    report_of,
    running_of_log,
)
from npu_session import (
    HERE,
    arrays_of,
    compiled_model,
    driver_version,
    open_session,
    postprocess,
    printable,
    provider_options,
    read_image,
)

#: Least F1 and mean overlap of boxes that are as recorded.
LEAST_F1, LEAST_OVERLAP = 0.9, 0.85


def sqnr(expected: np.ndarray, found: np.ndarray) -> float:
    """Signal-to-noise ratio in dB: infinite for equal arrays, minus infinity where one alone is no
    number.
    """
    if expected.dtype.kind not in "biuf" or found.dtype.kind not in "biuf":
        return float("inf") if (expected == found).all() else -float("inf")
    wanted, error = expected.astype(np.float64), deviation(expected, found)
    noise, signal = (
        float(np.square(error).sum()),
        float(np.square(wanted[np.isfinite(wanted)]).sum()),
    )
    if noise == 0:
        return float("inf")
    return (
        10 * float(np.log10(max(signal, 1e-300) / noise))
        if np.isfinite(noise)
        else -float("inf")
    )


def deviation(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The difference of found and expected values; 0 where both are NaN, or the same infinity."""
    wanted, got = expected.astype(np.float64), found.astype(np.float64)
    same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        return np.where(
            same,
            0.0,
            np.where(np.isfinite(got) & np.isfinite(wanted), got - wanted, np.inf),
        )


def main() -> int:
    options = _options()
    files = sorted((HERE / "samples").glob("*.npz"))
    if not files:
        print(
            f"compare: {HERE / 'samples'} has no samples; copy the whole folder of the bundle",
            file=sys.stderr,
        )
        return 2
    try:
        if not options.fresh:
            return _compare(options, files)
        # The engine writes its report and counts only while it compiles.
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ["NPU_CACHE"] = folder
            return _compare(options, files)
    except Exception as error:  # numpy and onnxruntime raise many unrelated types
        print(f"compare: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare this machine's outputs with the recorded ones.",
    )
    parser.add_argument("--device", choices=["auto", "npu", "cpu"], default="auto")
    parser.add_argument(
        "--least",
        type=float,
        default=20.0,
        help="least signal-to-noise ratio in dB (default: 20)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=50,
        help="runs for the latency; 0 for none (default: 50)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="compile in an empty cache, so that the engine counts the operators again",
    )
    parser.add_argument(
        "--data", type=Path, help="folder of .npz files, or of images, with labels"
    )
    parser.add_argument(
        "--labels", type=Path, help="CSV file of file names and class numbers"
    )
    options = parser.parse_args()
    if (options.data is None) != (options.labels is None):
        parser.error("--data and --labels belong together")
    if math.isnan(options.least):  # no ratio is below it
        parser.error("--least is no number")
    return options


def _compare(options: argparse.Namespace, files: list[Path]) -> int:
    """Open the session, and print every part of the comparison; return the exit code."""
    os.environ.setdefault(REPORT_VARIABLE, REPORT)
    try:
        with logged() as lines:
            session, where = open_session(
                options.device, verbose=True, fresh=options.fresh
            )
    except RuntimeError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(f"engine: {_engine(where)}")
    worst = _worst(session, files)
    print(f"on the {where.upper()}, {_samples(len(files))}: worst {worst:.1f} dB")
    differs = worst < options.least
    reason = f"below {options.least:g} dB"
    boxes = None
    # Outputs of other shapes, or without numbers, have no boxes to match.
    if (HERE / "boxes.py").is_file() and worst > -float("inf"):
        boxes = _boxes(session, files)
    if boxes is not None and boxes.count:
        print(
            f"boxes: {boxes.sentence}: F1 {boxes.f1:.3f}, mean overlap {boxes.overlap:.3f}"
        )
        differs = boxes.f1 < LEAST_F1 or boxes.overlap < LEAST_OVERLAP
        reason = "other boxes"
    if options.runs > 0:
        print(f"latency: {_latency(session, files[0], options.runs)}")
    code = 0
    if where == "npu":
        code = _print_operators(lines, fresh=options.fresh)
    if options.labels is not None:
        print(f"top-1: {_accuracy(session, where, options.data, options.labels)}")
    if differs:
        hint = (
            ""
            if where == "npu"
            else "; without VNNI a CPU's sums of 8-bit products saturate in onnxruntime"
        )
        print(
            f"compare: {reason}: this machine computes something else{hint}",
            file=sys.stderr,
        )
        return 1
    return code


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"


def _engine(where: str) -> str:
    """Return the versions of onnxruntime and of the driver."""
    import onnxruntime as ort

    driver = f", driver {driver_version()}" if where == "npu" else ""
    return f"onnxruntime {ort.__version__}{driver}"


def _feeds(session: Any, file: Path) -> dict[str, Any]:
    """Return the inputs of the model from a .npz file or an image."""
    inputs = session.get_inputs()
    if file.suffix.lower() != ".npz":
        return {inputs[0].name: read_image(file)}
    with np.load(file, allow_pickle=False) as arrays:
        return {value.name: arrays[value.name] for value in inputs}


def _worst(session: Any, files: list[Path]) -> float:
    """Print the agreement of each output of each sample; return the least ratio in dB."""
    names = [printable(value.name) for value in session.get_outputs()]
    worst, places = float("inf"), list[bool]()
    for file in files:
        with np.load(HERE / "outputs" / file.name, allow_pickle=False) as arrays:
            expected = dict(arrays)
        computed: dict[str, np.ndarray] = {}
        for place, value in enumerate(session.run(None, _feeds(session, file))):
            computed.update(arrays_of(f"output_{place}", value))
        for key in {**expected, **computed}:
            name = re.sub(r"^output_(\d+)", lambda found: names[int(found[1])], key)
            if key not in computed or key not in expected:
                side = "recorded" if key in expected else "computed"
                print(f"{file.name} {name}: {side} alone")
                worst = -float("inf")
                continue
            wanted, found = expected[key], computed[key]
            if wanted.shape != found.shape:
                print(
                    f"{file.name} {name}: shape {found.shape}, recorded {wanted.shape}",
                )
                worst = -float("inf")
                continue
            ratio = sqnr(wanted, found)
            more = ""
            if wanted.dtype.kind in "biuf" and wanted.size:
                places.append(bool(np.argmax(found) == np.argmax(wanted)))
                same = "same" if places[-1] else "OTHER"
                greatest = np.abs(deviation(wanted, found)).max()
                more = f", greatest deviation {greatest:.3g}, {same} greatest value"
            print(f"{file.name} {name}: {ratio:.1f} dB{more}")
            worst = min(worst, ratio)
    if places:
        print(f"agreement of the greatest value: {sum(places)} of {len(places)}")
    return worst


def _boxes(session: Any, files: list[Path]) -> Any:
    """Return the boxes of this machine, matched with the recorded ones; None without any layout."""
    import boxes

    settings = json.loads((HERE / "provider_options.json").read_text(encoding="utf-8"))
    names = [value.name for value in session.get_outputs()]
    layout, pairs = None, list[Any]()
    for file in files:
        feeds = _feeds(session, file)
        with np.load(HERE / "outputs" / file.name, allow_pickle=False) as arrays:
            recorded = {
                name: arrays[f"output_{place}"]
                for place, name in enumerate(names)
                if f"output_{place}" in arrays
            }
        computed = session.run(None, feeds)
        results = [recorded, dict(zip(names, computed, strict=True))]
        if settings.get("postprocess"):
            results = [postprocess({**feeds, **outputs}) for outputs in results]
        expected, found = map(boxes.arrays_of, results)
        layout = layout or boxes.detector_layout(expected, feeds)
        if layout is None:
            return None
        detected = [boxes.detections(layout, outputs) for outputs in (expected, found)]
        pairs += zip(*detected, strict=True)
    return boxes.Matches.of(pairs)


def _latency(session: Any, file: Path, runs: int) -> str:
    """Return the latency and the throughput of one inference after the other."""
    feeds, seconds = _feeds(session, file), list[float]()
    for _ in range(min(runs, 3)):  # the first runs allocate memory
        session.run(None, feeds)
    for _ in range(runs):
        start = perf_counter()
        session.run(None, feeds)
        seconds.append(perf_counter() - start)
    median, most = np.percentile(seconds, (50, 95)) * 1e3
    rate = runs / sum(seconds)
    return (
        f"median {median:.2f} ms, 95 % within {most:.2f} ms; {rate:.1f} inferences per second, one"
        f" after the other ({runs} runs)"
    )


def _print_operators(lines: list[str], *, fresh: bool) -> int:
    """Print the operators by device and whether the forecast held; return the exit code.

    Args:
        lines: the engine's log of the opening of the session.
        fresh: True if nothing that was compiled before was used.
    """
    counts, source = _counts(lines, fresh=fresh)
    if counts is None:
        print(
            "operators: unknown, as the compiled model came from a cache: python compare.py"
            " --device npu --fresh"
        )
        return 0
    report = json.loads((HERE / "report.json").read_text(encoding="utf-8"))
    held, rows = compared(counts, report["forecast"])
    print(f"operators by the engine's {source}: {'; '.join(map(printable, rows))}")
    print(f"forecast: {'held' if held else 'did NOT hold'}")
    if 0 in (counts.operators.get("NPU", 0), counts.running):
        print("compare: no operator runs on the NPU", file=sys.stderr)
        return 1
    return 0


def _counts(lines: list[str], *, fresh: bool) -> tuple[Counts | None, str]:
    """Return the counts of the engine's report, or of its log, and which of them it is."""
    import onnxruntime as ort

    settings = json.loads((HERE / "provider_options.json").read_text(encoding="utf-8"))
    device, options = provider_options(ort, settings, HERE)
    compiled = None if fresh else compiled_model(device, options, HERE)
    report = report_of(options)
    if compiled is not None:
        # Written by precompile.py.
        report = compiled.with_suffix(".report.json")
    if report is not None and report.is_file():
        return replace(
            counts_of_report(report), running=running_of_log(lines)
        ), "report"
    return counts_of_log(lines), "log"


def _accuracy(session: Any, where: str, data: Path, labels: Path) -> str:
    """Return the share of right classes, on the NPU beside that of the CPU."""
    with labels.open(encoding="utf-8", newline="") as file:
        rows = [(row[0], row[1].strip()) for row in csv.reader(file) if len(row) > 1]
    classes = [(name, int(label)) for name, label in rows if label.isdecimal()]
    if not classes:
        raise SystemExit(
            f"compare: {labels} has no rows of a file name and a class number"
        )
    sessions = {where: session}
    if where == "npu":
        sessions["cpu"] = open_session("cpu")[0]
    right = dict.fromkeys(sessions, 0)
    for name, label in classes:
        feeds = _feeds(session, data / name)
        for device, opened in sessions.items():
            scores = opened.run(None, feeds)[0]
            right[device] += int(np.argmax(scores) == label)
    shares = [
        f"{100 * count / len(classes):.2f} % on the {device.upper()}"
        for device, count in right.items()
    ]
    return f"{', '.join(shares)}, of {_samples(len(classes))}"


if __name__ == "__main__":
    sys.exit(main())
