"""Wrong preprocessing of real data: how much of it the check of the float model finds.

    QUARK_ONNX_DATA=DIR python benchmarks/preprocessing.py [--tasks squeezenet ...]
        [--output FILE.md] [--leave-one-out]

Sixteen models, nine of them in packages (_packaged.py), each with its own preprocessing, which must
raise no finding, and those of images and sentences with six wrong ones each (five for gray).
Images: four other scalings with the right order of channels, the other order of channels with the
right scaling, and pixels (height, width, channel) read as (channel, height, width). Sentences: a
mask of zeros, padding that is not masked, no special tokens, identifiers shifted by one, words
unknown to the vocabulary, and characters for tokens. 32 samples each, 16 for those of packages. The
exit code is 1 when fewer than 80 % are found, or a right one is doubted.

Images are also tried with a wrong scaling and the wrong order of channels at once, with the right
preprocessing of unusual pictures (dark, in gray, frames of a film, eight of them), and images for
classifiers a second time with labels, on 96 samples. For these, a second count tells how often the
advice is the right preprocessing.

The first six image models are those that the limits for outputs were chosen on; --leave-one-out
chooses the limits for gain and significance of classifiers on three of them and counts on the
fourth, and the limit for the biases of the first layers on all image models but one. Inputs of
another size (factors of 100) count as wrong there.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _data import Feeds, load, root
from _packaged import INPUTS as PACKAGED
from _results import table

from quark_onnx.files.io import load as load_model
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.preprocessing.alternatives import Pictures
from quark_onnx.preprocessing.evidence import Classified
from quark_onnx.preprocessing.first_layers import FirstLayers, octaves
from quark_onnx.preprocessing.pixels import scaling_of
from quark_onnx.running.run import Reference

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLES, PACKAGED_SAMPLES = 32, 16
FOUND = 0.8
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
    "-1..1": lambda inputs: (inputs + 1) * 127.5,
    "0..1": lambda inputs: inputs * 255,
}
#: The right scaling of each task, and the wrong ones that are tried.
IMAGES = {
    "resnet20": ("imagenet", ("0..1", "0..255", "-1..1", "caffe")),
    "resnet44": ("imagenet", ("0..1", "0..255", "-1..1", "caffe")),
    "squeezenet": ("caffe", ("0..1", "0..255", "-1..1", "imagenet")),
    "mobilenetv2": ("imagenet", ("0..1", "0..255", "-1..1", "caffe")),
    "yolox_nano": ("0..255", ("0..1", "-1..1", "imagenet", "caffe")),
    "ultraface": ("ultraface", ("0..1", "0..255", "imagenet", "caffe")),
    # Models of packages. The limits of the layout and of contrast were chosen with them in view.
    "ocr-lines": ("-1..1", ("0..1", "0..255", "imagenet", "caffe")),
    "text-detector": ("imagenet", ("0..1", "0..255", "-1..1", "caffe")),
    "text-direction": ("-1..1", ("0..1", "0..255", "imagenet", "caffe")),
    "captchas": ("0..255", ("0..1", "-1..1", "imagenet", "caffe")),
    "characters": ("0..255", ("0..1", "-1..1", "imagenet", "caffe")),
    "faces": ("0..255", ("0..1", "-1..1", "imagenet", "caffe")),
    "yolov8": ("0..1", ("0..255", "-1..1", "imagenet", "caffe")),
}
#: The options of each right scaling, or of the one that the check knows and is nearest to it.
OPTIONS = {
    "0..255": "--scale 1",
    "imagenet": "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225",
    "caffe": "--scale 1 --mean 103.939 116.779 123.68",
    "ultraface": "--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5",
    "-1..1": "--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5",
    "0..1": "--scale 1/255",
}
#: The most common scaling that is wrong for a task, for the case of two errors at once.
COMMON = ("imagenet", "0..1")
SWAP = "--color swapped"
TWO_ERRORS = "and swapped"
UNUSUAL = "right, "
TASKS = (*IMAGES, "minilm-stsb", "speech", "file-types")
CLASSIFIERS = ("resnet20", "resnet44", "squeezenet", "mobilenetv2")
#: Scalings of about one, and of about a hundred: the biases tell the two sizes apart.
SMALL = {"0..1", "-1..1", "imagenet", "ultraface"}
#: Limits that --leave-one-out tries: octaves; a clear gain, a significant one, and its Student's t.
#: The strictest first, which is taken among equals: no false alarm comes first.
OCTAVES = (5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5)
CLEAR = (0.12, 0.25, 0.5, 1.0)
GAINS, STUDENTS = (0.0, 0.005, 0.015, 0.03, 0.06, 0.12, 0.25), (0.0, 0.8, 1.6, 2.4, 3.2)


def image_variants(
    name: str, samples: list[Feeds]
) -> Iterator[tuple[str, list[Feeds]]]:
    """The right inputs, six wrong ones, and one with two errors, with a name for each."""
    [key] = samples[0]
    right, wrong = IMAGES[name]
    inputs = [sample[key] for sample in samples]
    pixels = [np.clip(PIXELS[right](each), 0, 255).round() for each in inputs]
    yield "right", samples

    def feeds(arrays: list[Array]) -> list[Feeds]:
        return [{key: np.ascontiguousarray(each, np.float32)} for each in arrays]

    for other in wrong:
        yield other, feeds([SCALINGS[other](each) for each in pixels])
    # Pictures in gray have one order of channels.
    if not np.array_equal(pixels[0][:, 0], pixels[0][:, -1]):
        swapped = [each[:, ::-1] for each in pixels]
        yield "swapped channels", feeds([SCALINGS[right](each) for each in swapped])
        common = next(each for each in COMMON if each in wrong)
        yield f"{common} {TWO_ERRORS}", feeds([SCALINGS[common](p) for p in swapped])
    rows = [each.transpose(0, 2, 3, 1).copy().reshape(each.shape) for each in inputs]
    yield "wrong layout", feeds(rows)


def unusual_variants(
    name: str, samples: list[Feeds]
) -> Iterator[tuple[str, list[Feeds]]]:
    """The right scaling of pictures that are not as those of the training."""
    [key] = samples[0]
    right, _ = IMAGES[name]
    pixels = [np.clip(PIXELS[right](sample[key]), 0, 255).round() for sample in samples]
    generator = np.random.default_rng(0)
    film = [
        np.clip(pixels[9] + generator.normal(0, 4, pixels[9].shape), 0, 255).round()
        for _ in pixels
    ]
    unusual = {
        "dark": [0.4 * each for each in pixels],
        "in gray": [each.mean(1, keepdims=True).repeat(3, axis=1) for each in pixels],
        "a film": film,
        "eight": pixels[8:16],
    }
    for kind, pictures in unusual.items():
        feeds = [
            {key: np.ascontiguousarray(SCALINGS[right](each), np.float32)}
            for each in pictures
        ]
        yield UNUSUAL + kind, feeds


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


def right_options(name: str, variant: str) -> str:
    """The options that turn a wrong preprocessing of images into the right one."""
    scaling = [] if variant == "swapped channels" else [OPTIONS[IMAGES[name][0]]]
    swap = [SWAP] if "swapped" in variant else []
    return " ".join([*scaling, *swap])


def class_labels(name: str) -> list[int] | None:
    """The classes of a classifier's calibration samples; None for other tasks."""
    if name.startswith("resnet"):
        arrays = np.load(root() / "vision/cifar10/cifar10_lossless.npz")
        return [int(label) for label in arrays["calib_y"]]
    if name in ("squeezenet", "mobilenetv2"):
        with (root() / "vision/imagenet/labels.csv").open(encoding="utf-8") as file:
            return [int(row["label"]) for row in csv.DictReader(file)][::10]
    return None


