"""Checks of data preprocessing by the float model's outputs.

The check reads the outputs that calibration computes anyway. Every scaling is tried on the first
2 rows, with the other order of channels where it is promising, and promising pairs on up to 32
rows. Where the responses of the first layers fit training inputs, only scalings that fit as well
are tried.

With labels of a classifier, the float model's top-1 decides, on up to 128 rows. The cost is
independent of the amount of data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from calibrators.onnx_runtime.remembering import without_memory
from calibrators.onnx_runtime.session import outputs_of
from calibrators.onnx_runtime.tensors import estimate_bytes
from calibrators.onnx_runtime.worker import Session
from quark_onnx.preprocessing.alternatives import Alternative, Pictures
from quark_onnx.preprocessing.evidence import (
    Classified,
    Detected,
    Evidence,
    Labelled,
    evidence_for,
)
from quark_onnx.preprocessing.finding import Finding
from quark_onnx.preprocessing.first_layers import (
    BatchNormDistance,
    FirstLayers,
    farther,
    fits,
    much_farther,
    octaves,
    scaled_by_model,
    too_large,
)
from quark_onnx.preprocessing.pixels import (
    Scaling,
    are_alike,
    are_faint,
    as_channels_last,
    picture_axis,
    scaling_of,
    smoothness,
)
from quark_onnx.preprocessing.search import FIRST, OutputsOn, PreprocessingSearch
from quark_onnx.preprocessing.tokens import token_findings
from quark_onnx.report.measure import lanes_for
from quark_onnx.report.verdict.boxes import arrays_of
from quark_onnx.report.verdict.task import Task, find_task

Feeds = Mapping[str, NDArray[Any]]

#: Maximum number of rows, of rows with labels, and of bytes of their stored inputs.
_ROWS, _LABELLED_ROWS, _BYTES = 32, 128, 1 << 27
#: Maximum bytes of weights of a model for which alternatives are tried.
_LARGEST = 1 << 30
#: Numbers of rows after which the hopeless alternatives are dropped, without and with labels.
_STAGES = (2, 4, FIRST, 16, 24, _ROWS)
_LABELLED_STAGES = (4, FIRST, 16, 32, 64, _LABELLED_ROWS)
#: Number of rows for the responses of first layers to an alternative.
_RESPONSE_ROWS = 4
#: Limits of collapsed predictions: minimum rows, maximum distinct classes as a share of rows,
#: and maximum mean top probability.
_COLLAPSE_ROWS, _COLLAPSE_CLASSES, _COLLAPSE_CONFIDENCE = 16, 0.15, 0.5
#: Number of rows on which outputs are compared with those of a scaling that the biases speak for.
_TELLING_ROWS = 12
#: Octaves by which a scaling may be farther from the biases than the nearest one of its size.
_OF_A_SIZE = 1.5
#: Factor from which inputs are as large as others.
_AS_LARGE = 0.9
#: Factors between which inputs are those of pictures with more contrast, in which a detector finds
#: more.
_MORE_CONTRAST = 1.1, 3.0
#: Factor by which inputs are of another size, and maximum changes of a classifier's predictions
#: with a shift then, compared with those as given.
_MUCH_LARGER, _STEADIER = 8.0, 0.95

_FAINT = Finding(
    "scaling",
    "the pictures hardly differ from one value per channel, as by a mean of pixels from 0 to 255"
    " that is subtracted from pixels from 0 to 1, before the model or in it",
    "use --scale 1",
    "--scale 1",
)


class PreprocessingCheck:
    """A collector of a float model's inputs and outputs, to detect wrong inputs."""

    def __init__(self, model: ModelProto, task: str = "auto") -> None:
        """Start without samples.

        Args:
            model: the float model.
            task: a task in ``report.verdict.TASKS``, or ``auto``.
        """
        self._model = model
        self._asked = task
        self._task: Task | None = None
        self._given: Evidence | None = None
        self._feeds: list[Feeds] = []
        # Rows of each sample's inputs.
        self._counts: list[int] = []
        self._bytes = 0
        # Rows of evidence in the first 0, 1, 2, ... samples: a model may compute several rows of
        # outputs for one of its inputs.
        self._given_rows = [0]
        self._labelled_rows = [0]
        self._unknown: list[tuple[Mapping[str, Any], Sequence[int | None]]] = []
        self._first_output: NDArray[Any] | None = None
        self._varies = False
        self._labels: list[Sequence[int | None]] = []
        self._labelled: Labelled | None = None
        # By scaling and order of channels.
        self._known_ratios: dict[tuple[Scaling | None, bool], list[float]] = {}

    def add(
        self,
        feeds: Mapping[str, Any],
        expected: Mapping[str, Any],
        labels: Sequence[int | None] = (),
    ) -> None:
        """Add a sample with the outputs of the float model.

        Args:
            feeds: the sample.
            expected: the outputs of the float model.
            labels: the class of each row, None for an unknown one; empty without labels.
        """
        # Sequences and maps have no rows that could be counted.
        given, outputs = arrays_of(feeds), arrays_of(expected)
        size = sum(value.nbytes for value in given.values())
        if self.is_full or self._bytes + size > _BYTES or not outputs:
            return
        # Outputs on wrong inputs may overflow; such rows are no evidence.
        with np.errstate(all="ignore"):
            # The outputs of the first sample decide the task.
            if self._task is None:
                self._task = find_task(self._model, given, outputs, self._asked)
                self._given = evidence_for(self._task)
            self._watch(outputs)
            # Outputs unlike those of the first sample are no evidence.
            if not self._task.reads(outputs):
                return
            # Rows of another number, such as the boxes that are found, are not those of inputs.
            rows = _rows_of(given, outputs.get(self._task.output))
            if self._given is not None and self._given.reads(outputs, rows):
                self._given.add(outputs)
            if self._given is not None:
                self._given_rows.append(len(self._given))
            self._add_labels(outputs, labels)
        self._feeds.append(given)
        self._counts.append(rows)
        self._bytes += size

    @property
    def _rows(self) -> int:
        """Return the number of rows of the samples' inputs."""
        return sum(self._counts)

    @property
    def is_full(self) -> bool:
        """Return whether further samples are ignored."""
        most = _ROWS if self._labelled is None else _LABELLED_ROWS
        return self._rows >= most

    def _add_labels(
        self, outputs: Mapping[str, NDArray[Any]], labels: Sequence[int | None]
    ) -> None:
        """Score the outputs of a classifier on labels, if every sample has them.

        Args:
            outputs: outputs of the float model on a sample, by name.
            labels: the class of each row, None for an unknown one; empty without labels, which ends
                the comparison by labels.
        """
        assert self._task is not None
        if not self._feeds and self._task.name == "classifier":
            self._labelled = Labelled(self._task.output, self._labels)
        # A sample without labels ends the comparison: hits must be of the same rows for every
        # alternative.
        if not labels:
            self._labelled = None
        if self._labelled is not None:
            self._labels.append(labels)
            self._labelled.add(outputs)
            self._labelled_rows.append(len(self._labelled))

    def remember(
        self, feeds: Mapping[str, Any], labels: Sequence[int | None] = ()
    ) -> None:
        """Add a sample without outputs; the float model runs on demand.

        Args:
            feeds: the sample; it is run only with labels, and where pictures have alternatives to
                compare.
            labels: as for ``add``.
        """
        self._unknown.append((feeds, labels))

    def _watch(self, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Record whether the output ever changes.

        Args:
            outputs: outputs of the float model on a sample, by name; that of the task counts.
        """
        assert self._task is not None
        value = np.atleast_1d(outputs.get(self._task.output, np.zeros(0)))
        if self._first_output is None:
            self._first_output = value[:1].copy()
        # Rows of one batch are compared, too.
        same = value.shape[1:] == self._first_output.shape[1:]
        self._varies |= not same or not (value == self._first_output).all()

    def findings(self, session: Session) -> list[Finding]:
        """Return signs of wrong preprocessing; empty if the data looks right.

        Args:
            session: session on the float model, for alternatives.
        """
        if self._task is None or not self._feeds:
            return []
        with np.errstate(all="ignore"):
            found = list(self._found(session))
        labelled = self._labelled
        if found or labelled is None or len(labelled) < FIRST:
            return found
        if not labelled.is_by_chance:
            return []
        return [
            Finding(
                "labels",
                f"the float model finds {labelled}, little more than by chance",
                "look at the preprocessing, and at the labels: indices of classes in the model's"
                " order, or their names in it, --labels NAMES.txt",
            )
        ]

    def _found(self, session: Session) -> Iterator[Finding]:
        """Yield signs of wrong preprocessing: of tokens, constant outputs, layout, and pictures."""
        has_alternatives = self._given is not None and self._pictures() is not None
        if has_alternatives or self._labelled is not None:
            for feeds, labels in self._unknown:
                self.add(feeds, _outputs(session, feeds), labels)
        yield from token_findings(self._model, self._feeds)
        pictures = self._pictures()
        # Before the outputs are looked at, which are nearly constant then, too.
        if pictures is not None and self._is_faint(pictures[0], pictures[2]):
            yield _FAINT
            return
        if self._constant():
            yield Finding(
                "outputs",
                f"the float model computes the same for all {self._rows} inputs",
                "look at the inputs: scaling, mean and standard deviation, layout",
            )
        if pictures is None:
            return
        name, axis, images = pictures
        few = images[: self._count(_ROWS)]
        smooth = other = smoothness(few)
        # Of most pictures the channels are alike: they are not read a second time.
        if axis == 1 and smooth.unrelated:
            other = smoothness(as_channels_last(few))
        if smooth.is_interleaved(other):
            yield Finding(
                "layout",
                f"neighbouring rows of input {name!r} have a correlation of"
                f" {smooth.down:.2f}, and of {other.down:.2f} if its values are read as (height,"
                " width, channel)",
                "the pixels are (height, width, channel) read as (channel, height,"
                " width): --layout nchw for image files, --input-layout nhwc for arrays",
                "--layout nchw",
            )
        elif (
            smooth.natural
            and not are_alike(few)
            and estimate_bytes(self._model) <= _LARGEST
        ):
            with lanes_for(session) as lanes:
                run = partial(_outputs, without_memory(session))
                yield from self._picture_findings(
                    partial(lanes.in_order, run), name, axis, images
                )

    def _is_faint(self, name: str, images: list[NDArray[Any]]) -> bool:
        """Return whether pictures are faint, as given or after the model's own mean and scale.

        Args:
            images: the pictures of every sample, channels on axis 1.
        """
        few = self._count(FIRST)
        if are_faint(images[:few]):
            return True
        scaled = scaled_by_model(self._model, name, self._feeds[:few])
        return bool(scaled) and are_faint(scaled)

    def _constant(self) -> bool:
        """Return whether the output is constant although the inputs change."""
        if self._rows < FIRST or self._varies:
            return False
        return not all(_are_equal(self._feeds[0], feeds) for feeds in self._feeds)

    def _pictures(self) -> tuple[str, int, list[NDArray[Any]]] | None:
        """Return the input with pictures, the channel axis, and the batches as NCHW.

        Returns:
            Name, axis in the input, and a view of every sample; None without exactly one float
            input of pictures, or if the samples have different layouts.
        """
        inputs = []
        for name, value in self._feeds[0].items():
            axis = picture_axis(value.shape)
            if axis is not None and value.dtype.kind == "f":
                inputs.append((name, axis))
        # With two inputs of pictures, an alternative of one of them would prove nothing.
        if len(inputs) != 1:
            return None
        name, axis = inputs[0]
        images = [np.moveaxis(feed[name], axis, 1) for feed in self._feeds]
        # A later sample has another layout or size of the channels.
        if any(picture_axis(image.shape) != 1 for image in images):
            return None
        return name, axis, images

    def _picture_findings(
        self, run: OutputsOn, name: str, axis: int, images: list[NDArray[Any]]
    ) -> Iterator[Finding]:
        """Yield findings on the scaling and the order of channels of pictures.

        Args:
            name: the input with the pictures.
            images: the pictures of every sample, channels on axis 1.
        """
        pictures = Pictures(self._feeds, name, axis, images, scaling_of(images))
        alternatives = list(pictures.alternatives())
        if self._labelled is not None and len(self._labelled) >= FIRST:
            finding = self._better_top1(run, self._labelled, alternatives)
            if finding is not None:
                yield finding
            # Labels that fit the given preprocessing settle the question without further runs.
            if finding is not None or self._labelled.fits:
                return
        yield from self._unlabelled(run, alternatives)

    def _unlabelled(
        self, run: OutputsOn, alternatives: list[Alternative]
    ) -> Iterator[Finding]:
        """Yield a finding from the responses of the first layers, or from the outputs.

        Args:
            alternatives: the preprocessings to compare with the given one.
        """
        layers = FirstLayers(self._model)
        self._known_ratios.clear()
        # Statistics of the first layers need few rows, and no run of the whole model.
        few = self._feeds[: self._count(FIRST)]
        responses = layers.responses(few)
        distance = layers.batch_norm_distance(responses)
        ratios = layers.ratios(responses)
        finding: Finding | None = None
        if distance is not None:
            finding = _batch_norm_finding(layers, alternatives, distance, len(few))
            # Otherwise the scaling is the training's, and the order of channels is left, which the
            # statistics hardly tell.
            alternatives = [
                alternative
                for alternative in alternatives
                if alternative.scaling is None
            ]
        # Without a BatchNormalization, biases that match the responses speak for the scaling.
        elif fits(ratios):
            alternatives = [
                alternative
                for alternative in alternatives
                if alternative.scaling is None
                or not farther(self._ratios(layers, alternative), ratios)
            ]
        if finding is None and distance is None:
            finding = self._by_biases(run, layers, ratios, alternatives)
        if finding is None:
            alternatives = self._admissible(layers, ratios, alternatives)
            finding = self._by_outputs(run, alternatives, distance)
        if finding is not None:
            yield finding

    def _by_outputs(
        self,
        run: OutputsOn,
        alternatives: list[Alternative],
        distance: BatchNormDistance | None,
    ) -> Finding | None:
        """Return a finding from the evidence in the outputs, if there are enough.

        Args:
            alternatives: the preprocessings that the responses of the first layers leave.
            distance: from the data of the training; None without a BatchNormalization.
        """
        if self._given is None or self._given_rows[self._count(_ROWS)] < FIRST:
            return None
        finding = self._better(run, alternatives)
        if finding is None and distance is None and self._collapsed():
            return Finding(
                "outputs",
                f"the float model finds {self._given}",
                "look at scaling, mean, standard deviation, color and layout of the data",
            )
        return finding

    def _ratios(self, layers: FirstLayers, alternative: Alternative) -> list[float]:
        """Return the ratios of responses to biases on the first rows of an alternative."""
        key = alternative.scaling, alternative.swapped
        if key not in self._known_ratios:
            few = [*alternative.feeds(0, self._count(_RESPONSE_ROWS))]
            self._known_ratios[key] = layers.ratios(layers.responses(few))
        return self._known_ratios[key]

    def _by_biases(
        self,
        run: OutputsOn,
        layers: FirstLayers,
        ratios: Sequence[float],
        alternatives: Sequence[Alternative],
    ) -> Finding | None:
        """Return a scaling of the size that the biases of the first layers were trained for.

        Args:
            ratios: ratios of responses to biases with the given inputs.

        Returns:
            The most common one of the size, if the outputs do not speak against it; None without
            one.
        """
        distances = list[tuple[Alternative, float]]()
        for alternative in alternatives:
            if alternative.swapped:
                continue
            # The first layers are cheap, and spare most alternatives a run of the whole model.
            other = self._ratios(layers, alternative)
            if much_farther(ratios, other):
                distances.append((alternative, octaves(other)))
        nearest = min((distance for _, distance in distances), default=0.0)
        for alternative, distance in distances:
            if distance > nearest + _OF_A_SIZE:
                continue
            if not self.tells(run, alternative, ratios):
                continue
            size = "far above" if min(ratios) > 1 else "far below"
            return Finding(
                alternative.cause,
                f"the first layers respond {size} their biases (median"
                f" {float(np.median(ratios)):.2g} times), and like those of a trained model with"
                f" {alternative.name}",
                alternative.advice,
                alternative.options,
            )
        return None

    def tells(
        self, run: OutputsOn, alternative: Alternative, ratios: Sequence[float]
    ) -> bool:
        """Return whether the outputs may be believed to be as good with an alternative.

        Biases that no BatchNormalization was folded into may be as small as they like, and seem to
        call for small inputs, with which a classifier tells less, and a detector finds less. No
        training leaves first layers that hardly look at their inputs.

        Args:
            run: runs the float model.
            alternative: another preprocessing of the samples that were added.
            ratios: ratios of responses to biases with the given inputs.
        """
        count = self._count(_TELLING_ROWS)
        given = self._given
        if given is None or self._given_rows[count] < FIRST:
            return max(ratios) < 1
        evidence = self._fresh()
        for outputs in run(alternative.feeds(0, count)):
            evidence.add(outputs)
        return given.head(self._given_rows[count]).kept_by(evidence)

    def _is_plausible(
        self, run: OutputsOn, alternative: Alternative, evidence: Evidence
    ) -> bool:
        """Return whether the evidence with an alternative can be believed.

        A detector finds more in pictures with more contrast, without being meant for them.

        Where all pictures show one thing, wrong inputs make predictions differ, which looks like
        information. The right ones make them surer, too, unless the given inputs are larger.

        Inputs of another size saturate a softmax, which looks like certainty. Much larger ones
        speak for themselves only if predictions change less with a small shift.
        """
        pictures = alternative.pictures
        given = self._feeds[: self._count(_TELLING_ROWS)]
        other = list(alternative.feeds(0, len(given)))

        def size(samples: Sequence[Feeds]) -> float:
            return float(np.mean([feeds[pictures.name].std() for feeds in samples]))

        def unsteadiness(samples: Sequence[Feeds]) -> float:
            evidence, shifted = self._fresh(), self._fresh()
            for outputs in run(samples):
                evidence.add(outputs)
            for outputs in run(map(pictures.shifted, samples)):
                shifted.add(outputs)
            assert isinstance(evidence, Classified) and isinstance(shifted, Classified)
            return evidence.change(shifted)

        given_size, other_size = size(given), size(other)
        if not isinstance(self._given, Classified):
            least, most = _MORE_CONTRAST
            return not least * given_size < other_size < most * given_size
        assert isinstance(evidence, Classified)
        surer = self._given.head(len(evidence)).student(evidence) >= 0
        if other_size >= _AS_LARGE * given_size and not surer:
            return False
        if other_size < _MUCH_LARGER * given_size:
            return True
        return unsteadiness(other) <= _STEADIER * unsteadiness(given)

    def _better(
        self, run: OutputsOn, alternatives: Sequence[Alternative]
    ) -> Finding | None:
        """Return a preprocessing with significantly more evidence in the outputs.

        Args:
            alternatives: the preprocessings to try; those with fewer changes first.

        Returns:
            The finding; None if no preprocessing is significantly better.
        """
        assert self._given is not None
        counts = [self._count(rows) for rows in _STAGES]
        search = PreprocessingSearch(
            # With labels, more rows are collected than evidence without labels needs.
            self._given.head(self._given_rows[counts[-1]]),
            self._fresh,
            run,
            counts,
            self._count(FIRST),
            self._given_rows,
            partial(self._is_plausible, run),
        )
        return search.finding(alternatives)

    def _better_top1(
        self, run: OutputsOn, labelled: Labelled, alternatives: Sequence[Alternative]
    ) -> Finding | None:
        """Return a preprocessing with a significantly higher top-1 of the float model.

        Args:
            labelled: top-1 with the given preprocessing.
            alternatives: the preprocessings to try; those with fewer changes first.

        Returns:
            The finding; None if no preprocessing is significantly better.
        """
        counts = [self._count(rows) for rows in _LABELLED_STAGES]
        search = PreprocessingSearch(
            labelled.head(self._labelled_rows[counts[-1]]),
            # The labels are shared; hits begin anew.
            lambda: Labelled(labelled.output, self._labels),
            run,
            counts,
            self._count(FIRST),
            self._labelled_rows,
        )
        return search.finding(alternatives)

    def _admissible(
        self,
        layers: FirstLayers,
        ratios: Sequence[float],
        alternatives: list[Alternative],
    ) -> list[Alternative]:
        """Return alternatives without inputs so large that a detector finds noise.

        Args:
            ratios: ratios of responses to biases with the given inputs.
        """
        # Inputs as large as the given ones are no argument against an alternative.
        if not (layers and isinstance(self._given, Detected)) or too_large(ratios):
            return alternatives
        return [
            alternative
            for alternative in alternatives
            if not too_large(self._ratios(layers, alternative))
        ]

    def _collapsed(self) -> bool:
        """Return whether a classifier predicts few classes, without certainty, for many rows."""
        given = self._given
        return (
            isinstance(given, Classified)
            and len(given) >= _COLLAPSE_ROWS
            and given.classes <= _COLLAPSE_CLASSES * len(given)
            and given.confidence < _COLLAPSE_CONFIDENCE
        )

    def _count(self, rows: int) -> int:
        """Return the least number of leading samples with so many rows.

        All samples if they have fewer rows.
        """
        total = 0
        for index, count in enumerate(self._counts):
            # Whole samples: a batch is never split.
            if total >= rows:
                return index
            total += count
        return len(self._feeds)

    def _fresh(self) -> Evidence:
        """Return empty evidence of the task."""
        assert self._task is not None
        evidence = evidence_for(self._task)
        assert evidence is not None
        return evidence


def _batch_norm_finding(
    layers: FirstLayers,
    alternatives: Sequence[Alternative],
    distance: BatchNormDistance,
    few: int,
) -> Finding | None:
    """Return a finding on inputs unlike BatchNormalization's training data.

    Args:
        alternatives: the preprocessings to compare. Statistics over all channels say little about
            the order of channels.
        distance: distance of the given data.
        few: number of leading samples to compare on.

    Returns:
        The scaling that is nearest to the training data, if it is clearly nearer; no scaling if
        the data are far from it with any; None for data that may be of another kind.
    """
    if not distance.is_other_data:
        return None
    evidence = (
        "the first BatchNormalization was trained on other values: the mean deviates by"
        f" {distance.deviation:.2g} standard deviations, the variance {distance.ratio:.2g} times"
    )
    best: tuple[BatchNormDistance, Alternative] | None = None
    for alternative in alternatives:
        if alternative.swapped:
            continue
        responses = layers.responses([*alternative.feeds(0, few)])
        other = layers.batch_norm_distance(responses)
        if other is not None and (best is None or other.total < best[0].total):
            best = (other, alternative)
    if best is not None and best[0].is_nearer_than(distance):
        return Finding(
            best[1].cause,
            f"{evidence}; they agree with {best[1].name}"
            if not best[0].is_other_data
            else f"{evidence}; {best[1].name} is nearer",
            best[1].advice,
            best[1].options,
        )
    if not distance.is_far:
        return None
    return Finding("scaling", evidence, "look at scale, mean and standard deviation")


def _rows_of(feed: Feeds, output: NDArray[Any] | None) -> int:
    """Return the number of rows of a sample: a first axis of its inputs.

    Args:
        output: the output that the task reads; None without one.
    """
    # Inputs may have different first axes, such as a picture and a hundred anchors: the batch is
    # the one that the output has, too.
    sizes = [len(value) for value in feed.values() if value.ndim]
    if output is not None and output.ndim and len(output) in sizes:
        return len(output)
    return max(sizes, default=1)


def _are_equal(first: Feeds, second: Feeds) -> bool:
    """Return whether two samples have the same values."""
    return first.keys() == second.keys() and all(
        np.array_equal(value, second[name]) for name, value in first.items()
    )


def _outputs(session: Any, feed: Feeds) -> dict[str, NDArray[Any]]:
    """Return the array outputs of a model on a sample, by name."""
    return arrays_of(outputs_of(session, feed))
