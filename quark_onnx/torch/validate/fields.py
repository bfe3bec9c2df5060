"""Values of a configuration, which may have any type, and findings where a field is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.rules import broken

#: Key of the configuration under which every client looks for the settings of the layout.
QUANTIZATION = "quantization_config"
NO_KEY = "there is no such key"
NO_KEY_OR_NULL = "there is no such key, or it is null"

#: Wanted values by field. A callable is a predicate of the value; any other value must be equal.
Conditions = Mapping[str, Any]


def object_of(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty object for any other value.

    >>> object_of({"bits": 4}), object_of(None)
    ({'bits': 4}, {})
    """
    return value if isinstance(value, dict) else {}


def objects_in(value: Any) -> dict[str, dict[str, Any]]:
    """Return the object-valued entries of a JSON object; empty for any other value.

    >>> objects_in({"group_0": {"format": None}, "group_1": "int4"})
    {'group_0': {'format': None}}
    """
    # entries of another type have findings of their own, and must not stop the other checks
    entries = object_of(value).items()
    return {key: entry for key, entry in entries if isinstance(entry, dict)}


def strings_of(value: Any) -> list[str]:
    """Return the strings of a JSON array; another value has none.

    >>> strings_of(["lm_head", 3]), strings_of("lm_head")
    (['lm_head'], [])
    """
    # a string is iterable, too, and must not be taken for a list of its letters
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, str)]


def one_of(*allowed: Any) -> Callable[[Any], bool]:
    """Return a predicate for the allowed values.

    >>> one_of(4, 8)(8)
    True
    """
    # a tuple needs no hash, so that a list or object where a name should be does not fail
    return lambda value: value in allowed


def is_true(value: object) -> bool:
    """Return whether a value is the JSON value true; vLLM compares with `is True`."""
    return value is True


def is_set(value: object) -> bool:
    """Return whether a field is there, and neither null, false, 0 nor empty."""
    # clients test such fields by their truth, as vLLM's `not weight_quant.get("is_dynamic")`
    return bool(value)


def is_unset(value: object) -> bool:
    """Return whether a field is missing, null, false, 0 or empty."""
    return not value


def is_given(value: object) -> bool:
    """Return whether a field is there, and not null."""
    return value is not None


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; true is not, though bool is a subclass of int."""
    return type(value) is int


def is_positive(value: object) -> TypeGuard[int]:
    """Return whether a value is a positive integer; true is not.

    >>> is_positive(128), is_positive(True), is_positive(-1)
    (True, False, False)
    """
    return type(value) is int and value > 0


def is_object(value: object) -> bool:
    """Return whether a value is a JSON object."""
    return isinstance(value, dict)


def is_names(value: object) -> bool:
    """Return whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def shown(value: object) -> str:
    """Return a value as text of at most 80 characters."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def fits(value: object, wanted: object) -> bool:
    """Return whether a value meets a predicate, or equals the wanted value."""
    return bool(wanted(value) if callable(wanted) else value == wanted)


def meets(entries: Mapping[str, Any], conditions: Conditions) -> bool:
    """Return whether the fields of an object meet all conditions.

    >>> meets({"dtype": "int8"}, {"dtype": one_of("int8", "uint8"), "is_dynamic": is_unset})
    True
    """
    # a missing field is tested as None, as clients read it by ``get``
    return all(fits(entries.get(key), wanted) for key, wanted in conditions.items())


@dataclass(frozen=True)
class FieldCheck:
    """Requirement for a field of a configuration.

    Attributes:
        rule: name of the rule that a wrong value breaks.
        key: the field.
        wanted: the allowed value, or a predicate of the value.
        found: text of the finding; the other fields can be named in braces.
        absent: text of the finding for a missing field or null; by default that of other values.
        severity: severity of the finding; by default that of the rule.
    """

    rule: str
    key: str
    wanted: Any
    found: str = ""
    absent: str = ""
    severity: str = ""

    def text(self, entries: Mapping[str, Any]) -> str:
        """Return the text of a finding for the fields of an object."""
        value = entries.get(self.key)
        if value is None and self.absent:
            return self.absent
        # the format names other fields, for example "{observer_cls!r}, with {qscheme}"
        return self.found.format(**entries) if self.found else shown(value)


def field_findings(
    entries: Mapping[str, Any], place: str, *checks: FieldCheck, separator: str = "."
) -> Iterator[Finding]:
    """Yield a finding for every field that does not meet its check.

    Args:
        entries: the object with the fields.
        place: the object's place.
        checks: requirements for the fields.
        separator: text between the place of the object and the name of a field.
    """
    for check in checks:
        if not fits(entries.get(check.key), check.wanted):
            where = f"{place}{separator}{check.key}"
            yield broken(check.rule, where, check.text(entries), check.severity)


def missing_key_findings(
    entries: Mapping[str, Any], place: str, rule: str, *keys: str
) -> Iterator[Finding]:
    """Yield a finding for every key that an object lacks."""
    for key in keys:
        if key not in entries:
            yield broken(rule, f"{place}.{key}", NO_KEY)


def name_list_findings(entries: Mapping[str, Any], key: str) -> Iterator[Finding]:
    """Yield an entry of the quantization_config that is neither null nor a list of names."""
    names = entries.get(key)
    if names is not None and not is_names(names):
        text = f"{names!r}, and not a list of names"
        yield broken("malformed", f"{QUANTIZATION}.{key}", text)
