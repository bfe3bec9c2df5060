"""XINT8 on small classifiers, over several draws of the calibration samples: is one tool better, or
was it lucky?

    QUARK_ONNX_DATA=... python benchmarks/draws.py [--tasks resnet20 ...] [--draws 5] [--recipes
        plain cle ...] [--tools ours ...] [--amd-quark-python VENV/bin/python] [--again] [--stale]
        [--report]

With 1,000 test images an image is a tenth of a point, and which 100 samples calibrate moves every
row by several. Here each tool quantizes once for each draw, both from the same samples, and one
procedure judges them: the metric, and the signal-to-noise ratio of the outputs on 100 samples that
no draw has. What is compared are the means, image by image; the difference comes with its standard
error over the draws and the test images, which are samples, too. A measurement is kept in
OUT/draws.json as soon as it is made; what is there is not measured again without --again, or
--stale where an older version of our source made it. The exit code is 1 where rows of ours are
below, so that chance alone calls one of them all below in 5 % of all cases, where the mean over all
rows is below at that level (Student's test, one-sided), where the rules of the target cost more
than 0.3 points, and where that cannot be told; without any row of amd-quark's the rules alone are
judged.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _data import Samples, digest, load
from _images import (
    COST,
    Array,
    Difference,
    difference,
    packed,
    right,
    together,
    unpacked,
    worse,
)
from _results import Row, Store, add_arguments, due, table
from _settings import Setting
from _tools import AmdQuark, Ours

from quark_onnx import QConfig, compare, quantize

TASKS = ("resnet20", "resnet44")  # the others have no more samples than one draw
SIZE, DRAWS, MOST = 100, 5, 10  # samples of a draw, draws, those that there are at most
ALL = 2000  # samples, of which the last ones judge
_ADAROUND, _ADAQUANT = "adaround:iterations=200", "adaquant:iterations=200"


@dataclass(frozen=True)
class Recipe:
    """Optimizers by a name: ours, amd-quark's, and ours within all rules of a target."""

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    settled: tuple[str, ...]


RECIPES = (
    Recipe("plain", (), (), ()),
    Recipe("cle", ("cle",), ("cle",), ("cle",)),
    Recipe("adaround", (_ADAROUND,), ("adaround:200",), (_ADAROUND, "bias_correction")),
    Recipe("adaquant", (_ADAQUANT,), ("adaquant:200",), (_ADAQUANT, "bias_correction")),
    Recipe(
        "cle+adaround",
        ("cle", _ADAROUND),
        ("cle", "adaround:200"),
        ("cle", _ADAROUND, "bias_correction"),
    ),
    Recipe(
        "cle+adaquant",
        ("cle", _ADAQUANT),
        ("cle", "adaquant:200"),
        ("cle", _ADAQUANT, "bias_correction"),
    ),
)
#: In place of a difference.
_UNKNOWN = "not judged: fewer than two draws of one model that both have"
TOOLS = OURS, SETTLED, THEIRS = "ours", "ours, rules settled", "amd-quark"


@dataclass(frozen=True)
class Run:
    """One thing to measure."""

    task: str
    recipe: Recipe
    tool: str
    draw: int

    @property
    def key(self) -> str:
        return f"{self.task}/{self.tool}/{self.recipe.name}/{self.draw}"


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """What the command line asks for, draw by draw, so that what a broken run leaves is complete in
    itself.
    """
    tools = [
        tool for tool in arguments.tools if tool != THEIRS or arguments.amd_quark_python
    ]
    for draw in range(arguments.draws):
        for task in arguments.tasks:
            for recipe in RECIPES:
                if recipe.name in arguments.recipes:
                    yield from (Run(task, recipe, tool, draw) for tool in tools)


def measure(run: Run, samples: Samples, judges: list[Any], python: Path | None) -> Row:
    """Metric and signal-to-noise ratio of one model."""
    task = load(run.task)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "quantized.onnx"
        if run.tool == THEIRS and python is not None:
            AmdQuark(python).measure(
                task.path, samples, Setting("XINT8"), output, *run.recipe.theirs
            )
        else:
            config = QConfig.of("XINT8").with_(optimizers=run.recipe.ours)
            if run.tool == SETTLED:
                config = config.with_(target="stx", optimizers=run.recipe.settled)
            quantize(task.path, samples, config, output)
        flags = right(run.task, task, output)
        ratio = round(float(compare(task.path, output, judges).sqnr), 3)
    return {
        "value": round(100 * float(flags.mean()), 4),
        "images": len(flags),
        "right": packed(flags),
        "sqnr": ratio,
    }