@dataclass(frozen=True)
class Outcome:
    """What the check says of one preprocessing, with or without labels."""

    task: str
    variant: str
    findings: list[Finding]
    runs: int
    labelled: bool = False

    @property
    def right(self) -> bool:
        is_right = self.variant == "right" or self.unusual
        return bool(self.findings) is not is_right

    @property
    def unusual(self) -> bool:
        return self.variant.startswith(UNUSUAL)

    @property
    def counts(self) -> bool:
        """Whether the outcome is one of those without labels, seven for each task."""
        others = self.labelled or self.unusual or TWO_ERRORS in self.variant
        return not others

    @property
    def advice_is_right(self) -> bool:
        return [finding.options for finding in self.findings] == [
            right_options(self.task, self.variant)
        ]


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


def right_inputs(name: str) -> tuple[Path, list[Feeds]]:
    """The model of a task, and its samples with the right preprocessing."""
    if name in PACKAGED:
        return PACKAGED[name](PACKAGED_SAMPLES)
    task = load(name)
    return task.path, list(task.calibration(3 * SAMPLES))


def variants_of(name: str, samples: list[Feeds]) -> Iterator[tuple[str, list[Feeds]]]:
    """The right inputs and wrong ones, with a name for each."""
    if name in IMAGES:
        return image_variants(name, samples)
    if name.startswith("minilm"):
        return text_variants(samples)
    # No preprocessing of speech and bytes is checked; right ones must not be doubted.
    return iter([("right", samples)])


