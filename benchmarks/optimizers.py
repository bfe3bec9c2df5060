"""What optimizers make of quantized models: metrics, time and memory, ours beside amd-quark's.

    QUARK_ONNX_DATA=... python benchmarks/optimizers.py [--tasks resnet20 ...] [--presets XINT8 ...]
        [--recipes plain cle ...] [--tools ours] [--amd-quark-python VENV/bin/python]
        [--again] [--stale] [--busy] [--repeats 5] [--report]

Both tools get the same 100 calibration samples, and one procedure judges both. Each run is a
process of its own, so that its peak memory is its own. A measurement is kept in OUT/optimizers.json
as soon as it is made; what is there is not measured again without --again. A star marks rows that
an older version of our source made; --stale measures those again, and evaluates the files that are
not byte by byte as before. Where both tools were timed, a second table says how many times as fast
ours is: the whole of a quantization, and what the optimizer adds to the plain one. On a machine
that others use, too, let all take turns by --repeats: of a row the least seconds are kept. The last
table says what the rows have to reach; the exit code is 1 where one of them is missed.
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

from _data import Samples, digest, evaluated, load
from _marks import TEXT, ZEROS, verdicts
from _results import Row, Store, add_arguments, due, table
from _settings import Setting
from _tools import AmdQuark, Ours

CALIBRATION_SAMPLES = 100
ITERATIONS = 200
TOOLS = ("ours", "amd-quark")
#: What of a measurement is kept.
_KEPT = ("file", "runtime", "value", "seconds", "peak_mb", "sqnr", "note")
VISION = ("squeezenet", "mobilenetv2", "resnet20", "resnet44", "yolox_nano")


@dataclass(frozen=True)
class Recipe:
    """Optimizers by a name.

    Ours as texts, amd-quark's as its peer script calls them, None where it has none.
    """

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...] | None
    presets: tuple[str, ...] = ("A8W8", "XINT8", "A8W4")
    tasks: tuple[str, ...] = VISION


_ADAROUND, _ADAQUANT = (
    f"adaround:iterations={ITERATIONS}",
    f"adaquant:iterations={ITERATIONS}",
)
_CLE, _WEIGHTS = (
    "cle:relu6=bound,silu=scale",
    "cle:activations=false,relu6=bound,silu=scale",
)
_SMOOTH = "smoothquant:alpha=auto,insert=true"
_QUARTER = "auto_mixed_precision:target=15,share=0.25"
_LONG = (
    _CLE,
    "gptq:asymmetric=true,scales=true",
    "adaquant:iterations=1000",
    "bias_correction",
)
_DAMPED = (_CLE, "gptq:asymmetric=true,scales=true,damping=auto", "bias_correction")
_TEXT = {"presets": ("A8W8-channel", "A8W8"), "tasks": TEXT}
RECIPES = (
    Recipe("plain", (), ()),
    Recipe("cle", (_CLE,), ("cle",)),
    Recipe("cle by weights alone", (_WEIGHTS,), None),
    Recipe("bias", ("bias_correction",), None),
    Recipe("adaround", (_ADAROUND,), (f"adaround:{ITERATIONS}",)),
    Recipe("adaquant", (_ADAQUANT,), (f"adaquant:{ITERATIONS}",)),
    Recipe("cle+adaround", (_CLE, _ADAROUND), ("cle", f"adaround:{ITERATIONS}")),
    Recipe("cle+gptq+bias", (_CLE, "gptq:asymmetric=true", "bias_correction"), None),
    Recipe("cle+adaquant+bias", (_CLE, _ADAQUANT, "bias_correction"), None),
    Recipe("cle+gptq scales+adaquant+bias", _LONG, None, presets=("A8W4",)),
    Recipe("plain", (), None, presets=(ZEROS,), tasks=("mobilenetv2",)),
    Recipe(
        "cle+gptq scales+adaquant+bias",
        _LONG,
        None,
        presets=(ZEROS,),
        tasks=("mobilenetv2",),
    ),
    Recipe(
        "cle+gptq scales damped+bias",
        _DAMPED,
        None,
        presets=(ZEROS,),
        tasks=("mobilenetv2",),
    ),
    Recipe(
        "plain", (), None, presets=("A8W8-unsafe",), tasks=("yolox_nano", "minilm-stsb")
    ),
    Recipe(
        "mixed",
        ("auto_mixed_precision:target=25",),
        None,
        presets=("A8W8-unsafe",),
        tasks=("minilm-stsb",),
    ),
    Recipe(
        "mixed",
        (_CLE, _QUARTER, "gptq:asymmetric=true", "bias_correction"),
        None,
        presets=("A8W8", "A8W8-unsafe"),
        tasks=("yolox_nano",),
    ),
    Recipe("plain", (), None, **_TEXT),
    Recipe("smoothquant auto", (_SMOOTH,), None, **_TEXT),
    Recipe("quarot", ("quarot",), None, **_TEXT),
    Recipe("quarot online", ("quarot:online=true",), None, **_TEXT),
    Recipe("plain", (), None, presets=("XINT8", "A8W4"), tasks=TEXT),
    Recipe("bias", ("bias_correction",), None, presets=("A8W4",), tasks=TEXT),
    Recipe("adaround", (_ADAROUND,), None, presets=("XINT8", "A8W4"), tasks=TEXT),
    Recipe("adaquant", (_ADAQUANT,), None, presets=("XINT8", "A8W4"), tasks=TEXT),
    Recipe(
        "smoothquant auto+gptq",
        (_SMOOTH, "gptq:asymmetric=true"),
        None,
        presets=("A8W4",),
        tasks=TEXT,
    ),
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


def every(task: str) -> Iterator[Run]:
    """All that there is to measure on a task."""
    for recipe in RECIPES:
        for preset in recipe.presets if task in recipe.tasks else ():
            yield Run(task, preset, recipe, "ours")
            if recipe.theirs is not None and preset == "XINT8":
                yield Run(task, preset, recipe, "amd-quark")


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """What the command line asks for."""
    for run in (run for task in arguments.tasks for run in every(task)):
        asked = (
            (arguments.recipes, run.recipe.name),
            (arguments.presets, run.preset),
            (arguments.tools, run.tool),
        )
        measurable = run.tool == "ours" or arguments.amd_quark_python
        if measurable and all(not wanted or value in wanted for wanted, value in asked):
            yield run


def config_of(preset: str, optimizers: tuple[str, ...]) -> object:
    """The configuration of a row: A8W8 and XINT8 with one scale for a tensor, A8W4 with one for
    each channel.

    "unsafe" quantizes also what few bits are known to ruin. Only the named optimizers run.
    """
    from quark_onnx import QConfig, QuantizationSpec

    if preset == "XINT8" or preset == "INT4":
        return QConfig.of(preset).with_(optimizers=optimizers, equalize=False)
    base = QConfig.of("A8W8").with_(equalize=False)
    if preset == "A8W8":
        return base.with_(per_channel=False, optimizers=optimizers)
    if preset in ("A8W4", ZEROS):
        dtype = "uint4" if preset == ZEROS else "int4"
        weight = QuantizationSpec(
            dtype, symmetric=preset == "A8W4", per_channel=True, calibrator="minmse"
        )
        return base.with_(weight=weight, optimizers=optimizers)
    return base.with_(safe=not preset.endswith("unsafe"), optimizers=optimizers)


def raised(model: str, notes: list[str]) -> str:
    """What mixed precision has done, beside the number of nodes of the type of the worst one.

    Empty if it has not.
    """
    import onnx

    first = next((note for note in notes if note.startswith("raised to")), None)
    count = next(
        (note for note in notes if note.startswith("auto_mixed_precision:")), None
    )
    if first is None or count is None:
        return ""
    types = {
        node.name: node.op_type
        for node in onnx.load(model, load_external_data=False).graph.node
    }
    worst = types.get(first.split(": ")[1].split(" (")[0], "")
    return (
        f"{count.split(': ')[1]}; the worst is one of"
        f" {sum(kind == worst for kind in types.values())} {worst} nodes"
    )


def child(model: str, folder: str, output: str, preset: str, *optimizers: str) -> None:
    """Quantize in this process, and print what it took."""
    import onnxruntime  # noqa: F401  before the time is taken, as the other tool imports it
    from peers.amd_quark import peak_mb

    from quark_onnx import quantize

    start = time.perf_counter()
    result = quantize(
        model, Samples(Path(folder)), config_of(preset, optimizers), output
    )
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "peak_mb": peak_mb(), "sqnr": result.report.worst_sqnr}
    note = raised(model, result.report.notes)
    print(json.dumps(found | ({"note": note} if note else {})))


def measure(
    run: Run, samples: Samples, kept: Row | None, arguments: argparse.Namespace
) -> Row:
    """Quantize in a process of its own, and evaluate unless `kept` is a row of the same file."""
    task = load(run.task)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "quantized.onnx"
        if run.tool == "ours":
            command = [
                sys.executable,
                __file__,
                "--child",
                str(task.path),
                str(samples.files[0].parent),
                str(output),
            ]
            done = subprocess.run(
                [*command, run.preset, *run.recipe.ours], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-400:])
            found = json.loads(done.stdout.splitlines()[-1])
        else:
            tool = AmdQuark(arguments.amd_quark_python)
            found = tool.measure(
                task.path, samples, Setting("XINT8"), output, *(run.recipe.theirs or ())
            )
        found |= evaluated(task, output, kept)
    if arguments.busy:
        del found["seconds"]
    return {name: found[name] for name in _KEPT if name in found}


def report(store: Store, tasks: list[str], source: str) -> str:
    """One table for each task."""
    rows, parts = store.rows(), list[str]()
    for name in tasks:
        task, lines = load(name), list[list[object]]()
        known = [(run, rows[run.key]) for run in every(name) if run.key in rows]
        for run, row in known:
            stale = "*" if run.tool == "ours" and row["source"] != source else ""
            value = "fails" if "error" in row else f"{row['value']:.2f}{stale}"
            cost = [
                f"{row[name]:.0f}" if name in row else ""
                for name in ("seconds", "peak_mb")
            ]
            lines.append([run.preset, run.recipe.name, run.tool, value, *cost])
        lines.sort(key=lambda line: str(line[0]))
        head = ["preset", "optimizers", "tool", task.metric, "seconds", "peak MB"]
        notes = [f"{run.key}: {row['note']}" for run, row in known if "note" in row]
        notes += [
            f"{run.key}: {' '.join(row['error'].split())}"
            for run, row in known
            if "error" in row
        ]
        parts.append(
            "\n\n".join(
                [f"## {name}, float {task.float_value:.2f}", table(head, lines), *notes]
            )
        )
    return "\n\n".join([*parts, speed(rows, tasks)])


def speed(rows: dict[str, Row], tasks: list[str]) -> str:
    """How long ours and amd-quark's take where both were timed: as a whole, and without what the
    plain one takes.
    """
    lines = list[list[object]]()
    for task in tasks:
        plain = [
            rows.get(f"{task}/{tool}/XINT8/plain", {}).get("seconds") for tool in TOOLS
        ]
        for recipe in ("adaround", "adaquant"):
            found = [rows.get(f"{task}/{tool}/XINT8/{recipe}", {}) for tool in TOOLS]
            if not all("seconds" in row for row in found):
                continue
            (ours, theirs), memory = (
                (row["seconds"] for row in found),
                [f"{row['peak_mb']:.0f}" for row in found],
            )
            alone = ""
            if None not in plain:
                alone = f"{(theirs - plain[1]) / (ours - plain[0]):.1f}"
            lines.append(
                [
                    task,
                    recipe,
                    f"{ours:.1f}",
                    f"{theirs:.1f}",
                    f"{theirs / ours:.1f}",
                    alone,
                    *memory,
                ]
            )
    head = [
        "task",
        "optimizer",
        "ours, s",
        "amd-quark, s",
        "times as fast",
        "the optimizer alone",
        "MB",
        "amd-quark, MB",
    ]
    return "\n\n".join(
        [f"## Time of {ITERATIONS} iterations, XINT8", table(head, lines)]
    )


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=(*VISION, *TEXT),
        default=[*VISION, *TEXT],
        metavar="TASK",
    )
    parser.add_argument("--presets", nargs="+", metavar="PRESET")
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="RECIPE",
        help=", ".join(dict.fromkeys(r.name for r in RECIPES)),
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, help="measure only these")
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="COUNT",
        help="measure all so often, in turn",
    )
    add_arguments(parser, "amd-quark-python", "again", "stale", "report", "busy", "out")
    arguments = parser.parse_args()
    store, source, folders = (
        Store(arguments.out / "optimizers.json"),
        Ours().source,
        dict[str, TemporaryDirectory[str]](),
    )
    fastest = dict[str, float]()
    for run in (run for _ in range(arguments.repeats) for run in runs(arguments)):
        row: Row = {
            "model": digest(load(run.task).path),
            "source": source if run.tool == "ours" else "",
        }
        again = arguments.again or arguments.repeats > 1
        kept = store.rows().get(run.key)
        if arguments.report or not due(kept, row, again=again, stale=arguments.stale):
            continue
        if kept and kept.get("model") != row["model"]:
            kept = None
        if run.task not in folders:
            folders[run.task] = TemporaryDirectory()
            Samples.write(
                load(run.task).calibration(CALIBRATION_SAMPLES),
                Path(folders[run.task].name),
            )
        try:
            samples = Samples(Path(folders[run.task].name))
            row |= measure(run, samples, kept, arguments)
            if "seconds" in row:
                row["seconds"] = fastest[run.key] = min(
                    row["seconds"], fastest.get(run.key, float("inf"))
                )
        except Exception as error:  # a tool that fails is a result too
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        store.put(run.key, row)
        took = f"{row['seconds']:.0f} s" if "seconds" in row else ""
        outcome = (
            row.get("error") or f"{row['value']:.2f}  {took}  {row['peak_mb']:.0f} MB"
        )
        print(f"{run.key:55} {outcome}", file=sys.stderr, flush=True)
    found = [
        v
        for task in arguments.tasks
        for v in verdicts(task, load(task).float_value, store.rows())
    ]
    judged = table(
        ["task", "mark", "ours", "at least", "verdict"],
        [verdict.cells for verdict in found],
    )
    text = "\n\n".join([report(store, arguments.tasks, source), "## Marks", judged])
    print(text)
    if set(arguments.tasks) == {*VISION, *TEXT}:
        (arguments.out / "optimizers.md").write_text(
            f"# Optimizers\n\n{text}\n", encoding="utf-8"
        )
    return int(not all(verdict.met for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
