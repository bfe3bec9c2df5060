"""Judges by task: comparisons of two models' outputs, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quark_onnx.common.wording import counted
from quark_onnx.report.figures import near_limits, percentage, wilson
from quark_onnx.report.verdict.boxes import Floats, Matches, detections
from quark_onnx.report.verdict.task import Task, squeezed
from quark_onnx.report.verdict.verdict import MeasuredValue, limits_of

Arrays = Mapping[str, NDArray[Any]]

#: Probability of a decision, and the share up to which values between 0 and 1 are undecided.
_YES, _UNDECIDED = 0.5, 0.1
#: Number of samples from which predicted classes differ.
_ROWS = 16
#: Maximum number of logits per batch.
#: float64 copies of a batch of logits (tokens by vocabulary) take 32 MiB each.
_CHUNK = 1 << 22


class Judge(Protocol):
    """A comparison of a float and a quantized model's outputs."""

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        """Add one sample.

        Args:
            feeds: inputs by name.
            expected: outputs of the float model by name.
            actual: outputs of the quantized model by name; ranks and types are those of
                ``expected``.
        """

    def figures(self) -> tuple[MeasuredValue, ...]:
        """Return the figures over the samples; empty if nothing was comparable."""


def judge_for(task: Task) -> Judge | None:
    """Return the judge of a task; None where SQNR is the only figure.

    Args:
        task: the task, with the output to read; a detector without a layout has no judge.
    """
    if task.name == "detector" and task.layout is not None:
        return Detections(task)
    judges: dict[str, type[Judge]] = {
        "classifier": Classes,
        "decisions": Decisions,
        "segmentation": Pixels,
        "mask": Masks,
        "embedding": Vectors,
        "language": Tokens,
        "image": Images,
    }
    judge = judges.get(task.name)
    return judge(task) if judge else None  # type: ignore[call-arg]


class Pixels:
    """The share of pixels with the float model's predicted class."""

    def __init__(self, task: Task) -> None:
        self._output, self._axis = task.output, task.axis
        self._rows = self._equal = 0

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        # The class of each pixel; ties go to the first class in both models.
        before = predicted(expected[self._output], self._axis)
        after = predicted(actual[self._output], self._axis)
        if before.shape == after.shape:
            self._equal += int((before == after).sum())
        # Rows count even if the shapes differ: they do not agree.
        self._rows += before.size

    def figures(self) -> tuple[MeasuredValue, ...]:
        if not self._rows:
            return ()
        share = self._equal / self._rows
        limits = limits_of("segmentation", "agreement")
        shown = percentage(share, limits)
        text = f"{shown} of the pixels have the class of the float model"
        return (MeasuredValue("agreement", share, text),)