def outcomes(name: str) -> Iterator[Outcome]:
    """The outcomes for each preprocessing of a task, without and with labels."""
    path, every = right_inputs(name)
    model = load_model(path)
    session = _Counting(Reference(model, path).session)
    names = [value.name for value in session.get_outputs()]
    labels = class_labels(name)

    def outcome(
        variant: str, samples: list[Feeds], classes: list[int] | None
    ) -> Outcome:
        check = PreprocessingCheck(model)
        for place, feed in enumerate(samples):
            outputs = dict(zip(names, session.run(names, feed), strict=True))
            check.add(feed, outputs, [] if classes is None else [classes[place]])
        session.runs = 0
        findings = check.findings(session)
        return Outcome(name, variant, findings, session.runs, classes is not None)

    samples = every[::3] if len(every) == 3 * SAMPLES else every[:SAMPLES]
    for variant, feeds in variants_of(name, samples):
        yield outcome(variant, feeds, None)
    if name in IMAGES:
        for variant, feeds in unusual_variants(name, samples):
            yield outcome(variant, feeds, None)
    if labels is not None:
        for variant, feeds in image_variants(name, every):
            yield outcome(variant, feeds, labels)


@dataclass(frozen=True)
class Evidence:
    """Gains of the alternatives to one preprocessing of a classifier.

    Attributes:
        right: whether the preprocessing is the right one.
        gains: gain in information by alternative, in nats.
        students: Student's t of the gain in certainty by alternative.
    """

    right: bool
    gains: Array
    students: Array

    def is_flagged(self, clear: float, gain: float, student: float) -> bool:
        """A clear gain needs no significance."""
        significant = (self.gains >= gain) & (self.students >= student)
        return bool(((self.gains >= clear) | significant).any())


def evidence(name: str) -> Iterator[Evidence]:
    """Measure the alternatives to each preprocessing of a classifier, except for the layout."""
    task = load(name)
    model = load_model(task.path)
    session = Reference(model, task.path).session
    output = session.get_outputs()[0].name
    every = list(task.calibration(3 * SAMPLES))

    def classified(feeds: Iterable[Mapping[str, Array]]) -> Classified:
        found = Classified(output)
        for feed in feeds:
            found.add({output: session.run([output], feed)[0]})
        return found

    for variant, feeds in image_variants(name, every[::3]):
        if variant == "wrong layout":
            continue
        [key] = feeds[0]
        images = [feed[key] for feed in feeds]
        given = classified(feeds)
        gains, students = [], []
        pictures = Pictures(feeds, key, 1, images, scaling_of(images))
        for other in pictures.alternatives():
            found = classified(other.feeds(0, len(feeds)))
            gains.append(found.strength - given.strength)
            students.append(given.student(found))
        yield Evidence(variant == "right", np.array(gains), np.array(students))


@dataclass(frozen=True)
class Size:
    """How far a preprocessing is from the biases of the first layers.

    Attributes:
        right: whether the size of the inputs is right: within a factor of 8.
        gaps: octaves by which each other scaling is nearer, if the outputs with it tell as much.
    """

    right: bool
    gaps: Array

    def is_flagged(self, octaves: float) -> bool:
        return bool((self.gaps >= octaves).any())


def sizes(name: str) -> Iterator[Size]:
    """Measure the distances from the biases for each scaling of a task's images."""
    path, every = right_inputs(name)
    model = load_model(path)
    session = Reference(model, path).session
    layers = FirstLayers(model)
    names = [value.name for value in session.get_outputs()]
    right = IMAGES[name][0]

    def outputs_on(samples: Iterable[Feeds]) -> Iterator[Feeds]:
        for feeds in samples:
            yield dict(zip(names, session.run(names, feeds), strict=True))

    def ratios(feeds: Iterable[Feeds]) -> list[float]:
        return layers.ratios(layers.responses(list(feeds)))

    for variant, feeds in image_variants(name, every[:PACKAGED_SAMPLES]):
        if variant not in ("right", *SCALINGS) or not layers:
            continue
        check = PreprocessingCheck(model)
        for feed, outputs in zip(feeds, outputs_on(feeds), strict=True):
            check.add(feed, outputs)
        given = ratios(feeds[:4])
        if len(given) < 2:
            continue
        [key] = feeds[0]
        images = [feed[key] for feed in feeds]
        gaps = [0.0]
        for other in Pictures(feeds, key, 1, images, scaling_of(images)).alternatives():
            if other.swapped:
                continue
            gap = octaves(given) - octaves(ratios(other.feeds(0, 4)))
            if gap >= min(OCTAVES) and check.tells(outputs_on, other, given):
                gaps.append(gap)
        is_right = variant == "right" or (variant in SMALL) == (right in SMALL)
        yield Size(is_right, np.array(gaps))


