"""Errors of a model's outputs compared with a reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from calibrators.onnx_runtime.interrupt import AT_ONCE, Lanes
from calibrators.onnx_runtime.remembering import may_be_random, without_memory
from calibrators.onnx_runtime.session import feeds_of, outputs_of
from calibrators.onnx_runtime.worker import Session


@dataclass(frozen=True)
class OutputError:
    """The error of an output over the samples.

    Attributes:
        name: name of the output.
        sqnr: SQNR in dB, ``10 log10(sum reference^2 / sum error^2)``; infinite if equal, minus
            infinite if a shape differs, None for outputs that are not float, or random.
        cosine: cosine similarity of all values; None if sqnr is None, NaN if sqnr is minus
            infinite.
        max_error: maximum absolute difference; infinite if a shape differs or a value is finite
            in only one model; None if sqnr is None.
        agreement: share of equal values, if sqnr is None.
        broken: number of values that are finite in only one model.
        steps: number of samples over which each model read its own states; 0 for independent
            samples.
        random: the reference itself is not deterministic, so the error is meaningless.
        shapes: the first differing shapes of reference and other model, as text; None if equal.
        spread: least, median and greatest SQNR of a single sample, in dB; None for fewer than two
            samples, and if sqnr is None.
        varying: SQNR of the varying part in dB: the energy of the reference's deviations from its
            mean over samples and positions, divided by that of the error. None if the reference
            does not vary, and if sqnr is None.
    """

    name: str
    sqnr: float | None
    cosine: float | None
    max_error: float | None
    agreement: float | None
    random: bool = False
    broken: int = 0
    shapes: tuple[str, str] | None = None
    steps: int = 0
    spread: tuple[float, float, float] | None = None
    varying: float | None = None

    @property
    def sqnr_of_changes(self) -> float | None:
        """Return the SQNR that a constant offset of the output does not raise, in dB.

        It is that of the varying part, and at most that of the whole output.
        """
        if self.sqnr is None or self.varying is None:
            return self.sqnr
        return min(self.sqnr, self.varying)


#: An output with at least the first SQNR in dB is not random, nor is an output whose repetition
#: reaches the second.
_GOOD, _REPEATED = 20.0, 60.0
#: Number of rows from which each column of a matrix has a mean of its own.
_ROWS_OF_MEANS = 3
#: Share of the energy below which deviations from the mean are rounding errors of the sums.
_ROUNDING = 1e-12

#: Called with a sample, and with the outputs of the reference and of the other model by name.
Observe = Callable[
    [Mapping[str, NDArray[Any]], Mapping[str, Any], Mapping[str, Any]],
    None,
]

#: The text for outputs without a measurement.
Default = TypeVar("Default", float, None)


def least_sqnr(errors: Iterable[OutputError], default: Default) -> float | Default:
    """Return the minimum SQNR over the outputs, in dB; the default without SQNR.

    Args:
        errors: the errors of the outputs.
        default: result if no output has an SQNR.
    """
    # Integer and random outputs have no SQNR (None).
    return min(
        (error.sqnr for error in errors if error.sqnr is not None),
        default=default,
    )


def measure(
    reference: Session,
    other: Session,
    samples: Iterable[Mapping[str, NDArray[Any]]],
    observe: Observe | None = None,
) -> list[OutputError]:
    """Run two sessions on equal samples and return the error of every output.

    Outputs are in the reference's order. Sequences and maps count as the arrays in them.
    Without samples, no error is known.

    Args:
        reference: session on the float model.
        other: session on the other model.
        samples: inputs by name.
        observe: called after each sample.
    """
    measurement = Measurement(reference, other)
    with lanes_for(reference) as lanes:
        for run in lanes.in_order(measurement.run, samples):
            measurement.add(run)
            if observe is not None:
                observe(*run)
    return measurement.results()


def lanes_for(session: Session) -> Lanes:
    """Return threads for runs of a session; one where outputs depend on the order of the runs."""
    return Lanes(1 if may_be_random(session) else AT_ONCE)


class Run(NamedTuple):
    """A run of two models on a sample.

    Attributes:
        feeds: the inputs of the reference.
        expected: the outputs of the reference by name.
        actual: the outputs of the other model by name.
    """

    feeds: dict[str, Any]
    expected: dict[str, Any]
    actual: dict[str, Any]


class Measurement:
    """The errors of a model's outputs against a reference, sample by sample."""

    def __init__(
        self, reference: Session, other: Session, names: list[str] | None = None
    ) -> None:
        """Start without samples.

        Args:
            reference: session on the float model.
            other: session on the other model.
            names: outputs to compare; None for all of the reference.
        """
        self._reference, self._other = reference, other
        self._names = (
            [value.name for value in reference.get_outputs()]
            if names is None
            else names
        )
        self._totals = OutputTotals(self._names)
        self._feeds: dict[str, Any] | None = None

    def run(self, sample: Mapping[str, NDArray[Any]]) -> Run:
        """Run both models on a sample."""
        feeds = feeds_of(self._reference, sample)
        expected = outputs_of(self._reference, feeds, self._names)
        # A quantized model may lack an input whose readers were removed.
        actual = outputs_of(self._other, sample, self._names)
        return Run(feeds, expected, actual)

    def add(self, run: Run) -> None:
        """Add the errors of a run."""
        self._feeds = run.feeds
        self._totals.add(self._names, run.expected, run.actual)

    def so_far(self) -> list[OutputError]:
        """Return the error of each output, random outputs included."""
        return self._totals.results()

    def results(self) -> list[OutputError]:
        """Return the error of each output after the last sample; empty without samples."""
        if self._feeds is None:
            return []
        results = self.so_far()
        # A good output is not random, so the two extra runs are spared for most models.
        poor = any(_poor(result, _GOOD) for result in results)
        if not poor or not may_be_random(self._reference):
            return results
        # An output is random if the float model itself does not repeat it. A session that was
        # opened again begins with the numbers of the session before: two runs of one session tell.
        session = without_memory(self._reference)
        once = outputs_of(session, self._feeds, self._names)
        repeated = outputs_of(session, self._feeds, self._names)
        for index, result in enumerate(results):
            name = result.name
            # Both runs are of the float model on one sample: any difference is chance.
            repetition = Total()
            repetition.add(once[name], repeated[name])
            if _poor(result, _GOOD) and _poor(repetition.result(name), _REPEATED):
                results[index] = OutputError(
                    name,
                    None,
                    None,
                    None,
                    self._totals.agreement(name),
                    random=True,
                )
        return results