class Classes(Pixels):
    """The share of samples with the float model's predicted class."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._certain = task.certain
        self._classes = set[int]()

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        super().add(feeds, expected, actual)
        if len(self._classes) < 2:
            before = predicted(expected[self._output], self._axis)
            self._classes.update(before.tolist())

    def figures(self) -> tuple[MeasuredValue, ...]:
        if not self._rows:
            return ()
        # Values whose greatest is the same on all samples are quantities, such as means.
        if not self._certain and self._rows >= _ROWS and len(self._classes) < 2:
            return ()
        share = self._equal / self._rows
        limits = limits_of("classifier", "agreement")
        # The lower bound decides with few samples whether the verdict is certain.
        least, most = wilson(self._equal, self._rows)
        text = (
            f"{self._equal} of {self._rows} predicted classes equal those of the float"
            f" model ({percentage(share, limits)}; 95 % interval"
            f" {percentage(least, limits)} to {percentage(most, limits)})"
        )
        return (MeasuredValue("agreement", share, text, least),)


def predicted(scores: NDArray[Any], axis: int = -1) -> NDArray[np.int64]:
    """Return the predicted class per row, or per position.

    Args:
        scores: (N, classes), (N, positions, classes), each with trailing ones; or integers,
            which are the classes.
        axis: axis of the classes, without trailing ones.
    """
    if scores.dtype.kind in "iu":
        return scores.astype(np.int64).reshape(-1)
    rows = scores.reshape(squeezed(scores))
    return np.asarray(rows.argmax(axis=axis).reshape(-1))


class Decisions:
    """The share of equal decisions at 0.5, of a model with a Sigmoid for each of them."""

    def __init__(self, task: Task) -> None:
        self._output = task.output
        self._count = self._equal = 0
        # Decisions of "yes": in both models, and in each of them.
        self._both = self._before = self._after = 0
        self._difference = 0.0

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        before, after = expected[self._output], actual[self._output]
        # Decisions count even if the shapes differ: they do not agree.
        self._count += before.size
        if before.shape != after.shape:
            self._before += before.size
            self._difference += before.size
            return
        yes, found_yes = before >= _YES, after >= _YES
        self._equal += int((yes == found_yes).sum())
        self._both += int((yes & found_yes).sum())
        self._before += int(yes.sum())
        self._after += int(found_yes.sum())
        self._difference += float(np.abs(before - after).sum(dtype=np.float64))

    def figures(self) -> tuple[MeasuredValue, ...]:
        if not self._count:
            return ()
        share = self._equal / self._count
        limits = limits_of("decisions", "agreement")
        difference = self._difference / self._count
        figures = [
            MeasuredValue(
                "agreement",
                share,
                f"{self._equal} of {counted(self._count, 'decision')} at 0.5 as in the float"
                f" model ({percentage(share, limits)})",
            )
        ]
        if self._before or self._after:
            f1 = 2 * self._both / (self._before + self._after)
            shown = near_limits(f1, limits_of("decisions", "f1"), 3)
            text = f"{self._both} of {self._before} above 0.5 found again: F1 {shown}"
            figures.append(MeasuredValue("f1", f1, text))
        text = f"probabilities change by {difference:.3f} on average"
        figures.append(MeasuredValue("difference", difference, text))
        return tuple(figures)


class Masks:
    """The overlap (IoU) of masks: at 0.5 if the float model's are of two values, else as they are.

    The overlap of shares is the sum of the lesser over that of the greater (Ruzicka's similarity),
    which for zeros and ones is the IoU.
    """

    def __init__(self, task: Task) -> None:
        self._output = task.output
        self._count = self._undecided = 0
        # Intersection and union, at 0.5 and of shares.
        self._decided = np.zeros(2)
        self._shares = np.zeros(2)

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        before = expected[self._output].astype(np.float64)
        after = actual[self._output].astype(np.float64)
        # A mask of another shape has no overlap.
        if before.shape != after.shape:
            after = np.zeros_like(before)
        self._count += before.size
        self._undecided += int((np.minimum(before, 1 - before) > _UNDECIDED).sum())
        self._decided += _overlap(before >= _YES, after >= _YES)
        self._shares += _overlap(before, after)

    def figures(self) -> tuple[MeasuredValue, ...]:
        if not self._count:
            return ()
        at, overlap = "", self._shares
        if self._undecided < _UNDECIDED * self._count:
            at, overlap = " at 0.5", self._decided
        shared, union = overlap
        # Two empty masks are equal.
        iou = float(shared / union) if union else 1.0
        shown = near_limits(iou, limits_of("mask", "iou"), 3)
        return (MeasuredValue("iou", iou, f"IoU of the masks{at} {shown}"),)


def _overlap(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sums of the lesser and of the greater values."""
    return np.array([np.minimum(before, after).sum(), np.maximum(before, after).sum()])


class Detections:
    """F1, overlap and scores of detections, matched with the float model's."""

    def __init__(self, task: Task) -> None:
        assert task.layout is not None
        self._layout = task.layout
        self._pairs: list[tuple[Floats, Floats]] = []

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        before = detections(self._layout, expected)
        after = detections(self._layout, actual)
        # One entry for each image of the batch: boxes (n, 6) of both models, in falling order of
        # scores.
        self._pairs += zip(before, after, strict=False)

    def figures(self) -> tuple[MeasuredValue, ...]:
        # Over all samples, which is why the boxes are kept until here.
        matches = Matches.of(self._pairs)
        if not matches.count:
            return ()
        f1, overlap, change = matches.f1, matches.overlap, matches.change
        return (
            MeasuredValue(
                "f1",
                f1,
                f"{matches.sentence}: F1 {near_limits(f1, limits_of('detector', 'f1'), 3)}",
            ),
            MeasuredValue(
                "iou",
                overlap,
                "mean IoU of matched boxes"
                f" {near_limits(overlap, limits_of('detector', 'iou'), 3)}",
            ),
            MeasuredValue(
                "score_change", change, f"scores change by {change:.3f} on average"
            ),
        )


class Vectors:
    """The cosine of embeddings, and the rank correlation of similarities."""

    def __init__(self, task: Task) -> None:
        self._output = task.output
        self._before: list[Floats] = []
        self._after: list[Floats] = []

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        before = pooled(feeds, expected[self._output])
        after = pooled(feeds, actual[self._output])
        # Samples of another width cannot be stacked with the first ones.
        width = len(self._before[0]) if self._before else before.shape[1]
        if before.shape == after.shape and before.shape[1] == width:
            self._before += list(before)
            self._after += list(after)

    def figures(self) -> tuple[MeasuredValue, ...]:
        if not self._before:
            return ()
        # (samples, width), rows of length 1: dot products are cosines.
        before, after = unit(np.array(self._before)), unit(np.array(self._after))
        cosine = float((before * after).sum(axis=1).mean())
        shown = near_limits(cosine, limits_of("embedding", "cosine"), 4)
        figures = [MeasuredValue("cosine", cosine, f"mean cosine {shown}")]
        rank = _rank_correlation(before, after)
        if not math.isnan(rank):
            shown = near_limits(rank, limits_of("embedding", "rank"), 4)
            text = f"rank correlation of similarities {shown}"
            figures.append(MeasuredValue("rank", rank, text))
        return tuple(figures)


def pooled(feeds: Arrays, value: NDArray[Any]) -> Floats:
    """Return a vector per sample: the mean over positions, if any.

    Args:
        feeds: the sample; an input with ``mask`` in its name selects positions.
        value: (N, width) or (N, positions, width).
    """
    value = value.reshape(squeezed(value)).astype(np.float64)
    if value.ndim == 2:
        return value
    # Without a mask among the inputs, every position counts.
    mask = np.ones(value.shape[:2])
    for name, feed in feeds.items():
        if "mask" in name.lower() and feed.shape == value.shape[:2]:
            mask = feed.astype(np.float64)
    total = (value * mask[..., None]).sum(axis=1)
    # A fully masked row has a sum of zeros, and stays zero.
    return np.asarray(total / np.maximum(mask.sum(axis=1, keepdims=True), 1))


def unit(rows: Floats) -> Floats:
    """Return rows of length 1; zeros stay zero.

    Args:
        rows: vectors, (n, width).
    """
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1))


