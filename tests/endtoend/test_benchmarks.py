"""Benchmarks run, small, and judge what they measure."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the benchmarks are not part of this distribution"
)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("llm_large")


@pytest.mark.slow
def test_a_small_model(tmp_path: Path) -> None:
    program = [sys.executable, str(FOLDER / "llm_large.py"), "--shape", "1", "256"]
    done = subprocess.run(
        [*program, "--clock", "cpu", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "llm_large.json").read_text("utf-8"))
    schemes = ("uint4_wo_128", "fp8", "gguf-q4_1")
    assert set(found) == {f"1 x 256/{scheme}" for scheme in schemes}
    block = 256 * 256 * 2 + 2 * 64 * 256 + 3 * 256 * 704 + 2 * 256
    count = 2 * 32_000 * 256 + block + 256
    for row in found.values():
        assert 0 <= row["source"] - 2 * count < 5_000
        assert (row["parameters"], row["block"]) == (count, 2 * block)
        assert row["size"] < row["source"]
        assert row["seconds"] > 0
        assert 100 << 20 < row["private"] < row["peak"] < 1 << 30
    assert done.stdout.startswith("| run ")
    assert not (tmp_path / "llm_large.md").exists()


def test_what_is_a_miss(large: Any) -> None:
    good = large.Result(10.0, 9.0, 900, 800, 500, 500, 260)
    assert large.complaints(good) == []
    for change, word in (
        ({"peak": 240}, "memory: 240, estimated 500"),
        ({"size": 900}, "disk"),
    ):
        (found,) = large.complaints(replace(good, **change))
        assert found.startswith(word)


def test_runs_by_name(large: Any) -> None:
    run = large.Run.of("1T:2:16/uint4_wo_128+gptq:damping=0.1")
    assert (run.size.blocks, run.size.experts) == (2, 16)
    assert (run.scheme, run.algorithm) == ("uint4_wo_128", "gptq:damping=0.1")
    assert not large.Run.of("8B/uint4_wo_128").calibrates
    with pytest.raises(SystemExit, match="is no run"):
        large.Run.of("9B/fp8")


def test_headers_describe_the_whole_model(large: Any, tmp_path: Path) -> None:
    """A checkpoint without values: names, shapes and sizes, and no space on disk."""
    from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint

    size = large.SIZES["1B"].with_(blocks=2)
    block = large.write_headers(tmp_path / "model", size.config())
    source = FloatCheckpoint(tmp_path / "model")
    shapes = {name: tuple(each.shape) for name, each in source.model.named_parameters()}
    assert {name: source.reader.shape(name) for name in source.reader} == shapes
    assert block == 2 * 2048**2 + 2 * 256 * 2048 + 3 * 2048 * 5632 + 2 * 2048
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert sum(file.stat().st_blocks for file in files) * 512 < 1 << 20


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_images")


def test_flags_as_text(images: Any) -> None:
    flags = np.random.default_rng(0).random(1001) < 0.9
    assert np.array_equal(images.unpacked(images.packed(flags), 1001), flags)


def test_standard_error_over_draws_and_images(images: Any) -> None:
    """Many experiments with known effects of draws and of images: the spread of their means is what
    each of them says, and a difference of nothing is called one in about 5 % of them.
    """
    rng, said, means, below = np.random.default_rng(1), [], [], 0
    for _ in range(1500):
        hard, lucky = rng.normal(size=(1, 400)), rng.normal(size=(5, 1))
        first, second = (
            hard * side + 0.15 * lucky * side + rng.normal(size=(5, 400)) > 0
            for side in (1, -1)
        )
        found = images.difference(list(first), list(second))
        said.append(found.error**2)
        means.append(found.mean)
        below += found.below()
        assert found.mean == pytest.approx(100 * (first.mean() - second.mean()))
    assert np.mean(said) == pytest.approx(np.var(means), rel=0.15)
    assert 0.02 < below / 1500 < 0.08


def test_one_draw_sees_the_images_alone(images: Any) -> None:
    first, second = np.zeros(1000, bool), np.zeros(1000, bool)
    first[:10] = second[7:30] = True
    found = images.difference([first], [second])
    cells = 100.0 * (first.astype(float) - second)
    assert (found.mean, found.error) == pytest.approx(
        (-1.3, cells.std(ddof=1) / 1000**0.5)
    )
    assert found.below() and found.below(-0.3) and not found.below(-1.0)
    assert str(found) == f"-1.30 ± {found.error:.2f}"
    same = images.difference([first, first], [first, first])
    assert (same.mean, same.error) == (0, 0) and not same.below() and same.below(0.1)


def test_what_is_more_than_chance_over_draws(images: Any) -> None:
    draws = importlib.import_module("draws")
    easy = np.zeros(1000, bool)
    easy[:910] = True

    def rows(tool: str, *wrong: tuple[int, int]) -> dict[str, dict[str, Any]]:
        """Rows of draws, in each of which the images from one to another are wrong, too."""
        made = {}
        for draw, (start, stop) in enumerate(wrong):
            flags = easy.copy()
            flags[start:stop] = False
            row = {
                "value": flags.mean() * 100,
                "images": 1000,
                "right": images.packed(flags),
                "sqnr": 20.0 - stop,
            }
            row["model"] = "a"
            made[f"resnet20/{tool}/plain/{draw}"] = row
        return made

    settled = rows("ours, rules settled", (0, 0), (0, 1), (0, 0))
    unlucky = (
        rows("ours", (0, 6), (3, 6), (0, 0))
        | rows("amd-quark", (10, 11), (0, 0), (7, 12))
        | settled
    )
    text, missed = draws.report(unlucky, ["resnet20"])
    assert (
        "-0.10 ± 0.33" in text and not missed
    )  # sqrt((280.0 + 76.7 - 36.4) / 3000), mean squares by sums of squares
    worse = (
        rows("ours", (0, 50), (0, 51), (0, 49))
        | rows("amd-quark", (0, 0), (0, 1), (0, 0))
        | settled
    )
    text, missed = draws.report(worse, ["resnet20"])
    assert [line.split(" points")[0] for line in missed] == [
        "resnet20 plain ours: -4.97 ± 0.68",
        "ours, over all rows: -4.97 ± 0.68",
    ]
    assert (
        "ours: -4.97 ± 0.68 points of top-1, -49.67 dB of SQNR, which is higher in 0 of"
        " 3 models" in text
    )
    costly = (
        rows("ours", (0, 0), (0, 1))
        | rows("ours, rules settled", (0, 9), (0, 9))
        | rows("amd-quark", (0, 0), (0, 0))
    )
    text, missed = draws.report(costly, ["resnet20"])
    assert [line.split(":")[0] for line in missed] == [
        "resnet20, rules cost at most 0.3",
        "resnet20, best within the rules",
        "resnet20 plain ours, rules settled",
        "ours, rules settled, over all rows",
    ]


def test_chance_alone_misses_a_row_as_often_as_it_may(images: Any) -> None:
    """Families of 24 differences of nothing: one in twenty has a row that is called worse."""
    rng, called = np.random.default_rng(2), 0
    for _ in range(400):
        means = rng.normal(size=24)
        called += bool(
            images.worse(
                {
                    str(i): images.Difference(mean, 1.0, 1e9)
                    for i, mean in enumerate(means)
                }
            )
        )
    assert 0.02 < called / 400 < 0.08
    bad = {
        "bad": images.Difference(-5.0, 1.0, 1e9),
        "worst": images.Difference(-9.0, 1.0, 1e9),
    }
    assert images.worse(bad | {"good": images.Difference(0.5, 1.0, 1e9)}) == [
        "worst",
        "bad",
    ]


def test_what_cannot_be_told_over_draws_is_a_miss(images: Any) -> None:
    draws = importlib.import_module("draws")
    row = {
        "value": 100.0,
        "images": 8,
        "right": images.packed(np.ones(8, bool)),
        "sqnr": 20.0,
        "model": "a",
    }
    good = {
        f"resnet20/{tool}/plain/{draw}": row
        for tool in draws.TOOLS
        for draw in range(2)
    }
    assert draws.report(good, ["resnet20"])[1] == []
    without = {key: row for key, row in good.items() if "amd-quark" not in key}
    text, missed = draws.report(without, ["resnet20"])
    assert not missed and "ours: not measured" in text
    every = [f"resnet20 plain {tool}" for tool in draws.TOOLS[:2]]
    every += [f"resnet20, {mark}" for mark in ("rules cost", "best within the rules")]

    def complaints(rows: dict[str, Any]) -> list[str]:
        missed = draws.report(rows, ["resnet20"])[1]
        assert all("not judged: fewer than two draws" in line for line in missed)
        return [line.split(":")[0] for line in missed]

    # of an older version; of one draw; of none
    assert (
        complaints(
            {key: {n: row[n] for n in ("value", "sqnr", "model")} for key in good}
        )
        == every
    )
    assert (
        complaints({key: row for key, row in good.items() if key.endswith("0")})
        == every
    )
    assert complaints({}) == ["resnet20, rules cost"]
    # of another model
    other = good | {key: {**row, "model": "b"} for key in good if "amd-quark" in key}
    assert complaints(other) == [*every[:2], every[3]]


def test_what_models_for_a_processor_miss(images: Any) -> None:
    npu = importlib.import_module("npu")
    flags = np.zeros(900, bool)
    flags[:600] = True

    def found(
        tool: str, name: str, wrong: int, *broken: str, settled: bool = False
    ) -> Any:
        right = flags.copy()
        right[:wrong] = False
        way = npu.Way(tool, name, print, settled)
        return npu.Found(
            way, None if wrong < 0 else right, 20.0, dict.fromkeys(broken, 1)
        )

    def verdicts(*each: Any) -> list[bool]:
        return [met for _, met in npu.marks(list(each))]

    plain, theirs = found("ours", "XINT8", 0, "G1"), found("amd-quark", "XINT8", 3)
    good = found("ours", "XINT8, rules settled", 2, settled=True)
    assert verdicts(plain, good, theirs) == [True, True, True, True]
    assert verdicts(plain, good) == [True, True, True]
    wrong = found("ours", "XINT8, rules settled", 2, "C1", settled=True)
    assert verdicts(plain, wrong, theirs) == [True, False, True, True]
    bad = found("ours", "XINT8, rules settled", 40, settled=True)
    assert verdicts(plain, bad, theirs) == [True, True, False, False]
    failed = found("ours", "XINT8, rules settled", -1, settled=True)
    assert verdicts(plain, failed, theirs) == [False, True, False, False]
    assert verdicts(found("ours", "XINT8", -1), good, theirs) == [
        False,
        True,
        False,
        True,
    ]
    assert verdicts(plain, good, found("amd-quark", "XINT8, cle", -1)) == [
        True,
        True,
        True,
        True,
    ]
    only_other = found("ours", "A8W8, for the target", 0, settled=True)
    assert verdicts(plain, bad, only_other, theirs) == [True, True, False, False]


def test_what_a_simulation_misses(images: Any) -> None:
    simulate = importlib.import_module("simulate")
    row = {
        a.name: {part: {"near": 100.0} for part in ("alone", "whole")}
        for a in simulate.VARIANTS
    }
    assert simulate.complaints({"resnet20": row}, ["resnet20"]) == []
    assert simulate.complaints({"resnet20": row}, ["resnet20", "resnet44"]) == [
        "resnet44 was not measured"
    ]
    row["ties up, averages dpu"]["whole"]["near"] = (
        80.0  # rounds otherwise than onnxruntime: may drift
    )
    assert simulate.complaints({"resnet20": row}, ["resnet20"]) == []
    row["ties up, averages dpu"]["alone"]["near"] = 99.8
    row["ties even, averages exact"]["whole"]["near"] = 99.0
    assert simulate.complaints({"resnet20": row}, ["resnet20"]) == [
        "resnet20, ties up, averages dpu, alone: 99.800 % within one code",
        "resnet20, ties even, averages exact, whole: 99.000 % within one code",
    ]


def test_what_is_due(images: Any) -> None:
    due, tag = importlib.import_module("_results").due, {"model": "a", "source": "2"}
    assert due(None, tag) and due({}, tag)
    assert not due(tag | {"value": 1.0}, tag) and due(
        tag | {"value": 1.0}, tag, again=True
    )
    assert due({"model": "b", "source": "2"}, tag) and due(tag | {"error": "no"}, tag)
    assert not due({"model": "a", "source": "1"}, tag) and due(
        {"model": "a", "source": "1"}, tag, stale=True
    )


def test_marks_of_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    marks = importlib.import_module("_marks")
    note = (
        "9 of 100 nodes 16 bits, 3.1 -> 16.2 dB (target 16 dB{}); the worst is one of"
        " {} Conv nodes"
    )

    def missed(
        task: str, floating: float, rows: dict[str, dict[str, Any]]
    ) -> list[str]:
        found = list(
            marks.verdicts(
                task, floating, {f"{task}/{key}": row for key, row in rows.items()}
            )
        )
        return [verdict.mark for verdict in found if not verdict.met]

    good: dict[str, dict[str, Any]] = {
        "ours/XINT8/plain": {"value": 70.0},
        "ours/XINT8/adaround": {"value": 82.5, "seconds": 10.0, "peak_mb": 100.0},
        "amd-quark/XINT8/adaround": {"value": 82.54, "seconds": 50.0, "peak_mb": 101.0},
        "amd-quark/XINT8/plain": {"error": "fails"},
        "ours/A8W8/cle": {"value": 83.0},
        "ours/A8W4 with zero points/plain": {"value": 81.5},
    }
    assert missed("mobilenetv2", 84.0, good) == []
    for key, row, mark in (
        ("ours/XINT8/adaround", {"value": 82.4}, "XINT8: within 1.5 points of float"),
        ("ours/A8W8/cle", {"value": 82.9}, "A8W8: within 1 points of float"),
        (
            "ours/A8W4 with zero points/plain",
            {"value": 81.4},
            "A8W4 or A8W4 with zero points: within 2.5 points of float",
        ),
        ("amd-quark/XINT8/adaround", {"value": 82.6}, "XINT8, adaround: amd-quark"),
        ("ours/XINT8/plain", {"value": None}, "XINT8, plain: amd-quark"),
        (
            "ours/XINT8/adaround",
            {"value": 82.5, "seconds": 10.1, "peak_mb": 9.0},
            "adaround: as fast as amd-quark",
        ),
        (
            "ours/XINT8/adaround",
            {"value": 82.5, "seconds": 5.0, "peak_mb": 101.0},
            "adaround: as fast as amd-quark",
        ),
    ):
        changed = {name: dict(each) for name, each in good.items()} | {
            key: {n: v for n, v in row.items() if v is not None}
        }
        assert mark in missed("mobilenetv2", 84.0, changed)
    assert len(missed("mobilenetv2", 84.0, {})) == 3
    mixed = "mixed meets its target with fewer nodes than of the worst type"
    detector: dict[str, dict[str, Any]] = {
        "ours/A8W8/cle": {"value": 30.0},
        "ours/XINT8/cle": {"value": 28.0},
        "ours/A8W8-unsafe/mixed": {"value": 32.0, "note": note.format("", 10)},
    }
    assert missed("yolox_nano", 33.7, detector) == []
    for text in (note.format("", 9), note.format(", missed", 10), ""):
        row = {"value": 32.0, "note": text}
        assert mixed in missed(
            "yolox_nano", 33.7, detector | {"ours/A8W8-unsafe/mixed": row}
        )
    many = {"value": 40.0, "note": note.format("", 90).replace("9 of 100", "26 of 100")}
    assert missed("yolox_nano", 33.7, detector | {"ours/A8W8-unsafe/mixed": many}) == [
        "mixed, at most 25% of the nodes"
    ]


def test_families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every family either works or is refused by a message that names the layer.

    Others fail, and the table says so.
    """
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("llm_families")
    rows = dict[str, Any]()
    for family in ("llama", "xlm", "blt"):
        (tmp_path / family).mkdir()
        rows[family] = json.loads(
            json.dumps(benchmark.outcomes(family, tmp_path / family))
        )
    assert [rows["llama"][recipe] for recipe in benchmark.RECIPES] == ["works"] * 3
    assert all(
        0 < rows["llama"][f"{recipe}: error"] < 0.6 for recipe in benchmark.RECIPES
    )
    assert rows["xlm"]["fp8"] == rows["xlm"]["mxfp4"] == "works"
    refused = (
        "refused: something happens in front of transformer.ffns.1; the model cannot be"
        " walked block by block"
    )
    assert rows["xlm"]["uint4_wo_32 + gptq"] == refused
    assert "3000012" in rows["blt"]["absent"]
    rows["other"] = {
        "class": "Other",
        "kind": "causal",
        "fails": "the process ended with code -6",
    }
    text = benchmark.report(rows)
    assert (
        "| llama " in text
        and "- uint4_wo_32 + gptq: 1 works, 1 refused, 1 fails" in text
    )
    assert text.index("| blt ") > text.index("## No tiny model")
    assert "other: the process ended with code -6" in list(benchmark.failures(rows))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("runtime")


