"""quark-onnx search: the table, the best model, the journal, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import onnx
import pytest

from quark_onnx.config import from_dict
from tests.models import parse

SEARCH = (
    "search",
    "model.onnx",
    "--data",
    "data",
    "--preset",
    "A8W8",
    "S8S8",
    "--calibrator",
    "minmax",
)
SHORT = (*SEARCH, "--optimize", "bias_correction")


def test_table_and_model(cli: Any) -> None:
    finished = cli(*SHORT, "-o", "best.onnx")
    assert finished.code == 0
    lines = finished.out.splitlines()
    assert lines[0] == "model     model.onnx -> best.onnx"
    assert "15 to calibrate on, 5 to judge by" in lines[1]
    assert lines[2].startswith("tried     8 of 8 configurations; front: none of ")
    columns = [title.strip() for title in lines[3].split("  ") if title]
    assert columns[:4] == ["#", "configuration", "SQNR", "size"]
    table = lines[4:12]
    assert table[0].endswith("front")
    assert [line.split()[0] for line in table] == [str(rank) for rank in range(1, 9)]
    assert {line.split()[1] for line in table} == {"A8W8", "S8S8"}
    assert any(line.startswith("best ") for line in lines)
    # The best model is written, so that nothing is left to do.
    assert lines[-2].startswith("verdict   good: ")
    command = cli(*SHORT).out.splitlines()[-1].strip()
    assert shlex.split(command)[1:] == [*SHORT, "--output", "best.onnx"]
    onnx.checker.check_model("best.onnx", full_check=True)
    assert sorted(path.name for path in Path().iterdir()) == [
        "best.onnx",
        "data",
        "model.onnx",
    ]


def test_json(cli: Any) -> None:
    finished = cli(*SHORT, "-o", "best.onnx", "--json")
    document = finished.json
    assert list(document) == [
        "schema",
        "command",
        "model",
        "output",
        "calibrated",
        "judged",
        "left",
        "left_names",
        "total",
        "reached",
        "verdict",
        "actions",
        "candidates",
    ]
    rows = document["candidates"]
    assert list(rows[0]) == [
        "name",
        "config",
        "score",
        "seconds",
        "bytes",
        "error",
        "judged",
        "pruned",
        "runtime",
        "scatter",
        "pareto",
    ]
    assert [row["score"] for row in rows] == sorted(
        (row["score"] for row in rows), reverse=True
    )
    assert rows[0]["pareto"] and rows[0]["bytes"] == Path("best.onnx").stat().st_size
    assert all(from_dict(row["config"]) for row in rows)


def test_an_interrupted_search_goes_on(cli: Any) -> None:
    journal = ("--journal", "search.journal")
    first = cli(*SHORT, *journal, "--json").json["candidates"]
    lines = Path("search.journal").read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    kept = sum(b'"record"' in line for line in lines[:half])
    assert 0 < kept < 8
    content = b"".join(lines[:half]) + lines[half][:25]
    Path("search.journal").write_bytes(content)
    again = cli(*SHORT, *journal, "--json").json["candidates"]
    seconds = {row["name"]: row["seconds"] for row in first}
    same = [row for row in again if row["seconds"] == seconds[row["name"]]]
    assert len(same) == kept
    assert {(row["name"], row["score"]) for row in again} == {
        (row["name"], row["score"]) for row in first
    }


def test_few_trials(cli: Any) -> None:
    finished = cli(*SHORT, "--trials", "2")
    assert "tried     2 of 8 configurations" in finished.out
    assert len(cli(*SHORT, "--trials", "2", "--json").json["candidates"]) == 2


def test_a_device(cli: Any) -> None:
    """The formats that a file can have; without a model that the device takes, an error."""
    arguments = (*SEARCH[:4], "--calibrator", "none", "--optimize", "none")
    rows = cli(*arguments, "--target", "stx", "--json").json["candidates"]
    assert {row["name"] for row in rows} == {"XINT8", "A8W8", "A16W8"}
    assert {row["config"]["target"] for row in rows} == {"stx"}
    finished = cli(*arguments, "--target", "phx")
    assert (
        finished.code == 2
        and "it has 1; all of it would run on the CPU" in finished.error
    )


def test_a_missed_target_shows_what_there_is(cli: Any) -> None:
    finished = cli(*SHORT, "--min-sqnr", "200", "-o", "best.onnx", "--json")
    assert finished.code == 1
    assert finished.error.endswith("dB: below --min-sqnr 200")
    assert finished.json["error"]["kind"] == "AccuracyError"
    assert len(finished.json["candidates"]) == 8 and Path("best.onnx").exists()
    document = cli(*SHORT, "--min-sqnr", "1", "--json").json
    assert document["reached"] and len(document["candidates"]) == 1


def test_a_budget_leaves_some_out(cli: Any) -> None:
    finished = cli(*SHORT, "--budget", "1/1000000")
    assert finished.code == 0
    (line,) = [
        line for line in finished.out.splitlines() if line.startswith("not tried ")
    ]
    assert "A8W8 minmax" in line
    assert line.endswith(" and 4 more: did not fit into --budget")
    complete = cli(*SHORT, "--budget", "1/1000000", "--verbose").out
    assert complete.count(": did not fit into --budget") == 7
    document = cli(*SHORT, "--budget", "1/1000000", "--json").json
    proposed = [action["text"] for action in document["actions"]]
    assert proposed and all(text in finished.out for text in proposed)
    assert cli(*SHORT, "--budget", "2h").code == 0


def test_what_fails_is_in_the_table(cli: Any) -> None:
    Path("bad.yaml").write_text("nodes: [nowhere]\n", encoding="utf-8")
    finished = cli(
        "search",
        "model.onnx",
        "--data",
        "data",
        "--preset",
        "bad.yaml",
        "A8W8",
        "--trials",
        "2",
        "--json",
    )
    assert finished.code == 0
    assert finished.json["candidates"][-1]["name"] == "bad.yaml"
    finished = cli(
        *SEARCH[:4],
        "--preset",
        "bad.yaml",
        "A8W8",
        "--calibrator",
        "none",
        "--optimize",
        "none",
    )
    assert "failed    bad.yaml: " in finished.out
    rows = [line for line in finished.out.splitlines() if line.startswith("  1 ")]
    assert len(rows) == 1 and "A8W8" in rows[0]
    finished = cli(*SEARCH[:4], "--preset", "bad.yaml")
    assert (
        finished.code == 2
        and "every candidate of the search failed; bad.yaml: " in finished.error
    )


def test_granularity(cli: Any) -> None:
    document = cli(
        *SEARCH[:4],
        "--preset",
        "S8S8",
        "--granularity",
        "tensor",
        "channel",
        "--optimize",
        "none",
        "--json",
    )
    assert any(
        row["name"].endswith(" per_tensor") for row in document.json["candidates"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--preset", "A8W9"],
            ["--preset: unknown preset 'A8W9'", "did you mean 'A8W8'"],
        ),
        (["--preset"], ["--preset: there is none"]),
        (
            ["--calibrator", "minmx"],
            ["--calibrator: unknown calibrator 'minmx'", "did you mean 'minmax'"],
        ),
        (
            ["--optimize", "cle+bias_corection"],
            ["--optimize: unknown optimizer", "did you mean 'bias_correction'"],
        ),
        (
            ["--budget", "10x"],
            ["--budget", "'10x' is no time above 0; write it as 90s, 10m or 1.5h"],
        ),
        (["--budget", "0"], ["--budget", "'0' is no time above 0"]),
        (["--budget=-5m"], ["--budget", "'-5m' is no time above 0"]),
        (["--budget", "m"], ["--budget", "'m' is no time above 0"]),
        (["--min-sqnr", "high"], ["--min-sqnr", "'high' is not a number"]),
        (["--trials", "0"], ["--trials", "'0' is not a whole number of at least 1"]),
        (
            ["--target", "phy"],
            ["--target: unknown target 'phy'", "did you mean 'phx'"],
        ),
        (["--granularity", "row"], ["--granularity", "'row'"]),
        (
            ["--journal", "model.onnx"],
            ["--journal model.onnx is the input MODEL itself"],
        ),
        (
            ["--journal", "no/where.journal"],
            ["journal", "no", "cannot be read and written"],
        ),
        (
            ["--journal", "new.onnx", "-o", "new.onnx"],
            ["--output and --journal are the same file, new.onnx"],
        ),
        (["-o", "model.onnx"], ["--output model.onnx is the input MODEL itself"]),
        (["-o", "data"], ["--output data is the input --data itself"]),
        (["--limit", "1"], ["this needs at least two samples"]),
        (["--jurnal", "x"], ["did you mean '--journal'"]),
    ],
)
def test_bad_input(
    cli: Any, folder: Path, arguments: list[str], words: list[str]
) -> None:
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    finished = cli("search", "model.onnx", "--data", "data", *arguments)
    assert (finished.code, finished.out) == (2, "")
    for word in words:
        assert word in finished.error
    assert {
        path: path.read_bytes() for path in folder.iterdir() if path.is_file()
    } == files


def test_models_and_data_that_do_not_serve(cli: Any) -> None:
    onnx.save(parse("g (float[4] x) => (int64[1] y) { y = ArgMax (x) }"), "top.onnx")
    for arguments, words in (
        (["absent.onnx", "--data", "data"], "absent.onnx cannot be read"),
        (
            ["model.onnx"],
            "there is no data: give samples with --data PATH, or --random-data",
        ),
        (["model.onnx", "--data", "absent"], "absent does not exist"),
        (["top.onnx", "--random-data", "4"], "give a metric"),
    ):
        finished = cli("search", *arguments)
        assert finished.code == 2 and words in finished.error


def test_a_page_is_written(cli: Any) -> None:
    finished = cli(*SHORT, "--html", "found.html")
    assert finished.code == 0
    text = Path("found.html").read_text(encoding="utf-8")
    assert "<h1>Search for a configuration</h1>" in text and ">front</td>" in text
