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
    objects = tuple(
        algorithm(given) if isinstance(given, str) else given for given in algorithms
    )
    _check_stages(objects)
    # Codes are chosen once: a follower is added only if the user names no algorithm of weights.
    if at_stage(objects, "weights"):
        return objects
    # AWQ asks for its clipping search in this way.
    names = [getattr(each, "follower", "") for each in objects]
    followers = [algorithm(name) for name in names if name]
    # algorithms of the last stage come last, as checked above
    ends = at_stage(objects, "end")
    return (*objects[: len(objects) - len(ends)], *followers, *ends)


def _check_stages(algorithms: tuple[Any, ...]) -> None:
    """Raise ConfigError for a value that is no algorithm, and for a wrong order."""
    for value in algorithms:
        # A class has the stage of its instances: GPTQ where GPTQ() is meant.
        if getattr(value, "stage", None) not in STAGES or isinstance(value, type):
            raise ConfigError(
                f"algorithms has {value!r}; it must be an algorithm, as GPTQ(), or its name",
            )
    # Neighbours in order of their stages are enough for the whole list.
    for earlier, later in pairwise(algorithms):
        if STAGES.index(earlier.stage) > STAGES.index(later.stage):
            task = _TASKS.get(later.stage, "works on the float model")
            raise ConfigError(
                f"{later.name} {task}; name it in front of {earlier.name}"
            )


def at_stage(algorithms: Iterable[Any], *stages: str) -> list[Any]:
    """Return the algorithms whose stage is given."""
    return [algorithm for algorithm in algorithms if algorithm.stage in stages]
