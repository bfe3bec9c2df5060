"""The contract of an optimizer: a frozen dataclass that is its own configuration."""

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
from quark_onnx.errors import ConfigError, data_errors
from quark_onnx.graph import Graph
from quark_onnx.kernels.noise import Rounding
from quark_onnx.optimizers.problem import Problem, Solution
from quark_onnx.registry import OPTIMIZERS

#: Calibration data that can be read several times; one sample is alive at a time.
Samples = Sequence[Mapping[str, Any]] | Spool


class Rewrites(int):
    """How many places were rewritten, with remarks for the report.

    >>> Rewrites(2, ["one was left alone"]) == 2
    True
    """

    notes: tuple[str, ...]

    def __new__(cls, count: int, notes: Iterable[str] = ()) -> Rewrites:
        self = super().__new__(cls, count)
        self.notes = tuple(notes)
        return self


class FloatOptimizer(Protocol):
    """Rewrites the float graph in place before it is planned, without changing what it computes,
    unless it says so.

    The caller verifies the claim by running the model before and after.

    Attributes:
        name: by which configurations call it.
        stage: "float".
        needs_data: whether it does nothing without samples.
        reads_data: whether it reads samples where there are some.
        exact: whether it claims that the model computes the same afterwards.
        judged: whether it is there for the accuracy alone, so that it is left out where it brings
            none.
    """

    name: ClassVar[str]
    stage: ClassVar[str]
    judged: ClassVar[bool]

    @property
    def needs_data(self) -> bool: ...

    @property
    def reads_data(self) -> bool: ...

    @property
    def exact(self) -> bool: ...

    def __call__(self, graph: Graph, samples: Samples, rounding: Rounding) -> int:
        """How many places were rewritten; ``Rewrites`` also says what was left alone, and why.

        Args:
            samples: calibration data, ``{input name: array}``; it may be read several times, and
                may be empty.
            rounding: how finely the configuration rounds what it says nothing special about.
        """
        ...


@runtime_checkable
class Adaptive(Protocol):
    """An optimizer of the float graph that has settings to be chosen by what they bring."""

    def variants(self, graph: Graph) -> list[tuple[Any, float]]:
        """Return optimizers to try instead, in their order, and what each costs.

        The caller takes the first that brings enough for its cost: by how much it is estimated to
        make the quantized model slower (0.2 for 20 %).
        """
        ...


class LayerOptimizer(Protocol):
    """Chooses the codes of a layer, and its bias, after scales are known.

    Layer by layer, in the order of the graph.

    The caller keeps what it proposes, output by output, where the loss on rows held out is less
    than before.

    Attributes:
        name: by which configurations call it.
        stage: "layer".
        reads_data: True.
        moves_bias: whether it wants every layer to have a bias that may change.
        reads_mean: whether it asks problems for the mean input of the float model.
    """

    name: ClassVar[str]
    stage: ClassVar[str]
    reads_data: ClassVar[bool]
    moves_bias: ClassVar[bool]

    @property
    def reads_mean(self) -> bool: ...

    def __call__(self, problem: Problem, present: Solution) -> Solution:
        """A proposal, starting from what was found so far."""
        ...


def watch(
    graph: Graph,
    tensors: Sequence[Observation],
    samples: Samples,
) -> list[Statistic]:
    """The statistics of tensors of a graph in one pass over the data.

    Raises:
        DataError: a sample that does not fit or cannot be run.
    """
    with data_errors():
        return collect(graph.to_model(), tensors, iter(samples))


def require_whole(optimizer: Any, *settings: str, least: int = 1) -> None:
    """Raise ConfigError unless these settings are whole numbers, of at least ``least``."""
    for setting in settings:
        value = getattr(optimizer, setting)
        if type(value) is not int or value < least:
            wanted = f"a whole number of at least {least}"
            raise ConfigError(
                f"{setting} of {optimizer.name} is {value!r}; it must be {wanted}",
            )


def require_number(
    optimizer: Any,
    *settings: str,
    least: float = -inf,
    most: float = inf,
) -> None:
    """Raise ConfigError unless these settings are numbers between two ends, and finite."""
    for setting in settings:
        value = getattr(optimizer, setting)
        if not is_number(value) or not isfinite(value) or not least <= value <= most:
            ends = [f" of at least {least:g}"] * (least > -inf) + [
                f" of at most {most:g}",
            ] * (most < inf)
            wanted = f"a number{' and'.join(ends)}"
            raise ConfigError(
                f"{setting} of {optimizer.name} is {value!r}; it must be {wanted}",
            )


def require_flag(optimizer: Any, *settings: str) -> None:
    """Raise ConfigError unless these settings are true or false."""
    for setting in settings:
        if not isinstance(getattr(optimizer, setting), bool):
            found = getattr(optimizer, setting)
            raise ConfigError(
                f"{setting} of {optimizer.name} is {found!r}; it must be true or false",
            )


C = TypeVar("C", bound=type[Any])


@overload
def register(cls: C) -> C: ...
@overload
def register(*, override: bool = False) -> Callable[[C], C]: ...
def register(cls: C | None = None, *, override: bool = False) -> Any:
    """Class decorator, with arguments or without: register an optimizer by its ``name``.

    Args:
        override: replace the optimizer that has this name.

    Raises:
        ConfigError: the name is taken.
    """

    def add(optimizer: C) -> C:
        OPTIMIZERS.add(optimizer.name, optimizer, override=override)
        return optimizer

    return add if cls is None else add(cls)
