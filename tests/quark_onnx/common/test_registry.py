"""Registry: each name once, and an unknown one is an error with the nearest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES, PRESETS, RULES, Registry


def test_values_by_name() -> None:
    registry: Registry[int] = Registry("number")
    assert registry.register("one", "uno")(1) == 1
    assert (list(registry), len(registry), "uno" in registry, registry["one"]) == (
        ["one", "uno"],
        2,
        True,
        1,
    )
    assert registry.get("two") is None


def test_a_name_is_taken_once() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    with pytest.raises(
        ConfigError, match=r"number 'one' is registered twice.*override"
    ):
        registry.add("one", 2)
    assert registry["one"] == 1
    registry.add("one", 2, override=True)
    registry.register("one", "two", override=True)(3)
    assert list(registry.values()) == [3, 3]


def test_a_class_is_named_by_the_module_that_defines_it() -> None:
    registry: Registry[type] = Registry("kind")
    registry.add("int", int)
    with pytest.raises(ConfigError, match=r"by builtins\.int and pathlib\.Path"):
        registry.add("int", Path)


def test_a_cell_of_a_notebook_may_be_run_again() -> None:
    cell = """
@registry.register("mine")
class Mine:
    pass
"""
    registry: Registry[type] = Registry("kind")
    names = {"registry": registry, "__name__": "__main__"}
    exec(cell, names)
    first = registry["mine"]
    exec(cell, names)
    assert registry["mine"] is names["Mine"] is not first
    exec(cell.replace("Mine", "Other"), names)
    assert registry["mine"] is names["Other"], "the class was renamed in the cell"
    # In a module, the same name twice is a mistake.
    with pytest.raises(ConfigError, match=r"by __main__\.Other and plugin\.Mine"):
        exec(cell, {"registry": registry, "__name__": "plugin"})


def test_names_with_a_spelling_are_the_same_in_any_case() -> None:
    registry: Registry[int] = Registry("number", spelling=str.upper)
    registry.add("One", 1)
    assert (list(registry), registry["one"], registry.get("oNe")) == (["ONE"], 1, 1)
    assert "ONE" in registry and 1 not in registry
    with pytest.raises(ConfigError, match="registered twice"):
        registry.add("one", 1)


def test_a_name_that_is_looked_for_in_vain_says_where_it_is() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    registry.decline("Two", "take one twice")
    with pytest.raises(ConfigError, match="unknown number 'TWO'; take one twice"):
        registry["TWO"]
    assert "two" not in registry and dict(registry.elsewhere) == {
        "two": "take one twice"
    }


def test_an_unknown_name() -> None:
    for registry, word, near in (
        (DTYPES, "int9", "int8"),
        (PRESETS, "A8W9", "A8W8"),
        (RULES, "Convv", "Conv"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"unknown {registry.kind} '{word}'; did you mean '{near}'",
        ):
            registry[word]


def test_the_home_module_is_imported_once_and_other_threads_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry: Registry[int] = Registry("number", "numbers_of_a_plugin")
    imported: list[str] = []

    def slow_import(name: str) -> None:
        imported.append(name)
        sleep(0.05)
        registry.add("one", 1)

    monkeypatch.setattr("calibrators.registry.import_module", slow_import)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(registry.__getitem__, ["one"] * 4)) == [1] * 4
    assert imported == ["numbers_of_a_plugin"]


def test_a_home_that_cannot_be_imported_is_tried_again() -> None:
    registry: Registry[int] = Registry("number", "no_such_module")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            registry["one"]


def test_a_replacement_stays_where_the_home_is_imported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry: Registry[int] = Registry("number", "numbers_of_a_plugin")
    monkeypatch.setattr(
        "calibrators.registry.import_module", lambda name: registry.add("one", 1)
    )
    registry.add("one", 11, override=True)
    assert registry["one"] == 11
    with pytest.raises(ConfigError, match="registered twice"):
        registry.add("one", 1)
