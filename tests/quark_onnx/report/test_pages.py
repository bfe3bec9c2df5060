"""Reports and comparisons as pages: blocks, and the samples that differ most."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quark_onnx import compare, quantize
from quark_onnx.page.blocks import (
    Action,
    Drawing,
    Facts,
    Figure,
    Gallery,
    Heading,
    Judgement,
    Multiline,
    Names,
    Notes,
    Picture,
    Problem,
    Problems,
    Ranking,
    RankingEntry,
    Reasons,
    Share,
    Strong,
    Terms,
    Text,
    TitledTable,
    Warnings,
)
from quark_onnx.page.browser import html_of, render_page
from quark_onnx.page.png import png
from quark_onnx.page.svg import drawing, tag
from quark_onnx.page.terminal import render_lines
from quark_onnx.report.verdict.boxes import DetectorLayout
from quark_onnx.report.verdict.exhibits import Exhibits
from quark_onnx.report.verdict.task import Task
from tests.browser import check_alone, laid_out
from tests.models import normal, parse, weight

Arrays = dict[str, NDArray[Any]]
CLASSIFIER = parse(
    """g (float[N, 3, 16, 16] x) => (float[N, 4] y) {
        c = Conv <kernel_shape = [3, 3]> (x, w)
        p = GlobalAveragePool (c)
        f = Flatten (p)
        y = Softmax (f)
    }""",
    w=weight(4, 3, 3, 3),
)


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """The pixels of a PNG file without filters, by the specification."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, parts = 8, dict[bytes, bytes]()
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (check,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert check == zlib.crc32(kind + body)
        parts[kind] = body
        place += 12 + length
    width, height, depth, color = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert (depth, color) == (8, 2)
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8)
    rows = rows.reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_a_png_has_the_pixels() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(pixels_of(png(image)), image)
    half = np.ones((5, 14, 3), np.uint8)[:, ::2]  # not contiguous
    np.testing.assert_array_equal(pixels_of(png(half)), half)


def images(exhibits: Exhibits) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    for picture in exhibits.gallery.pictures:
        parts = [
            (title, pixels_of(part) if isinstance(part, bytes) else part)
            for title, part in picture.parts
        ]
        yield picture.caption, parts


def test_images_whose_class_changed() -> None:
    """Of eight samples three change, the surest first; the others are not shown."""
    task = Task("classifier", "y", ranks=(("y", 2, "f"),))
    exhibits = Exhibits()
    for index, margin in enumerate([0.1, 0.0, 0.9, 0.0, 0.5, 0.0, 0.0, 0.0]):
        before = np.array([[0.0, margin, 0.0]])
        after = np.array([[0.0, 0.0, 1.0]]) if margin else before
        image = np.full((1, 3, 16, 20), float(index), np.float32)
        image[0, :, 0, 0] = 10.0
        exhibits.add(task, {"x": image}, {"y": before}, {"y": after})
    found = list(images(exhibits))
    assert [caption for caption, _ in found] == [
        f"sample {index}: class 1 in float, 2 quantized" for index in (2, 4, 0)
    ]
    shown = found[0][1][0][1]
    assert shown.shape == (16, 20, 3)
    assert (shown[0, 0] == 255).all() and (shown[1:] == 0).all()


def test_boxes_of_both_models() -> None:
    layout = DetectorLayout("selected", "y", "", "", (32, 32), 6)
    task = Task("detector", "y", layout, (("y", 3, "f"),))
    box = np.array([[[4.0, 6.0, 20.0, 24.0, 0.9, 0.0]]])
    exhibits = Exhibits()
    image = np.zeros((1, 3, 32, 32), np.float32)
    exhibits.add(task, {"x": image}, {"y": box}, {"y": box})
    assert not exhibits.gallery.pictures
    moved = box + np.array([8.0, 4.0, 8.0, 4.0, 0.0, 0.0])
    exhibits.add(task, {"x": image}, {"y": box}, {"y": moved})
    ((caption, parts),) = images(exhibits)
    assert caption == "sample 1: 1 of 1 box lost, 1 new"
    before, after = (part for _, part in parts)
    assert before[6, 10].any() and not before[10, 10].any()  # the frame, and inside
    assert after[10, 20].any() and not after[6, 10].any()


