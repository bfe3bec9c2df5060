"""Smooth pictures, and a classifier that was trained on them in a scaling."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from quark_onnx.preprocessing.pixels import Scaling
from quark_onnx.running.run import Reference
from tests.models import parse, weight

Images = NDArray[Any]


def pictures(count: int, size: int = 24) -> list[Images]:
    """Smooth pictures in pixels, (1, 3, size, size), each with a black and a white corner."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size] / size
    found = []
    for _ in range(count):
        image = np.zeros((1, 3, size, size))
        for channel in range(3):
            a, b, c, d = generator.normal(size=4)
            wave = np.sin(4 * (a * x + b * y) + c) + d * x
            image[0, channel] = wave - wave.min()
            image[0, channel] *= 255 / image[0, channel].max()
        image[..., 0, 0], image[..., -1, -1] = 0, 255
        found.append(image)
    return found


def trained(scaling: Scaling) -> ModelProto:
    """A classifier whose BatchNormalization has the statistics of pictures in a scaling."""
    filters = weight(8, 3, 3, 3)
    first = parse("g (float[N, 3, H, W] x) => (float y) { y = Conv (x, w) }", w=filters)
    session = Reference(first).session
    outputs = [
        session.run(None, {"x": scaling.of_pixels(each).astype(np.float32)})[0]
        for each in pictures(40)
    ]
    values = np.concatenate(outputs)
    return parse(
        """g (float[N, 3, H, W] x) => (float y) {
            a = Conv (x, w)
            b = BatchNormalization (a, gamma, beta, mean, variance)
            c = Relu (b)
            d = GlobalAveragePool (c)
            e = Flatten (d)
            y = Gemm (e, v)
        }""",
        w=filters,
        gamma=np.ones(8, np.float32),
        beta=np.zeros(8, np.float32),
        mean=values.mean(axis=(0, 2, 3)),
        variance=values.var(axis=(0, 2, 3)),
        v=weight(8, 10),
    )