def _poor(error: OutputError, bound: float) -> bool:
    """Return whether an SQNR is below a bound in dB, or values differ where there is no SQNR."""
    if error.sqnr is None:
        # Integer outputs: one unequal value suffices, because random indices differ anywhere.
        return error.agreement != 1.0
    return error.sqnr < bound


def _leaves(value: Any) -> list[NDArray[Any]]:
    """Return the arrays of a value, sequence or map; empty for an empty optional."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        # ZipMap of scikit-learn's exporters returns a sequence of maps: class to probability.
        return [np.asarray(list(value.values()))]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [np.asarray(value)]


def _shapes(leaves: Iterable[NDArray[Any]]) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in leaves]


def _as_text(shapes: list[tuple[int, ...]]) -> str:
    """Return the shape of an output as text, or the shapes of a sequence or map."""
    return str(shapes[0]) if len(shapes) == 1 else str(shapes)


class _Moments:
    """Number, sum and sum of squares of values, for the energy of deviations from the mean."""

    def __init__(self) -> None:
        # (3, means): one mean for each column of a matrix, one for all values otherwise.
        self._sums: NDArray[np.float64] | None = None

    def add(self, values: NDArray[np.float64], counted: NDArray[np.bool_]) -> None:
        """Add values.

        Args:
            values: values of any shape, with zeros where they do not count.
            counted: whether a value counts, of the same shape.
        """
        # Columns of a matrix are features with offsets of their own. The axis of the features of
        # other arrays is unknown, and a mean of each position would take a pattern for an offset.
        axis = 0 if values.ndim == 2 else None
        sums = np.array(
            [
                counted.sum(axis, dtype=np.float64),
                values.sum(axis),
                np.square(values).sum(axis),
            ]
        ).reshape(3, -1)
        if self._sums is None:
            self._sums = sums
        elif self._sums.shape == sums.shape:
            self._sums += sums
        else:
            self._sums = _joined(self._sums) + _joined(sums)

    @property
    def energy(self) -> float | None:
        """Return the energy of the deviations from the mean; None if the values do not vary."""
        sums = self._sums
        if sums is None or not sums.size:
            return None
        if sums[0].min() < _ROWS_OF_MEANS:
            sums = _joined(sums)
        count, total, squares = sums
        if count.min() < 2:
            return None
        # Bessel's correction: the mean is that of the same values.
        deviations = (squares - total**2 / count) * count / (count - 1)
        energy = float(deviations.sum())
        return energy if energy > _ROUNDING * squares.sum() else None


def _joined(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums over all columns, for a common mean."""
    return np.asarray(sums.sum(axis=1, keepdims=True))


