"""What the rows of optimizers.py have to reach, and whether they do.

A mark whose rows were not measured is missed, too. Single runs of the ResNets beside amd-quark's
are decided by a few images; draws.py judges those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from _results import Row

TEXT = ("minilm-stsb", "minilm-sst2")
ZEROS = "A8W4 with zero points"
#: How far below the float model the best row of these presets may be, in points; and what mAP a
#: detector has to have.
POINTS: dict[str, dict[tuple[str, ...], float]] = {
    "squeezenet": {("XINT8",): 1.0, ("A8W8",): 1.0, ("A8W4", ZEROS): 2.5},
    "mobilenetv2": {("XINT8",): 1.5, ("A8W8",): 1.0, ("A8W4", ZEROS): 2.5},
    "resnet20": {("XINT8",): 1.0, ("A8W8",): 1.0, ("A8W4", ZEROS): 2.5},
    "resnet44": {("XINT8",): 1.0, ("A8W8",): 1.0, ("A8W4", ZEROS): 2.5},
    "minilm-stsb": {("A8W8", "A8W8-channel"): 1.0, ("INT4",): 1.0},
    "minilm-sst2": {("A8W8", "A8W8-channel"): 1.0, ("INT4",): 1.0},
}
LEAST = {"yolox_nano": {"A8W8": 30.0, "XINT8": 28.0}}
#: Of mixed precision: the mAP, and the share of nodes that may have 16 bits.
MIXED, SHARE = 32.0, 0.25
#: Times as fast as amd-quark's at the same iterations, as a whole.
FASTER = 5.0
#: Draws.py judges these beside amd-quark.
DRAWN = ("resnet20", "resnet44")
_RAISED = re.compile(
    r"(\d+) of (\d+) nodes .*?\(target [\d.]+ dB(, missed)?\); the worst is one of (\d+) "
)


@dataclass(frozen=True)
class Verdict:
    """One mark, as a row of a table."""

    task: str
    mark: str
    ours: str
    against: str
    met: bool

    @property
    def cells(self) -> list[object]:
        return [
            self.task,
            self.mark,
            self.ours,
            self.against,
            "met" if self.met else "MISSED",
        ]


def verdicts(task: str, floating: float, rows: Mapping[str, Row]) -> Iterator[Verdict]:
    """All marks of a task.

    Args:
        floating: the metric of the float model.
        rows: by "task/tool/preset/recipe".
    """
    for presets, points in POINTS.get(task, {}).items():
        least = floating - points
        yield _best(task, rows, presets, f"within {points:g} points of float", least)
    for preset, least in LEAST.get(task, {}).items():
        yield _best(task, rows, (preset,), "mAP", least)
    yield from _mixed(task, rows)
    yield from _beside(task, rows)
    yield from _speed(task, rows)


def _best(
    task: str,
    rows: Mapping[str, Row],
    presets: tuple[str, ...],
    mark: str,
    least: float,
) -> Verdict:
    """The best row of some presets; mixed precision has marks of its own."""
    known = {
        key: row["value"]
        for key, row in rows.items()
        if "value" in row
        and _of(key, task, "ours")
        and _preset(key) in presets
        and not key.endswith("/mixed")
    }
    name = f"{' or '.join(presets)}: {mark}"
    if not known:
        return Verdict(task, name, "not measured", f"{least:.2f}", False)
    best = max(known, key=lambda key: known[key])
    return Verdict(
        task,
        name,
        f"{known[best]:.2f}, {_recipe(best)}",
        f"{least:.2f}",
        known[best] >= least,
    )


def _mixed(task: str, rows: Mapping[str, Row]) -> Iterator[Verdict]:
    """Mixed precision: with fewer raised nodes than the type of the worst has.

    And the mAP of a detector.
    """
    found = {
        key: row
        for key, row in rows.items()
        if _of(key, task, "ours") and key.endswith("/mixed")
    }
    if task == "yolox_nano":
        shares = {key: _RAISED.match(row.get("note", "")) for key, row in found.items()}
        within = {
            k: found[k]["value"]
            for k, m in shares.items()
            if m and int(m[1]) <= SHARE * int(m[2])
        }
        best = f"{max(within.values()):.2f}" if within else "not measured"
        met = bool(within) and max(within.values()) >= MIXED
        yield Verdict(
            task, f"mixed, at most {SHARE:.0%} of the nodes", best, f"{MIXED:.2f}", met
        )
    elif task != "minilm-stsb":
        return
    unsafe = f"{task}/ours/A8W8-unsafe/mixed"
    said = _RAISED.match(found.get(unsafe, {}).get("note", ""))
    ours, against = (
        (f"{said[1]} nodes{said[3] or ''}", said[4]) if said else ("not measured", "")
    )
    met = said is not None and said[3] is None and int(said[1]) < int(said[4])
    yield Verdict(
        task,
        "mixed meets its target with fewer nodes than of the worst type",
        ours,
        against,
        met,
    )


def _beside(task: str, rows: Mapping[str, Row]) -> Iterator[Verdict]:
    """At least amd-quark's, row by row, to a tenth of a point.

    Where its run fails, ours has to be there.
    """
    for key, theirs in rows.items():
        if task in DRAWN or not _of(key, task, "amd-quark"):
            continue
        ours = rows.get(f"{task}/ours/{_preset(key)}/{_recipe(key)}", {})
        value, other = ours.get("value"), theirs.get("value")
        met = value is not None and (
            other is None or round(value, 1) >= round(other, 1)
        )
        cells = ["fails" if each is None else f"{each:.2f}" for each in (value, other)]
        yield Verdict(
            task, f"{_preset(key)}, {_recipe(key)}: amd-quark", cells[0], cells[1], met
        )


def _speed(task: str, rows: Mapping[str, Row]) -> Iterator[Verdict]:
    """Several times as fast as amd-quark, in less memory, where both were timed."""
    for recipe in ("adaround", "adaquant"):
        ours, theirs = (
            rows.get(f"{task}/{tool}/XINT8/{recipe}", {})
            for tool in ("ours", "amd-quark")
        )
        if "seconds" in ours and "seconds" in theirs:
            times, memory = (
                theirs["seconds"] / ours["seconds"],
                ours["peak_mb"] / theirs["peak_mb"],
            )
            met = times >= FASTER and memory < 1
            cells = f"{times:.1f} times, {memory:.2f} of its memory"
            yield Verdict(
                task,
                f"{recipe}: as fast as amd-quark",
                cells,
                f"{FASTER:g} times, less memory",
                met,
            )


def _of(key: str, task: str, tool: str) -> bool:
    return key.startswith(f"{task}/{tool}/")


def _preset(key: str) -> str:
    return key.split("/")[2]


def _recipe(key: str) -> str:
    return key.split("/", 3)[3]
