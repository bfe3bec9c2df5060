"""Which test images a classifier has right, and how certain a difference is that was measured on some of them only.

A test set of 900 or 1,000 images sees a few images as tenths of a point, and which samples calibrate moves every model
by several more. Two tools are compared image by image, over one or several draws of the calibration samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _data import Task, labels, session_of

Array = np.ndarray[Any, np.dtype[Any]]
#: Points of top-1 that the rules of a target may cost.
COST = 0.3
#: By how many standard errors a mean is below at the level of 5 %, one-sided, by degrees of freedom (Student's t).
_CERTAIN = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83, 10: 1.81, 15: 1.75}
_CERTAIN |= {20: 1.72, 30: 1.70, 60: 1.67, 120: 1.66, 1000: 1.65}


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
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(bool)


@dataclass(frozen=True)
class Difference:
    """A mean difference in points of top-1.

    Attributes:
        mean: of all images and draws.
        error: its standard error.
        freedom: the degrees of freedom of the error.
    """

    mean: float
    error: float
    freedom: float

    def below(self, mark: float = 0.0) -> bool:
        """Whether it is below a mark at the level of 5 % (Student's test, one-sided)."""
        known = bisect_right(sorted(_CERTAIN), max(self.freedom, 1)) - 1
        return self.mean - mark < -list(_CERTAIN.values())[known] * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.error:.2f}"


def difference(first: Sequence[Array], second: Sequence[Array]) -> Difference:
    """The first model's top-1 less the second's; one array of booleans, by test image, for each draw.

    Images and draws are both samples of those that there could have been, so both are random effects of a two-way
    layout with one observation in each cell: the variance of the mean is (MS_draws + MS_images - MS_rest) / cells, its
    degrees of freedom Satterthwaite's. With a single draw only the images are seen.
    """
    cells = 100.0 * (np.stack(first).astype(np.float64) - np.stack(second))
    draws, images = cells.shape
    mean, by_draw, by_image = cells.mean(), cells.mean(axis=1), cells.mean(axis=0)
    of_images = draws * by_image.var(ddof=1)
    if draws == 1:
        return Difference(float(mean), float(of_images / images) ** 0.5, images - 1)
    of_draws = images * by_draw.var(ddof=1)
    rest = np.square(cells - by_draw[:, None] - by_image + mean).sum() / ((draws - 1) * (images - 1))
    whole = max(of_draws + of_images - rest, of_draws, of_images)  # no estimated component is below zero
    parts = ((of_draws, draws - 1), (of_images, images - 1), (rest, (draws - 1) * (images - 1)))
    against = sum(float(part) ** 2 / freedom for part, freedom in parts)
    freedom = float(whole) ** 2 / against if against else 1.0
    return Difference(float(mean), float(whole / cells.size) ** 0.5, freedom)
