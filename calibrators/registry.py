"""Registries: named values of one kind, from three sources.

A name is registered by this project's own modules, by a user's script, or by a *plug-in*: a module
of another distribution that an entry point names. Plug-ins are imported at the first look-up of
their registry.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from functools import cache
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from calibrators.errors import CalibrationError, nearest
from calibrators.shown import short

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, SelectableGroups

T = TypeVar("T")

#: Warnings that were given already: plug-ins of one distribution often fail for the same reason.
_warned: set[str] = set()


class Registry(Generic[T]):
    """Named values of one kind.

    A name is registered once, unless ``override=True`` replaces its value. An unknown name is an
    error with the nearest match. With a ``spelling``, names are the same in any case.

    Args:
        kind: the noun for error messages.
        home: a module whose import registers the built-in values. It is imported at the first
            look-up, as it may need an optional package.
        plugins: the group of entry points whose modules register further values. They are imported
            at the first look-up, after ``home``.
        spelling: ``str.lower`` or ``str.upper``, which makes a registered name of what was written.
    """

    #: The exception that an unknown or a taken name raises.
    error: ClassVar[type[Exception]] = CalibrationError

    def __init__(
        self,
        kind: str,
        home: str = "",
        plugins: str = "",
        spelling: Callable[[str], str] = str,
    ) -> None:
        self.kind = kind
        self._spelling = spelling
        self._home = home
        self._plugins = plugins
        self._plugins_loaded = not plugins
        self._loading = self._loads_plugin = False
        self._lock = RLock()
        self._registered: dict[str, T] = {}
        self._replaced: set[str] = set()
        self._elsewhere: dict[str, str] = {}

    @property
    def contents(self) -> dict[str, T]:
        """The registered values; the first look-up imports ``home`` and the plug-ins."""
        # other threads wait until all values are registered; the imports may look up values, too
        with self._lock:
            if not self._loading:
                self._loading = True
                try:
                    self._load()
                finally:
                    self._loading = False
        return self._registered

    def _load(self) -> None:
        if self._home:
            import_module(self._home)
            # Only after a successful import: with a missing package every look-up reports the
            # reason.
            self._home = ""
        # Plug-ins import quark_onnx, and a look-up during the import of quark_onnx would be
        # circular.
        if not self._plugins_loaded and _plugins_can_be_imported():
            self._plugins_loaded = True
            for entry in _entry_points(self._plugins):
                self._load_plugin(entry)

    def _load_plugin(self, entry: EntryPoint) -> None:
        """Import a plug-in; a failure is a warning, and leaves the registry unchanged."""
        before = dict(self._registered)
        self._loads_plugin = True
        try:
            entry.load()
        except Exception as error:  # whatever the module of someone else raises
            self._registered = before
            warning = _failure(entry, error)
            if warning not in _warned:
                _warned.add(warning)
                warnings.warn(warning, stacklevel=2)
        finally:
            self._loads_plugin = False

    def add(self, name: str, value: T, *, override: bool = False) -> T:
        """Register a value, and return it.

        A class or function of ``__main__`` replaces another one from there, as a cell of a notebook
        may be run again. An older version in an installed plug-in does not replace it.

        Args:
            name: the name to register, in any case where the registry has a ``spelling``.
            value: the value of the name.
            override: replace the value that the name has. The replacement stays where ``home``,
                imported later, registers the built-in value.

        Raises:
            CalibrationError: the name is taken (``ConfigError`` in quark_onnx).
        """
        name = self._spelling(name)
        if override:
            self._replaced.add(name)
        elif name in self._registered and not _is_run_again(
            self._registered[name], value
        ):
            if self._loads_plugin and _is_of_main(self._registered[name]):
                return value
            # The user's replacement came before ``home``, whose value is the one to drop.
            if self._home and name in self._replaced:
                return value
            raise self.error(
                f"{self.kind} {name!r} is registered twice:"
                f" by {_origin(self._registered[name])} and {_origin(value)};"
                " choose another name, or replace the first with override=True",
            )
        self._registered[name] = value
        return value

    def register(self, *names: str, override: bool = False) -> Callable[[T], T]:
        """Return a decorator that calls ``add`` for every name.

        Args:
            *names: the names of the decorated function or class.
            override: replace the values that the names have.
        """

        def decorate(value: T) -> T:
            for name in names:
                self.add(name, value, override=override)
            return value

        return decorate

    def decline(self, name: str, instead: str) -> None:
        """Record a hint for a name, in any case, that users may look for and that is missing.

        Args:
            name: the name that users may know from another tool.
            instead: the hint, a clause of the error message.
        """
        self._elsewhere[name.lower()] = instead

    def __getitem__(self, name: str) -> T:
        values, key = self.contents, self._spelling(name)
        if key not in values:
            instead = self._elsewhere.get(str(name).lower())
            hint = f"; {instead}" if instead else nearest(key, values)
            raise self.error(f"unknown {self.kind} {short(name)}{hint}")
        return values[key]

    def get(self, name: str) -> T | None:
        """Return the value of a name, or None."""
        return self.contents.get(self._spelling(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._spelling(name) in self.contents

    @property
    def plugins(self) -> list[str]:
        """The installed distributions with plug-ins for the registry; nothing is imported."""
        entries = _entry_points(self._plugins) if self._plugins else []
        return sorted({_distribution(entry) for entry in entries})

    @property
    def elsewhere(self) -> Mapping[str, str]:
        """Hints for names that users may look for, by the name in lower case."""
        return self._elsewhere

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents)

    def __len__(self) -> int:
        return len(self.contents)

    def keys(self) -> KeysView[str]:
        """Return the registered names."""
        return self.contents.keys()

    def values(self) -> ValuesView[T]:
        """Return the registered values."""
        return self.contents.values()

    def items(self) -> ItemsView[str, T]:
        """Return the names with their values."""
        return self.contents.items()


def _entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, in an order that is the same everywhere."""
    entries = _installed(tuple(sys.path)).select(group=group)
    return sorted(entries, key=lambda entry: (_distribution(entry), entry.name))