def test_images_and_their_difference() -> None:
    task = Task("image", "y", ranks=(("y", 4, "f"),))
    before = np.linspace(0, 1, 3 * 16 * 16, dtype=np.float32).reshape(1, 3, 16, 16)
    exhibits = Exhibits()
    exhibits.add(task, {"x": before}, {"y": before}, {"y": before})
    assert not exhibits.gallery.pictures  # no difference, nothing to see
    exhibits.add(task, {"x": before}, {"y": before}, {"y": before + 0.05})
    ((caption, parts),) = images(exhibits)
    assert caption.startswith("sample 1: root mean square error 0.05")
    assert [title for title, _ in parts] == ["float", "quantized", "difference"]
    # Neither numbers that are none, nor an image of one color.
    for odd in (np.full_like(before, np.nan), np.ones_like(before)):
        exhibits.add(task, {"x": before}, {"y": odd}, {"y": odd + np.float32(1e-6)})
    assert len(exhibits.gallery.pictures) == 1
    # Ten times 0.05, around gray: three quarters of the way to white.
    np.testing.assert_allclose(parts[2][1], 191, atol=1)


def test_curves_of_the_worst_samples() -> None:
    task = Task("series", "y", ranks=(("y", 2, "f"),))
    exhibits = Exhibits()
    wave = np.sin(np.linspace(0, 6, 50))[None]
    for error in range(10):
        exhibits.add(task, {"x": wave}, {"y": wave}, {"y": wave + 0.01 * error})
    captions = [caption for caption, _ in images(exhibits)]
    assert captions == [f"sample {index}, output y" for index in range(9, 3, -1)]
    # The worst line of a batch.
    batch = np.concatenate([wave, wave, wave])
    errors = np.array([[0.0], [9.0], [0.0]])
    exhibits.add(task, {}, {"y": batch}, {"y": batch + errors})
    assert next(images(exhibits))[0] == "sample 10, output y, line 1"
    assert "<polyline" in exhibits.gallery.pictures[0].parts[0][1]  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(2, 3), (1, 3, 4, 4), (1, 7, 16, 16), (1, 16, 16)])
def test_inputs_that_are_no_images_are_not_shown(shape: tuple[int, ...]) -> None:
    task = Task("classifier", "y", ranks=(("y", 2, "f"),))
    exhibits = Exhibits()
    rows = shape[0]
    before, after = np.eye(2)[[0] * rows], np.eye(2)[[1] * rows]
    exhibits.add(task, {"x": np.ones(shape)}, {"y": before}, {"y": after})
    assert not exhibits.gallery.pictures


DRAWN = drawing(400, 100, "<D>", [tag("rect", width=9, height=9)])
BLOCKS = [
    Heading("Title <1>", "a.onnx → b.onnx"),
    Judgement("risky", "outputs <x>", (Action("try:", "--preset A16W8"),)),
    Facts([("Size", "1 <MB>", "less")]),
    TitledTable("Outputs", ("name", "dB"), [("<y>", "20")], "a note", "error"),
    TitledTable(
        "Layers",
        ("name", "other format", "names", "error"),
        [("<B>",), ("<L>", "", Names("2 <K>", ("<I>", "<J>")), Strong("0.1"))],
    ),
    Reasons("Float", {"<N>": "why"}, "node", "nodes"),
    Notes("Notes", ["one <two>"], "notes"),
    Warnings(lines=["<W>"]),
    Drawing("Plot", "a <Q>", lambda: [DRAWN], [("ring", "<K>")]),
    Ranking(
        "Noise",
        "most first",
        [
            RankingEntry(
                "<E>",
                "<O>",
                [("SQNR", "20 dB")],
                [Share(0.5, "<C>", "<M>", "--a <A>")],
                [Figure(DRAWN, "Weight", "<F>", "<G>")],
            )
        ],
        "none",
        "tensor",
        "noise",
    ),
    Problems(
        "Rules",
        ("severity", "rule", "what", "fix", "from"),
        [Problem("wrong", "R1", "<R>", [("<P>", "<V>")], "<H>", ["<Z>"])],
    ),
    Terms("Terms", [("<T>", "a term")]),
    Text("Settings", "a: <set>\n  c: 1"),
    Gallery("Images", "look", [Picture("<s>", [("x", png(np.zeros((2, 2, 3))))])]),
]


