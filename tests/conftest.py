"""Settings of the whole suite.

No test fails because the machine was slow for a moment. A second run, in another environment, can
leave out the tests that a first one has passed: ``--passed=FILE`` writes their names, and
``--without=FILE`` reads them (as one word: pytest takes a file of its own for one with tests).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import Context
from pathlib import Path

import pytest
from hypothesis import settings

from calibrators.onnx_runtime.isolation import always_isolated

settings.register_profile("steady", deadline=None)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", metavar="FILE", help="write the names of passed tests")
    parser.addoption("--without", metavar="FILE", help="leave these tests out")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Only the process that reports to the user has a file to write to.
    if _passed is None:
        return
    if report.when == "call" and report.passed:
        _calls.add(report.nodeid)
    if report.when == "teardown" and report.passed and report.nodeid in _calls:
        with _passed.open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


#: Tests whose call has passed.
_calls = set[str]()
_passed: Path | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _passed
    file = config.getoption("--passed")
    without = config.getoption("--without")
    if without is not None and not Path(without).is_file():
        raise pytest.UsageError(f"--without: there is no file {without}")
    if file is not None and file == without:
        raise pytest.UsageError("--passed would empty the file of --without")
    if file is not None and not hasattr(config, "workerinput"):
        _passed = Path(file)
        _passed.write_text("", encoding="utf-8")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    file = config.getoption("--without")
    if file is None:
        return
    known = set(Path(file).read_text(encoding="utf-8").splitlines())
    left_out = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="module")
def one_process() -> Iterator[Context]:
    """A context in which all commands of a file open their sessions in one process.

    Otherwise each command starts a process, which takes longer than what most tests do with it.
    """
    with always_isolated() as context:
        yield context