@cache
def samples_of(task: str) -> list[Any]:
    """All that there are, read once for all draws."""
    return list(load(task).calibration(ALL))


def summary(rows: dict[str, Row], task: str, recipe: str, tool: str) -> dict[int, Row]:
    """What is known, by draw."""
    start = f"{task}/{tool}/{recipe}/"
    return {
        int(key.removeprefix(start)): row
        for key, row in rows.items()
        if key.startswith(start)
    }


def pairs(
    rows: dict[str, Row], task: str, recipe: str, tool: str
) -> list[tuple[Row, Row]]:
    """Ours and theirs, for each draw that both have."""
    ours, theirs = (summary(rows, task, recipe, each) for each in (tool, THEIRS))
    return [(ours[draw], theirs[draw]) for draw in sorted(ours.keys() & theirs.keys())]


def gain(known: list[tuple[Row, Row]]) -> Difference | None:
    """The first less the second.

    None for fewer than two draws of the same model whose images are known.
    """
    known = [
        pair
        for pair in known
        if all("right" in row for row in pair) and pair[0]["model"] == pair[1]["model"]
    ]
    if len(known) < 2:
        return None
    first, second = ([flags(pair[side]) for pair in known] for side in (0, 1))
    return difference(first, second)


def over_all(rows: dict[str, Row], tasks: list[str], tool: str) -> Difference | None:
    """The mean difference over all recipes that both have in all draws.

    None where there are none.
    """
    parts = []
    for task in tasks:
        known = [pairs(rows, task, recipe.name, tool) for recipe in RECIPES]
        known = [each for each in known if gain(each) is not None]
        common = min((len(each) for each in known), default=0)
        if common > 1:
            sides = [
                [
                    np.mean([flags(each[draw][side]) for each in known], axis=0)
                    for draw in range(common)
                ]
                for side in (0, 1)
            ]
            parts.append(difference(*sides))
    return together(parts) if parts else None


def flags(row: Row) -> Array:
    """Which test images are right."""
    return unpacked(row["right"], row["images"])


def report(rows: dict[str, Row], tasks: list[str]) -> tuple[str, list[str]]:
    """The tables, and in words what ours misses."""
    lines, marks, missed = list[list[object]](), list[list[object]](), list[str]()
    differences = dict[str, Difference]()
    for task in tasks:
        for recipe in (recipe.name for recipe in RECIPES):
            for tool in (OURS, SETTLED, THEIRS):
                known = summary(rows, task, recipe, tool)
                if not known:
                    continue
                values = [row["value"] for row in known.values()]
                spread = f"{min(values):.1f} to {max(values):.1f}"
                line: list[object] = [
                    task,
                    recipe,
                    tool,
                    len(values),
                    statistics.fmean(values),
                    spread,
                ]
                line.append(
                    f"{statistics.fmean(row['sqnr'] for row in known.values()):.1f}"
                )
                both = pairs(rows, task, recipe, tool) if tool != THEIRS else []
                found = gain(both)
                lines.append([*line, str(found or "")])
                if found is not None:
                    differences[f"{task} {recipe} {tool}"] = found
                elif both:
                    missed.append(f"{task} {recipe} {tool}: {_UNKNOWN}")
        for mark in (settling(rows, task), best(rows, task)):
            if mark is not None:
                marks.append([task, *mark[0]])
                told = "; ".join(str(cell) for cell in mark[0][1:] if cell != "")
                missed += [f"{task}, {mark[0][0]}: {told}"] if mark[1] else []
    missed += [f"{name}: {differences[name]}" for name in worse(differences)]
    for tool in (OURS, SETTLED):
        found = over_all(rows, tasks, tool)
        missed += (
            [f"{tool}, over all rows: {found}"]
            if found is not None and found.below()
            else []
        )
    head = [
        "model",
        "optimizers",
        "tool",
        "draws",
        "mean top-1",
        "top-1",
        "SQNR, dB",
        "less amd-quark's",
    ]
    sums = [f"{tool}: {whole(rows, tasks, tool)}" for tool in (OURS, SETTLED)]
    judged = table(["model", "mark", "ours", "against", "difference"], marks)
    return (
        "\n\n".join(
            [table(head, lines), judged, "Over all rows, ours less amd-quark's:", *sums]
        ),
        missed,
    )


