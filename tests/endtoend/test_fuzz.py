"""Malformed models: whatever a file holds, the command line refuses it with a reason, or does its
work.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.endtoend.fuzz import COMMANDS, outcomes, sound
from tests.endtoend.mutations import MUTATIONS, mutant

COUNT, SEED = 350, 0


@pytest.mark.timeout(3600)  # a command that hangs has a limit of its own
@pytest.mark.parametrize("count", [35, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_no_mutant_does_harm(count: int) -> None:
    """No internal error, no dead process, no gigabyte, no run without end, and no file left behind.

    ``python -m tests.endtoend.fuzz --count 10000`` runs more.
    """
    found = list(outcomes(range(count), SEED))
    assert [outcome for outcome in found if outcome.failure] == []
    codes = Counter(outcome.code for outcome in found)
    assert codes[0] > count // 7 and codes[2] > count // 2, (
        "both sound and unsound models are among them"
    )
    assert {outcome.command for outcome in found} == COMMANDS.keys()


def test_mutants_are_those_of_the_seed_and_of_every_kind() -> None:
    seen = set[str]()
    for index in range(COUNT):
        model = sound(index)[1]
        data, mutations = mutant(model, index)
        assert (data, mutations) == mutant(model, index)
        seen |= set(mutations)
    assert {change.__name__ for change in MUTATIONS} <= seen
