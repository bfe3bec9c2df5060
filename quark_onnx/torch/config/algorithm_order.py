"""Algorithms by name or by text: ``"gptq"``, or ``"gptq:damping=0.02"``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from quark_onnx.config.spec import check_names
from quark_onnx.config.text import parse_call
from quark_onnx.errors import ConfigError
from quark_onnx.registry import ALGORITHMS

#: The order of stages: algorithms of the whole model, of blocks, of weights, and of the
#: quantized model.
STAGES = ("model", "block", "weights", "end")


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
    found = tuple(
        algorithm(each) if isinstance(each, str) else each for each in algorithms
    )
    _check_stages(found)
    # Codes are chosen once: a follower is added only if the user names no algorithm of weights.
    if at_stage(found, "weights"):
        return found
    # AWQ asks for its clipping search in this way.
    followers = tuple(
        algorithm(each.follower) for each in found if getattr(each, "follower", "")
    )
    # algorithms of the last stage come last, as checked above
    ends = at_stage(found, "end")
    return (*found[: len(found) - len(ends)], *followers, *ends)


def _check_stages(algorithms: tuple[Any, ...]) -> None:
    """Raise ConfigError for a value that is no algorithm, and for a wrong order."""
    for each in algorithms:
        # A class has the stage of its instances: GPTQ where GPTQ() is meant.
        if getattr(each, "stage", None) not in STAGES or isinstance(each, type):
            raise ConfigError(
                f"algorithms has {each!r}; it must be an algorithm, as GPTQ(), or its name",
            )
    # Neighbours in order of their stages are enough for the whole list.
    for one, other in pairwise(algorithms):
        if STAGES.index(one.stage) > STAGES.index(other.stage):
            task = "works on the float model"
            if other.stage == "weights":
                task = "chooses codes"
            raise ConfigError(f"{other.name} {task}; name it in front of {one.name}")


def at_stage(algorithms: Iterable[Any], *stages: str) -> list[Any]:
    """Return the algorithms of one of some stages."""
    return [algorithm for algorithm in algorithms if algorithm.stage in stages]