def mean(known: dict[int, Row]) -> float:
    return statistics.fmean(row["value"] for row in known.values())


def settling(rows: dict[str, Row], task: str) -> tuple[list[object], bool]:
    """What the rules of the target cost the plain model, and whether that is too much."""
    settled, plain = (summary(rows, task, "plain", tool) for tool in (SETTLED, OURS))
    found, mark = (
        gain(
            [
                (settled[draw], plain[draw])
                for draw in sorted(settled.keys() & plain.keys())
            ]
        ),
        "rules cost",
    )
    if found is None:
        return [mark, _UNKNOWN, "", ""], True
    cells: list[object] = [
        f"{mark} at most {COST}",
        mean(settled),
        f"plain {mean(plain):.2f}",
        str(found),
    ]
    return cells, found.mean < -COST


def best(rows: dict[str, Row], task: str) -> tuple[list[object], bool] | None:
    """The best of our optimizers within the rules beside the best of amd-quark's, and whether ours
    is worse; None where theirs were not measured.
    """
    ours, theirs = (
        {r.name: summary(rows, task, r.name, tool) for r in RECIPES}
        for tool in (SETTLED, THEIRS)
    )
    mark = "best within the rules"
    if not any(theirs.values()):
        return None
    if not any(ours.values()):
        return [mark, _UNKNOWN, "", ""], True
    names = [
        max((n for n in known if known[n]), key=lambda n, of=known: mean(of[n]))
        for known in (ours, theirs)
    ]
    first, second = ours[names[0]], theirs[names[1]]
    found = gain(
        [(first[draw], second[draw]) for draw in sorted(first.keys() & second.keys())]
    )
    cells: list[object] = [
        mark,
        f"{names[0]} {mean(first):.2f}",
        f"amd-quark {names[1]} {mean(second):.2f}",
    ]
    return [*cells, str(found or _UNKNOWN)], found is None or found.below()


def whole(rows: dict[str, Row], tasks: list[str], tool: str) -> str:
    """Means over all pairs of ours and theirs, of the metric and of the signal-to-noise ratio."""
    known = [
        pair
        for task in tasks
        for recipe in RECIPES
        for pair in pairs(rows, task, recipe.name, tool)
    ]
    if not known:
        return "not measured"
    gains = {
        name: [ours[name] - theirs[name] for ours, theirs in known]
        for name in ("value", "sqnr")
    }
    ahead, found = sum(each > 0 for each in gains["sqnr"]), over_all(rows, tasks, tool)
    return (
        f"{found or _UNKNOWN} points of top-1, {statistics.fmean(gains['sqnr']):+.2f}"
        f" dB of SQNR, which is higher in {ahead} of {len(known)} models"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [recipe.name for recipe in RECIPES]
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK"
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=names, default=names, metavar="RECIPE"
    )
    parser.add_argument(
        "--tools",
        nargs="+",
        choices=TOOLS,
        default=TOOLS,
        metavar="TOOL",
        help=", ".join(TOOLS),
    )
    parser.add_argument(
        "--draws", type=int, choices=range(2, MOST + 1), default=DRAWS, metavar="COUNT"
    )
    add_arguments(parser, "amd-quark-python", "again", "stale", "report", "out")
    arguments = parser.parse_args()
    store, source = Store(arguments.out / "draws.json"), Ours().source
    for run in () if arguments.report else runs(arguments):
        tag = {
            "model": digest(load(run.task).path),
            "source": "" if run.tool == THEIRS else source,
        }
        kept = store.rows().get(run.key, {})
        if not due(
            kept,
            tag,
            again=arguments.again or "right" not in kept,
            stale=arguments.stale,
        ):
            continue
        every = samples_of(run.task)
        with TemporaryDirectory() as folder:
            samples = Samples.write(
                islice(iter(every), run.draw * SIZE, (run.draw + 1) * SIZE),
                Path(folder),
            )
            row = measure(run, samples, every[-SIZE:], arguments.amd_quark_python)
        store.put(run.key, {**tag, **row})
        print(
            f"{run.key:45} {row['value']:.2f}  {row['sqnr']:.1f} dB",
            file=sys.stderr,
            flush=True,
        )
    text, missed = report(store.rows(), arguments.tasks)
    print(text)
    title = (
        f"# XINT8 over draws of {SIZE} calibration samples\n\n`python"
        f" benchmarks/draws.py`, {SIZE} of them a draw."
    )
    (arguments.out / "draws.md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
