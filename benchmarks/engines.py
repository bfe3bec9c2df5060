"""Files of our presets and of NNCF in onnxruntime and in OpenVINO: error, runtime, integer layers.

    QUARK_ONNX_DATA=DIR python benchmarks/engines.py [--tasks squeezenet ...] [--presets A8W8 ...]
        [--nncf-python VENV/bin/python] [--busy] [--again] [--report]

Needs the extra `openvino`. Each file is written once and measured on both engines with one thread,
as `quark-onnx compare --engine` does: the SQNR of the worst output against the float model in
onnxruntime, on samples that did not calibrate; the latency relative to the float model on the same
engine, in turns, unless `--busy`; the layers that run on integers. Rows go to OUT/engines.json one
by one. The mark is the time in OpenVINO of the file for ``--target openvino``, at most 1.05 times
that of NNCF's file on every model: both run in turns, and the median of several rounds counts, as
one file differs from itself by 5 % from round to round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from _data import Feeds, Samples, digest, load
from _models import espnet
from _results import Row, Store, add_arguments, add_store_arguments, due, table
from _settings import Setting
from _tools import Nncf

TASKS = (
    "squeezenet",
    "mobilenetv2",
    "resnet20",
    "yolox_nano",
    "ultraface",
    "minilm-stsb",
)
#: A preset, or the preset and the target of its file.
FOR_OPENVINO = "A8W8 openvino"
PRESETS = ("A8W8", FOR_OPENVINO, "A8W8 cpu", "S8S8", "U8U8", "XINT8")
#: A network with random weights and 40 PRelu, which the benchmark writes; it needs no data.
ESPNET = "espnet"
ENGINES = ("onnxruntime", "openvino")
#: Greatest time of our file for OpenVINO, relative to that of NNCF's file.
MARK = 1.05
#: The row of that time, and the rounds of which the median counts.
AGAINST, ROUNDS = f"{FOR_OPENVINO} against {Nncf.name}", 9
#: Samples for calibration, and to compare on.
CALIBRATION, COMPARED = 16, 64


def measure(model: Path, file: Path, samples: Samples, *, timed: bool) -> Row:
    """Return the figures of a file on each engine."""
    from quark_onnx import compare, on_engine

    row = Row({"float file": digest(model), "file": digest(file)})
    for name in ENGINES:
        try:
            with on_engine(name):
                found = compare(
                    model, file, samples, time=timed, threads=1, preprocessing=False
                )
        except Exception as error:
            row[name] = {"failed": str(error)[:200]}
            continue
        assert found.run is not None
        row[name] = {
            "engine": found.run.engine,
            "sqnr": round(found.sqnr, 2),
            "integer_layers": found.run.integer_layers,
            "layers": found.run.layers,
            "float_layers": found.run.float_layers,
        }
        if found.latency is not None:
            row[name]["ratio"] = round(found.latency.ratio, 3)
            row[name]["float_ms"] = round(found.latency.reference_ms, 2)
    return row


def report(rows: dict[str, Row], tasks: list[str]) -> Iterator[str]:
    """Yield a table for each model."""
    header = ["file"]
    for name in ENGINES:
        header += [f"{name}: dB", "time / float", "on integers"]
    for task in tasks:
        lines = []
        for maker in (*PRESETS, Nncf.name):
            if row := rows.get(f"{task}/{maker}"):
                cells = [cell for name in ENGINES for cell in cells_of(row.get(name))]
                lines.append([maker, *cells])
        yield f"## {task}\n\n{table(header, lines)}"


def cells_of(found: Row | None) -> list[object]:
    """Return error, relative time and integer layers of a row on one engine.

    >>> cells_of({"sqnr": 20.5, "ratio": 0.5, "integer_layers": 2, "layers": 3})
    [20.5, 0.5, '2 of 3']
    """
    if not found or "failed" in found:
        return ["fails", None, None]
    return [
        found["sqnr"],
        found.get("ratio"),
        f"{found['integer_layers']} of {found['layers']}",
    ]


def marks(rows: dict[str, Row], tasks: Sequence[str]) -> list[list[object]]:
    """Return for each model our time in OpenVINO relative to NNCF's, and whether the mark is met.

    >>> marks({"a/A8W8 openvino against nncf": {"ratio": 1.0}}, ["a", "b"])
    [['a', 1.0, 'met'], ['b', None, 'not measured']]
    """
    lines = list[list[object]]()
    for task in tasks:
        ratio = rows.get(f"{task}/{AGAINST}", {}).get("ratio")
        if ratio is None:
            lines.append([task, None, "not measured"])
            continue
        lines.append([task, ratio, "met" if ratio <= MARK else "missed"])
    return lines


def made(
    maker: str, nncf: Nncf | None, model: Path, samples: Samples, file: Path
) -> str:
    """Write the file of a preset or of NNCF; return why it failed, empty if it did not."""
    from quark_onnx import QConfig, QuarkError, quantize

    try:
        if maker == Nncf.name and nncf is not None:
            nncf.quantize(model, samples, Setting("A8W8"), file)
        else:
            preset, _, target = maker.partition(" ")
            quantize(model, samples, QConfig.of(preset).with_(target=target), file)
    except (RuntimeError, QuarkError) as error:  # a peer that fails is a RuntimeError
        return str(error)[:200]
    return ""


def against(
    nncf: Nncf, model: Path, samples: Samples, feeds: Feeds, folder: Path
) -> Row:
    """Return the time of our file in OpenVINO relative to NNCF's, as the median of rounds."""
    from quark_onnx import on_engine
    from quark_onnx.trials.latency import measure_latency

    files = [folder / f"{maker}.onnx" for maker in (Nncf.name, FOR_OPENVINO)]
    for file in files:
        if not file.exists() and (why := made(file.stem, nncf, model, samples, file)):
            return Row(error=why)
    with on_engine("openvino"):
        ratios = [
            measure_latency(*files, feeds, threads=1).ratio for _ in range(ROUNDS)
        ]
    rounds = [round(each, 3) for each in sorted(ratios)]
    return Row(ratio=median(rounds), rounds=rounds)


