"""The engine that quantized models are judged and timed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onnx import ModelProto, load

from calibrators.errors import CalibrationError
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.providers import (
    current_provider,
    short_name,
)
from calibrators.onnx_runtime.providers import (
    provider as on_provider,
)
from calibrators.onnx_runtime.session import open_in_engine, open_session
from calibrators.onnx_runtime.worker import EngineLayer
from quark_onnx.common.errors import ConfigError, MissingDependency
from quark_onnx.common.registry import ENGINES
from quark_onnx.common.wording import tally
from quark_onnx.engines.base import Engine
from quark_onnx.engines.onnx_runtime import OnnxRuntime

_current: ContextVar[Selected | None] = ContextVar("engine", default=None)


@dataclass(frozen=True)
class Selected:
    """An engine that was selected.

    Attributes:
        engine: the class of its open models.
        provider: provider of onnxruntime, by its full name; empty for the engine's own choice.
    """

    engine: type[Engine]
    provider: str = ""

    @property
    def title(self) -> str:
        """Return name, version and provider for people, such as "openvino 2026.4.1"."""
        title = f"{self.engine.name} {_version(self.engine.package)}".strip()
        return f"{title}, {short_name(self.provider)}" if self.provider else title

    def open(
        self,
        model: ModelProto | Path,
        *,
        threads: int = 0,
        what: str = "a model",
    ) -> Any:
        """Open a model; the session has a further method ``layers``.

        Args:
            model: the model, or its file.
            threads: threads inside an operator; 0 lets the engine choose.
            what: names the model in the error of a crash.

        Raises:
            RuntimeCrash: the engine's process died while loading the model.
        """
        place = f"{self.engine.__module__}:{self.engine.__qualname__}"
        return open_in_engine(model, place, threads=threads, what=what)


def selected() -> Selected | None:
    """Return the engine of this context; None for onnxruntime without saturating sums."""
    return _current.get()


def open_quantized(model: ModelProto, what: str) -> Any:
    """Open a quantized model in the selected engine; without one, in onnxruntime.

    Args:
        model: the model.
        what: names the model in the error of a crash.
    """
    engine = selected()
    if engine is None:
        return open_session(model, what=what)
    return engine.open(model, what=what)


def engine_title() -> str:
    """Return the engine and provider that models are timed on; empty for onnxruntime's CPU."""
    engine = selected()
    if engine is not None:
        return engine.title
    provider = current_provider()
    return f"onnxruntime, {short_name(provider)}" if provider else ""


@contextmanager
def on_engine(name: str = "", provider: str = "") -> Iterator[None]:
    """Judge and time quantized models on an engine, in every function that the block calls.

    The float model, which they are compared with, runs in onnxruntime; for their latency both run
    in the engine. The engine runs in a process of its own.

    Args:
        name: name of an engine, such as ``openvino``; empty for none.
        provider: provider of onnxruntime for all of its sessions, calibration included, such as
            ``CUDA``; empty for the CPU.

    Raises:
        ConfigError: the engine is unknown, or the provider is not installed.
        MissingDependency: the package of the engine is not installed.

    >>> with on_engine("onnxruntime", provider="CPU"):
    ...     selected().engine.name
    'onnxruntime'
    """
    engine = ENGINES[name] if name else None
    if engine is not None and provider and not issubclass(engine, OnnxRuntime):
        raise ConfigError(
            f"provider {provider} is one of onnxruntime, and the engine is"
            f" {engine.name}: give one of the two"
        )
    if engine is not None and find_spec(engine.package) is None:
        raise MissingDependency(
            f"the engine {engine.name} needs {engine.package}, which is not installed:"
            f" {engine.install}"
        )
    with ExitStack() as stack:
        try:
            stack.enter_context(on_provider(provider))
        except CalibrationError as error:
            raise ConfigError(str(error)) from error
        if engine is not None:
            stack.enter_context(isolated())
            token = _current.set(Selected(engine, current_provider()))
            stack.callback(_current.reset, token)
        yield


@dataclass(frozen=True)
class EngineRun:
    """How an engine runs a quantized model.

    Attributes:
        engine: name, version and provider of the engine.
        layers: number of convolutions, matrix products and recurrent layers; 0 if the engine does
            not say how it runs them.
        integer_layers: number of these that run on integers.
        float_layers: number of the others, by the engine's name of the operator.
        remarks: what the engine is known to run slowly or wrongly in the model, with remedies.
    """

    engine: str
    layers: int
    integer_layers: int
    float_layers: dict[str, int]
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, session: Any, model: ModelProto | Path) -> EngineRun | None:
        """Return how the selected engine runs a quantized model; None without an engine.

        Args:
            session: the model, open in the engine.
            model: the model, or its file.
        """
        engine = selected()
        if engine is None:
            return None
        if isinstance(model, Path):
            model = load(model, load_external_data=False)
        remarks = tuple(engine.engine.remarks(model))
        layers: Sequence[EngineLayer] = session.layers()
        others = Counter(layer.operator for layer in layers if not layer.integer)
        integers = len(layers) - others.total()
        in_float = dict(others.most_common())
        return cls(engine.title, len(layers), integers, in_float, remarks)

    @property
    def counts(self) -> str:
        """Return how many layers run on integers, with the operators of the others.

        >>> EngineRun("onnxruntime", 3, 2, {"MatMul": 1}).counts
        '2 of 3, in float 1 MatMul'
        """
        if not self.layers:
            return "not known: the engine does not say"
        counts = f"{self.integer_layers} of {self.layers}"
        if not self.float_layers:
            return counts
        return f"{counts}, in float {tally(self.float_layers.items())}"


def _version(package: str) -> str:
    """Return the version of a distribution of this name; empty if there is none.

    Builds of onnxruntime have other names.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
