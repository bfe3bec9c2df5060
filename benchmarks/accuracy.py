"""Accuracy of float and quantized models on real tasks, compared with onnxruntime's, amd-quark's
and NNCF's.

    QUARK_ONNX_DATA=DIR python benchmarks/accuracy.py [--tasks mobilenetv2 ...] [--tools ours
        'onnxruntime*'] [--settings 'A8W8-*-channel' XINT8 ...] [--amd-quark-python VENV/bin/python]
        [--nncf-python VENV/bin/python] [--refresh ours] [--report]

The last six tasks are models that packages ship (_packaged.py). No setting is specific to one of
them, but two general rules were added after their rows were seen.
All tools get the same 100 calibration samples (fewer where the task has fewer), and one procedure
judges all. Each measurement is kept in OUT/accuracy.json as soon as it is made, so an interrupted
run goes on where it stopped; what another version of the tool or of the model left behind is
measured again. `--refresh ours` quantizes again where our source has changed since; such rows carry
a star until then. The accuracy of a file that came out byte by byte as before is not measured again
under the same onnxruntime. A row of ours may be below another tool's by no more than chance: up to
0.3 points, or more where `paired.py` has compared the same two results image by image, and found a
probability of 5 % or more (OUT/paired.json). Our default, A8W8, may not be further below our own
recipe for the model (`--recipe auto`), or of a transformer below DYNAMIC, either. The exit code is
1 when a mark is missed or was not measured.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from _data import Samples, Task, digest, evaluated, load, session_of
from _images import LEVEL
from _packaged import TASKS as PACKAGED
from _results import Row, Store, add_arguments, table
from _settings import RECIPES, SETTINGS, Setting
from _tools import (
    AmdQuark,
    Nncf,
    OnnxRuntime,
    Ours,
    Tool,
    add_peer_arguments,
)

TASKS = (
    "mobilenetv2",
    "squeezenet",
    "minilm-stsb",
    "yolox_nano",
    "resnet20",
    "minilm-sst2",
    "resnet44",
    "ultraface",
    *PACKAGED,
)
DETECTORS = ("yolox_nano",)  # the A16W8 and tail-excluded runs are theirs alone
TRANSFORMERS = ("minilm-stsb", "minilm-sst2", "ocr-lines")  # the DYNAMIC runs
CALIBRATION_SAMPLES = 100
TOLERANCE = 0.3  # ours may be this much below onnxruntime at equal settings
#: What onnxruntime's functions do when no option is given. Tasks of packages compare defaults with
#: defaults.
ONNXRUNTIME_DEFAULT = Setting("A8W8", "minmax", per_channel=False)


@dataclass(frozen=True)
class Mark:
    """The best of ours among `settings` (a pattern) on `task` has to reach `least`."""

    task: str
    settings: str
    least: float


#: The tools that ours may not be below. Their environments are not needed to read known results.
PEERS: tuple[Tool, ...] = (
    OnnxRuntime(),
    OnnxRuntime(exclude_tail=True),
    AmdQuark(Path()),
    Nncf(Path()),
)
MARKS = (
    Mark("yolox_nano", "A16W8", 33.0),
    Mark("yolox_nano", "A8W8-*-channel", 22.0),
    Mark("mobilenetv2", "A8W8", 82.5),
    Mark("mobilenetv2", "XINT8", 68.0),
    Mark("squeezenet", "XINT8", 59.0),
    Mark("minilm-stsb", "A8W8", 79.0),
    Mark("ultraface", "A8W8", 97.0),
    Mark("ultraface", "XINT8", 90.0),
)


@dataclass(frozen=True)
class Gap:
    """How far ours is from another tool at one setting; below zero where it is worse.

    Attributes:
        peer: the name of the other tool.
        ours, theirs: the metric of both; ours is None where it was not measured.
    """

    task: str
    peer: str
    setting: Setting
    ours: float | None
    theirs: float

    @property
    def key(self) -> str:
        """The key of the pair in paired.json."""
        return f"{self.task}/{self.peer}/{self.setting}"

    @property
    def value(self) -> float:
        """The metric of ours less that of the other tool."""
        return -self.theirs if self.ours is None else self.ours - self.theirs

    @property
    def missed(self) -> bool:
        """Whether ours is further below than the tolerance; chance is another question."""
        return self.ours is not None and self.value < -TOLERANCE


def own_setting(task: str, setting: Setting) -> Setting:
    """The setting of ours that is compared with a setting of another tool, or with a recipe."""
    if setting in RECIPES or (task in PACKAGED and setting == ONNXRUNTIME_DEFAULT):
        return Setting("A8W8")
    return setting


def gaps(
    rows: Mapping[str, Row],
    task: str,
    peer: Tool,
    ours: Tool | None,
    settings: Iterable[Setting],
) -> list[Gap]:
    """The differences at all settings that the other tool was measured at."""

    def value(tool: Tool, setting: Setting) -> float | None:
        canonical = tool.canonical(setting)
        row = rows.get(f"{task}/{tool.name}/{canonical}") if canonical else None
        return None if row is None else row["value"]

    found = list[Gap]()
    for setting in settings:
        theirs = value(peer, setting)
        if theirs is not None:
            mine = value(ours, own_setting(task, setting)) if ours else None
            found.append(Gap(task, peer.name, setting, mine, theirs))
    return found


def paired_row(rows: Mapping[str, Row], gap: Gap) -> Row | None:
    """The comparison of the same two results image by image; None where there is none."""
    row = rows.get(gap.key)
    same = row is not None and (row["ours"], row["theirs"]) == (gap.ours, gap.theirs)
    return row if same else None


class Bench:
    """One task under measurement: its rows in the store, and the means to make the missing ones."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.paired = Store(store.path.with_name("paired.json"))
        self.task: Task = load(name)
        self.model = digest(self.task.path)

    def key(self, tool: str, setting: Setting | str) -> str:
        return f"{self.name}/{tool}/{setting}"

    def row(self, tool: Tool, setting: Setting) -> Row | None:
        """The kept row of a tool at a setting, None where there is none."""
        canonical = tool.canonical(setting)
        return (
            self.store.rows().get(self.key(tool.name, canonical)) if canonical else None
        )

    def value(self, tool: Tool, setting: Setting) -> float | None:
        row = self.row(tool, setting)
        return row["value"] if row else None

    def settings(self) -> Iterator[Setting]:
        """The settings that make sense for this task."""
        settings = SETTINGS
        if self.name in PACKAGED:
            settings = (Setting("A8W8"), ONNXRUNTIME_DEFAULT, Setting("XINT8"))
        tasks = {"A16W8": DETECTORS, "DYNAMIC": TRANSFORMERS}
        return (
            setting
            for setting in chain(settings, RECIPES)
            if self.name in tasks.get(setting.preset, TASKS)
        )

    def measure_float(self) -> float:
        """The metric of the float model, measured once."""
        import onnxruntime

        key, version = self.key("float", "float"), onnxruntime.__version__
        kept = self.store.rows().get(key)
        if not kept or (kept["model"], kept["version"]) != (self.model, version):
            value = round(float(self.task.evaluate(session_of(self.task.path))), 4)
            kept = {
                "version": version,
                "model": self.model,
                "metric": self.task.metric,
                "value": value,
            }
            self.store.put(key, kept)
        return float(kept["value"])

    def measure(self, tool: Tool, setting: Setting, *, refresh: bool) -> None:
        """Quantize and evaluate, unless a kept row still holds."""
        canonical = tool.canonical(setting)
        if canonical is None:
            return
        kept = self.store.rows().get(self.key(tool.name, canonical))
        holds = kept and (kept["version"], kept["model"]) == (tool.version, self.model)
        if kept and holds and not (refresh and kept["source"] != tool.source):
            return
        row: Row = {
            "version": tool.version,
            "source": tool.source,
            "model": self.model,
            "metric": self.task.metric,
            "samples": len(self.samples),
            "value": None,
        }
        # A kept value counts for a file that is byte by byte the same.
        same = kept and all(kept.get(name) == row[name] for name in ("model", "metric"))
        start = time.perf_counter()
        try:
            with TemporaryDirectory() as folder:
                output = Path(folder) / "quantized.onnx"
                tool.quantize(self.task.path, self.samples, canonical, output)
                row["quantize_seconds"] = round(time.perf_counter() - start, 1)
                row |= evaluated(self.task, output, kept if same else None)
        except Exception as error:  # a tool that fails is a result too
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        self.store.put(self.key(tool.name, canonical), row)
        outcome = row.get("error") or f"{row['value']:.2f}"
        outcome += f"  ({time.perf_counter() - start:.0f} s)"
        print(
            f"{self.name:12} {tool.name:27} {canonical!s:24} {outcome}", file=sys.stderr
        )

    @cached_property
    def samples(self) -> Samples:
        """The calibration samples, written to a temporary folder once."""
        self._folder = TemporaryDirectory()
        return Samples.write(
            self.task.calibration(CALIBRATION_SAMPLES), Path(self._folder.name)
        )


