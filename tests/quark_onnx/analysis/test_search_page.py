"""The page of a search stands alone, says what was found, and a browser lays it out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from quark_onnx import QConfig
from quark_onnx.page.browser import render_page
from quark_onnx.search.candidate import Candidate
from quark_onnx.search.drawing import score_plots
from quark_onnx.search.result import SearchResult
from tests.browser import check_alone, laid_out

A8W8 = QConfig.of("A8W8")


def candidate(
    name: str, score: float | None, size: int, seconds: float, runtime: float = 1.0
) -> Candidate:
    return Candidate(
        score,
        seconds,
        size if score is not None else None,
        runtime=runtime,
        name=name,
        config=A8W8,
    )


@pytest.fixture
def found() -> SearchResult:
    """Seven candidates, of which three are on the front, one failed and one was pruned."""
    import optuna

    candidates = [
        candidate("A16W8 cle", 41.5, 1_400_000, 12.0),
        candidate("A16W8", 40.9, 1_300_000, 4.0),
        candidate("A8W8 <cle>", 27.25, 1_350_000, 6.5),
        candidate("A8W8", 25.0, 1_290_000, 3.0, 0.8),
        candidate("XINT8", 18.0, 1_295_000, 30.0, 1.1),
        replace(candidate("S8S8", 17.0, 1_280_000, 2.0), pruned=True, judged=8),
        replace(candidate("BAD", None, 0, 1.0), error="out of <luck>"),
    ]
    study = optuna.create_study()
    return SearchResult(candidates, 30, 10, ["A8W8 adaquant"], 24, True, study)


def page_of(found: SearchResult) -> str:
    return render_page("search", found.blocks())


def test_it_says_what_was_found(found: SearchResult) -> None:
    text = page_of(found)
    assert "A16W8 cle is best: 41.50 dB SQNR in 1.4 MB" in text
    assert "Take a smaller model: A16W8 <small>1.3 MB, 0.6 dB less" in text
    assert "Raise --budget: 1 configuration did not fit" in text
    # A16W8 is 7 % smaller than the best; XINT8 is as large as A8W8, and slower.
    assert text.count(">front</td>") == 3
    assert '<th class="number">runtime, × float</th>' in text and ">1.10</td>" in text
    assert "ended early, after 8 samples" in text
    assert "1 configuration: out of &lt;luck&gt;" in text and "<cle>" not in text
    assert "activation: " in text
    check_alone(text)


def test_the_text_says_what_the_page_says(found: SearchResult) -> None:
    lines = str(found).splitlines()
    rows = [line for line in lines if line.startswith("  ") and line[2].isdigit()]
    assert len(rows) == 6 and sum(row.endswith("front") for row in rows) == 3
    assert "failed    BAD: out of <luck>" in lines
    assert "not tried A8W8 adaquant: did not fit into --budget" in lines
    start = "verdict   unknown: A16W8 cle is best: 41.50 dB SQNR in 1.4 MB"
    assert lines[-3:] == [
        start,
        "try       take a smaller model: A16W8 (1.3 MB, 0.6 dB less)",
        "try       raise --budget: 1 configuration did not fit",
    ]


def test_a_long_search_says_where_its_candidates_are(found: SearchResult) -> None:
    many = [candidate(f"A8W8 {place}", 20.0, 9, 1.0) for place in range(50)]
    text = str(replace(found, candidates=many))
    assert "  and 10 more; the page and the JSON document have them all\n" in text


def test_a_missed_target_is_poor(found: SearchResult) -> None:
    text = page_of(replace(found, reached=False))
    assert 'class="verdict poor"' in text and "which misses the target" in text


@pytest.mark.parametrize("sizes", [(334_161, 334_184), (334_161, 334_161), (1, 9_000)])
def test_ticks_of_an_axis_differ(found: SearchResult, sizes: tuple[int, int]) -> None:
    """Of sizes that are nearly equal, too."""
    pair = [
        replace(each, bytes=size, score=20.0)
        for each, size in zip(found.candidates, sizes, strict=False)
    ]
    drawn = "".join(score_plots(pair, pair, "SQNR").draw())
    for anchor in ("middle", "end"):
        for plot in drawn.split("<svg")[1:]:
            ticks = re.findall(rf'text-anchor="{anchor}">([^<]*\d)</text>', plot)
            assert len(set(ticks)) == len(ticks) >= 2, ticks


def test_a_single_candidate_has_no_plot(found: SearchResult) -> None:
    text = page_of(replace(found, candidates=found.candidates[:1]))
    assert "<svg" not in text


def test_every_candidate_failed(found: SearchResult) -> None:
    text = page_of(replace(found, candidates=found.candidates[-1:]))
    assert "Every candidate failed" in text


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (768, True), (390, False), (390, True)]
)
def test_a_browser_lays_it_out(
    found: SearchResult, tmp_path: Path, width: int, dark: bool
) -> None:
    found.write_page(tmp_path / "page.html", "Search", "net.onnx")
    page = laid_out(tmp_path / "page.html", width, dark=dark)
    assert [plot["title"] for plot in page["plots"]] == [
        "SQNR against size",
        "SQNR against runtime",
    ]
