"""The recipes of CONTRIBUTING lead to extensions that work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.recipes import copy, recipes, run


def test_every_recipe_has_code_a_registration_and_a_test() -> None:
    found = recipes()
    assert len(found) == 8
    for recipe in found:
        assert recipe.changes and recipe.commands, recipe.title
        tests = [path for path in recipe.files if path.startswith("tests/")]
        assert len(tests) == 1, recipe.title
        assert recipe.commands[0] == tests, recipe.title


@pytest.mark.slow
def test_the_recipes_work_together(tmp_path: Path) -> None:
    """Recipes that need no extra; each one is added to a tree that has the earlier ones."""
    copy(tmp_path)
    chosen = [recipe for recipe in recipes() if not recipe.optional]
    for recipe in chosen:
        recipe.apply(tmp_path)
    run(tmp_path, chosen)