def leave_one_out() -> str:
    """Choose limits on all models but one, and count on that one."""
    lines = ["limits for gain and significance of classifiers:"]
    measured = {name: list(evidence(name)) for name in CLASSIFIERS}
    lines += _left_out(measured, tuple(product(CLEAR, GAINS, STUDENTS)))
    lines.append("limit in octaves from the biases of the first layers, wrong sizes:")
    by_size = {name: list(sizes(name)) for name in IMAGES}
    lines += _left_out(by_size, tuple((limit,) for limit in OCTAVES))
    return "\n".join(lines)


def _left_out(
    measured: Mapping[str, Sequence[Evidence | Size]],
    candidates: Sequence[tuple[float, ...]],
) -> Iterator[str]:
    """Yield a line for each model that is left out, and one for all."""
    found = wrong = doubted = right = 0
    for name, own in measured.items():
        others = [
            row for other, rows in measured.items() if other != name for row in rows
        ]

        def errors(
            limits: tuple[float, ...], rows: list[Evidence | Size] = others
        ) -> int:
            # a right preprocessing that is doubted weighs as much as all that are missed
            return sum(
                len(rows) * row.is_flagged(*limits)
                if row.right
                else not row.is_flagged(*limits)
                for row in rows
            )

        limits = min(candidates, key=errors)
        bad = [row.is_flagged(*limits) for row in own if not row.right]
        good = [row.is_flagged(*limits) for row in own if row.right]
        found, wrong = found + sum(bad), wrong + len(bad)
        doubted, right = doubted + sum(good), right + len(good)
        yield (
            f"- {name}: limits {', '.join(f'{limit:g}' for limit in limits)};"
            f" {sum(bad)} of {len(bad)} found, {sum(good)} of {len(good)} right ones doubted"
        )
    yield f"- left out: {found} of {wrong} found, {doubted} of {right} right ones doubted"


def summary(found: list[Outcome]) -> str:
    """The counts in sentences."""
    counted = [each for each in found if each.counts]
    wrong = [each for each in counted if each.variant != "right"]
    doubted = sum(not each.right for each in counted if each.variant == "right")
    most = max(each.runs for each in counted if each.variant == "right")
    lines = [
        f"{sum(each.right for each in wrong)} of {len(wrong)} wrong preprocessings"
        f" found, {doubted} right ones doubted; the right ones cost at most {most} runs of"
        f" the float model beyond the {SAMPLES} of the verdict"
    ]
    twice = [each for each in found if not each.labelled and TWO_ERRORS in each.variant]
    if twice:
        lines.append(
            f"two errors at once: {sum(each.right for each in twice)} of {len(twice)}"
            f" found, {sum(each.advice_is_right for each in twice)} with the right advice"
        )
    unusual = [each for each in found if each.unusual]
    if unusual:
        lines.append(
            "unusual pictures with the right preprocessing (dark, in gray, a film, eight):"
            f" {sum(not each.right for each in unusual)} of {len(unusual)} doubted"
        )
    labelled = [each for each in found if each.labelled]
    if labelled:
        bad = [each for each in labelled if each.variant != "right"]
        good = [each for each in labelled if each.variant == "right"]
        scaled = [each for each in bad if each.variant != "wrong layout"]
        lines.append(
            f"with labels: {sum(each.right for each in bad)} of {len(bad)} found,"
            f" {sum(not each.right for each in good)} of {len(good)} right ones doubted;"
            f" {sum(each.advice_is_right for each in scaled)} of {len(scaled)} with the"
            " right advice on scaling and channels, at most"
            f" {max(each.runs for each in good)} runs for a right one"
        )
    return ".\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    options = parser.parse_args()
    if options.leave_one_out:
        print(leave_one_out())
        return 0
    found: list[Outcome] = []
    for name in options.tasks:
        for outcome in outcomes(name):
            found.append(outcome)
            said = "; ".join(map(str, outcome.findings)) or "-"
            mark = "ok" if outcome.right else "MISSED"
            labelled = "labels" if outcome.labelled else ""
            print(
                f"{name:12} {outcome.variant:20} {labelled:6} {outcome.runs:4} runs"
                f" {mark:6} {said}",
                flush=True,
            )
    text = summary(found)
    print(text)
    if options.output:
        rows = [
            (
                each.task,
                each.variant,
                "yes" if each.labelled else "no",
                "; ".join(f.cause for f in each.findings) or "-",
                "; ".join(f.options for f in each.findings if f.options) or "-",
                str(each.runs),
            )
            for each in found
        ]
        header = ("task", "preprocessing", "labels", "finding", "options", "extra runs")
        options.output.write_text(
            f"# Wrong preprocessing\n\n{text}.\n\n{table(header, rows)}\n",
            encoding="utf-8",
        )
    counted = [each for each in found if each.counts]
    flagged = [each.right for each in counted if each.variant != "right"]
    doubted = any(not each.right for each in found if each.variant == "right")
    return int(doubted or sum(flagged) < FOUND * len(flagged))


if __name__ == "__main__":
    sys.exit(main())
