"""The extension points of the package in one list: every registry, and what goes into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from threading import RLock
from typing import Any, Generic, TypeVar

from quark_onnx.errors import ConfigError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Named values of one kind.

    A name is registered once, and an unknown name is an error with the nearest match.

    Args:
        kind: the noun for error messages.
        home: a module whose import registers the built-in values. It is imported at the first
            look-up, as it may need an optional package.
    """

    def __init__(self, kind: str, home: str = "") -> None:
        self.kind = kind
        self._home = home
        self._lock = RLock()
        self._registered: dict[str, T] = {}
        self._elsewhere: dict[str, str] = {}

    @property
    def _values(self) -> dict[str, T]:
        """All values; imports ``home`` first."""
        # other threads wait until all values are registered; the import itself may look up values
        with self._lock:
            home, self._home = self._home, ""
            if home:
                try:
                    import_module(home)
                except ImportError:
                    self._home = home
                    raise
        return self._registered

    def add(self, name: str, value: T) -> T:
        if name in self._registered:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._registered[name] = value
        return value

    def decline(self, name: str, instead: str) -> None:
        """A name that users may look for here, and what they are told; in any case."""
        self._elsewhere[name.lower()] = instead

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator form of ``add``, for one or more names."""

        def decorate(value: T) -> T:
            for name in names:
                self.add(name, value)
            return value

        return decorate

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            instead = self._elsewhere.get(str(name).lower())
            raise ConfigError(
                f"unknown {self.kind}"
                f" {name!r}{f'; {instead}' if instead else nearest(name, self._values)}",
            )
        return self._values[name]

    def get(self, name: str) -> T | None:
        return self._values.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    @property
    def elsewhere(self) -> Mapping[str, str]:
        """What users are told who look for something that is elsewhere, by its name."""
        return self._elsewhere

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


#: Number formats: name -> DType.
DTYPES: Registry[Any] = Registry("number format")
#: Configurations by name: name -> QConfig.
PRESETS: Registry[Any] = Registry("preset")
#: What becomes of an operator's tensors: operator type -> rule(node, plan).
RULES: Registry[Any] = Registry("operator")
#: Rewrites of the float graph: name -> pass(graph) -> number of rewrites.
PASSES: Registry[Any] = Registry("pass")
#: What makes a quantized model better: name -> a frozen dataclass.
OPTIMIZERS: Registry[Any] = Registry("optimizer")
#: What chooses better codes for PyTorch models, or makes them easier to round: name -> a frozen
#: dataclass.
ALGORITHMS: Registry[Any] = Registry(
    "algorithm",
    "quark_onnx.torch.algorithms.registered",
)
#: What models are quantized for: name -> Target.
TARGETS: Registry[Any] = Registry("target")
#: What a model can be converted to: name -> Conversion.
CONVERSIONS: Registry[Any] = Registry("conversion")
#: Which configuration for which kind of model: name -> Recipe.
RECIPES: Registry[Any] = Registry("recipe")
