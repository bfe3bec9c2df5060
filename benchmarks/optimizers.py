"""What optimizers make of quantized models: metrics, time and memory, ours beside amd-quark's.

    QUARK_ONNX_DATA=... python benchmarks/optimizers.py [--tasks resnet20 ...] [--presets XINT8 ...]
        [--recipes plain cle ...] [--tools ours] [--amd-quark-python VENV/bin/python]
        [--again] [--report]

Both tools get the same 100 calibration samples, and one procedure judges both. Each run is a process of its own, so
that its peak memory is its own. A measurement is kept in OUT/optimizers.json as soon as it is made; what is there is
not measured again without --again. A star marks rows that an older version of our source made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from _data import Samples, digest, load
from _results import Row, Store, table
from _settings import Setting
from _tools import AmdQuark, Ours

CALIBRATION_SAMPLES = 100
ITERATIONS = 200
VISION = ("squeezenet", "mobilenetv2", "resnet20", "resnet44", "yolox_nano")
TEXT = ("minilm-stsb", "minilm-sst2")


@dataclass(frozen=True)
class Recipe:
    """Optimizers by a name; ours as texts, amd-quark's as its peer script calls them, None where it has none."""

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...] | None
    presets: tuple[str, ...] = ("A8W8", "XINT8", "A8W4")
    tasks: tuple[str, ...] = VISION


_ADAROUND, _ADAQUANT = f"adaround:iterations={ITERATIONS}", f"adaquant:iterations={ITERATIONS}"
_CLE, _BALANCE = "cle:relu6=bound", "cle:activations=true,relu6=bound,silu=scale"
_TEXT = {"presets": ("A8W8-channel",), "tasks": TEXT}
RECIPES = (
    Recipe("plain", (), ()),
    Recipe("cle", ("cle",), ("cle",)),
    Recipe("cle, Relu6 replaced", ("cle:relu6=replace",), None, tasks=("mobilenetv2",)),
    Recipe("cle, Relu6 bounded", (_CLE,), None, tasks=("mobilenetv2",)),
    Recipe("bias", ("bias_correction",), None),
    Recipe("adaround", (_ADAROUND,), (f"adaround:{ITERATIONS}",)),
    Recipe("adaquant", (_ADAQUANT,), (f"adaquant:{ITERATIONS}",)),
    Recipe("cle+adaround", (_CLE, _ADAROUND), ("cle", f"adaround:{ITERATIONS}")),
    Recipe("cle activations", (_BALANCE,), None),
    Recipe("cle activations+adaround", (_BALANCE, _ADAROUND), None),
    Recipe("cle activations+gptq+bias", (_BALANCE, "gptq:asymmetric=true", "bias_correction"), None),
    Recipe("cle activations+adaquant+bias", (_BALANCE, _ADAQUANT, "bias_correction"), None),
    Recipe("plain", (), None, **_TEXT),
    Recipe("smoothquant auto", ("smoothquant:alpha=auto,insert=true",), None, **_TEXT),
    Recipe("quarot", ("quarot",), None, **_TEXT),
    Recipe("quarot online", ("quarot:online=true",), None, **_TEXT),
    Recipe("plain", (), None, presets=("INT4",), tasks=TEXT),
    Recipe("gptq", ("gptq",), None, presets=("INT4",), tasks=TEXT),
)


@dataclass(frozen=True)
class Run:
    """One thing to measure."""

    task: str
    preset: str
    recipe: Recipe
    tool: str

    @property
    def key(self) -> str:
        return f"{self.task}/{self.tool}/{self.preset}/{self.recipe.name}"


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """What the command line asks for."""
    for task in arguments.tasks:
        for recipe in RECIPES:
            for preset in recipe.presets:
                named = not arguments.recipes or recipe.name in arguments.recipes
                if task not in recipe.tasks or not named or (arguments.presets and preset not in arguments.presets):
                    continue
                theirs = arguments.amd_quark_python and recipe.theirs is not None and preset == "XINT8"
                for tool in ("ours", "amd-quark") if theirs else ("ours",):
                    if not arguments.tools or tool in arguments.tools:
                        yield Run(task, preset, recipe, tool)


def config_of(preset: str, optimizers: tuple[str, ...]) -> object:
    """The configuration of a row: A8W8 and XINT8 with one scale for a tensor, A8W4 with one for each channel."""
    from quark_onnx import QConfig, QuantizationSpec

    if preset == "XINT8" or preset == "INT4":
        return QConfig.of(preset).with_(optimizers=optimizers)
    base = QConfig.of("A8W8")
    if preset == "A8W8":
        return base.with_(per_channel=False, optimizers=optimizers)
    if preset == "A8W4":
        weight = QuantizationSpec("int4", per_channel=True, calibrator="minmse")
        return base.with_(weight=weight, optimizers=optimizers)
    return base.with_(optimizers=optimizers)


