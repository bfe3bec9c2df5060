"""search: what is tried, in which order, when it ends, and how it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import CLE, QConfig, SearchResult, Space, compare, quantize, search
from quark_onnx.analysis import Search
from quark_onnx.config import to_dict
from quark_onnx.errors import ConfigError, DataError, ModelError
from tests.models import parse, residual, samples

MODULE = sys.modules["quark_onnx.analysis.search"]
SMALL = {
    "presets": ["A8W8", "XINT8"],
    "calibrators": ["minmax"],
    "optimizers": ["cle", "cle+bias_correction"],
}
ORDER = [
    "A8W8",
    "XINT8",
    "A8W8 minmax",
    "XINT8 minmax",
    "A8W8 cle",
    "XINT8 cle",
    "A8W8 cle+bias_correction",
    "XINT8 cle+bias_correction",
]


def pixels(count: int = 12) -> list[dict[str, Any]]:
    return samples(residual(), count)


class Workshop:
    """A clock that only quantizing moves on, by what the optimizers of the configuration cost."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, list[QConfig]()
        self.costs = dict[str, float]()
        self.data: Any = None

    def quantize(self, model: Any, data: Any, config: QConfig, *rest: Any) -> Any:
        self.data = list(data)
        self.done.append(config)
        self.now += 10.0 + sum(
            self.costs.get(optimizer.name, 0.0) for optimizer in config.optimizers
        )
        return quantize(model, data, config, *rest)


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop()
    monkeypatch.setattr(MODULE, "perf_counter", lambda: made.now)
    monkeypatch.setattr(MODULE, "quantize", made.quantize)
    return made


def names(found: SearchResult) -> set[str]:
    return {candidate.name for candidate in found.candidates}


def rows(found: SearchResult) -> list[Any]:
    return [
        (each.name, each.score, each.seconds, each.bytes, each.error)
        for each in found.candidates
    ]


def count_of_nodes(model: ModelProto) -> float:
    return len(model.graph.node)


def test_scores_are_those_of_samples_that_nothing_was_calibrated_on(
    workshop: Workshop,
) -> None:
    data = pixels()
    found = search(residual(), data, space=SMALL)
    judges = [data[1], data[5], data[9]]
    assert (found.calibrated, found.judged) == (9, 3)
    assert len(workshop.data) == 9
    assert not any(
        np.array_equal(used["x"], held["x"])
        for used in workshop.data
        for held in judges
    )
    best = found.best
    model = quantize(
        residual(), [s for i, s in enumerate(data) if i % 4 != 1], best.config
    ).model
    assert best.score == compare(residual(), model, judges).sqnr
    assert best.bytes == model.ByteSize()


def test_the_table_is_sorted_and_has_a_front() -> None:
    found = search(residual(), pixels(), space=SMALL)
    scores = [candidate.score for candidate in found.candidates]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert found.best is found.candidates[0] is found.front[0]
    for candidate in found.candidates:
        beaten = any(
            other.score >= candidate.score  # type: ignore[operator]
            and other.bytes <= candidate.bytes  # type: ignore[operator]
            and (other.score, other.bytes) != (candidate.score, candidate.bytes)
            for other in found.candidates
        )
        twin = any(
            (o.score, o.bytes) == (candidate.score, candidate.bytes)
            for o in found.front
        )
        assert twin is not beaten
    document = found.to_dict()
    assert [row["pareto"] for row in document["candidates"]] == [
        each in found.front for each in found.candidates
    ]
    assert json.loads(json.dumps(document)) == document


def test_the_order_is_cheap_first_and_the_same_each_time(workshop: Workshop) -> None:
    first = search(residual(), pixels(), space=SMALL)
    order, workshop.done = workshop.done, []
    again = search(residual(), pixels(), space=SMALL)
    assert workshop.done == order
    assert [replace(each, seconds=0.0) for each in first.candidates] == [
        replace(each, seconds=0.0) for each in again.candidates
    ]
    assert order[:2] == [QConfig.of("A8W8"), QConfig.of("XINT8")]
    cost = [len(config.optimizers) for config in order]
    assert cost == sorted(cost) and len(order) == 8