@cache
def _installed(path: tuple[str, ...]) -> SelectableGroups:
    """Return all entry points of the folders of ``sys.path``.

    They are read once for all registries, as the reading takes 5 ms in an environment of 200.
    """
    # Imported here: importlib.metadata takes time, and not every registry takes plug-ins.
    from importlib.metadata import entry_points

    return entry_points()


def _distribution(entry: EntryPoint) -> str:
    """Return name and version of the distribution that an entry point belongs to."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _plugins_can_be_imported() -> bool:
    """Return whether the modules that plug-ins import are complete.

    While quark_onnx is being imported its modules are not. ``__all__`` is set after the imports.
    """
    package = sys.modules.get("quark_onnx")
    return package is None or hasattr(package, "__all__")


def _failure(entry: EntryPoint, error: Exception) -> str:
    package = entry.dist.name if entry.dist else entry.module
    return (
        f"the plug-in {package} could not be loaded and is left out"
        f" ({_distribution(entry)}, entry point {entry.name!r} of {entry.group}):"
        f" {type(error).__name__}: {error}; update or uninstall {package}"
    )


def _is_run_again(registered: object, value: object) -> bool:
    """Return whether two values are classes or functions of ``__main__``."""
    return _is_of_main(registered) and _is_of_main(value)


def _is_of_main(value: object) -> bool:
    """Return whether a value is a class or function of ``__main__``: a script, or a notebook."""
    module = getattr(value, "__module__", "")
    return module == "__main__" and hasattr(value, "__qualname__")


def _origin(value: object) -> str:
    """Return the place where a class or function is defined, or a value's type."""
    name = getattr(value, "__qualname__", None)
    return (
        f"{value.__module__}.{name}"
        if name
        else f"a value of type {type(value).__name__}"
    )