def test_every_block_escapes_names() -> None:
    text = render_page("page", BLOCKS)
    names = [f"<{name}>" for name in "1xyNsBLKIJWQDEOCMAFGTRPVHZ"]
    for name in (*names, "<MB>", "<two>", "<set>"):
        assert (
            name not in text and name.replace("<", "&lt;").replace(">", "&gt;") in text
        )
    check_alone(text)
    no_problem = Problems("a", ("", "", "", "", ""), [])
    for empty in (
        TitledTable("a", (), []),
        Reasons("a", {}, "", ""),
        Notes("a", []),
        no_problem,
    ):
        assert html_of(empty) == ""
    assert "none" in html_of(replace(no_problem, nothing="none"))
    assert html_of(Gallery("a", "", [])) == html_of(Drawing("a", "", tuple)) == ""
    assert "none" in html_of(Ranking("a", "", [], "none"))
    with pytest.raises(TypeError, match="int is no block"):
        html_of(1)  # type: ignore[arg-type]


def test_a_name_with_a_line_break_stays_in_its_line() -> None:
    """It could pass for another row."""
    names = Names("2 Conv", ("y\nz: 99 dB",))
    grid = TitledTable("Outputs", ("output", "nodes"), [("x\nz: 99 dB", names)])
    text = html_of(grid)
    assert r"x\nz: 99 dB" in text and r"y\nz: 99 dB" in text
    grid = TitledTable("Sources", ("from", ""), [(Multiline("measured\nsource"), "")])
    assert "measured\nsource" in html_of(grid)


def test_lines_have_short_titles_and_end_with_the_verdict() -> None:
    """Blocks without a short title are for the page alone."""
    assert render_lines(BLOCKS) == [
        "error     a note:",
        "  name  dB",
        "  <y>   20",
        "notes     one <two>",
        "noise     most first:",
        "  #  tensor  SQNR",
        "  1  <E>     20 dB  <O>",
        "       <C>",
        "         -> <M>: --a <A>",
        "wrong     R1: <R>",
        "            <P>: <V>",
        "          fix: <H>",
        "          from: <Z>",
        "warning   <W>",
        "verdict   risky: outputs <x>",
        "try       --preset A16W8: try:",
    ]
    many = Notes("Notes", [str(number) for number in range(20)], "notes")
    more = "          and 8 more; the page and the JSON document have them all"
    assert render_lines([many])[-2:] == ["          11", more]
    assert render_lines([many], complete=True)[-1] == "          19"
    run = Action("run", "quark-onnx x", "1 node")
    command = Judgement("good", "fine", (run,), "2 samples")
    assert render_lines([command])[1:] == [
        "          on 2 samples",
        "try       run (1 node)",
        "          quark-onnx x",
    ]


def test_odd_names_do_not_break_a_table() -> None:
    """A line break is escaped, and columns make no room for a very long name."""
    name = "n" * 200
    rows = [
        ("a\nb: 99 dB", "20", "x"),
        (name, "", "y"),
        ("c", name, ""),
        ("d", "3", "z"),
    ]
    lines = render_lines(
        [TitledTable("", ("output", "dB", "cosine"), rows, "", "error")]
    )
    assert lines[1:] == [
        "  output       dB  cosine",
        r"  a\nb: 99 dB  20  x",
        f"  {name}",
        "                   y",
        f"  c            {name}",
        "  d            3   z",
    ]


def test_a_long_name_breaks_in_its_cell() -> None:
    """On a page, too, the columns beside it stay where they are."""
    shown = html_of(
        TitledTable("", ("output", "dB"), [("<" * 61, "20"), ("x" * 60, "1")])
    )
    assert f'<span class="long">{"&lt;" * 61}</span>' in shown
    assert shown.count('class="long"') == 1


def test_long_tables_are_cut() -> None:
    grid = TitledTable(
        "", ("name", "dB"), [(str(row), "2") for row in range(50)], "", "error"
    )
    lines = render_lines([grid])
    assert len(lines) == 1 + 1 + 40 + 1
    assert lines[-1].strip().startswith("and 10 more; the page and the JSON document")
    assert len(render_lines([grid], complete=True)) == 1 + 1 + 50