def test_only_the_best_presets_are_refined() -> None:
    found = search(residual(), pixels(), space={**SMALL, "refine": 1})
    assert len(found.candidates) == 5
    found = search(
        residual(),
        pixels(),
        space=Space(presets=["XINT8", "A16W8"], optimizers="cle", refine=0),
    )
    assert names(found) == {"XINT8", "A16W8"}


def test_optimizers_go_on_top_of_the_best_calibrator() -> None:
    space = Space(
        "XINT8",
        ["minmse", "entropy", "nonoverflow"],
        optimizers=[CLE(sweeps=2, activations=False)],
    )
    found = search(residual(), pixels(), space=space)
    plain = [each for each in found.candidates if not each.config.optimizers]
    (optimized,) = [each for each in found.candidates if each.config.optimizers]
    assert len(plain) == 3  # minmse is that of the preset
    assert optimized.config == plain[0].config.with_(
        optimizers=(CLE(sweeps=2, activations=False),)
    )
    assert optimized.name == f"{plain[0].name} cle:sweeps=2,activations=False"


def test_granularities_and_configs_of_ones_own() -> None:
    mine = QConfig.of("S8S8").with_(bias=False)
    space = Space([mine, "INT4"], [], [True, False], [])
    assert names(search(residual(), pixels(), space=space)) == {
        "config1",
        "config1 per_tensor",
        "INT4",
    }


# The end


def test_the_target_ends_it(workshop: Workshop) -> None:
    everything = search(residual(), pixels(), space=SMALL)
    scores = {each.name: each.score for each in everything.candidates}
    found = search(residual(), pixels(), space=SMALL, target=scores["A8W8"])
    assert (names(found), found.reached) == ({"A8W8"}, True)
    found = search(residual(), pixels(), space=SMALL, target=1e3)
    assert (len(found.candidates), found.reached, found.left) == (8, False, 0)


def test_a_candidate_that_has_begun_is_finished_and_the_next_is_not_begun(
    workshop: Workshop,
) -> None:
    found = search(residual(), pixels(), space=SMALL, budget=35.0)
    assert (
        len(found.candidates) == 3 and workshop.now == 30.0
    )  # a fourth of 10 s would end at 40
    assert found.left == 5 and found.reached
    workshop.now = 0.0
    assert names(search(residual(), pixels(), space=SMALL, budget=0.001)) == {
        "A8W8"
    }  # the first is always tried


def test_what_is_slow_is_left_out_and_what_is_fast_is_not(workshop: Workshop) -> None:
    """bias_correction took 500 s on the one preset, so it is not begun on the other; cle is."""
    workshop.costs["bias_correction"] = 500.0
    space = {**SMALL, "optimizers": ["bias_correction", "cle"]}
    found = search(residual(), pixels(), space=space, budget=600.0)
    assert found.left == 1
    assert sum("bias_correction" in name for name in names(found)) == 1
    assert sum(name.endswith(" cle") for name in names(found)) == 2


def test_reading_the_data_counts(workshop: Workshop) -> None:
    def slow() -> Iterator[dict[str, Any]]:
        for sample in pixels():
            workshop.now += 5.0
            yield sample

    assert len(search(residual(), slow(), space=SMALL, budget=75.0).candidates) == 1


# Data and metrics


def test_a_generator_is_read_once() -> None:
    read = []

    def stream() -> Iterator[dict[str, Any]]:
        for sample in pixels():
            read.append(1)
            yield sample

    one, other = (
        search(residual(), data, space=SMALL) for data in (stream(), pixels())
    )
    assert [(each.name, each.score) for each in one.candidates] == [
        (each.name, each.score) for each in other.candidates
    ]
    assert len(read) == 12


def test_a_metric_decides_and_nothing_is_held_out(workshop: Workshop) -> None:
    found = search(
        residual(), pixels(), space=SMALL, metric=count_of_nodes, target=10_000
    )
    assert (found.calibrated, found.judged, found.reached) == (12, 0, False)
    for each in found.candidates:
        assert each.score == count_of_nodes(
            quantize(residual(), pixels(), each.config).model
        )


