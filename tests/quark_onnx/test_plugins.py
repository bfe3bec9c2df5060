"""Plug-ins are found by their entry points, at the first look-up; one that fails is left out."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from calibrators import Extremes, Grid, Range
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import Registry
from tests.models import normal, parse, weight
from tests.plugins import install


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path, whose modules are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture(autouse=True)
def numbers() -> Registry[int]:
    """A registry with a built-in value, which the plug-ins of the tests import from here."""
    registry: Registry[int] = Registry("number", plugins="quark_onnx.numbers")
    registry.add("one", 1)
    sys.modules["registry_of_the_test"] = type(sys)("registry_of_the_test")
    sys.modules["registry_of_the_test"].NUMBERS = registry  # type: ignore[attr-defined]
    return registry


IMPORT = "from registry_of_the_test import NUMBERS"


def test_a_plugin_is_imported_at_the_first_look_up(
    site: Path, numbers: Registry[int]
) -> None:
    code = f"{IMPORT}; NUMBERS.add('two', NUMBERS['one'] + 1)"
    install(site, "numbers-more", {"numbers_more": code}, numbers="more = numbers_more")
    numbers.add("three", 3)
    assert "numbers_more" not in sys.modules
    assert numbers["two"] == 2 and list(numbers) == ["one", "three", "two"]


def test_a_plugin_that_fails_is_named_and_the_others_are_loaded(
    site: Path, numbers: Registry[int]
) -> None:
    bad = f"{IMPORT}; NUMBERS.add('half', 0); import a_missing_package"
    good = f"{IMPORT}; NUMBERS.add('two', 2)"
    install(site, "bad-numbers", {"numbers_bad": bad}, numbers="bad = numbers_bad")
    install(site, "more-numbers", {"numbers_good": good}, numbers="b = numbers_good")
    with pytest.warns(UserWarning) as caught:
        assert list(numbers) == ["one", "two"]
    [warning] = caught
    assert str(warning.message) == (
        "the plug-in bad-numbers could not be loaded and is left out (bad-numbers 1.0,"
        " entry point 'bad' of quark_onnx.numbers): ModuleNotFoundError: No module"
        " named 'a_missing_package'; update or uninstall bad-numbers"
    )
    assert len(numbers) == 2  # and without another warning


@pytest.mark.parametrize(
    ("code", "expected", "warned"),
    [
        ("NUMBERS.add('one', 11, override=True)", 11, []),
        ("NUMBERS.add('one', 11)", 1, ["number 'one' is registered twice"]),
    ],
)
def test_a_plugin_replaces_a_value_only_if_it_says_so(
    site: Path, numbers: Registry[int], code: str, expected: int, warned: list[str]
) -> None:
    install(site, "ones", {"ones": f"{IMPORT}; {code}"}, numbers="ones = ones")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert numbers["one"] == expected
    assert len(caught) == len(warned)
    assert all(part in str(w.message) for part, w in zip(warned, caught, strict=True))


def test_a_plugin_whose_module_is_missing(site: Path, numbers: Registry[int]) -> None:
    install(site, "hollow", {}, numbers="hollow = no_such_module_of_hollow")
    with pytest.warns(UserWarning, match="plug-in hollow could not be loaded"):
        assert numbers["one"] == 1


def test_an_unknown_name_lists_those_of_plugins(
    site: Path, numbers: Registry[int]
) -> None:
    install(
        site,
        "spare-numbers",
        {"numbers_spare": f"{IMPORT}; NUMBERS.add('seventeen', 17)"},
        numbers="spare = numbers_spare",
    )
    with pytest.raises(ConfigError, match="did you mean 'seventeen'"):
        numbers["sevente"]


CALIBRATOR = """
    from dataclasses import dataclass
    from calibrators import Grid, Range, register
    from calibrators.extremes import Extremes
    import quark_onnx  # which is being imported where this comes too early
    quark_onnx.QConfig

    @register("half_minmax")
    @dataclass(frozen=True)
    class HalfMinMax:
        def statistic(self) -> Extremes:
            return Extremes()

        def range(self, statistic: Extremes, grid: Grid) -> Range:
            return Range(statistic.lo / 2, statistic.hi / 2)
"""


@pytest.mark.parametrize("package", ["calibrators", "quark_onnx"])
def test_importing_a_package_imports_no_plugin(tmp_path: Path, package: str) -> None:
    install(
        tmp_path,
        "half",
        {"half_minmax": CALIBRATOR},
        calibrators="half = half_minmax",
        formats="half = half_minmax",
        presets="half = half_minmax",
        rules="half = half_minmax",
        optimizers="half = half_minmax",
    )
    code = f"""
import sys, {package}
assert "half_minmax" not in sys.modules
import calibrators
print(calibrators.create("half_minmax"))
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (finished.returncode, finished.stdout) == (0, "HalfMinMax()\n"), (
        finished.stderr
    )


def test_a_cell_stays_where_a_plugin_has_an_older_version(
    numbers: Registry[Any], site: Path
) -> None:
    names = {"registry": numbers, "__name__": "__main__"}
    exec("@registry.register('two')\nclass Two: pass", names)
    older = (
        f"{IMPORT}\nclass Two: pass\nNUMBERS.add('two', Two); NUMBERS.add('three', 3)"
    )
    install(site, "older", {"numbers_older": older}, numbers="a = numbers_older")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers["two"] is names["Two"]
    assert numbers["three"] == 3


@dataclass(frozen=True)
class Halved:
    """A calibrator with a mistake, as the author of a plug-in makes it."""

    def statistic(self) -> Extremes:
        return Extremes()

    def range(self, statistic: Extremes, grid: Grid) -> Range:
        return Range(statistic.low / 2, statistic.high / 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["activation", "weight"])
def test_a_mistake_of_a_calibrator_names_it_and_the_tensor(part: str) -> None:
    model = parse(
        "g (float[2, 4] x) => (float[2, 4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )
    preset = QConfig.of("A8W8")
    spec = getattr(preset, part).with_(calibrator=Halved())
    tensor = "x" if part == "activation" else "w"
    told = rf"tensor '{tensor}': .*test_plugins.Halved fails: AttributeError: .* 'low'"
    with pytest.raises(ConfigError, match=told):
        quantize(model, [{"x": normal(2, 4)}], preset.with_(**{part: spec}))
