"""The page stands alone, and a browser lays it out as it is meant."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark_onnx import Analysis, QConfig, analyze, quantize_static
from quark_onnx.analysis.findings import Unmatched
from quark_onnx.analysis.weights import bins
from quark_onnx.page.browser import render_page
from quark_onnx.page.svg import short, ticks
from tests.browser import check_alone, laid_out, measured
from tests.models import conv_net, samples


def render(found: Analysis) -> str:
    return render_page("analysis", found.blocks())


@pytest.fixture(scope="module")
def found() -> Analysis:
    """Of a network whose first input is clipped and whose weights have one scale each."""
    model, feeds = conv_net(6), samples(conv_net(6), 6)
    wide = [
        {name: value * np.float32(3) for name, value in feed.items()} for feed in feeds
    ]
    return analyze(
        model, quantize_static(model, feeds, QConfig.of("XINT8").with_(search=0)), wide
    )


def test_the_page_stands_alone(found: Analysis) -> None:
    text = render(found)
    assert len(re.findall("<svg", text)) >= 4
    check_alone(text)


def test_names_are_text(found: Analysis) -> None:
    tensor = replace(found.ranking[0], name='<script>alert("1")</script>', added=1e3)
    text = render(replace(found, tensors=[tensor]))
    assert "<script" not in text and "&lt;script&gt;" in text


def test_an_analysis_without_anything_to_show(found: Analysis) -> None:
    text = render(replace(found, tensors=[], weights=[], unmatched=[], outputs=[]))
    assert "No tensor differs" in text


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    found: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def fail(*_: Any) -> str:
        raise ValueError("as if")

    monkeypatch.setattr("quark_onnx.page.browser.render_page", fail)
    with pytest.raises(ValueError, match="as if"):
        found.write_page(path, "analysis")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("width", "dark"),
    [(1280, False), (390, False), (390, True)],
    ids=["desktop", "phone", "phone-dark"],
)
def test_a_browser_lays_it_out(
    found: Analysis, tmp_path: Path, width: int, dark: bool
) -> None:
    found.write_page(tmp_path / "page.html", "analysis")
    page = laid_out(tmp_path / "page.html", width, dark=dark)
    assert len(page["plots"]) >= 3
    assert all(plot["box"][3] - plot["box"][1] > 100 for plot in page["plots"])


def test_bars_beyond_the_grid_are_set_off(found: Analysis, tmp_path: Path) -> None:
    found.write_page(tmp_path / "page.html", "analysis")
    page, _ = measured(tmp_path / "page.html", 1280)
    clipped = next(
        t
        for t in found.ranking
        if t.clipped_high + t.clipped_low > 1e-3 and t.histogram is not None
    )
    plot = next(
        plot
        for plot in page["plots"]
        if plot["title"] == f"Histogram of {clipped.name} against its grid"
    )
    fills = {shape["kind"]: shape["fill"] for shape in plot["shapes"]}
    assert fills["bar cut"] != fills["bar"]
    band = next(shape["box"] for shape in plot["shapes"] if shape["kind"] == "band")
    cut = next(shape["box"] for shape in plot["shapes"] if shape["kind"] == "bar cut")
    assert cut[0] < band[0] or cut[2] > band[2]


def test_ticks_are_round_and_inside() -> None:
    for lo, hi in ((0.0, 1.0), (-3.7, 12.2), (1e-5, 3e-5), (-4096.0, 4064.0)):
        found = ticks(lo, hi, 5)
        assert 2 <= len(found) <= 8
        assert all(lo <= value <= hi for value in found)
        assert len({short(value) for value in found}) == len(found)


def test_bins_of_an_empty_histogram() -> None:
    from calibrators import Histogram

    assert bins(Histogram()) is None
    constant = Histogram()
    constant.observe(np.full((1, 5), 2.0, np.float32))
    one = bins(constant)
    assert one is not None and sum(one.counts) == 5


def test_it_begins_with_a_verdict_and_what_to_do(found: Analysis) -> None:
    """The verdict is that of compare; a fix for several tensors is one action."""
    text = render(found)
    start = text[: text.index("<h2>Error along the graph")]
    judged = found.verdict
    assert judged is not None and f"SQNR {found.sqnr:.2f} dB" in judged.sentence
    sentence = f"{judged.sentence}."
    assert f"{sentence[0].upper()}{sentence[1:]}" in start
    assert f"<small>On {judged.measured_on}.</small>" in start
    assert f'class="verdict {judged.band}"' in start
    shown = re.findall(r"<li>.*?</li>", start)
    assert len(shown) <= 3 and len(set(shown)) == len(shown)
    assert all("<code>" in action for action in shown)
    assert "adds most of the noise.</small>" in start


def test_tensors_without_a_counterpart_are_grouped_by_reason(found: Analysis) -> None:
    entries = [Unmatched(name, "fused") for name in "abc"] + [Unmatched("d", "lost")]
    text = render(replace(found, unmatched=entries))
    assert "3 tensors and constants: fused" in text
    assert "1 tensor or constant: lost" in text
