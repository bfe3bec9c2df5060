"""Algorithms by name or by text: ``"gptq"``, or ``"gptq:damping=0.02"``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import ALGORITHMS
from quark_onnx.config.spec import check_names
from quark_onnx.config.text import parse_call

#: The order of stages: algorithms of the whole model, of blocks, of weights, and of the
#: quantized model.
STAGES = ("model", "block", "weights", "end")
#: Tasks of stages other than work on the float model, for errors.
_TASKS = {"weights": "chooses codes"}


def algorithm(text: str) -> Any:
    """Return the algorithm that a text describes.

    Raises:
        ConfigError: the name or a setting is unknown.

    >>> algorithm("clip:steps=10")
    Clip(steps=10, shrink=0.5)
    """
    name, settings = parse_call(text, "algorithm")
    cls = ALGORITHMS[name]
    check_names(settings, cls)
    return cls(**settings)


def in_order(algorithms: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return algorithms as objects, and check their order.

    Args:
        algorithms: texts or algorithm objects.

    Raises:
        ConfigError: an algorithm is unknown, or comes after an algorithm that must follow.

    >>> in_order(("clip",))
    (Clip(steps=20, shrink=0.5),)
    """
    found = tuple(map(_resolved, algorithms))
    _check_stages(found)
    # Codes are chosen once: a follower is added only if the user names no algorithm of weights.
    if at_stage(found, "weights"):
        return found
    followers = list[Any]()
    for each in found:
        # AWQ asks for its clipping search in this way.
        name = getattr(each, "follower", "")
        if name:
            followers.append(algorithm(name))
    # algorithms of the last stage come last, as checked above
    ends = at_stage(found, "end")
    return (*found[: len(found) - len(ends)], *followers, *ends)


def _resolved(given: Any) -> Any:
    """Return the algorithm of a text; another value is returned unchanged."""
    if isinstance(given, str):
        return algorithm(given)
    return given


def _is_algorithm(value: Any) -> bool:
    """Return whether a value has a stage, and is no class."""
    # A class has the stage of its instances: GPTQ where GPTQ() is meant.
    return getattr(value, "stage", None) in STAGES and not isinstance(value, type)


def _check_stages(algorithms: tuple[Any, ...]) -> None:
    """Raise ConfigError for a value that is no algorithm, and for a wrong order.

    Args:
        algorithms: the algorithms in the order that the user gives.
    """
    for each in algorithms:
        if not _is_algorithm(each):
            raise ConfigError(
                f"algorithms has {each!r}; it must be an algorithm, as GPTQ(), or its name",
            )
    # Neighbours in order of their stages are enough for the whole list.
    for one, other in pairwise(algorithms):
        if STAGES.index(one.stage) > STAGES.index(other.stage):
            task = _TASKS.get(other.stage, "works on the float model")
            raise ConfigError(f"{other.name} {task}; name it in front of {one.name}")


def at_stage(algorithms: Iterable[Any], *stages: str) -> list[Any]:
    """Return the algorithms of one of some stages."""
    return [algorithm for algorithm in algorithms if algorithm.stage in stages]
