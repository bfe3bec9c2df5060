"""Evidence in a float model's outputs: labels, information in classes, or detected boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quark_onnx.common.wording import counted
from quark_onnx.report.figures import percentage, wilson
from quark_onnx.report.verdict.boxes import detections, softmax
from quark_onnx.report.verdict.task import Task, squeezed

Outputs = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float64]

#: Gain in nats that needs no significance test.
_CLEAR = 0.25
#: Minimum Student's t of the paired difference, minimum rows, and minimum gain in nats or shares.
_SIGNIFICANT, _ROWS, _LEAST_GAIN = 1.6, 16, 0.015
#: Gain in nats below which an alternative is dropped, by the number of rows so far.
_HOPELESS_GAIN = {2: -0.4, 4: -0.3, 8: -0.1, 16: -0.02, 24: 0.0}
#: Share of the greatest possible information below which only an alternative with a gain is tried
#: further, and that gain as a share: the right preprocessing would be clearly better.
_WEAK, _WEAK_GAIN = 0.5, 0.05
#: Loss as a multiple of the missing information beyond which an alternative is dropped, and the
#: number of rows from which this holds.
_HEADROOM, _SURE_ROWS = 0.5, 8
#: Share of the greatest possible information above which evidence is strong.
_STRONG = 0.8
#: Against strong evidence: mean loss of certainty in nats beyond which an alternative is dropped,
#: and Student's t of the gain below which it is dropped, by the number of rows so far.
_UNSURE, _UNLIKELY = 0.75, {4: -1.0, 8: -0.5, 16: 0.0}
#: Share of the evidence below which an alternative is dropped, by the number of rows so far.
_HOPELESS_SHARE = {2: 0.2, 4: 0.4, 8: 0.6, 16: 0.85, 24: 0.95}
#: Minimum z of McNemar's test on the labels, and minimum gain in top-1. A preprocessing is compared
#: with nine others, so the limit is higher than that of a single test.
_MCNEMAR, _LEAST_TOP1_GAIN = 2.5, 0.03
#: Share of the information, and of the greatest scores of boxes, that remains with a scaling that
#: the first layers speak for: the right one tells as much, and inputs that are too small tell less.
_KEPT_INFORMATION, _KEPT_SCORE = 0.9, 0.5
#: Hits that an alternative may lack, as a multiple of the square root of the number of rows.
_MISSING_HITS = 0.5
#: Top-1 that is little above chance: as a multiple of it, and as the difference.
_LITTLE, _LITTLE_MORE = 2.0, 0.1
#: Minimum top-1 of a model with fitting labels: absolute, and as a multiple of chance.
_FITTING_TOP1, _ABOVE_CHANCE = 0.1, 3.0


class Evidence(Protocol):
    """Evidence in a model's outputs on rows."""

    def reads(self, outputs: Outputs, rows: int) -> bool:
        """Return whether the outputs on a sample are evidence.

        Args:
            outputs: outputs of the float model by name.
            rows: number of rows of the sample's inputs.
        """

    def kept_by(self, other: Evidence) -> bool:
        """Return whether ``other`` is about as strong evidence on equal rows.

        Args:
            other: the evidence with an alternative preprocessing.
        """

    def add(self, outputs: Outputs) -> None:
        """Add the outputs on a sample.

        Args:
            outputs: outputs of the float model by name.
        """

    def head(self, rows: int) -> Evidence:
        """Return the evidence of the first rows.

        Args:
            rows: maximum number of rows.
        """

    def hopeless(self, other: Evidence) -> bool:
        """Return whether ``other`` is weaker evidence on equal rows.

        The more rows, the less weaker it has to be.

        Args:
            other: the evidence with an alternative preprocessing.
        """

    def surer_than(self, other: Evidence) -> bool:
        """Return whether ``other`` is clearly less certain on equal rows.

        This tells against ``other`` only where the evidence on more rows is strong.

        Args:
            other: the evidence with an alternative preprocessing.
        """

    def beaten_by(self, other: Evidence) -> bool:
        """Return whether ``other`` is significantly stronger evidence on equal rows.

        Args:
            other: the evidence with an alternative preprocessing.
        """

    @property
    def strong(self) -> bool:
        """Return whether only slightly stronger evidence is possible."""

    @property
    def strength(self) -> float:
        """Return the strength, comparable for a model on equal rows."""

    def __len__(self) -> int: ...

    def __str__(self) -> str: ...