def test_ratios_are_those_of_each_turn(runtime: Any) -> None:
    """A turn in which the machine is ten times slower changes no ratio."""
    taken = {
        "float": [2.0, 20.0, 2.0, 2.0],
        "ours": [1.0, 10.0, 1.0, 1.0],
        "onnxruntime": [4.0, 40.0, 4.0, 4.0],
    }
    row = runtime.figures(taken)
    assert (row["ours/float"], row["ours/onnxruntime"], row["ours"]) == (0.5, 0.25, 1.0)


@pytest.mark.parametrize(
    ("row", "words", "met"),
    [
        ({"ours/float": 0.5, "ours/onnxruntime": 1.02}, "met", True),
        ({"ours/float": 0.5, "ours/onnxruntime": 1.021}, "MISSED", False),
        ({"ours/float": 1.2, "ours/onnxruntime": 0.9}, "met, slower than float", True),
        ({"ours/float": 0.9}, "onnxruntime's fails", True),
        (
            {
                "ours/float": 2,
                "ours/onnxruntime": 2,
                "onnxruntime bytes": 95,
                "float bytes": 100,
            },
            None,
            True,
        ),
        ({"ours failed": "why"}, "why", False),
        ({}, "not measured", False),
    ],
)
def test_verdict_on_a_runtime(
    runtime: Any, row: dict[str, Any], words: str | None, met: bool
) -> None:
    found = runtime.verdict("A8W8", row)
    assert found == (words or "onnxruntime's is float, slower than float", met)


