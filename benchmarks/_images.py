"""Which test images a classifier has right, and how certain a difference is that was measured on
some of them only.

A test set of 900 or 1,000 images sees a few images as tenths of a point, and which samples
calibrate moves every model by several more. Two tools are compared image by image, over one or
several draws of the calibration samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _data import Task, labels, session_of

Array = np.ndarray[Any, np.dtype[Any]]
#: Points of top-1 that the rules of a target may cost.
COST = 0.3
#: How often chance alone may call something worse that is not.
LEVEL = 0.05
#: Points at which a density is summed, and degrees of freedom that are as good as any more.
_POINTS, _MANY = 2001, 1000.0


class Recorder:
    """A session that remembers the first output of every run."""

    def __init__(self, model: Path) -> None:
        self._session = session_of(model)
        self.found: list[Array] = []

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def run(self, names: Any, feeds: Any) -> Any:
        values = self._session.run(names, feeds)
        self.found.append(values[0].reshape(len(values[0]), -1))
        return values


def logits(task: Task, model: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What a model computes on each test image: images x classes."""
    recorder = Recorder(model)
    task.evaluate(recorder)
    return np.concatenate(recorder.found).astype(np.float64)


def right(name: str, task: Task, model: Path) -> Array:
    """For each test image whether the class is the right one."""
    return np.asarray(logits(task, model).argmax(axis=1) == labels(name))


def packed(flags: Array) -> str:
    """Booleans as text.

    >>> packed(np.array([True, False, True])), unpacked("a0", 3)
    ('a0', array([ True, False,  True]))
    """
    return np.packbits(flags).tobytes().hex()


def unpacked(text: str, count: int) -> Array:
    """What `packed` has written."""
    return np.unpackbits(
        np.frombuffer(bytes.fromhex(text), np.uint8), count=count
    ).astype(bool)


@dataclass(frozen=True)
class Difference:
    """A mean difference, in points of top-1 or another unit.

    Attributes:
        mean: of all images and draws.
        error: its standard error.
        freedom: the degrees of freedom of the error.
    """

    mean: float
    error: float
    freedom: float

    def chance(self, mark: float = 0.0) -> float:
        """How often what is not below a mark would be found so far below it (Student's test,
        one-sided).
        """
        short = mark - self.mean
        return (
            _tail(short / self.error, self.freedom) if self.error else float(short <= 0)
        )

    def below(self, mark: float = 0.0) -> bool:
        """Whether it is below a mark, and that is more than chance."""
        return self.chance(mark) < LEVEL

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.error:.2f}"


def difference(
    first: Sequence[Array], second: Sequence[Array], unit: float = 0.01
) -> Difference:
    """The first model's top-1 less the second's; one array of booleans, by test image, for each
    draw. Of other numbers, by what is tested, in another unit.

    Images and draws are both samples of those that there could have been, so both are random
    effects of a two-way layout with one observation in each cell: the variance of the mean is
    (MS_draws + MS_images - MS_rest) / cells, its degrees of freedom Satterthwaite's. With a single
    draw only the images are seen.
    """
    cells = (np.stack(first).astype(np.float64) - np.stack(second)) / unit
    draws, images = cells.shape
    mean, by_draw, by_image = cells.mean(), cells.mean(axis=1), cells.mean(axis=0)
    of_images = draws * by_image.var(ddof=1)
    if draws == 1:
        return Difference(float(mean), float(of_images / images) ** 0.5, images - 1)
    of_draws = images * by_draw.var(ddof=1)
    rest = np.square(cells - by_draw[:, None] - by_image + mean).sum() / (
        (draws - 1) * (images - 1)
    )
    whole = max(
        of_draws + of_images - rest, of_draws, of_images
    )  # no estimated component is below zero
    parts = (
        (of_draws, draws - 1),
        (of_images, images - 1),
        (rest, (draws - 1) * (images - 1)),
    )
    against = sum(float(part) ** 2 / freedom for part, freedom in parts)
    freedom = float(whole) ** 2 / against if against else 1.0
    return Difference(float(mean), float(whole / cells.size) ** 0.5, freedom)


def worse(found: Mapping[str, Difference], among: int = 0) -> list[str]:
    """Which of many differences are below zero, so that chance calls one of them so in 5 % of all
    cases; a test of each by itself would in 71 % of those with 24 (Holm 1979, "A Simple
    Sequentially Rejective Multiple Test Procedure").

    Args:
        found: differences by any names.
        among: of how many these were picked as those that look worst; at least as many as there
            are.

    >>> one, two = Difference(-0.5, 0.2, 1000), Difference(0.1, 0.2, 1000)
    >>> worse({"a": one}), worse({"a": one, **{str(i): two for i in range(20)}})
    (['a'], [])
    """
    chances = {name: each.chance() for name, each in found.items()}
    names, count = list[str](), max(among, len(chances))
    for rank, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        if chances[name] >= LEVEL / (count - rank):
            break
        names.append(name)
    return names


def together(parts: Sequence[Difference]) -> Difference:
    """The mean of differences that know nothing of each other."""
    squares = [(part.error / len(parts)) ** 2 for part in parts]
    against = sum(
        square**2 / part.freedom for square, part in zip(squares, parts, strict=True)
    )
    freedom = sum(squares) ** 2 / against if against else 1.0
    return Difference(
        float(np.mean([part.mean for part in parts])), sum(squares) ** 0.5, freedom
    )


def _tail(t: float, freedom: float) -> float:
    """How often a value of Student's distribution is greater than t; under t = sqrt(f) tan(a) its
    density is a power of cosine.

    >>> [round(_tail(t, freedom), 3) for t, freedom in ((6.314, 1), (2.132, 4), (1.725, 20), (0, 7), (-1.645, 1e9))]
    [0.05, 0.05, 0.05, 0.5, 0.95]
    """  # noqa: E501
    freedom = min(freedom, _MANY)
    whole, part = (
        np.trapezoid(np.cos(angles) ** (freedom - 1), angles)
        for angles in (
            np.linspace(start, np.pi / 2, _POINTS)
            for start in (-np.pi / 2, np.arctan(t / freedom**0.5))
        )
    )
    return float(part / whole)
