"""Study: each candidate is tried once, until one is enough or the budget is over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import ceil, log2
from typing import NamedTuple

import pytest

from quark_onnx.study.study import Memory, Study, bisected


class Number(NamedTuple):
    """A candidate."""

    name: str
    key: int


ONE, TWO, THREE = (Number(f"number {key}", key) for key in (1, 2, 3))


def squared(tried: list[int]) -> Study[Number, int]:
    """A study that lists the candidates that it measures."""

    def measure(number: Number) -> int:
        tried.append(number.key)
        return number.key**2

    return Study(measure)


def test_candidates_are_tried_in_their_order_and_equal_ones_once() -> None:
    tried = list[int]()
    study = squared(tried)
    again = Number("another name", 2)
    assert list(study.run([THREE, TWO, again, ONE])) == [(THREE, 9), (TWO, 4), (ONE, 1)]
    assert list(study.run([TWO, THREE])) == []
    assert study.record_of(again) == 4
    assert study.record_of(Number("new", 5)) == 25
    assert tried == [3, 2, 1, 5]
    assert study.untried == [] and not study.is_reached()


def test_the_next_candidate_may_depend_on_the_records() -> None:
    study = squared([])

    def doubling() -> Iterator[Number]:
        number = ONE
        while number.key < 100:
            yield number
            number = Number("", study.finished()[-1][1] + 1)

    assert [record for _, record in study.run(doubling())] == [1, 4, 25, 676]


def test_a_record_that_is_enough_ends_it() -> None:
    study = Study[Number, int](lambda each: each.key, is_enough=lambda key: key > 1)
    assert [each for each, _ in study.run([ONE, TWO, THREE])] == [ONE, TWO]
    assert study.is_reached() and list(study.run([THREE])) == []


def test_what_does_not_fit_is_left_out_and_named() -> None:
    """The estimate may depend on what is finished."""

    def fits(number: Number, finished: list[tuple[Number, int]]) -> bool:
        return not finished or number.key <= finished[0][0].key

    study = Study[Number, int](lambda each: each.key, fits=fits)
    assert [each for each, _ in study.run([TWO, THREE, ONE])] == [TWO, ONE]
    assert study.untried == [THREE] and study.untried_names == ["number 3"]
    assert study.first_open([THREE, ONE]) is None


def test_a_candidate_whose_time_ran_out_is_named_and_has_no_record() -> None:
    study = Study[Number, int](lambda each: None if each is TWO else each.key)
    assert [each for each, _ in study.run([ONE, TWO, TWO, THREE])] == [ONE, THREE]
    assert study.untried_names == ["number 2 (ended: the budget was over)"]


def test_an_error_ends_it_and_the_candidate_is_tried_again() -> None:
    calls = list[int]()

    def measure(number: Number) -> int:
        calls.append(number.key)
        if calls == [1, 2]:
            raise KeyboardInterrupt
        return number.key

    records = Memory[Number, int]()
    study = Study(measure, records)
    with pytest.raises(KeyboardInterrupt):
        list(study.run([ONE, TWO, THREE]))
    assert study.finished() == [(ONE, 1)]
    assert list(study.run([ONE, TWO, THREE])) == [(TWO, 2), (THREE, 3)]


@pytest.mark.parametrize("high", [1, 2, 3, 7, 8, 20])
def test_bisection_finds_the_first_that_passes(high: int) -> None:
    for first in range(1, high + 1):
        asked = list[int]()

        def passes(number: int, first: int = first, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number >= first

        assert bisected(0, high, passes) == first
        assert len(asked) <= ceil(log2(high)) and len(set(asked)) == len(asked)


def test_a_warning_of_several_trials_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("quark_onnx.trials.scale_search")

    def measure(number: Number) -> int:
        logger.warning("the scales are not searched")
        logger.warning("number %s", number.key)
        logging.getLogger("another").warning("of another package")
        return number.key

    study = Study[Number, int](measure)
    assert len(list(study.run([ONE, TWO]))) == 2
    assert study.record_of(THREE) == 3
    messages = caplog.messages
    assert messages.count("the scales are not searched") == 1
    assert [text for text in messages if "number" in text] == [
        f"number {key}" for key in (1, 2, 3)
    ]
    assert messages.count("of another package") == 3
    logger.warning("the scales are not searched")
    assert caplog.messages.count("the scales are not searched") == 2