def test_defaults_beside_nncf_have_a_table_and_a_verdict(runtime: Any) -> None:
    row = {"float": 4.0, "ours": 2.0, "nncf": 1.9, "ours/float": 0.5, "ours/nncf": 1.05}
    assert runtime.verdict("A8W8", row, "nncf") == ("MISSED", False)
    rows = {runtime.nncf_key("resnet20"): row}
    shown = list(runtime.report(rows, ["resnet20"], ["A8W8"]))
    assert "not measured" in shown[0] and "| resnet20 " in shown[1]
    assert "ours/nncf" in shown[1] and "MISSED" in shown[1]


def test_equal_files_are_not_timed_again(runtime: Any, tmp_path: Path) -> None:
    """A row holds as long as its files, its onnxruntime and its clock are the same."""
    model = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), model)
    feeds = {"x": np.ones((1, 2), np.float32)}
    runtime.Samples.write(iter([feeds]), tmp_path / "samples")

    def measured(known: dict[str, Any], clock: str = "cpu") -> dict[str, Any]:
        row = runtime.measure(
            model, tmp_path / "samples", "DYNAMIC", 1, 0, clock, known
        )
        assert {"ours file", "onnxruntime file", "turns"} <= row.keys(), row
        return dict(row)

    first = measured({}) | {"float": -1.0}
    assert measured(first) == first
    assert measured(first, "wall")["float"] > 0
    assert measured(first | {"ours file": "another"})["float"] > 0


