"""A small network, and what the quantizer makes of it."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize_static
from tests.models import Feeds, residual, samples


@pytest.fixture
def data() -> list[Feeds]:
    return samples(residual(), 6)


def quantized_as(preset: str) -> ModelProto:
    model = residual()
    return quantize_static(model, samples(model, 6), QConfig.of(preset).with_(search=0))


@pytest.fixture
def quantized() -> ModelProto:
    return quantized_as("A8W8")