def evidence_for(task: Task) -> Evidence | None:
    """Return empty evidence of a task; None without informative confidence."""
    if task.name == "classifier":
        return Classified(task.output)
    if task.name == "detector" and task.layout is not None:
        return Detected(task)
    return None


def _limit(limits: Mapping[int, float], rows: int) -> float:
    """Return the limit for the greatest number of rows that is reached, or the least."""
    reached = [limit for least, limit in limits.items() if least <= rows]
    return reached[-1] if reached else min(limits.values())


def _student(differences: Floats) -> float:
    """Return Student's t of the mean of (rows,) paired differences; 0 if all are equal."""
    # The standard error of the mean; equal differences have none, and count as no evidence.
    spread = differences.std(ddof=1) / len(differences) ** 0.5
    if not spread:
        return 0.0
    return float(differences.mean() / spread)


@dataclass
class Classified:
    """Predicted distributions of a classifier.

    The mutual information of classes and inputs is the entropy of the mean minus the mean of
    the entropies. It is high if the model is certain and predicts different classes for
    different inputs.
    """

    output: str
    rows: list[Floats] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)

    def reads(self, outputs: Outputs, rows: int) -> bool:
        return len(outputs[self.output]) == rows

    def kept_by(self, other: Evidence) -> bool:
        return other.strength >= _KEPT_INFORMATION * self.strength

    def add(self, outputs: Outputs) -> None:
        value = outputs[self.output]
        # Indices of classes have no confidence, and classes of positions are not of an input.
        if value.dtype.kind != "f" or len(squeezed(value)) != 2:
            return
        scores = value.reshape(squeezed(value)).astype(np.float64)
        rows = _probabilities(scores)
        # Rows of another number of classes cannot be averaged.
        if not self.rows or rows.shape[1] == len(self.rows[0]):
            self.rows += list(rows)
            # Logarithms of probabilities are logits; those of a Softmax may be 0.
            is_softmax = np.array_equal(rows, scores)
            self.scores += list(np.log(rows + 1e-30) if is_softmax else scores)

    def head(self, rows: int) -> Classified:
        return Classified(self.output, self.rows[:rows], self.scores[:rows])

    @property
    def strength(self) -> float:
        # (rows, classes).
        table = np.array(self.rows)
        return float(_entropy(table.mean(axis=0)) - _entropy(table).mean())

    @property
    def classes(self) -> int:
        """Return the number of distinct predicted classes."""
        return len(np.unique(np.array(self.rows).argmax(axis=1)))

    @property
    def confidence(self) -> float:
        """Return the mean probability of the predicted class."""
        return float(np.array(self.rows).max(axis=1).mean())

    @property
    def greatest(self) -> float:
        """Return the greatest possible strength."""
        # As many classes as rows can be told apart, at most; two for a bound above 0.
        return float(np.log(max(2, min(len(self), len(self.rows[0])))))

    @property
    def strong(self) -> bool:
        return self.strength > _STRONG * self.greatest

    def hopeless(self, other: Evidence) -> bool:
        gain = other.strength - self.strength
        # Weak evidence for the given preprocessing: only clearly more is worth further rows.
        if self.strength < _WEAK * self.greatest:
            return gain < _WEAK_GAIN * self.greatest
        # little is missing to the greatest strength: a better preprocessing falls short by less
        missing = self.greatest - self.strength
        tolerated = -_HEADROOM * missing if len(self) >= _SURE_ROWS else -np.inf
        return gain < max(_limit(_HOPELESS_GAIN, len(self)), tolerated)

    def surer_than(self, other: Evidence) -> bool:
        assert isinstance(other, Classified)
        # (rows,), paired: both predict the same inputs.
        loss = _entropy(np.array(other.rows)) - _entropy(np.array(self.rows))
        if loss.mean() > _UNSURE:
            return True
        # the spread of fewer rows says nothing
        enough = len(self) >= min(_UNLIKELY)
        return enough and self.student(other) < _limit(_UNLIKELY, len(self))

    def beaten_by(self, other: Evidence) -> bool:
        assert isinstance(other, Classified)
        gain = other.strength - self.strength
        if gain >= _CLEAR:
            return True
        certain = len(self) >= _ROWS and self.student(other) >= _SIGNIFICANT
        return bool(certain and gain >= _LEAST_GAIN)

    def student(self, other: Classified) -> float:
        """Return Student's t of the fall of the entropies of the predictions.

        Args:
            other: predictions of the same rows with an alternative preprocessing.

        Returns:
            A positive value if ``other`` is more certain.
        """
        return _student(_entropy(np.array(self.rows)) - _entropy(np.array(other.rows)))

    def change(self, shifted: Classified) -> float:
        """Return how much predictions change with a shift, relative to their differences.

        Logits are compared without their mean, so that a factor of all of them, by which larger
        inputs look more certain, cancels.

        Args:
            shifted: predictions of the same inputs, shifted.

        Returns:
            The mean distance to the prediction of the shifted input, over the mean distance of two
            inputs; infinite if all predictions are equal.
        """
        here, there = _centred(self.scores), _centred(shifted.scores)
        pairs = np.linalg.norm(here[:, None] - here[None], axis=-1)
        between = float(pairs.sum()) / max(1, len(here) * (len(here) - 1))
        within = float(np.linalg.norm(here - there, axis=-1).mean())
        return within / between if between else np.inf

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return (
            f"{counted(self.classes, 'class')} for {counted(len(self), 'input')}, mean top"
            f" probability {self.confidence:.2f}"
        )