class Total:
    """The error of an output, accumulated sample by sample."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0
        self.product = 0.0
        self.energy = 0.0
        self.largest = 0.0
        self.equal = 0
        self.count = 0
        self.broken = 0
        self.floating = True
        self.shapes: tuple[str, str] | None = None
        self._sqnr_of_samples: list[float] = []
        self._moments = _Moments()

    @property
    def agreement(self) -> float:
        """Return the share of equal values; 1 for no values."""
        if not self.count:
            return 1.0
        return self.equal / self.count

    def add(self, reference: Any, other: Any) -> None:
        """Add an output of the two models on a sample.

        Args:
            reference: output of the reference: an array, a sequence, a map, or None.
            other: output of the other model.
        """
        before = _leaves(reference)
        after = _leaves(other)
        # An empty sequence has no type; once an output was not float, it has no SQNR.
        self.floating &= bool(before) and all(leaf.dtype.kind == "f" for leaf in before)
        self.count += sum(leaf.size for leaf in before)
        # Values of different shapes have no difference: the noise is infinite, and the first shapes
        # are reported.
        expected = _shapes(before)
        actual = _shapes(after)
        if expected != actual:
            self.shapes = self.shapes or (_as_text(expected), _as_text(actual))
            # An empty sequence against a filled one: one value that does not agree.
            self.count += not before
            self.noise = float("inf")
            self.largest = float("inf")
            self._sqnr_of_samples.append(float("-inf"))
            return
        signal = noise = 0.0
        for a, b in zip(before, after, strict=True):
            # NaN is unequal to itself; both models computing NaN is agreement. Works for integers,
            # too.
            both_nan = (a != a) & (b != b)
            self.equal += int(np.sum((a == b) | both_nan))
            if self.floating:
                energy, error = self._add(a, b)
                signal += energy
                noise += error
        self.signal += signal
        self.noise += noise
        self._sqnr_of_samples.append(decibels(signal, noise))

    def _add(self, reference: NDArray[Any], other: NDArray[Any]) -> tuple[float, float]:
        """Add two arrays of floats; values finite in only one model count as broken.

        Args:
            reference: values of the reference, of any float type and shape.
            other: values of the other model, of the same shape.

        Returns:
            The energies of the reference and of the error.
        """
        # Finite in both models: the values that energies and errors are summed over.
        both = np.isfinite(reference) & np.isfinite(other)
        # float64: the square of a float16 above 255 overflows in float16.
        a = reference.astype(np.float64)
        b = other.astype(np.float64)
        # Equal infinities, such as those of attention masks, are no error.
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        unlike = ~both & ~same  # finite in only one model
        a = np.where(both, a, 0.0)
        b = np.where(both, b, 0.0)
        self.energy += float(np.sum(b * b))
        self.product += float(np.sum(a * b))
        self.broken += int(unlike.sum())
        signal = float(np.sum(a * a))
        self._moments.add(a, both)
        if unlike.any():
            self.largest = float("inf")
            return signal, float("inf")
        error = a - b
        # initial: an output may be empty, as of a detector that finds nothing.
        self.largest = max(self.largest, float(np.abs(error).max(initial=0.0)))
        return signal, float(np.sum(np.square(error)))

    def result(self, name: str) -> OutputError:
        """Return the error over all samples.

        Args:
            name: name of the output.
        """
        if not self.floating:
            return OutputError(
                name,
                None,
                None,
                None,
                self.agreement,
                shapes=self.shapes,
            )
        cosine = float("nan")
        # After an infinite error the sums lack values, so that a cosine of them would be wrong.
        if np.isfinite(self.noise):
            cosine = cosine_similarity(self.product, self.signal, self.energy)
        return OutputError(
            name,
            decibels(self.signal, self.noise),
            cosine,
            self.largest,
            None,
            broken=self.broken,
            shapes=self.shapes,
            spread=self._spread(),
            varying=self._varying(),
        )

    def _varying(self) -> float | None:
        """Return the SQNR of the varying part in dB; None if the reference does not vary."""
        energy = self._moments.energy
        return None if energy is None else decibels(energy, self.noise)

    def _spread(self) -> tuple[float, float, float] | None:
        """Return least, median and greatest SQNR of a sample; None for fewer than two."""
        ratios = self._sqnr_of_samples
        if len(ratios) < 2:
            return None
        # The lower of two middle values: the mean of infinities is no number.
        return min(ratios), median_low(ratios), max(ratios)


class OutputTotals:
    """The errors of several outputs, accumulated sample by sample.

    Sums, and no outputs, are kept: memory does not grow with the number of samples.

    Args:
        names: names of the outputs, in the order of the results.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._totals = {name: Total() for name in names}

    def add(
        self,
        names: Iterable[str],
        expected: Mapping[str, Any],
        actual: Mapping[str, Any],
    ) -> None:
        """Add some outputs of the two models on a sample.

        Args:
            names: names of the outputs to add.
            expected: outputs of the reference by name.
            actual: outputs of the other model by name.
        """
        for name in names:
            self._totals[name].add(expected[name], actual[name])

    def agreement(self, name: str) -> float:
        """Return the share of equal values of an output; 1 for no values."""
        return self._totals[name].agreement

    def results(self) -> list[OutputError]:
        """Return the error of each output over the samples."""
        return [total.result(name) for name, total in self._totals.items()]


def cosine_similarity(product: float, signal: float, energy: float) -> float:
    """Return the cosine similarity of two tensors.

    Args:
        product: sum of the products of their values.
        signal: sum of the squares of the first tensor.
        energy: sum of the squares of the second tensor.

    >>> cosine_similarity(6.0, 4.0, 9.0), cosine_similarity(0.0, 0.0, 0.0)
    (1.0, 1.0)
    """
    norm = np.sqrt(signal * energy)
    if norm:
        return float(product / norm)
    # a tensor of zeros has no direction: equal to another one of zeros, and to nothing else
    return float(signal == energy)


def decibels(signal: float, noise: float) -> float:
    """Return a signal-to-noise ratio in dB.

    >>> decibels(100.0, 1.0)
    20.0
    """
    if noise == 0:
        return float("inf")
    # Noise on a signal of zeros: log10(0) would be a warning.
    if signal == 0 or not np.isfinite(noise):
        return float("-inf")
    return float(10 * np.log10(signal / noise))