@pytest.mark.parametrize(("seconds", "turns"), [(600, 30), (0, 12)])
def test_files_run_in_turn(
    runtime: Any, tmp_path: Path, seconds: float, turns: int
) -> None:
    """Every file is run as often as was asked for, or while there is time."""
    model = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), model)
    feeds = {"x": np.ones((1, 2), np.float32)}
    files = {"float": model, "ours": model}
    taken = runtime.run_in_turn(files, feeds, 30, seconds, "wall")
    assert {name: len(times) for name, times in taken.items()} == {
        "float": turns,
        "ours": turns,
    }
    assert all(time > 0 for times in taken.values() for time in times)


MODEL = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }"""


def test_what_grows_faster_than_the_graph_or_was_not_measured_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    scaling, results = (
        importlib.import_module(name) for name in ("scaling", "_results")
    )
    store = results.Store(tmp_path / "scaling.json")
    for work, seconds in (
        ("W8", (2.0, 29.0)),
        ("check", (2.0, 31.0)),
        ("explain", (2.0,)),
    ):
        for size, taken in zip((2000, 20_000), seconds, strict=False):
            store.put(f"chain/{size}/{work}", {"seconds": taken, "onnxruntime": 1.0})
    rows = scaling.rows_of(store, ["chain"], [2000, 20_000], ["W8", "check", "explain"])
    assert [row[-1] for row in rows] == ["met", "MISSED", "MISSED"]
    assert rows[0][:5] == ["chain", "W8", 1.0, 1.45, 1.0]


@pytest.mark.parametrize(
    ("seconds", "peak", "verdict"),
    [(64.0, 150.0, "met"), (100.0, 150.0, "MISSED"), (64.0, 400.0, "MISSED")],
)
def test_what_grows_faster_than_the_images_is_missed(
    seconds: float, peak: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    scaling = importlib.import_module("scaling")
    rows = [
        {"cpu_seconds": 4.0, "peak_mb": 130.0},
        {"cpu_seconds": seconds, "peak_mb": peak},
    ]
    row = scaling.images_row(rows, [1000, 16_000])
    assert row[:2] == ["4.0 s, 130 MB", f"{seconds:.1f} s, {peak:.0f} MB"]
    assert (row[-3], row[-1]) == (seconds / 64, verdict)


@pytest.mark.parametrize("shape", ["chain", "branches", "constants", "residual"])
def test_a_growing_model_has_the_nodes_asked_for(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    model = importlib.import_module("_growing").SHAPES[shape](50)
    onnx.checker.check_model(model, full_check=True)
    assert 50 <= len(model.graph.node) <= 60