def child(model: str, folder: str, output: str, preset: str, *optimizers: str) -> None:
    """Quantize in this process, and print what it took."""
    from peers.amd_quark import peak_mb

    from quark_onnx import quantize

    start = time.perf_counter()
    result = quantize(model, Samples(Path(folder)), config_of(preset, optimizers), output)
    seconds = time.perf_counter() - start
    sqnr = result.report.worst_sqnr
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb(), "sqnr": sqnr}))


def measure(run: Run, samples: Samples, arguments: argparse.Namespace) -> Row:
    """Quantize in a process of its own, and evaluate."""
    import onnxruntime

    task = load(run.task)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "quantized.onnx"
        if run.tool == "ours":
            command = [sys.executable, __file__, "--child", str(task.path), str(samples.files[0].parent), str(output)]
            done = subprocess.run([*command, run.preset, *run.recipe.ours], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-400:])
            found = json.loads(done.stdout.splitlines()[-1])
        else:
            tool = AmdQuark(arguments.amd_quark_python)
            found = tool.measure(task.path, samples, Setting("XINT8"), output, *(run.recipe.theirs or ()))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(output), options, providers=["CPUExecutionProvider"])
        found["value"] = round(float(task.evaluate(session)), 4)
    return {name: found[name] for name in ("value", "seconds", "peak_mb", "sqnr") if name in found}


def report(store: Store, tasks: list[str], source: str) -> str:
    """One table for each task."""
    rows, parts = store.rows(), list[str]()
    for name in tasks:
        task, lines = load(name), list[list[object]]()
        for recipe in RECIPES:
            for preset in recipe.presets:
                for tool in ("ours", "amd-quark"):
                    row = rows.get(Run(name, preset, recipe, tool).key)
                    if row is None or name not in recipe.tasks:
                        continue
                    stale = "*" if tool == "ours" and row["source"] != source else ""
                    value = row.get("error") or f"{row['value']:.2f}{stale}"
                    cost = [f"{row['seconds']:.0f}", f"{row['peak_mb']:.0f}"] if "seconds" in row else ["", ""]
                    lines.append([preset, recipe.name, tool, value, *cost])
        lines.sort(key=lambda line: str(line[0]))
        head = ["preset", "optimizers", "tool", task.metric, "seconds", "peak MB"]
        parts.append(f"## {name}, float {task.float_value:.2f}\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=(*VISION, *TEXT), default=[*VISION, *TEXT], metavar="TASK")
    parser.add_argument("--presets", nargs="+", metavar="PRESET")
    parser.add_argument(
        "--recipes", nargs="+", metavar="RECIPE", help=", ".join(dict.fromkeys(r.name for r in RECIPES))
    )
    parser.add_argument("--tools", nargs="+", choices=("ours", "amd-quark"), help="measure only these")
    parser.add_argument("--amd-quark-python", type=Path, help="the Python of an environment with amd-quark")
    parser.add_argument("--again", action="store_true", help="measure again what is known")
    parser.add_argument("--report", action="store_true", help="measure nothing, print what is known")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    store, source, folders = (
        Store(arguments.out / "optimizers.json"),
        Ours().source,
        dict[str, TemporaryDirectory[str]](),
    )
    for run in runs(arguments):
        kept = store.rows().get(run.key)
        if arguments.report or (kept and not arguments.again and "error" not in kept):
            continue
        if run.task not in folders:
            folders[run.task] = TemporaryDirectory()
            Samples.write(load(run.task).calibration(CALIBRATION_SAMPLES), Path(folders[run.task].name))
        row: Row = {"model": digest(load(run.task).path), "source": source if run.tool == "ours" else ""}
        try:
            row |= measure(run, Samples(Path(folders[run.task].name)), arguments)
        except Exception as error:  # a tool that fails is a result too
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        store.put(run.key, row)
        outcome = row.get("error") or f"{row['value']:.2f}  {row['seconds']:.0f} s  {row['peak_mb']:.0f} MB"
        print(f"{run.key:55} {outcome}", file=sys.stderr, flush=True)
    text = report(store, arguments.tasks, source)
    print(text)
    if set(arguments.tasks) == {*VISION, *TEXT}:
        (arguments.out / "optimizers.md").write_text(f"# Optimizers\n\n{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