def test_a_metric_that_is_no_number() -> None:
    with pytest.raises(
        ConfigError, match="the metric returned 'good'; it must be a number"
    ):
        search(residual(), pixels(), metric=lambda model: "good")  # type: ignore[arg-type, return-value]
    with pytest.raises(
        ConfigError, match=r"the metric returned 1000.*that a float can hold"
    ):
        search(
            residual(),
            pixels(),
            space={"presets": "A8W8"},
            metric=lambda model: 10**400,
        )
    values = iter([1, float("nan"), np.float32(0.5)])
    space = {"presets": ["A8W8", "S8S8", "XINT8"], "refine": 0}
    found = search(residual(), pixels(), space=space, metric=lambda model: next(values))
    assert [each.name for each in found.candidates] == ["A8W8", "XINT8", "S8S8"]
    assert found.candidates[-1].error == "the metric is not a number (NaN)"


def test_a_failing_candidate_is_a_row() -> None:
    space = {
        **SMALL,
        "presets": ["A8W8", QConfig.of("A8W8").with_(nodes=("nowhere",))],
        "optimizers": [],
    }
    found = search(residual(), pixels(), space=space)
    failed = found.candidates[-1]
    assert (failed.name, failed.score, failed.bytes) == ("config2", None, None)
    assert "nowhere" in failed.error
    assert names(found) == {
        "A8W8",
        "config2",
        "A8W8 minmax",
    }  # what failed is not refined
    assert failed not in found.front


def test_if_all_fail_the_first_says_why() -> None:
    with pytest.raises(
        ModelError, match=r"every candidate of the search failed; config1: .*nowhere"
    ):
        search(residual(), pixels(), space={"presets": [QConfig(nodes=("nowhere",))]})


def test_what_cannot_be_judged() -> None:
    with pytest.raises(DataError, match="a search needs at least two samples"):
        search(residual(), pixels(1))
    assert (
        search(
            residual(), pixels(1), space={"refine": 0}, metric=count_of_nodes
        ).calibrated
        == 1
    )
    with pytest.raises(DataError, match="the calibration data holds no sample"):
        search(residual(), [])
    top = parse("g (float[4] x) => (int64[1] y) { y = ArgMax (x) }")
    with pytest.raises(
        ModelError,
        match=(
            r"no output \(y\) is float and repeatable, so none has an SQNR; give a"
            r" metric"
        ),
    ):
        search(top, samples(top))
    with pytest.raises(ModelError, match=r"nowhere\.onnx"):
        search("nowhere.onnx", [])


# The journal


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "search.jsonl"


def test_what_is_in_the_journal_is_not_tried_again(
    workshop: Workshop, journal: Path
) -> None:
    first = search(residual(), pixels(), space=SMALL, journal=journal)
    header, *lines = journal.read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines][:2] == ORDER[:2]
    assert json.loads(header)["quark_onnx_search"]["samples"] == 12
    workshop.done.clear()
    again = search(residual(), pixels(), space=SMALL, journal=str(journal))
    assert workshop.done == [] and rows(again) == rows(first)
    wider = search(
        residual(),
        pixels(),
        space={**SMALL, "calibrators": ["minmax", "entropy"]},
        journal=journal,
    )
    assert len(workshop.done) == len(wider.candidates) - len(first.candidates) > 0