def _rank_correlation(before: Floats, after: Floats) -> float:
    """Return the Spearman correlation of pairwise similarities.

    NaN for fewer than four samples.

    Args:
        before: vectors of the float model, (samples, width), of length 1.
        after: vectors of the quantized model for the same samples, also of length 1.

    Returns:
        The correlation, between -1 and 1.
    """
    if len(before) < 4:
        return math.nan
    # Each pair of samples once, without the diagonal of ones.
    upper = np.triu_indices(len(before), 1)
    ranks = [
        # argsort of argsort gives ranks; stable, so that equal similarities rank alike in both
        # models.
        np.argsort(np.argsort((rows @ rows.T)[upper], kind="stable"), kind="stable")
        for rows in (before, after)
    ]
    # Exactly 1: corrcoef may return 0.999..., and a threshold compares with it.
    if (ranks[0] == ranks[1]).all():
        return 1.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


class Tokens:
    """The divergence of next-token distributions, and the agreement of top-1 tokens."""

    def __init__(self, task: Task) -> None:
        self._output = task.output
        self._divergence = 0.0
        self._tokens = self._equal = 0

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        before = expected[self._output]
        after = actual[self._output]
        # The distributions cannot be compared: infinitely far apart.
        if before.shape != after.shape:
            self._divergence = math.inf
            self._tokens += 1
            return
        before = before.reshape(-1, before.shape[-1])
        after = after.reshape(before.shape)
        # In chunks of tokens: logits of a long text with a large vocabulary fill the memory.
        step = max(1, _CHUNK // before.shape[1])
        for start in range(0, len(before), step):
            a = _log_probabilities(before[start : start + step])
            b = _log_probabilities(after[start : start + step])
            # A token of probability 0 (a masked logit, -inf) adds nothing, also where -inf - -inf
            # is NaN.
            terms = np.where(np.isneginf(a), 0.0, np.exp(a) * (a - b))
            self._divergence += float(terms.sum())
            self._equal += int((a.argmax(axis=1) == b.argmax(axis=1)).sum())
            self._tokens += len(a)

    def figures(self) -> tuple[MeasuredValue, ...]:
        if not self._tokens:
            return ()
        # Rounding may leave a tiny negative sum. max returns NaN only where NaN comes first.
        divergence = max(self._divergence / self._tokens, 0.0)
        share = self._equal / self._tokens
        shown = near_limits(divergence, limits_of("language", "divergence"), 4)
        return (
            MeasuredValue(
                "divergence",
                divergence,
                f"KL divergence {shown} nats per token",
            ),
            MeasuredValue(
                "agreement",
                share,
                f"the likeliest token agrees in {percentage(share)}",
            ),
        )


def _log_probabilities(logits: NDArray[Any]) -> Floats:
    """Return the log-softmax of logits (tokens, vocabulary) in float64."""
    rows = logits.astype(np.float64)
    # Less the maximum, exp cannot overflow; the softmax is the same.
    rows = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))


