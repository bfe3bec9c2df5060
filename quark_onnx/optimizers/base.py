"""Define the contract of an optimizer: a frozen dataclass with its own settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite
from typing import (
    Any,
    ClassVar,
    Protocol,
    TypeVar,
    overload,
    runtime_checkable,
)

from calibrators import Statistic
from calibrators.base import is_number
from calibrators.onnx_runtime.control_flow import Observation
from calibrators.onnx_runtime.runner import collect
from calibrators.readers.spool import Spool
from quark_onnx.common.errors import data_errors
from quark_onnx.common.registry import OPTIMIZERS
from quark_onnx.config.checks import Requirement, require_all, require_flags, whole
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import Rounding
from quark_onnx.optimizers.problem import RoundingProblem, Solution

#: Calibration data for several passes; one sample is in memory at a time.
Samples = Sequence[Mapping[str, Any]] | Spool


class Rewrites(int):
    """Number of rewrites, with notes for the report.

    Attributes:
        notes: notes for the report.
        share_of_slowdown: share of the slowdown estimated by ``Adaptive.variants`` that the rewrite
            causes; less than 1 if it left out operators that bring little.

    >>> Rewrites(2, ["one was left alone"]) == 2
    True
    """

    notes: tuple[str, ...]
    share_of_slowdown: float

    def __new__(
        cls,
        count: int,
        notes: Iterable[str] = (),
        share_of_slowdown: float = 1.0,
    ) -> Rewrites:
        """Create a number with notes."""
        # int is immutable, so that the number is set in __new__, not in __init__.
        self = super().__new__(cls, count)
        self.notes = tuple(notes)
        self.share_of_slowdown = share_of_slowdown
        return self


class FloatOptimizer(Protocol):
    """Rewrites the float graph in place before planning, without changing its function.

    The caller verifies the function by running the model before and after, if it is ``exact``.

    Attributes:
        name: name in configurations.
        stage: "float".
        judged: serves accuracy alone, so that the caller drops it without a gain.
    """

    name: ClassVar[str]
    stage: ClassVar[str] = "float"
    judged: ClassVar[bool] = True

    @property
    def needs_data(self) -> bool:
        """Whether the optimizer does nothing without samples."""
        return False

    @property
    def reads_data(self) -> bool:
        """Whether the optimizer can use samples."""
        return self.needs_data

    @property
    def exact(self) -> bool:
        """Whether the optimizer claims an unchanged function."""
        return True

    def __call__(self, graph: Graph, samples: Samples, rounding: Rounding) -> int:
        """Rewrite a graph, and return the number of rewrites, as ``Rewrites`` with notes.

        Args:
            graph: the float graph, changed in place.
            samples: calibration data, ``{input name: array}``, for any number of passes; may be
                empty.
            rounding: the configuration's default rounding.
        """
        ...


@runtime_checkable
class Adaptive(Protocol):
    """An optimizer of the float graph with settings that are chosen by their effect."""

    def variants(self, graph: Graph, *, fused: bool = False) -> list[tuple[Any, float]]:
        """Return optimizers to try in place of ``self``, in order, each with its cost.

        The cost is the estimated slowdown of the quantized model (0.2 for 20 %). The caller takes
        the first variant whose gain in accuracy is worth the cost. Functions cost nothing after
        layers where they are ``fused``.
        """
        ...


class LayerOptimizer(Protocol):
    """Chooses the weight and the bias of a layer, after scales are known.

    Layers come in graph order. The caller accepts a proposal per output, where the loss on held-out
    rows is less than before.

    Attributes:
        name: name in configurations.
        stage: "layer".
        reads_data: True.
        moves_bias: needs every layer to have a variable bias.
        reads_mean: reads the mean input of the float model from problems.
    """

    name: ClassVar[str]
    stage: ClassVar[str] = "layer"
    reads_data: ClassVar[bool] = True
    moves_bias: ClassVar[bool] = False

    @property
    def reads_mean(self) -> bool:
        """Whether the optimizer reads the mean input of the float model."""
        return False

    def __call__(self, problem: RoundingProblem, present: Solution) -> Solution:
        """Return a proposal, starting from the present solution."""
        ...


def watch(
    graph: Graph, tensors: Sequence[Observation], samples: Samples
) -> list[Statistic]:
    """Return the statistics of tensors in a pass over the data.

    Raises:
        DataError: a sample does not fit or cannot be run.
    """
    with data_errors():
        # Samples may be read again by the next optimizer; an iterator belongs to this pass.
        return collect(graph.to_model(), tensors, iter(samples))


def require_whole(optimizer: Any, *settings: str, least: int = 1) -> None:
    """Raise ConfigError unless the settings are integers, at least ``least``."""
    wanted = f"a whole number of at least {least}"
    _require(optimizer, settings, whole(least), wanted)


def require_number(
    optimizer: Any,
    *settings: str,
    least: float = -inf,
    most: float = inf,
) -> None:
    """Raise ConfigError unless the settings are finite numbers between two ends."""
    ends = []
    if least > -inf:
        ends.append(f" of at least {least:g}")
    if most < inf:
        ends.append(f" of at most {most:g}")

    def holds(value: Any) -> bool:
        # NaN and infinity are numbers, but no settings.
        return is_number(value) and isfinite(value) and least <= value <= most

    _require(optimizer, settings, holds, f"a number{' and'.join(ends)}")


def require_flag(optimizer: Any, *settings: str) -> None:
    """Raise ConfigError unless the settings are booleans."""
    require_flags(optimizer, settings, f" of {optimizer.name}")


def _require(
    optimizer: Any,
    settings: Iterable[str],
    holds: Callable[[Any], bool],
    wanted: str,
) -> None:
    requirements = [Requirement(setting, holds, wanted) for setting in settings]
    require_all(optimizer, requirements, f" of {optimizer.name}")


C = TypeVar("C", bound=type[Any])


@overload
def register(cls: C) -> C: ...
@overload
def register(*, override: bool = False) -> Callable[[C], C]: ...
def register(cls: C | None = None, *, override: bool = False) -> Any:
    """Register an optimizer by its ``name``: a class decorator with or without arguments.

    Args:
        cls: the optimizer, if used without arguments.
        override: replace the optimizer of this name.

    Raises:
        ConfigError: the name is taken.
    """

    def add(optimizer: C) -> C:
        OPTIMIZERS.add(optimizer.name, optimizer, override=override)
        return optimizer

    # ``@register`` passes the class as the argument, ``@register(...)`` in a second call.
    return add if cls is None else add(cls)
