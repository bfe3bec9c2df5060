"""Wrong preprocessing of real data: how much of it the check of the float model finds.

    QUARK_ONNX_DATA=DIR python benchmarks/preprocessing.py [--tasks squeezenet ...]
        [--output FILE.md]

Seven models, each with its own preprocessing, which must raise no finding, and with six wrong ones
each. Images: four other scalings with the right order of channels, the other order of channels with
the right scaling, and pixels (height, width, channel) read as (channel, height, width). Sentences:
a mask of zeros, padding that is not masked, no special tokens, identifiers shifted by one, words
unknown to the vocabulary, and characters for tokens. 32 samples each. The exit code is 1 when fewer
than 90 % are found, or a right one is doubted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _data import Feeds, load
from _results import table

from quark_onnx.graph.io import load as load_model
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.steps.run import Reference

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLES = 32
FOUND = 0.9
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CAFFE = (103.939, 116.779, 123.68)


def _column(values: tuple[float, ...]) -> Array:
    return np.array(values, np.float32).reshape(1, 3, 1, 1)


SCALINGS: dict[str, Callable[[Array], Array]] = {
    "0..1": lambda pixels: pixels / 255,
    "0..255": lambda pixels: pixels,
    "-1..1": lambda pixels: pixels / 127.5 - 1,
    "imagenet": lambda pixels: (pixels / 255 - _column(MEAN)) / _column(STD),
    "caffe": lambda pixels: pixels - _column(CAFFE),
    "ultraface": lambda pixels: (pixels - 127) / 128,
}
PIXELS: dict[str, Callable[[Array], Array]] = {
    "0..255": lambda inputs: inputs,
    "imagenet": lambda inputs: (inputs * _column(STD) + _column(MEAN)) * 255,
    "caffe": lambda inputs: inputs + _column(CAFFE),
    "ultraface": lambda inputs: inputs * 128 + 127,
}
#: The right scaling of each task, and the wrong ones that are tried.
IMAGES = {
    "resnet20": ("imagenet", ("0..1", "0..255", "-1..1", "caffe")),
    "resnet44": ("imagenet", ("0..1", "0..255", "-1..1", "caffe")),
    "squeezenet": ("caffe", ("0..1", "0..255", "-1..1", "imagenet")),
    "mobilenetv2": ("imagenet", ("0..1", "0..255", "-1..1", "caffe")),
    "yolox_nano": ("0..255", ("0..1", "-1..1", "imagenet", "caffe")),
    "ultraface": ("ultraface", ("0..1", "0..255", "imagenet", "caffe")),
}
TASKS = (*IMAGES, "minilm-stsb")


def image_variants(
    name: str, samples: list[Feeds]
) -> Iterator[tuple[str, list[Feeds]]]:
    """The right inputs and six wrong ones, with a name for each."""
    [key] = samples[0]
    right, wrong = IMAGES[name]
    inputs = [sample[key] for sample in samples]
    pixels = [np.clip(PIXELS[right](each), 0, 255).round() for each in inputs]
    yield "right", samples

    def feeds(arrays: list[Array]) -> list[Feeds]:
        return [{key: np.ascontiguousarray(each, np.float32)} for each in arrays]

    for other in wrong:
        yield other, feeds([SCALINGS[other](each) for each in pixels])
    yield "swapped channels", feeds([SCALINGS[right](each[:, ::-1]) for each in pixels])
    rows = [each.transpose(0, 2, 3, 1).copy().reshape(each.shape) for each in inputs]
    yield "wrong layout", feeds(rows)


def text_variants(samples: list[Feeds]) -> Iterator[tuple[str, list[Feeds]]]:
    """The right tokens and six wrong ones, with a name for each."""
    ids = [sample["input_ids"] for sample in samples]

    def feeds(rows: list[Array], mask: int = 1) -> list[Feeds]:
        return [
            {
                "input_ids": row,
                "attention_mask": np.full_like(row, mask),
                "token_type_ids": np.zeros_like(row),
            }
            for row in rows
        ]

    yield "right", samples
    yield "mask of zeros", feeds(ids, mask=0)
    yield (
        "padding not masked",
        feeds([np.pad(row, ((0, 0), (0, 128 - row.shape[1]))) for row in ids]),
    )
    yield "no special tokens", feeds([row[:, 1:-1] for row in ids])
    yield "shifted by one", feeds([row + 1 for row in ids])
    yield "unknown words", feeds([np.where(row > 2000, 100, row) for row in ids])
    characters = [
        np.array([[ord(c) for c in " ".join(map(str, row[0]))]]) for row in ids
    ]
    yield "characters", feeds(characters)


@dataclass(frozen=True)
class Outcome:
    """What the check says of one preprocessing."""

    task: str
    variant: str
    findings: list[Finding]
    runs: int

    @property
    def right(self) -> bool:
        return bool(self.findings) is (self.variant != "right")


class _Counting:
    """A session that counts its runs."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.runs = 0

    def run(self, names: Any, feeds: Any) -> Any:
        self.runs += 1
        return self._session.run(names, feeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def outcomes(name: str) -> Iterator[Outcome]:
    """The outcome for each preprocessing of a task."""
    task = load(name)
    every = list(task.calibration(3 * SAMPLES))
    samples = every[::3] if len(every) == 3 * SAMPLES else every[:SAMPLES]
    model = load_model(task.path)
    session = _Counting(Reference(model, task.path).session)
    names = [value.name for value in session.get_outputs()]
    variants = (
        image_variants(name, samples) if name in IMAGES else text_variants(samples)
    )
    for variant, feeds in variants:
        check = PreprocessingCheck(model)
        for feed in feeds:
            check.add(feed, dict(zip(names, session.run(names, feed), strict=True)))
        session.runs = 0
        yield Outcome(name, variant, check.findings(session), session.runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: list[Outcome] = []
    for name in options.tasks:
        for outcome in outcomes(name):
            found.append(outcome)
            said = "; ".join(map(str, outcome.findings)) or "-"
            mark = "ok" if outcome.right else "MISSED"
            print(
                f"{name:12} {outcome.variant:18} {outcome.runs:4} runs {mark:6} {said}",
                flush=True,
            )
    wrong = [each for each in found if each.variant != "right"]
    flagged = sum(each.right for each in wrong)
    doubted = sum(not each.right for each in found if each.variant == "right")
    most = max(each.runs for each in found if each.variant == "right")
    summary = (
        f"{flagged} of {len(wrong)} wrong preprocessings found, {doubted} right ones"
        f" doubted; the right ones cost at most {most} runs of the float model beyond the"
        f" {SAMPLES} of the verdict"
    )
    print(summary)
    if options.output:
        rows = [
            (
                each.task,
                each.variant,
                "; ".join(f.cause for f in each.findings) or "-",
                str(each.runs),
            )
            for each in found
        ]
        text = table(("task", "preprocessing", "finding", "extra runs"), rows)
        options.output.write_text(
            f"# Wrong preprocessing\n\n{summary}.\n\n{text}\n", encoding="utf-8"
        )
    return int(doubted > 0 or flagged < FOUND * len(wrong))


if __name__ == "__main__":
    sys.exit(main())