@dataclass
class Labelled:
    """Top-1 of a classifier on labelled rows.

    Attributes:
        output: the output with the scores.
        labels: the classes of the rows of each sample, in the order of the samples; None for a
            row without a label.
        hits: whether the predicted class is the label, by labelled row.
        likelihoods: the probability of the label, by labelled row; it breaks ties.
    """

    output: str
    labels: Sequence[Sequence[int | None]]
    hits: list[bool] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)
    classes: int = 0
    _samples: int = 0

    def reads(self, outputs: Outputs, rows: int) -> bool:
        return True

    def kept_by(self, other: Evidence) -> bool:
        return not self.hopeless(other)

    def add(self, outputs: Outputs) -> None:
        value = outputs[self.output]
        labels = self.labels[self._samples]
        self._samples += 1
        if value.dtype.kind != "f":
            return
        rows = _probabilities(value.reshape(squeezed(value)))
        self.classes = rows.shape[1]
        # Rows beyond the labels have none.
        for row, label in zip(rows, labels, strict=False):
            if label is not None:
                # A label beyond the classes counts as a miss.
                is_class = 0 <= label < len(row)
                self.hits.append(bool(row.argmax() == label))
                self.likelihoods.append(float(row[label]) if is_class else 0.0)

    def head(self, rows: int) -> Labelled:
        return Labelled(
            self.output,
            self.labels,
            self.hits[:rows],
            self.likelihoods[:rows],
            self.classes,
        )

    @property
    def top1(self) -> float:
        return _mean(self.hits)

    @property
    def strength(self) -> float:
        # Rows are few, so that top-1 often ties; the likelihood of the labels decides then.
        return self.top1 + 0.001 * _mean(self.likelihoods)

    @property
    def is_by_chance(self) -> bool:
        """Return whether top-1 is little above chance, so that something is wrong.

        Of few rows, a model that is right halfway between chance and always may miss many: as long
        as the interval of 95 % reaches that far, nothing is known.
        """
        chance = 1 / max(2, self.classes)
        little = self.top1 <= min(_LITTLE * chance, chance + _LITTLE_MORE)
        return little and wilson(sum(self.hits), len(self))[1] < (1 + chance) / 2

    @property
    def fits(self) -> bool:
        """Return whether top-1 is far above chance, so that labels and model fit."""
        chance = 1 / max(2, self.classes)
        # Of few classes, three times chance is unreachable; halfway to 1 then suffices.
        clear = min(_ABOVE_CHANCE * chance, (1 + chance) / 2)
        return self.top1 >= max(_FITTING_TOP1, clear)

    @property
    def strong(self) -> bool:
        return False

    def hopeless(self, other: Evidence) -> bool:
        assert isinstance(other, Labelled)
        missing = sum(self.hits) - sum(other.hits)
        return missing > _MISSING_HITS * float(np.sqrt(len(self.hits)))

    def surer_than(self, other: Evidence) -> bool:
        return False

    def beaten_by(self, other: Evidence) -> bool:
        assert isinstance(other, Labelled)
        mine = np.array(self.hits, bool)
        others = np.array(other.hits, bool)
        # McNemar's test: only rows that one preprocessing gets right and the other does not
        # count.
        won = int((others & ~mine).sum())
        lost = int((mine & ~others).sum())
        if not won + lost:
            return False
        certain = won - lost >= _MCNEMAR * (won + lost) ** 0.5
        # Labels in another order fit no preprocessing, and one of them by chance least badly.
        return bool(
            certain and won - lost >= _LEAST_TOP1_GAIN * len(mine) and other.fits
        )

    def __len__(self) -> int:
        return len(self.hits)

    def __str__(self) -> str:
        inputs = counted(len(self), "labelled input")
        return f"the right class of {percentage(self.top1)} of {inputs}"