def opened(task: str, folder: Path) -> tuple[Path, Iterator[Feeds]]:
    """Return the float model of a task and its samples."""
    if task != ESPNET:
        loaded = load(task)
        return loaded.path, loaded.calibration(CALIBRATION + COMPARED)
    images = np.random.default_rng(1).normal(
        size=(CALIBRATION + COMPARED, 1, 3, 256, 256)
    )
    feeds = ({"input": image.astype(np.float32)} for image in images)
    return espnet(folder / "espnet.onnx"), feeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_store_arguments(parser, (*TASKS, ESPNET))
    add_arguments(parser, "busy")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--nncf-python", type=Path, metavar="VENV/bin/python")
    options = parser.parse_args()
    store = Store(options.out / "engines.json")
    nncf = None if options.nncf_python is None else Nncf(options.nncf_python)
    makers = [*options.presets, *([Nncf.name] if nncf is not None else [])]
    for task in [] if options.report else options.tasks:
        with TemporaryDirectory() as place:
            folder = Path(place)
            model, feeds = opened(task, folder)
            first = Samples.write(islice(feeds, CALIBRATION), folder / "calibration")
            others = Samples.write(islice(feeds, COMPARED), folder / "compared")
            for maker in makers:
                key, tag = f"{task}/{maker}", {"model": digest(model)}
                if not due(store.rows().get(key), tag, again=options.again):
                    continue
                file = folder / f"{maker}.onnx"
                if why := made(maker, nncf, model, first, file):
                    row = Row({name: {"failed": why} for name in ENGINES})
                else:
                    timed = not options.busy
                    row = measure(model, file, others, timed=timed)
                store.put(key, tag | row)
                print(key, [cells_of(row[name]) for name in ENGINES], flush=True)
            key, tag = f"{task}/{AGAINST}", {"model": digest(model)}
            timed = nncf is not None and not options.busy
            if timed and due(store.rows().get(key), tag, again=options.again):
                row = against(nncf, model, first, next(iter(others)), folder)
                store.put(key, tag | row)
    text = "\n\n".join(report(store.rows(), [*TASKS, ESPNET]))
    found = marks(store.rows(), TASKS)
    header = [f"{FOR_OPENVINO} in OpenVINO", "time / NNCF's", f"mark {MARK}"]
    text += f"\n\n## Mark\n\n{table(header, found)}"
    title = "# Engines\n\nBy `benchmarks/engines.py`, one thread."
    (options.out / "engines.md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    print(table(header, found))
    return int(any(verdict == "missed" for *_, verdict in found))


if __name__ == "__main__":
    raise SystemExit(main())
