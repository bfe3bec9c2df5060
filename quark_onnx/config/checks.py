"""Check settings one by one, and the fields of a class by tables of requirements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, nearest


@dataclass(frozen=True)
class Requirement:
    """Requirement for a single setting.

    Attributes:
        name: the setting.
        holds: predicate of its value.
        wanted: valid values, for the message: "it must be ...".
    """

    name: str
    holds: Callable[[Any], bool]
    wanted: str


@dataclass(frozen=True)
class Contradiction:
    """A contradiction between settings.

    Attributes:
        holds: predicate of the settings; true where they exclude each other.
        message: text of the error; the settings are ``{settings}``, with their attributes.
    """

    holds: Callable[[Any], bool]
    message: str


def require(
    holds: bool,
    name: str,
    value: object,
    wanted: str,
    error: type[Exception] = ConfigError,
) -> None:
    """Check the value of a setting.

    Args:
        holds: the value is valid.
        name: the setting, as the user knows it.
        value: the value.
        wanted: valid values, for the message.
        error: class of the error.

    Raises:
        ConfigError: the value is not valid.

    >>> require(0 > 1, "trials", 0, "a number of candidates, 1 or more")
    Traceback (most recent call last):
    quark_onnx.common.errors.ConfigError: trials is 0; it must be a number of candidates, 1 or more
    """
    # The value is shortened and escaped: a setting may come from a file of the user.
    if not holds:
        raise error(f"{name} is {short(value)}; it must be {wanted}")


def require_one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ConfigError unless a value is among the given ones.

    Args:
        name: name of the setting, for the message.
        value: its value.
        choices: the accepted values, in the order of the message.
    """
    # An iterator would be exhausted by the check, before the message lists the choices.
    choices = list(choices)
    require(value in choices, name, value, f"one of: {', '.join(map(str, choices))}")


def require_known(
    name: object,
    known: Collection[Any],
    complaint: str,
    error: type[Exception] = ConfigError,
) -> None:
    """Check a name, and suggest the nearest known one.

    Args:
        name: the name that the user has given.
        known: the valid names.
        complaint: start of the message, in front of the name.
        error: class of the error.

    Raises:
        ConfigError: the name is not known.

    >>> require_known("entropi", ("minmax", "entropy"), "unknown calibrator")
    Traceback (most recent call last):
    quark_onnx.common.errors.ConfigError: unknown calibrator 'entropi'; did you mean 'entropy'?
    """
    if name not in known:
        raise error(f"{complaint} {short(name)}{nearest(str(name), known)}")


def refuse_first(
    contradictions: Iterable[tuple[object, str]], error: type[Exception] = ConfigError
) -> None:
    """Raise an error for the first contradiction that is present.

    Args:
        contradictions: pairs of a value, true if the contradiction is present, and a message.
        error: class of the error.
    """
    for present, message in contradictions:
        if present:
            raise error(message)


def require_all(
    settings: object, requirements: Iterable[Requirement], where: str = ""
) -> None:
    """Raise ConfigError for the first requirement that is not met.

    Args:
        settings: an object with the settings as attributes.
        requirements: the requirements.
        where: what the settings belong to, for messages.
    """
    for requirement in requirements:
        value = getattr(settings, requirement.name)
        require(
            requirement.holds(value),
            f"{requirement.name}{where}",
            value,
            requirement.wanted,
        )


def refuse(
    settings: object, contradictions: Iterable[Contradiction], where: str = ""
) -> None:
    """Raise ConfigError for the first contradiction among settings.

    Args:
        settings: an object with the settings as attributes.
        contradictions: the contradictions.
        where: start of the message.
    """
    for contradiction in contradictions:
        # Formatted only if needed: the checks run for every spec that is composed.
        if contradiction.holds(settings):
            message = contradiction.message.format(settings=settings)
            raise ConfigError(f"{where}{message}")


def require_choice(settings: object, name: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless a field has one of the given values.

    Args:
        settings: an object with the setting as attribute.
        name: name of the setting.
        choices: the accepted values, in the order of the message.
    """
    require_one_of(name, getattr(settings, name), choices)


def require_flags(settings: object, names: Iterable[str], where: str = "") -> None:
    """Raise ConfigError unless the fields of these names are booleans.

    Args:
        settings: an object with the settings as attributes.
        names: names of the settings.
        where: what the settings belong to, for messages.
    """
    for name in names:
        require_all(settings, [Requirement(name, is_flag, "true or false")], where)


def require_items(name: str, items: Iterable[object], kind: type) -> None:
    """Raise ConfigError unless all items of a list are of a class.

    Args:
        name: name of the setting, for the message.
        items: the items of the list.
        kind: the accepted class.
    """
    for item in items:
        if not isinstance(item, kind):
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise ConfigError(
                f"{name} holds {short(item)}, which is not {article} {kind.__name__}",
            )


def one_of(*choices: object) -> Callable[[object], bool]:
    """Return a predicate: the value is among the given ones.

    >>> one_of("qdq", "vendor")("qdq")
    True
    """
    # Compared by equality, so that 1 passes for True.
    return lambda value: value in choices


def instance_of(*kinds: type) -> Callable[[object], bool]:
    """Return a predicate: the value is of one of some classes."""
    return lambda value: isinstance(value, kinds)


def whole(least: int, greatest: float = float("inf")) -> Callable[[object], bool]:
    """Return a predicate: the value is an integer, not a boolean, between bounds.

    >>> whole(0, 4)(4), whole(0)(True)
    (True, False)
    """
    # The exact type excludes booleans, which YAML writes as yes, no, on and off.
    return lambda value: type(value) is int and least <= value <= greatest


def optional(holds: Callable[[Any], bool]) -> Callable[[object], bool]:
    """Return a predicate: the value is None, or meets another predicate.

    >>> optional(whole(1))(None)
    True
    """
    return lambda value: value is None or holds(value)


def is_flag(value: object) -> bool:
    """Return whether a value is a boolean."""
    # 0 and 1 are no flags, although they equal False and True.
    return isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, and not a boolean."""
    # True would be the axis 1.
    return type(value) is int
