"""The tutorials that need an extra run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endtoend.tutorials import EXTRAS, check


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRAS)
def test_tutorials_run(name: str, tmp_path: Path) -> None:
    for module in EXTRAS[name]:
        pytest.importorskip(module)
    check(name, tmp_path)
