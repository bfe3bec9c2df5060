"""The recipe of CONTRIBUTING for an LLM algorithm leads to one that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.recipes import copy, recipes, run


@pytest.mark.slow
def test_the_recipe_works(tmp_path: Path) -> None:
    copy(tmp_path)
    (recipe,) = [each for each in recipes() if each.optional]
    recipe.apply(tmp_path)
    run(tmp_path, [recipe])