def test_rows_of_a_table_in_a_terminal() -> None:
    """A row of a single cell is a title; names of a cell are in brackets."""
    rows = [("group",), (Names("2 Conv", ("a", "b")), "−3.5", "")]
    grid = TitledTable("Nodes", ("nodes", "dB", "note"), rows, "all", "nodes")
    assert render_lines([grid.without_empty_columns()]) == [
        "nodes     all:",
        "  nodes          dB",
        "  group",
        "  2 Conv (a, b)  -3.5",
    ]
    rows = [("a", "", "1"), ("b", "", "2")]
    grid = TitledTable("", ("name", "no", "dB"), rows).without_empty_columns()
    assert (grid.header, grid.rows) == (["name", "dB"], [["a", "1"], ["b", "2"]])
    # Below a title, too.
    rows = [("group",), ("a", "", "1")]
    kept = TitledTable("", ("name", "no", "dB"), rows).without_empty_columns()
    assert (kept.header, kept.rows) == (["name", "dB"], [("group",), ["a", "1"]])
    # A second column keeps rows apart from titles.
    grid = TitledTable("", ("name", "no", "dB"), [("group",), ("a", "", "")])
    kept = grid.without_empty_columns()
    assert (kept.header, kept.rows) == (["name", "no"], [("group",), ["a", ""]])


def test_places_of_a_problem_are_grouped() -> None:
    """Three names stand for more of one kind, and three kinds for more of them."""
    same = [(f"n{place}", "gone") for place in range(5)]
    other = [(f"m{place}", f"has {place}") for place in range(4)]
    problem = Problem("error", "G1", "is static", [*same, *other])
    block = Problems("", ("", "", "", "", ""), [problem])
    assert render_lines([block]) == [
        "error     G1: is static",
        "            n0, n1, n2 and 2 more: gone",
        "            m0: has 0",
        "            m1: has 1",
        "            and 2 more; the page and the JSON document have them all",
    ]
    lines = render_lines([block], complete=True)
    assert lines[1:3] == ["            n0: gone", "            n1: gone"]
    assert len(lines) == 1 + 5 + 4
    reasons = Reasons("Float", dict.fromkeys("abcd", "why"), "node", "nodes", "float")
    assert render_lines([reasons]) == ["float     a, b, c and 1 more: why"]
    assert len(render_lines([reasons], complete=True)) == 4


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_lays_it_out(width: int, dark: bool, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render_page("page", BLOCKS), encoding="utf-8")
    laid_out(tmp_path / "page.html", width, dark=dark)


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    """The style sheet of the page does not reach the notebook."""
    shown = quantize(CLASSIFIER, None, "W8").report._repr_html_()
    assert shown.startswith('<iframe srcdoc="') and shown.count("<style>") == 1
    page = shown.split('srcdoc="')[1].split('" style="')[0]
    assert '"' not in page and "&quot;utf-8&quot;" in page


def test_report_and_comparison_as_pages(tmp_path: Path) -> None:
    samples = [{"x": normal(1, 3, 16, 16, seed=seed)} for seed in range(70)]
    result = quantize(CLASSIFIER, samples, "A8W8")
    assert "exhibits" not in result.report.to_dict()
    result.report.write_page(tmp_path / "r.html", "Quantization", "net.onnx")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert result.report.verdict is not None
    assert "net.onnx: Quantization" in text and "GlobalAveragePool" in text
    assert f"<b>{result.report.verdict.band.capitalize()}</b>" in text
    found = compare(CLASSIFIER, result.model, samples[:20], time=True)
    page = render_page("page", found.blocks())
    assert "Latency" in page and "run by both models" in page
    check_alone(page)
    random = quantize(CLASSIFIER, None, "W8").report
    assert not any(isinstance(block, Gallery) for block in random.blocks())


def test_a_box_near_the_limit_is_neither_lost_nor_new() -> None:
    """As in the verdict: its score passes the limit in one model alone."""
    layout = DetectorLayout("selected", "y", "", "", (32, 32), 6)
    task = Task("detector", "y", layout, (("y", 3, "f"),))
    exhibits = Exhibits()
    image = np.zeros((1, 3, 32, 32), np.float32)
    before, after = (
        np.array([[[4.0, 6.0, 20.0, 24.0, score, 0.0]]]) for score in (0.24, 0.26)
    )
    exhibits.add(task, {"x": image}, {"y": before}, {"y": after})
    assert not exhibits.gallery.pictures


def test_a_title_that_is_no_text(tmp_path: Path) -> None:
    """Names of files may hold bytes that are no UTF-8."""
    page = render_page(
        "m\udcff", [Heading("a", "m\udcff"), Judgement("good", "\udcff")]
    )
    page.encode("utf-8")