@pytest.mark.parametrize("cut", [1, 30, -1])
def test_a_search_that_was_killed_goes_on(
    workshop: Workshop, journal: Path, cut: int
) -> None:
    """In the middle of writing a line; of the header too."""
    whole = search(residual(), pixels(), space=SMALL, journal=journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    for kept in 0, 1, 3, 8:
        journal.write_bytes(b"".join(lines[:kept]) + lines[kept][:cut])
        workshop.done.clear()
        found = search(residual(), pixels(), space=SMALL, journal=journal)
        assert len(workshop.done) == 9 - max(kept, 1)
        assert rows(found) == rows(whole)
        assert len(journal.read_bytes().splitlines()) == 9


def test_failures_and_infinities_are_kept(journal: Path) -> None:
    space = {
        "presets": ["A8W8", QConfig(nodes=("nowhere",))],
        "calibrators": [],
        "optimizers": [],
    }
    metric: Callable[[ModelProto], float] = endless
    first = search(residual(), pixels(), space=space, metric=metric, journal=journal)
    assert first.best.score == np.inf
    assert rows(
        search(residual(), pixels(), space=space, metric=metric, journal=journal)
    ) == rows(first)


def endless(model: ModelProto) -> float:
    return float("inf")


def test_a_journal_of_something_else(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"presets": "A8W8", "calibrators": [], "optimizers": []}
    search(residual(), pixels(), space=space, journal=journal)
    before = journal.read_bytes()
    other = residual()
    other.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(
            onnx.numpy_helper.to_array(other.graph.initializer[0]) + np.float32(1),
            other.graph.initializer[0].name,
        )
    )
    for model, data, metric, words in (
        (other, pixels(), None, "another model"),
        (
            residual(),
            [*pixels()[:-1], pixels()[0]],
            None,
            "other data: a sample differs",
        ),
        (residual(), pixels(11), None, "other data: the number of samples differs"),
        (residual(), pixels(), count_of_nodes, "another metric"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"belongs to {words}; name another file, or remove this one",
        ):
            search(model, data, space=space, metric=metric, journal=journal)
    monkeypatch.setattr(MODULE, "__version__", "0.0.9")
    with pytest.raises(ConfigError, match="another version of this package"):
        search(residual(), pixels(), space=space, journal=journal)
    assert journal.read_bytes() == before


def test_two_metrics_are_told_apart_by_their_code(journal: Path) -> None:
    space = {"presets": "A8W8", "calibrators": [], "optimizers": []}
    first = search(
        residual(), pixels(), space=space, metric=lambda model: 1.0, journal=journal
    )
    again = search(
        residual(), pixels(), space=space, metric=lambda model: 1.0, journal=journal
    )
    assert rows(again) == rows(first)
    with pytest.raises(ConfigError, match="belongs to another metric"):
        search(
            residual(), pixels(), space=space, metric=lambda model: 2.0, journal=journal
        )


def test_a_file_that_is_no_journal_is_left_alone(journal: Path, tmp_path: Path) -> None:
    for content in (
        b"precious",
        b"precious\n",
        b"\x08\x07\xff\n\x00",
        b'{"a": 1}\n',
        b"[1]\n",
    ):
        journal.write_bytes(content)
        with pytest.raises(
            ConfigError,
            match="exists and is no journal of a search; it is not overwritten",
        ):
            search(residual(), pixels(), space=SMALL, journal=journal)
        assert journal.read_bytes() == content
    for path in (tmp_path, tmp_path / "absent" / "search.jsonl", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read and written"):
            search(residual(), pixels(), space=SMALL, journal=path)


def test_a_damaged_line_is_named(journal: Path) -> None:
    search(residual(), pixels(), space={**SMALL, "refine": 0}, journal=journal)
    header, first, second = journal.read_bytes().splitlines(keepends=True)
    entry = b'{"key": "x", "score": %s, "seconds": %s, "bytes": %s, "error": %s}\n'
    values = [
        (b'"high"', b"1", b"2", b'""'),
        (b"NaN", b"1", b"2", b'""'),
        (b"true", b"1", b"2", b'""'),
    ]
    values += [
        (b"9" * 400, b"1", b"2", b'""'),
        (b"1", b'"inf"', b"2", b'""'),
        (b"1", b"1", b"1e999", b'""'),
    ]
    values += [(b"1", b"1", b"2", b'"failed"'), (b"null", b"1", b"null", b'""')]
    for damage in (
        b"{}\n",
        b"nonsense\n",
        b"[" * 100_000 + b"\n",
        *(entry % each for each in values),
    ):
        journal.write_bytes(header + first + damage + second)
        with pytest.raises(ConfigError, match="line 3 is damaged"):
            search(residual(), pixels(), space=SMALL, journal=journal)


# Writing


def test_the_best_model_is_the_one_that_was_judged(
    tmp_path: Path, workshop: Workshop, journal: Path
) -> None:
    files = []
    for name in "first", "resumed":
        with Search(
            residual(), iter(pixels()), space=SMALL, journal=journal
        ) as running:
            found = running.run()
            running.write(found.best, tmp_path / f"{name}.onnx")
        files.append((tmp_path / f"{name}.onnx").read_bytes())
        assert len(files[-1]) == found.best.bytes
    assert files[0] == files[1]
    assert len(workshop.done) == 8 + 1  # the second run quantized that one alone
    with Search(residual(), pixels(), space=SMALL, journal=journal) as running:
        found = running.run()
        with pytest.raises(ConfigError, match="is a folder"):
            running.write(found.best, tmp_path)


# What a user may write


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {"presets": ["A8W9"]},
            r"presets: unknown preset 'A8W9'; did you mean 'A8W8'\?",
        ),
        (
            {"presets": []},
            "presets: there is none, so there is nothing to search; known: A16W4",
        ),
        (
            {"presets": ["absent.yaml"]},
            r"presets: config file absent\.yaml cannot be read",
        ),
        ({"presets": None}, "presets: config is a NoneType"),
        (
            {"calibrators": ["minmx"]},
            r"calibrators: unknown calibrator 'minmx'; did you mean 'minmax'\?",
        ),
        ({"calibrators": [3]}, "calibrators: calibrator is 3"),
        (
            {"optimizers": ["cle+adaquantt"]},
            r"optimizers: unknown optimizer 'adaquantt'; did you mean 'adaquant'\?",
        ),
        (
            {"optimizers": "cle:sweps=2"},
            r"optimizers: CLE has no setting 'sweps'; did you mean 'sweeps'\?",
        ),
        ({"optimizers": [""]}, "optimizers: unknown optimizer ''"),
        ({"optimizers": [7]}, "optimizers: optimizers holds 7"),
        ({"per_channel": ["yes"]}, "per_channel: 'yes' is neither True nor False"),
        ({"refine": -1}, "refine is -1"),
        (
            {"preset": "A8W8"},
            r"Space has no setting 'preset'; did you mean 'presets'\?",
        ),
        ("A8W8", "space is a str; it must be a Space, or a dictionary of its settings"),
    ],
)
def test_a_space_that_is_none(space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(residual(), pixels(), space=space)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, "budget is 0; it must be a number of seconds above 0"),
        ({"budget": "10m"}, "budget is '10m'"),
        ({"budget": float("inf")}, "budget is inf"),
        ({"budget": 10**400}, "budget is 1000"),
        ({"target": 10**400}, "target is 1000"),
        ({"target": "high"}, "target is 'high'; it must be a number"),
        ({"target": float("nan")}, "target is nan"),
        (
            {"metric": "sqnr"},
            "metric is 'sqnr'; it must take a model and return a number",
        ),
        ({"journal": 5}, "journal is 5; it must be a path"),
        ({"journal": ""}, "journal is ''; it must be a path"),
        ({"progress": "yes"}, "progress is 'yes'"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(residual(), pixels(), **settings)


def test_numbers_in_settings_may_have_a_plus() -> None:
    (change,) = list(
        Space(calibrators=[], optimizers=["adaquant:rate=1e+0+cle"]).stages()
    )[2]
    first, second = change(Space().trials()[0]).config.optimizers
    assert (first.rate, second) == (1.0, CLE())


def test_every_default_is_valid_and_the_names_tell_them_apart() -> None:
    space = Space()
    trials = space.trials()
    made = [
        change(trial)
        for trial in trials
        for stage in space.stages()
        for change in stage
    ]
    assert len({json.dumps(to_dict(trial.config)) for trial in made}) <= len(
        {trial.name for trial in made}
    )
    assert Space.of({"presets": "A8W8"}).presets == ("A8W8",)
    assert Space.of(None) == space == Space.of(space)
