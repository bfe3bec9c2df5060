"""Split calibration data: samples that measure ranges, and samples that are held out.

Ranges are measured without the held-out samples: on samples whose values are within the ranges, a
result has no clipping, and looks better than on new data.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

from calibrators.readers.spool import Spool

#: Number of first samples that are not held out: of ten, none can be spared.
_CALIBRATING = 10
#: Positions of the held-out samples among the first 64, and the stride of those after them: 16 of
#: 64, and a tenth of the rest. A small calibration set keeps most of its samples.
_EARLY = (_CALIBRATING, 20, 30, *range(38, 64, 2))
_EARLY_END, _EVERY_LATER = 64, 10
#: Least number of held-out samples, whatever their size, and number of samples for decisions.
_FEW = 4
#: Limit of the arrays of held-out samples in bytes: 16 images of 3 x 800 x 800 pixels.
_HELD_OUT_BYTES = 1 << 27
#: Calibration samples of the verdict, and the limit of their arrays in bytes.
_VERDICT_SAMPLES, _VERDICT_BYTES = 28, 1 << 26
#: Samples per held-out sample, and the most held-out samples, for a recurrent model. They are
#: consecutive.
_CONSECUTIVE_STRIDE, _CONSECUTIVE_AT_MOST = 5, 32


def consecutive_positions(length: int | None) -> range:
    """Return the positions of the consecutive held-out samples.

    The range is empty for too few samples.

    Args:
        length: number of samples; None if unknown.
    """
    if length is None:
        # From a stream of unknown length, as many samples as from 64.
        return range(_CALIBRATING, _CALIBRATING + len(_EARLY))
    count = max(
        min(_CONSECUTIVE_AT_MOST, length // _CONSECUTIVE_STRIDE), held_out_of(length)
    )
    start = min(_CALIBRATING, length // 2)
    if count > 1:
        return range(start, start + count)
    return range(0)


def is_held_out(position: int) -> bool:
    """Return whether a sample is held out from calibration.

    Only the position decides, so that a stream of unknown length is split like a list.

    >>> [position for position in range(44) if is_held_out(position)]
    [10, 20, 30, 38, 40, 42]
    """
    if position < _EARLY_END:
        return position in _EARLY
    return position % _EVERY_LATER == _EVERY_LATER // 2


def held_out_of(length: int) -> int:
    """Return how many samples of a data set are held out: 16 of 64, at least a tenth of more.

    >>> [held_out_of(length) for length in (10, 11, 32, 64, 100, 256, 1000)]
    [0, 1, 3, 16, 20, 36, 110]
    """
    return sum(map(is_held_out, range(length)))


def samples_for(held_out: int) -> int:
    """Return the least number of samples of which a given number is held out.

    >>> samples_for(1), samples_for(16)
    (11, 63)
    """
    positions = filter(is_held_out, count())
    return next(islice(positions, held_out - 1, None)) + 1


class _Reservoir:
    """A uniform random subset of a stream of unknown length, limited in bytes.

    Algorithm R (Vitter, "Random Sampling with a Reservoir", 1985), with a fixed seed.
    """

    def __init__(self, most: int, size: int) -> None:
        """Start without samples.

        Args:
            size: maximum total size of their arrays, in bytes.
        """
        self._most, self._size = most, size
        self._draws = random.Random(0)
        self._seen = 0
        self._kept: dict[int, Any] = {}
        self._bytes = 0

    @property
    def positions(self) -> list[int]:
        """The positions of the samples in the stream."""
        return sorted(self._kept)

    @property
    def samples(self) -> list[Any]:
        """The samples in the order of the stream."""
        return [self._kept[position] for position in self.positions]

    def add(self, sample: Any) -> None:
        """Keep the next sample of the stream, in place of another one if full, or drop it."""
        index = self._seen
        self._seen += 1
        if len(self._kept) >= self._most:
            # Sample number n replaces a kept one with probability most / n.
            drawn = self._draws.randrange(self._seen)
            if drawn >= self._most:
                return
            self._bytes -= _array_bytes(self._kept.pop(sorted(self._kept)[drawn]))
        self._kept[index] = sample
        self._bytes += _array_bytes(sample)
        self._bound()

    def shrink(self, most: int) -> None:
        """Keep at most ``most`` samples from now on."""
        self._most = min(self._most, most)
        self._bound()

    def _bound(self) -> None:
        """Drop the latest samples until number and bytes are within the limits."""
        while len(self._kept) > self._most:
            self._drop_last()
        while self._kept and self._bytes > self._size:
            self._drop_last()
            # As many samples of this size fit; one more would exceed the limit again.
            self._most = min(self._most, max(1, len(self._kept)))

    def _drop_last(self) -> None:
        """Drop the sample that was added last."""
        self._bytes -= _array_bytes(self._kept.popitem()[1])


def _array_bytes(sample: Any) -> int:
    """Return the total size of the arrays in a sample, in bytes."""
    values = sample.values() if isinstance(sample, Mapping) else ()
    return sum(getattr(value, "nbytes", 0) for value in values)


class HoldOut:
    """A filter that holds out calibration samples for measuring the result.

    Attributes:
        samples: the held-out samples.
        positions: their positions in the data.
        first: the first ``remember`` calibration samples.
        count: number of samples passed on to calibration.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        *,
        remember: int = 0,
        consecutive: range = range(0),
        verdict: bool = False,
        most: int | None = None,
    ) -> None:
        """Start without held-out samples.

        Args:
            samples: the calibration data.
            remember: number of first calibration samples to keep.
            consecutive: positions of consecutive samples to hold out, for recurrent models; if
                empty, single samples are held out.
            verdict: keep some calibration samples for the verdict, too, at most 64 MiB.
            most: maximum number of held-out samples, for a model that takes long to run; None for
                no limit. The limit of 128 MiB always holds. Four are held out in any case.
        """
        self._source = samples
        self._consecutive = consecutive
        self._remember = remember
        self._verdict = verdict and not consecutive
        self._most = most
        self._bytes = 0
        self._reservoir = _Reservoir(_VERDICT_SAMPLES + _FEW, _VERDICT_BYTES)
        self._outputs: dict[int, Mapping[str, Any]] = {}
        self._output_bytes = 0
        self.samples: list[Any] = []
        self.positions: list[int] = []
        self.first: list[Any] = []
        self.count = 0

    def calibrating_of(self, length: int | None) -> int | None:
        """Return about how many samples of a data set calibrate, before they are read.

        Samples beyond the limits of held-out ones calibrate, too.

        Args:
            length: the number of samples; None if unknown.
        """
        if length is None:
            return None
        if self._consecutive:
            return max(0, length - len(self._consecutive))
        held_out = held_out_of(length)
        if self._most is not None:
            held_out = min(held_out, max(_FEW, self._most))
        return length - held_out

    @property
    def deciding_samples(self) -> list[Any]:
        """Return the held-out samples that decisions between settings are made on.

        They are few, because each decision runs models on them: four from all of the data, or the
        consecutive ones of a recurrent model.
        """
        if self._consecutive:
            return self.samples[:_CONSECUTIVE_AT_MOST]
        stride = max(1, len(self.samples) // _FEW)
        return self.samples[::stride][:_FEW]

    @property
    def calibrated(self) -> list[Any]:
        """Return a few calibration samples for the verdict, drawn evenly."""
        return self._reservoir.samples

    @property
    def calibrated_positions(self) -> list[int]:
        """Return the positions of ``calibrated`` in the data."""
        positions = []
        for position in self._reservoir.positions:
            # Held-out samples, in ascending order, are not among those that are counted.
            for held_out in self.positions:
                position += held_out <= position
            positions.append(position)
        return positions

    def receive(self, position: int, outputs: Mapping[str, Any]) -> None:
        """Keep the float outputs on a calibration sample that the verdict needs.

        Args:
            position: position among the calibration samples.
            outputs: outputs of the calibrated graph.
        """
        positions = set(self._reservoir.positions)
        for dropped in self._outputs.keys() - positions:
            self._output_bytes -= _array_bytes(self._outputs.pop(dropped))
        size = _array_bytes(outputs)
        if (
            position in positions - self._outputs.keys()
            and self._output_bytes + size <= _VERDICT_BYTES
        ):
            self._outputs[position] = outputs
            self._output_bytes += size

    def computed(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """Yield the calibration samples of the verdict that have known outputs."""
        reservoir = self._reservoir
        for position, sample in zip(
            reservoir.positions, reservoir.samples, strict=True
        ):
            if position in self._outputs:
                yield sample, self._outputs[position]

    def __iter__(self) -> Iterator[Any]:
        for index, sample in enumerate(self._source):
            if self._consecutive:
                is_chosen = index in self._consecutive
            else:
                is_chosen = is_held_out(index)
            if is_chosen and self._has_room(sample):
                self.samples.append(sample)
                self.positions.append(index)
                self._bytes += _array_bytes(sample)
                # Held-out samples are better evidence, and come first.
                self._reservoir.shrink(
                    max(0, _VERDICT_SAMPLES + _FEW - len(self.samples))
                )
            else:
                if self._verdict:
                    self._reservoir.add(sample)
                if self.count < self._remember:
                    self.first.append(sample)
                self.count += 1
                yield sample

    def _has_room(self, sample: Any) -> bool:
        """Return whether another sample can be held out, within the limits."""
        if len(self.samples) < _FEW:
            return True
        if self._most is not None and len(self.samples) >= self._most:
            return False
        return self._bytes + _array_bytes(sample) <= _HELD_OUT_BYTES


def held_out_samples(
    samples: Spool, *, consecutive: bool = False, most: int | None = None
) -> list[Any]:
    """Return the samples that a run on these samples holds out, in their order.

    Args:
        samples: the samples of the run.
        consecutive: whether the run holds out consecutive samples, as for recurrent models.
        most: as for ``HoldOut``.
    """
    positions = consecutive_positions(len(samples)) if consecutive else range(0)
    hold_out = HoldOut(samples, consecutive=positions, most=most)
    for _ in hold_out:  # the calibration samples
        pass
    return hold_out.samples