def comparison(bench: Bench, tools: list[Tool], ours: Ours | None) -> str:
    """The table of one task: settings down, tools across, and ours minus onnxruntime's."""

    def cell(tool: Tool, setting: Setting) -> str | None:
        row = bench.row(tool, setting)
        if row is None:
            return None
        stale = "*" if tool is ours and row["source"] != tool.source else ""
        return "failed" if row["value"] is None else f"{row['value']:.2f}{stale}"

    def difference(setting: Setting) -> str | None:
        mine = bench.value(ours, own_setting(bench.name, setting)) if ours else None
        theirs = bench.value(OnnxRuntime(), setting)
        return None if mine is None or theirs is None else f"{mine - theirs:+.2f}"

    columns = [
        tool for tool in tools if any(bench.row(tool, s) for s in bench.settings())
    ]
    rows = [
        [s, *(cell(tool, s) for tool in columns), difference(s)]
        for s in bench.settings()
    ]
    header = ["setting", *(tool.name for tool in columns), "ours - onnxruntime"]
    body = table(header, [row for row in rows if any(row[1:])])
    return f"## {bench.name}: {bench.task.metric}, float {bench.measure_float():.2f}\n\n{body}"


def judge(bench: Bench, ours: Ours | None) -> Iterator[tuple[str, str, str, bool]]:
    """The marks of one task: (mark, wanted, measured, met)."""

    def value(setting: Setting) -> float | None:
        return bench.value(ours, setting) if ours else None

    for mark in MARKS:
        if mark.task == bench.name:
            settings = (s for s in bench.settings() if fnmatch(str(s), mark.settings))
            found = [(v, str(s)) for s in settings if (v := value(s)) is not None]
            best, where = max(found, default=(0.0, ""))
            measured = f"{best:.2f} ({where})" if found else "not measured"
            yield (
                f"{mark.task} {mark.settings}",
                f">= {mark.least}",
                measured,
                best >= mark.least,
            )
    rows = bench.store.rows()
    for peer in PEERS:
        found_gaps = gaps(rows, bench.name, peer, ours, bench.settings())
        if found_gaps:
            yield against(bench, f"against {peer.name}", found_gaps)
    recipes = gaps(rows, bench.name, ours, ours, RECIPES) if ours else []
    if recipes:
        yield against(bench, "default against own recipes", recipes)


