"""The page of a forecast stands alone, and a browser lays it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from quark_onnx import npu
from quark_onnx.npu.page import heading, write_page
from quark_onnx.page.browser import render_page
from tests.browser import measured
from tests.models import parse, weight
from tests.quark_onnx.npu.networks import NETWORKS


def render(found: npu.Preflight, name: str = "model") -> str:
    return render_page("forecast", [heading(found, name), *found.blocks()])


@pytest.fixture(scope="module")
def found() -> npu.Preflight:
    return npu.preflight(
        NETWORKS["ShuffleNetV2"]("XINT8"), "stx", kind="XINT8", release="1.6"
    )


def test_it_says_what_is_elsewhere_and_why(found: npu.Preflight) -> None:
    text = render(found, "shuffle <net>.onnx")
    assert "shuffle &lt;net&gt;.onnx" in text and "<net>" not in text
    assert (
        "it moves data in 5 dimensions" in text
        and "RyzenAI-SW quark_quantization logs" in text
    )
    wide, narrow = text.split("</svg>")[:2]
    assert wide.count('class="npu"') == found.subgraphs == 18
    assert narrow.count('class="npu"') == 18
    assert "http" not in text.replace("http-equiv", ""), "nothing comes from outside"


def test_control_characters_do_not_get_into_the_page() -> None:
    model = parse("g (float[1,4] x) => (float[1,4] y) { y = Softplus (x) }")
    model.graph.node[0].name = "\x00\x01\x0b"
    text = render(npu.preflight(model, "stx"))
    assert not set("\x00\x01\x0b") & set(text) and r"\x0b" in text


def test_a_model_that_is_all_there() -> None:
    model = parse(
        "g (float[1,4] x) => (float[1,4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )
    text = render(npu.preflight(model, "stx"))
    assert "Every operator is forecast to run on the NPU" in text


def test_pieces_that_read_from_each_other_are_joined() -> None:
    found = npu.preflight(
        NETWORKS["EfficientNet-b0"]("XINT8"), "stx", kind="XINT8", release="1.6"
    )
    text = render(found)
    drawn = [link for link in found.links if max(link) < 50]
    assert (
        text.split("</svg>")[0].count('class="link"') >= len(drawn) > 60
        and "more subgraphs are not drawn" in text
    )


def test_it_is_written_whole(found: npu.Preflight, tmp_path: Path) -> None:
    write_page(found, tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    title = "<title>model: forecast for stx</title>"
    assert text == render(found).replace("<title>forecast</title>", title)


@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_lays_it_out(
    found: npu.Preflight, tmp_path: Path, width: int
) -> None:
    write_page(found, tmp_path / "page.html")
    page, complaints = measured(tmp_path / "page.html", width)
    assert page["scroll"] <= page["width"] and not page["loaded"] and not complaints
    [plot] = page["plots"]
    left, _, right, _ = plot["box"]
    assert all(
        left - 1 <= text["box"][0] and text["box"][2] <= right + 1
        for text in plot["texts"]
    )
    boxes = [
        shape["box"] for shape in plot["shapes"] if shape["kind"] in ("npu", "cpu")
    ]
    for text in plot["texts"]:
        x0, y0, x1, y1 = text["box"]
        assert any(
            b[0] <= x0 and x1 <= b[2] + 1 and b[1] <= y0 and y1 <= b[3] for b in boxes
        ), text
