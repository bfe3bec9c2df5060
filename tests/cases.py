"""Many cases in one item, for tests whose cases cost less than pytest's own work on an item."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Test = Callable[..., None]


def loop_over(argument: str, cases: Mapping[str, Any]) -> Callable[[Test], Test]:
    """Run a test once for each case within one item.

    All cases are run. The first failure is raised, and a note names all failing cases.
    ``pytest.mark.parametrize`` makes an item of each case instead: prefer it where a case takes
    longer than some milliseconds, needs a fixture of its own, or skips.

    Args:
        argument: the parameter of the test that receives the case.
        cases: the values of the parameter by the names that a failure shows.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run_all(*arguments: Any, **named: Any) -> None:
            __tracebackhide__ = True
            failures: dict[str, Exception] = {}
            for name, value in cases.items():
                try:
                    test(*arguments, **named, **{argument: value})
                except Exception as error:
                    failures[name] = error
            if failures:
                first = next(iter(failures.values()))
                first.add_note(
                    f"{argument}: {len(failures)} of {len(cases)} cases fail, the"
                    f" traceback is of the first: {', '.join(failures)}"
                )
                raise first

        signature = inspect.signature(test)
        parameters = [
            parameter
            for name, parameter in signature.parameters.items()
            if name != argument
        ]
        run_all.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run_all

    return decorate
