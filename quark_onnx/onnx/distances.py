"""Distances between the outputs of two models, with AMD Quark's names.

Each distance is a mean over all samples and outputs. Less is better: signal-to-noise ratios are
negated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.config.checks import require
from quark_onnx.optimizers.mixed import Distance, Outputs

Floats = NDArray[np.float64]

#: Least value in logarithms and quotients, which would be undefined at 0.
_LEAST = 1e-10


def l2(expected: Floats, actual: Floats) -> float:
    """Return the Euclidean norm of the difference.

    Args:
        expected: values of the float model.
        actual: values of the quantized model.
    """
    return float(np.linalg.norm(expected - actual))


def kl(expected: Floats, actual: Floats) -> float:
    """Return the Kullback-Leibler divergence of values normalized to distributions.

    Values are shifted to a minimum of at least 0 and scaled to a sum of 1.

    Args:
        expected: values of the float model.
        actual: values of the quantized model.
    """
    # The constant inside the logarithm alone: p is 0 where the product has to vanish.
    p, q = _distribution(expected), _distribution(actual)
    return float(np.sum(p * np.log((p + _LEAST) / (q + _LEAST))))


def cosine(expected: Floats, actual: Floats) -> float:
    """Return 1 minus the cosine similarity; 0 if either side is zero.

    Args:
        expected: values of the float model.
        actual: values of the quantized model.
    """
    # The angle to a zero vector is undefined.
    norms = float(np.linalg.norm(expected)), float(np.linalg.norm(actual))
    if min(norms) < _LEAST:
        return 0.0
    return 1.0 - float(np.dot(expected, actual)) / (norms[0] * norms[1])


def sqnr(expected: Floats, actual: Floats) -> float:
    """Return the negative signal-to-noise ratio in dB.

    Args:
        expected: values of the float model.
        actual: values of the quantized model.
    """
    # An exact output, noise 0, has a finite ratio: 10 log10(signal / 1e-10).
    signal = float(np.mean(np.square(expected)))
    noise = float(np.mean(np.square(expected - actual)))
    return -10.0 * float(np.log10(max(signal, _LEAST) / max(noise, _LEAST)))


def psnr(expected: Floats, actual: Floats) -> float:
    """Return the negative ratio of the greatest magnitude to the noise in dB.

    Args:
        expected: values of the float model.
        actual: values of the quantized model.
    """
    # ``initial`` stands for the maximum of an empty output.
    peak = float(np.max(np.abs(expected), initial=0.0))
    noise = float(np.mean(np.square(expected - actual)))
    return 10.0 * float(np.log10(max(noise, _LEAST))) - 20.0 * float(
        np.log10(max(peak, _LEAST)),
    )


_KINDS: dict[str, Callable[[Floats, Floats], float]] = {
    "l2": l2,
    "kl": kl,
    "cosine": cosine,
    "sqnr": sqnr,
    "psnr": psnr,
}
#: Ratios in dB; scripts give the minimum as a positive or a negative number.
RATIOS = ("sqnr", "psnr")


def distance(name: str) -> Distance:
    """Return the distance with a name, as a function of two lists of outputs.

    Args:
        name: name of the distance.

    Raises:
        ConfigError: the name is unknown.

    >>> distance("l2")([[np.float32([3, 4])]], [[np.float32([0, 0])]])
    5.0
    """
    require(
        name in _KINDS,
        "metric_default",
        name,
        f"one of: {', '.join(_KINDS)}{nearest(name, _KINDS)}",
    )

    def mean(expected: Outputs, actual: Outputs) -> float:
        values = [_KINDS[name](*pair) for pair in _pairs(expected, actual)]
        # Samples without outputs do not differ.
        if not values:
            return 0.0
        return float(np.mean(values))

    return mean


def of_output(index: int, measure: Distance) -> Distance:
    """Return a distance between single outputs of each sample.

    Args:
        index: index of the output.
        measure: the distance, called with lists of this output alone.
    """

    def chosen(expected: Outputs, actual: Outputs) -> float:
        return measure(_only(index, expected), _only(index, actual))

    return chosen


def loss_of(evaluate: Callable[[Any], float]) -> Distance:
    """Return the loss of a score between the outputs of float and quantized model.

    Args:
        evaluate: function from outputs to a score, higher is better.
    """
    # Positive where the quantized model scores less.
    return lambda expected, actual: evaluate(expected) - evaluate(actual)


def _only(index: int, outputs: Outputs) -> list[list[Any]]:
    """Select an output of each sample.

    Raises:
        ConfigError: the model has fewer outputs.
    """
    # Each sample has the outputs of the model, in its order; negative indices count from the end.
    for sample in outputs:
        if not -len(sample) <= index < len(sample):
            raise ConfigError(
                f"metric_output_index is {index}; the model has {len(sample)} outputs",
            )
    return [[sample[index]] for sample in outputs]


def _pairs(expected: Outputs, actual: Outputs) -> Iterator[tuple[Floats, Floats]]:
    """Yield the values of outputs by sample, in both models."""
    for wanted, given in zip(expected, actual, strict=True):
        for reference, output in zip(wanted, given, strict=True):
            # float64, as sums of squares of float16 overflow at 65504.
            yield (
                np.asarray(reference, np.float64).ravel(),
                np.asarray(output, np.float64).ravel(),
            )


def _distribution(values: Floats) -> Floats:
    """Return values as a distribution; uniform if all values are zero."""
    shifted = values - min(float(values.min(initial=0.0)), 0.0)
    total = float(shifted.sum())
    if total > 0:
        return shifted / total
    return np.full(values.shape, 1.0 / max(values.size, 1))
