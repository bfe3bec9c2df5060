"""Engines for tests, which the other process imports from here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from calibrators.onnx_runtime.worker import EngineLayer
from quark_onnx.engines import OnnxRuntime


class Half(OnnxRuntime):
    """onnxruntime with half of every output: an SQNR of 6.02 dB."""

    name: ClassVar[str] = "half"

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        outputs = super().run(names, feeds)
        return [output * output.dtype.type(0.5) for output in outputs]

    def layers(self) -> list[EngineLayer]:
        return [EngineLayer("Product", True), EngineLayer("Product", False)]


class Silent(Half):
    """An engine that does not say how it runs layers."""

    name: ClassVar[str] = "silent"

    def layers(self) -> list[EngineLayer]:
        return []


class Crashing(Half):
    """An engine with a native crash in its first run."""

    name: ClassVar[str] = "crashing"

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        os.abort()


class Missing(Half):
    """An engine whose package is not installed."""

    name: ClassVar[str] = "missing"
    package: ClassVar[str] = "a_package_that_nobody_has"
    install: ClassVar[str] = "pip install a_package_that_nobody_has"