def _probabilities(rows: NDArray[Any]) -> Floats:
    """Return probabilities or logits (..., classes) as probabilities, (rows, classes).

    Args:
        rows: scores along the last axis, taken for logits unless they are not negative and sum to
            1 in every row.
    """
    rows = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
    # Some models end in a softmax, others in logits.
    if (rows >= 0).all() and np.allclose(rows.sum(axis=1), 1, atol=1e-3):
        return rows
    return softmax(rows)


def _centred(scores: Sequence[Floats]) -> Floats:
    """Return logits without their mean over the classes, (rows, classes)."""
    table = np.array(scores)
    return np.asarray(table - table.mean(axis=1, keepdims=True))


def _entropy(rows: Floats) -> Floats:
    """Return the entropies of distributions along the last axis, in nats."""
    # 0 log 0 is 0: the floor avoids minus infinity.
    return np.asarray(-(rows * np.log(np.maximum(rows, 1e-12))).sum(axis=-1))


@dataclass
class Detected:
    """Scores of a detector's boxes, by image."""

    task: Task
    scores: list[Floats] = field(default_factory=list)

    def reads(self, outputs: Outputs, rows: int) -> bool:
        return True

    def kept_by(self, other: Evidence) -> bool:
        assert isinstance(other, Detected)
        return other.strongest >= _KEPT_SCORE * self.strongest

    def add(self, outputs: Outputs) -> None:
        assert self.task.layout is not None
        # Boxes are (n, 6): x1, y1, x2, y2, score, class.
        self.scores += [boxes[:, 4] for boxes in detections(self.task.layout, outputs)]

    def head(self, rows: int) -> Detected:
        return Detected(self.task, self.scores[:rows])

    @property
    def squares(self) -> Floats:
        """Return the sum of squared scores of every image."""
        # Squares, because hundreds of boxes with scores near 0 must not outweigh one certain box.
        return np.array([float(np.square(scores).sum()) for scores in self.scores])

    @property
    def strength(self) -> float:
        return float(self.squares.mean())

    @property
    def strongest(self) -> float:
        """Return the mean over images of the greatest score."""
        return float(np.mean([scores.max(initial=0.0) for scores in self.scores]))

    @property
    def strong(self) -> bool:
        return False

    def hopeless(self, other: Evidence) -> bool:
        return other.strength < _limit(_HOPELESS_SHARE, len(self)) * self.strength

    def surer_than(self, other: Evidence) -> bool:
        return False

    def beaten_by(self, other: Evidence) -> bool:
        assert isinstance(other, Detected)
        gain = other.squares - self.squares
        # 0.1 is one box per image with a score of about 0.3: less is as good as no detection.
        enough = other.strength > 0.1 and gain.mean() > 0.1 * self.strength
        certain = len(self) >= _ROWS // 2 and _student(gain) >= _SIGNIFICANT
        return bool(enough and certain)

    def __len__(self) -> int:
        return len(self.scores)

    def __str__(self) -> str:
        count = np.mean([(scores >= 0.25).sum() for scores in self.scores])
        return f"{count:.1f} detections per image, mean greatest score {self.strongest:.2f}"


def _mean(values: Sequence[float]) -> float:
    """Return the mean; 0 without values."""
    return float(np.mean(values)) if values else 0.0
