"""search: what is tried, in which order, when it ends, and how it goes on."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import optuna
import pytest
from onnx import ModelProto

from quark_onnx import (
    CLE,
    QConfig,
    SearchResult,
    Space,
    compare,
    quantize,
    search,
)
from quark_onnx.common.errors import (
    ConfigError,
    DataError,
    MissingDependency,
    ModelError,
    TimeLimitError,
)
from quark_onnx.config import to_yaml
from quark_onnx.job import Result
from quark_onnx.search.search import Search
from tests.models import parse, residual, samples, weight

MODULE = sys.modules["quark_onnx.search.search"]
RUNS = sys.modules["quark_onnx.search.runs"]
SMALL = {
    "presets": ["A8W8", "S8S8"],
    "calibrators": ["minmax"],
    "optimizers": ["bias_correction"],
}
#: Each choice alone, the cheap first; the order of the others is the sampler's.
PROBES = ["A8W8", "A8W8 minmax", "S8S8", "A8W8 bias_correction"]
OTHERS = {
    "A8W8 minmax bias_correction",
    "S8S8 minmax",
    "S8S8 bias_correction",
    "S8S8 minmax bias_correction",
}


def pixels(count: int = 12) -> list[dict[str, Any]]:
    return samples(residual(), count)


class Workshop:
    """A clock that only quantizing moves on, by what the optimizers of the configuration cost.

    What has been quantized is remembered for all tests, which are about the order, time and
    records of the trials.
    """

    remembered: ClassVar[dict[tuple[bytes, bytes, QConfig], Result]] = {}

    def __init__(self) -> None:
        self.now, self.done = 0.0, list[QConfig]()
        self.costs = dict[str, float]()
        self.data: Any = None

    def quantize(
        self, model: Any, data: Any, config: QConfig, *rest: Any, **more: Any
    ) -> Any:
        self.data = list(data)
        self.done.append(config)
        self.now += 10.0 + sum(
            self.costs.get(optimizer.name, 0.0) for optimizer in config.optimizers
        )
        arrays = pickle.dumps([list(sample.items()) for sample in self.data])
        key = model.SerializeToString(deterministic=True), arrays, config
        if key not in self.remembered:
            self.remembered[key] = quantize(model, self.data, config, *rest, **more)
        return self.remembered[key]


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop()
    monkeypatch.setattr(RUNS, "perf_counter", lambda: made.now)
    monkeypatch.setattr(RUNS, "quantize", made.quantize)
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


def test_the_table_is_sorted_and_has_a_front(workshop: Workshop) -> None:
    found = search(residual(), pixels(), space=SMALL)
    scores = [candidate.score for candidate in found.candidates]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert found.best is found.candidates[0] is found.front[0]
    for candidate in found.candidates:
        beaten = any(
            other.score >= candidate.score  # type: ignore[operator]
            and other.bytes <= 1.01 * candidate.bytes  # type: ignore[operator]
            and (
                other.score > candidate.score  # type: ignore[operator]
                or 1.01 * other.bytes < candidate.bytes  # type: ignore[operator]
            )
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


def test_each_choice_is_tried_alone_first_and_the_order_is_the_same_each_time(
    workshop: Workshop,
) -> None:
    first = search(residual(), pixels(), space=SMALL)
    order, workshop.done = workshop.done, []
    workshop.remembered.clear()
    again = search(residual(), pixels(), space=SMALL)
    assert workshop.done == order
    assert [replace(each, seconds=0.0) for each in first.candidates] == [
        replace(each, seconds=0.0) for each in again.candidates
    ]
    by_name = {each.name: each.config for each in first.candidates}
    assert order[:4] == [by_name[name] for name in PROBES]
    assert names(first) == {*PROBES, *OTHERS}
    assert first.total == 8 and first.left == []


def test_the_number_of_candidates_is_limited(workshop: Workshop) -> None:
    found = search(residual(), pixels(), space=SMALL, trials=3)
    assert names(found) == set(PROBES[:3])
    assert (found.total, found.left) == (8, [])


def test_equalization_comes_second_where_layers_have_gates_between_them() -> None:
    gated = parse(
        "g (float[1,3,8,8] x) => (float[1,4,6,6] y)"
        " { c = Conv (x, w) s = Sigmoid (c) d = Mul (c, s) y = Conv (d, v) }",
        w=weight(4, 3, 3, 3),
        v=weight(4, 4, 1, 1),
    )
    for model, second in ((gated, "A8W8 cle"), (residual(), "S8S8")):
        found = search(
            model,
            samples(model, 12),
            space=Space(["A8W8", "S8S8"], [], optimizers=["bias_correction", "cle"]),
            trials=2,
        )
        assert names(found) == {"A8W8", second}


def test_a_choice_that_a_preset_has_anyway_is_tried_once() -> None:
    calibrator = QConfig.of("A16W8").activation.calibrator.name  # type: ignore[union-attr]
    space = Space(["A16W8", "A8W8"], [calibrator], optimizers=[])
    found = search(residual(), pixels(), space=space)
    assert names(found) == {"A16W8", "A8W8", f"A8W8 {calibrator}"}
    assert found.total == 3


def test_without_optuna_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        MissingDependency,
        match=r"a search needs Optuna: pip install '.*\[search\]'",
    ):
        search(residual(), pixels(), space=SMALL)


def test_presets_of_a_target() -> None:
    assert "XINT8" not in Space().axes["preset"]
    presets = Space(target="phx").axes["preset"]
    assert list(presets) == ["XINT8"]
    assert all(config.target == "phx" for config in presets.values())
    with pytest.raises(ConfigError, match="unknown target 'phy'; did you mean 'phx'"):
        Space(target="phy")


def test_optimizers_with_settings_are_named_with_them() -> None:
    space = Space(
        "A8W8",
        ["percentile:percentile=99.9"],
        optimizers=[CLE(sweeps=2, activations=False)],
    )
    found = search(residual(), pixels(), space=space)
    text = "cle:sweeps=2,activations=False"
    assert names(found) == {
        "A8W8",
        "A8W8 percentile:percentile=99.9",
        f"A8W8 {text}",
        f"A8W8 percentile:percentile=99.9 {text}",
    }
    (plain,) = [each for each in found.candidates if each.name == "A8W8"]
    (changed,) = [each for each in found.candidates if each.name == f"A8W8 {text}"]
    optimizers = (CLE(sweeps=2, activations=False),)
    assert changed.config == plain.config.with_(optimizers=optimizers)


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
    assert (len(found.candidates), found.reached, found.left) == (8, False, [])


def test_what_would_not_fit_is_not_begun_and_named(workshop: Workshop) -> None:
    found = search(residual(), pixels(), space=SMALL, budget=35.0)
    # a fourth of 10 s would end at 40
    assert len(found.candidates) == 3 and workshop.now == 30.0
    assert set(found.left) == {*PROBES[3:], *OTHERS} and found.reached
    workshop.now = 0.0
    # the first is always tried
    least = search(residual(), pixels(), space=SMALL, budget=0.001)
    assert names(least) == {"A8W8"}


def test_what_is_slow_is_left_out_and_what_is_fast_is_not(workshop: Workshop) -> None:
    """bias_correction took 500 s on the one preset, so it is not begun on the other; cle is."""
    workshop.costs["bias_correction"] = 500.0
    space = {
        "presets": ["A8W8", "S8S8"],
        "calibrators": [],
        "optimizers": ["bias_correction", "cle"],
    }
    found = search(residual(), pixels(), space=space, budget=600.0)
    assert found.left == ["S8S8 bias_correction"]
    assert sum("bias_correction" in name for name in names(found)) == 1
    assert sum(name.endswith(" cle") for name in names(found)) == 2


def test_a_candidate_whose_time_is_over_is_named_and_tried_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, journal: Path
) -> None:
    def quantize_in_time(model: Any, data: Any, config: QConfig, **more: Any) -> Any:
        if config.optimizers:
            workshop.now += 77.0
            raise TimeLimitError("its time is over")
        return workshop.quantize(model, data, config, **more)

    space = {"presets": "A8W8", "calibrators": [], "optimizers": ["bias_correction"]}
    with monkeypatch.context() as patch:
        patch.setattr(RUNS, "quantize", quantize_in_time)
        found = search(residual(), pixels(), space=space, budget=300, journal=journal)
    assert names(found) == {"A8W8"}
    assert found.left == ["A8W8 bias_correction (ended: the budget was over)"]
    found = search(residual(), pixels(), space=space, journal=journal)
    assert names(found) == {"A8W8", "A8W8 bias_correction"}


def test_reading_the_data_counts(workshop: Workshop) -> None:
    def slow() -> Iterator[dict[str, Any]]:
        for sample in pixels():
            workshop.now += 5.0
            yield sample

    assert len(search(residual(), slow(), space=SMALL, budget=75.0).candidates) == 1


# Data and metrics


def test_a_generator_is_read_once(workshop: Workshop) -> None:
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
    space = {
        "presets": ["A8W8", "S8S8", "A16W8"],
        "calibrators": [],
        "optimizers": [],
    }
    found = search(residual(), pixels(), space=space, metric=lambda model: next(values))
    assert [each.name for each in found.candidates] == ["A8W8", "A16W8", "S8S8"]
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
    with pytest.raises(DataError, match="this needs at least two samples"):
        search(residual(), pixels(1))
    assert (
        search(residual(), pixels(1), trials=1, metric=count_of_nodes).calibrated == 1
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
    return tmp_path / "search.journal"


def test_what_is_in_the_journal_is_not_tried_again(
    workshop: Workshop, journal: Path
) -> None:
    first = search(residual(), pixels(), space=SMALL, journal=journal)
    workshop.done.clear()
    again = search(residual(), pixels(), space=SMALL, journal=str(journal))
    assert workshop.done == [] and rows(again) == rows(first)
    wider = search(
        residual(),
        pixels(),
        space={**SMALL, "calibrators": ["minmax", "entropy"]},
        journal=journal,
        trials=None,
    )
    assert len(workshop.done) == len(wider.candidates) - len(first.candidates) > 0


def test_a_changed_file_is_another_configuration(
    workshop: Workshop, journal: Path, tmp_path: Path
) -> None:
    """Under the same label: the records of the journal are those of the earlier content."""
    path = tmp_path / "mine.yaml"
    space = {"presets": path, "calibrators": [], "optimizers": []}
    path.write_text(to_yaml(QConfig.of("A8W8")), encoding="utf-8")
    first = search(residual(), pixels(), space=space, journal=journal)
    path.write_text(to_yaml(QConfig.of("A16W8")), encoding="utf-8")
    second = search(residual(), pixels(), space=space, journal=journal)
    assert len(workshop.done) == 2
    assert [each.config for each in second.candidates] == [QConfig.of("A16W8")]
    assert second.best.score != first.best.score


def test_the_journal_is_one_of_optuna(journal: Path) -> None:
    found = search(residual(), pixels(), space=SMALL, journal=journal, trials=3)
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(journal))
    )
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    assert study.best_value == found.best.score == found.study.best_value
    assert [trial.user_attrs["name"] for trial in study.trials] == PROBES[:3]


def test_a_search_that_was_killed_goes_on(workshop: Workshop, journal: Path) -> None:
    """In the middle of writing a line, the first one too."""
    whole = search(residual(), pixels(), space=SMALL, journal=journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    half, last = len(lines) // 2, len(lines) - 1
    cuts = [(0, 1), (1, -1), (half, 30), *((last, cut) for cut in (1, 30, -1))]
    for kept, cut in cuts:
        journal.write_bytes(b"".join(lines[:kept]) + lines[kept][:cut])
        finished = sum(b'"record"' in line for line in lines[:kept])
        workshop.done.clear()
        found = search(residual(), pixels(), space=SMALL, journal=journal)
        assert len(workshop.done) == 8 - finished
        assert sorted(rows(found), key=str) == sorted(rows(whole), key=str)


def test_an_interrupted_candidate_is_tried_again(
    workshop: Workshop, journal: Path
) -> None:
    class Interrupted(Exception):
        pass

    def metric(model: ModelProto) -> float:
        if len(workshop.done) == 2:
            raise Interrupted
        return float(len(model.graph.node))

    for _ in range(2):
        with pytest.raises(Interrupted):
            search(residual(), pixels(), space=SMALL, metric=metric, journal=journal)
        workshop.done = workshop.done[:1] if len(workshop.done) == 2 else []
    workshop.done = [QConfig()] * 5
    found = search(residual(), pixels(), space=SMALL, metric=metric, journal=journal)
    assert names(found) == {*PROBES, *OTHERS}


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


def test_a_record_of_an_earlier_version_has_no_runtime(journal: Path) -> None:
    space = {"presets": "A8W8", "calibrators": [], "optimizers": []}
    first = search(residual(), pixels(), space=space, journal=journal)
    text = journal.read_text(encoding="utf-8")
    assert ', "runtime": null' in text or ',"runtime":null' in text
    for key in (', "runtime": null', ',"runtime":null'):
        text = text.replace(key, "")
    journal.write_text(text, encoding="utf-8")
    again = search(residual(), pixels(), space=space, journal=journal)
    assert rows(again) == rows(first) and again.best.runtime is None


@pytest.mark.parametrize(
    ("one", "other", "front"),
    [
        ((20.0, 0.5), (20.0, 0.9), [0]),  # faster, and as good
        ((20.0, 0.5), (21.0, 0.9), [0, 1]),
        ((20.0, 0.5), (20.1, 0.51), [1]),  # 5 % of the runtime are none
        ((20.0, 0.5), (20.1, None), [0, 1]),  # not measured: not comparable
        ((20.0, None), (20.1, None), [1]),
    ],
)
def test_the_front_has_three_axes(
    one: tuple[float, float | None],
    other: tuple[float, float | None],
    front: list[int],
) -> None:
    found = search(residual(), pixels(), space=SMALL, trials=1)
    pair = [
        replace(found.best, score=score, bytes=1000, runtime=runtime)
        for score, runtime in (one, other)
    ]
    both = replace(found, candidates=pair)
    assert both.front == [pair[place] for place in front]


def endless(model: ModelProto) -> float:
    return float("inf")


def test_a_journal_holds_searches_of_several_models_data_and_metrics(
    workshop: Workshop, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"presets": "A8W8", "calibrators": [], "optimizers": []}
    search(residual(), pixels(), space=space, journal=journal)
    other = residual()
    other.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(
            onnx.numpy_helper.to_array(other.graph.initializer[0]) + np.float32(1),
            other.graph.initializer[0].name,
        )
    )
    for model, data, metric in (
        (other, pixels(), None),
        (residual(), [*pixels()[:-1], pixels()[0]], None),
        (residual(), pixels(11), None),
        (residual(), pixels(), count_of_nodes),
        (residual(), pixels(), lambda model: 1.0),
        (residual(), pixels(), lambda model: 2.0),
    ):
        for tried in 1, 0:
            workshop.done.clear()
            search(model, data, space=space, metric=metric, journal=journal)
            assert len(workshop.done) == tried
    monkeypatch.setattr(MODULE, "__version__", "0.0.9")
    search(residual(), pixels(), space=space, journal=journal)
    assert len(workshop.done) == 1


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
    for path in (tmp_path, tmp_path / "absent" / "search.journal", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read and written"):
            search(residual(), pixels(), space=SMALL, journal=path)


@pytest.mark.parametrize(
    "damage", [b"{}\n", b"nonsense\n", b"[1]\n", b"[" * 100_000 + b"\n"]
)
def test_a_damaged_line_is_named(journal: Path, damage: bytes) -> None:
    search(residual(), pixels(), space=SMALL, trials=1, journal=journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    with pytest.raises(ConfigError, match=r"line 3(:| is no JSON)"):
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
        ({"presets": 3}, "presets: config is a int"),
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
        ({"target": 3}, "target of a space is 3; it must be the name of a target"),
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
        ({"trials": 0}, "trials is 0; it must be a number of candidates, 1 or more"),
        ({"trials": True}, "trials is True"),
        ({"journal": 5}, "journal is 5; it must be a path"),
        ({"journal": ""}, "journal is ''; it must be a path"),
        ({"progress": "yes"}, "progress is 'yes'"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(residual(), pixels(), **settings)


def test_numbers_in_settings_may_have_a_plus() -> None:
    space = Space(calibrators=[], optimizers=["adaquant:rate=1e+0+cle"])
    _, chain = space.axes["optimizers"].values()
    first, second = chain.optimizers
    assert (first.rate, second) == (1.0, CLE())


def test_every_default_is_valid_and_the_names_tell_them_apart() -> None:
    space = Space()
    probes, others = space.order("cle")
    assert [trial.name for trial in probes[:2]] == ["A8W8", "A8W8 cle+bias_correction"]
    trials = [*probes, *others]
    # A16W8 has one of the calibrators anyway, and the recipe is that of a model
    chains = len(space.optimizers)
    assert len(trials) == (3 * 6 - 1) * chains
    assert len({trial.name for trial in trials}) == len(trials)
    costs = [trial.relative_cost for trial in others]
    assert costs == sorted(costs)
    assert Space.of({"presets": "A8W8"}).presets == ("A8W8",)
    assert Space.of(None) == space == Space.of(space)