class Images:
    """The PSNR of the quantized model's images against the float model's."""

    def __init__(self, task: Task) -> None:
        self._output = task.output
        self._errors: list[float] = []
        self._least, self._greatest = math.inf, -math.inf

    def add(self, feeds: Arrays, expected: Arrays, actual: Arrays) -> None:
        before, after = expected[self._output], actual[self._output]
        if before.shape != after.shape:
            self._errors.append(math.inf)
            return
        before = before.astype(np.float64)
        self._errors.append(float(np.square(before - after).mean()))
        # The float model's images decide the range of the pixels.
        self._least = min(self._least, float(before.min()))
        self._greatest = max(self._greatest, float(before.max()))

    def figures(self) -> tuple[MeasuredValue, ...]:
        if not self._errors:
            return ()
        peak = _peak(self._least, self._greatest)
        # The mean over images of PSNR, as super-resolution papers report it, and not the PSNR of
        # the mean error.
        ratios = [_psnr(peak, error) for error in self._errors]
        psnr = float(np.mean(ratios))
        shown = near_limits(psnr, limits_of("image", "psnr"))
        return (MeasuredValue("psnr", psnr, f"PSNR {shown} dB (peak {peak:g})"),)


def _peak(least: float, greatest: float) -> float:
    """Return the pixel range: 255 or 1 if the values fit, else the observed range.

    Args:
        least: least value of the float model's images, over all samples.
        greatest: greatest value of the same images.
    """
    # Ten percent beyond [0, 255], respectively 20 % beyond [0, 1]: networks overshoot at edges.
    # Values that all stay below a tenth of 255 are normalized, and no pixels.
    if least > -26 and 26 < greatest < 282:
        return 255.0
    if least > -0.2 and greatest < 1.2:
        return 1.0
    if greatest > least:
        return greatest - least
    return 1.0


def _psnr(peak: float, error: float) -> float:
    """Return the peak signal-to-noise ratio in dB, for a mean squared error."""
    if error == 0:
        return math.inf
    if not math.isfinite(error):
        return -math.inf
    return 10 * math.log10(peak * peak / error)
