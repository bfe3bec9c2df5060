"""Many cases in one item, for tests whose cases cost less than pytest's own work on an item."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Test = Callable[..., None]


def loop_over(
    arguments: str | tuple[str, ...], cases: Mapping[str, Any] | Iterable[Any]
) -> Callable[[Test], Test]:
    """Run a test once for each case within one item.

    All cases are run. The first failure is raised, and a note names all failing cases.
    ``pytest.mark.parametrize`` makes an item of each case instead: prefer it where a case takes
    longer than some milliseconds, needs a fixture of its own, or skips.

    Args:
        arguments: the parameter of the test that receives the case, or several that each receive
            one of its values.
        cases: the cases by the names that a failure shows, or cases that are their own names.
    """
    several = not isinstance(arguments, str)
    filled = arguments if several else (arguments,)
    named_cases = (
        list(cases.items())
        if isinstance(cases, Mapping)
        else [(textwrap.shorten(str(case), 80), case) for case in cases]
    )

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run_all(*fixtures: Any, **named: Any) -> None:
            __tracebackhide__ = True
            failures: list[tuple[str, BaseException]] = []
            for name, case in named_cases:
                values = case if several else (case,)
                try:
                    test(*fixtures, **named, **dict(zip(filled, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((name, error))
            if failures:
                names = ", ".join(name for name, _ in failures)
                _, first = failures[0]
                first.add_note(
                    f"{', '.join(filled)}: {len(failures)} of {len(named_cases)} cases fail, the"
                    f" traceback is of the first: {names}"
                )
                raise first

        signature = inspect.signature(test)
        parameters = [
            parameter
            for name, parameter in signature.parameters.items()
            if name not in filled
        ]
        run_all.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run_all

    return decorate
