"""Fields: base of the configuration's dataclasses, which rejects unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, cast

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_known
from quark_onnx.config.spec import check_names

if TYPE_CHECKING:
    from typing_extensions import Self


class Fields:
    """Base of dataclasses with checked fields.

    An unknown field raises an error that names the nearest field, in the constructor and on
    assignment. Fields with a member of an enumeration also accept its name.
    """

    #: The enumerations, by field.
    ENUMS: ClassVar[Mapping[str, type[Enum]]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON, for ``from_dict``."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(cast(Any, self))}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Return the settings from the values of ``to_dict``.

        Raises:
            ConfigError: a field or a value is unknown, or a field is missing.
        """
        missing = [
            f.name
            for f in fields(cast(Any, cls))
            if f.default is MISSING
            and f.default_factory is MISSING
            and f.name not in entry
        ]
        if missing:
            raise ConfigError(f"{cls.__name__}: {missing[0]} is missing")
        return cls(**entry)

    def __new__(cls, *args: Any, **given: Any) -> Any:
        # In __new__, as the __init__ of a dataclass would raise a TypeError without the nearest
        # field.
        check_names(given, cls)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        check_names((name,), type(self))
        super().__setattr__(
            name,
            # Also for assignments after the constructor, which scripts use a lot.
            member(self.ENUMS[name], value, name) if name in self.ENUMS else value,
        )


def plain(value: Any) -> Any:
    """Return a value of JSON: names of enumeration members and classes, else the value."""
    if isinstance(value, Fields):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def member(kind: type[Enum], value: object, name: str) -> Any:
    """Return the member of an enumeration by name; None is returned unchanged.

    Raises:
        ConfigError: there is none.
    """
    if value is None or isinstance(value, kind):
        return value
    # A member of AMD Quark's own enumeration is another class with the same names.
    word = value.name if isinstance(value, Enum) else str(value)
    require_known(word, kind.__members__, f"{name} is")
    return kind[word]