def against(bench: Bench, label: str, found: list[Gap]) -> tuple[str, str, str, bool]:
    """The mark of one task against one other tool, or against recipes of ours."""
    measured = [gap for gap in found if gap.ours is not None]
    below = [gap for gap in measured if gap.missed]
    rows = bench.paired.rows()
    compared = [paired_row(rows, gap) for gap in below]
    words = f"{len(measured)} of {len(found)} settings measured, {len(below)} below"
    if measured:
        worst = min(measured, key=lambda gap: gap.value)
        words += f", worst {worst.value:+.2f} ({worst.setting}"
        if worst in below:
            row = compared[below.index(worst)]
            if row is None:
                words += ", not compared by image"
            else:
                words += f", p = {row['probability']:.2f}"
        words += ")"
    # a row that was not compared image by image counts as worse
    excused = [row is not None and row["probability"] >= LEVEL for row in compared]
    met = len(measured) == len(found) and all(excused)
    wanted = f">= -{TOLERANCE}, or chance"
    return f"{bench.name} {label}", wanted, words, met


def installed() -> Ours | None:
    """Ours, where it can be imported."""
    try:
        from quark_onnx import quantize_static  # noqa: F401
    except ImportError as error:
        print(
            f"quark_onnx cannot be imported ({error}): nothing of ours is measured",
            file=sys.stderr,
        )
        return None
    return Ours()


def wanted(
    arguments: argparse.Namespace, task: str, tool: Tool, setting: Setting
) -> bool:
    """Whether the command line asks for this measurement, and it can be made."""
    if arguments.report or (
        tool == OnnxRuntime(exclude_tail=True) and task not in DETECTORS
    ):
        return False
    if isinstance(tool, AmdQuark) and not arguments.amd_quark_python:
        return False
    if isinstance(tool, Nncf) and not arguments.nncf_python:
        return False
    if task in PACKAGED and isinstance(tool, Ours) and setting == ONNXRUNTIME_DEFAULT:
        return False
    by_setting = any(fnmatch(str(setting), pattern) for pattern in arguments.settings)
    return by_setting and any(
        fnmatch(tool.name, pattern) for pattern in arguments.tools
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK"
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help=", ".join(map(str, SETTINGS)),
    )
    parser.add_argument(
        "--tools",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="ours, onnxruntime, ...",
    )
    add_peer_arguments(parser)
    parser.add_argument(
        "--refresh",
        choices=["ours"],
        help="measure ours again where our source has changed",
    )
    add_arguments(parser, "report", "out")
    arguments = parser.parse_args()
    logging.getLogger("quark_onnx").setLevel(logging.ERROR)

    store = Store(arguments.out / "accuracy.json")
    ours = installed()
    amd_quark = AmdQuark(arguments.amd_quark_python or Path())
    nncf = Nncf(arguments.nncf_python or Path())
    peers: list[Tool] = [OnnxRuntime(), OnnxRuntime(exclude_tail=True), amd_quark, nncf]
    tools = [*peers, ours] if ours else peers
    report: list[str] = []
    verdicts: list[tuple[str, str, str, bool]] = []
    for name in arguments.tasks:
        bench = Bench(name, store)
        bench.measure_float()
        for setting in bench.settings():
            for tool in tools:
                if wanted(arguments, name, tool, setting):
                    bench.measure(tool, setting, refresh=arguments.refresh == tool.name)
        report.append(comparison(bench, tools, ours))
        verdicts += judge(bench, ours)
    rows = [[*words, "met" if met else "MISSED"] for *words, met in verdicts]
    report.append(
        "## Marks\n\n" + table(["mark", "wanted", "measured", "verdict"], rows)
    )
    text = "\n\n".join(report)
    print(text)
    if set(arguments.tasks) == set(TASKS):
        (arguments.out / "accuracy.md").write_text(f"# Accuracy\n\n{text}\n")
    return 0 if all(met for *_, met in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
