"""The report of a run as a page: it stands alone, says what the report says, and a browser lays it
out.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quark_onnx.page.browser import render_page
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.page.experts import tokens_of
from quark_onnx.torch.page.frame import Frame
from quark_onnx.torch.pipelines.estimate import Estimate
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.mixed_precision import mix
from quark_onnx.torch.pipelines.mixture import Mixture
from quark_onnx.torch.pipelines.ptq import PtqResult as Found
from quark_onnx.torch.pipelines.ptq import write_page
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.torch.pipelines.verdict import CheckpointVerdict
from tests import torch_families
from tests.browser import check_alone, laid_out
from tests.torch_models import made, tokens

Run = tuple[Found, Mixture]


def render(found: Found, mixture: Mixture | None = None) -> str:
    return render_page("report", replace(found, mixture=mixture).blocks())


@pytest.fixture(scope="module")
def run() -> Run:
    """Of a model with experts: algorithms of layers, one of blocks and one of the model, and a
    mixture.
    """
    model = made(torch_families.config_of("qwen3_moe"))
    mixture = mix(model, tokens(), ("mxfp4", "mxfp6_e2m3", "mxfp8"), 6, progress=False)
    algorithms = ("awq", "autoround:steps=2", "gptq", "distill:steps=2,sequences=4")
    config = TorchConfig(
        scheme("uint4_wo_32"), exclude=("lm_head",), algorithms=algorithms
    )
    report = quantize_model(model, tokens(), config, progress=False)
    return Found(report, Estimate(1 << 30, 1 << 20), 10.0, 10.5), mixture


def test_the_page_stands_alone(run: Run) -> None:
    text = render(run[0], run[1])
    assert (
        len(re.findall("<svg", text)) == 2 * 4
    )  # errors, bits, divergences, experts; wide and narrow
    check_alone(text)


def test_it_says_what_the_report_says(run: Run) -> None:
    found, mixture = run
    text = render(found, mixture)
    # two drawings, each with a ring or a dot for what each algorithm has made of each layer, and
    # lines for blocks
    own = [each for each in found.report.outcomes if each.layer and each.before > 0]
    changed = [
        each
        for each in own
        if each.before != each.after and each.layer in found.report.quantized
    ]
    wide = next(
        part
        for part in re.findall("<svg.*?</svg>", text, re.DOTALL)
        if "Error before" in part
    )
    assert wide.count('class="hollow"') == len(changed) > 30
    assert wide.count('class="filled"') == sum(
        each.layer in found.report.quantized for each in own
    )
    assert wide.count('class="whole was"') == 2
    hovers = re.findall("<title>(.*?)</title>", wide, re.DOTALL)
    assert all(
        any(hover.startswith(f"{each.layer}\n{each.algorithm}: ") for hover in hovers)
        for each in own
    )
    # a row for each outcome, in the order of the model
    table = text[text.index(">Layers</h2>") :]
    rows = re.findall('<tr(?: class="more")?><td.*?</tr>', table)
    assert len(rows) == len(found.report.outcomes)
    assert (
        "the whole model" in rows[0]
        and f"{found.report.outcomes[-1].before:#.3g}" in rows[0]
    )
    places = [
        text.index(f">{name}</th>") for name in ("model.layers.0", "model.layers.1")
    ]
    assert places == sorted(places)
    for group in mixture.groups:
        assert (
            f"{group.layers[0]} and {len(group.layers) - 1} more" in text
            or f"{group.layers[0]}\n" in text
        )
    assert "10.5000" in text and "+5.00 %" in text and f"{mixture.bits:.3f}" in text


def test_heights_are_those_of_a_logarithmic_scale() -> None:
    frame = Frame.around(
        ["a.0.x", "a.0.y", "a.1.x"], 1000, 300, [2e-4, 3e-2, 0.0, math.inf]
    )
    assert frame.lo <= 2e-4 and frame.hi >= 3e-2
    steps = [frame.y(value) for value in (1e-3, 1e-2)]
    assert steps[0] - steps[1] == pytest.approx(frame.y(2e-3) - frame.y(2e-2))
    assert frame.y(0.0) == frame.y(frame.lo) == pytest.approx(frame.bottom)
    assert frame.x(0) < frame.x(1) < frame.x(2) < 1000


def test_tokens_of_experts(run: Run) -> None:
    found = tokens_of(run[0].report.outcomes)
    assert list(found) == ["model.layers.0", "model.layers.1"]
    for row in found.values():
        assert set(row) == set(range(4))
        assert sum(row.values()) == 2 * 3 * 12  # two experts for each token
    notes = [
        ("m.0.experts.1.up", "the data has not reached it"),
        ("m.0.experts.0.up", "7 tokens"),
        ("m.0.q", "9 tokens"),
    ]
    outcomes = [Outcome(name, "gptq", 0, 0, note) for name, note in notes]
    assert tokens_of(outcomes) == {"m.0": {1: 0, 0: 7}}


def test_names_are_text() -> None:
    spec, name = scheme("int8"), '<script>alert("1")</script>'
    report = TorchReport(
        {name: spec},
        {f"{name}2": "<b>"},
        ["<i>"],
        [Outcome(name, "<u>", 0.2, 0.1, "<s>")],
    )
    text = render(Found(report, Estimate(1, 1)))
    assert (
        not re.search("<(?:script|b|i|u|s)>", text.replace("<b>0.1", ""))
        and "&lt;script&gt;" in text
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.0, 0.0), (math.nan, 0.1), (0.1, math.inf), (0.1, 0.0), (1e-30, 1e30)],
)
def test_odd_errors(before: float, after: float) -> None:
    report = TorchReport(
        {"m.0.q": scheme("int8")}, outcomes=[Outcome("m.0.q", "gptq", before, after)]
    )
    text = render(Found(report, Estimate(1, 1)))
    check_alone(text)
    assert ("Errors along the model" in text) is (before > 0 and math.isfinite(after))


def test_errors_below_zero_are_in_the_table() -> None:
    """Those that are counted from what layers before have done wrong are known up to a constant."""
    names = ("m.0.q", "m.0.k", "m.0.v")
    outcomes = [
        Outcome(names[0], "gptaq", 0.2, 0.1),
        Outcome(names[1], "gptaq", -1e-3, -0.25),
        Outcome(names[2], "gptaq", 0, 0),
    ]
    text = render(
        Found(
            TorchReport(dict.fromkeys(names, scheme("int8")), outcomes=outcomes),
            Estimate(1, 1),
        )
    )
    assert (
        "−0.00100" in text
        and "−0.250" in text
        and "1 that are below 0" in text
        and ">–<" in text
    )


def test_verdict_and_repeated_formats() -> None:
    quantized = {
        f"model.layers.{block}.mlp.{name}": scheme("int8" if name == "q" else "mxfp4")
        for block in range(4)
        for name in ("q", "up", "down")
    }
    verdict = CheckpointVerdict(
        4 << 20, 1 << 20, 2 << 20, "of text", 12, 0.2, 9.0, 9.5, advice="x"
    )
    text = render(Found(TorchReport(quantized), Estimate(1, 1), verdict=verdict))
    assert (
        "4.0 MiB before, 1.0 MiB after: 4.00 bits per weight of all layers; much is"
        in text
    )
    assert "<ol><li>X</li></ol>" in text and "25 % of 4.0 MiB" in text
    # each format is there once among formats; the blocks are alike, so that one entry is enough
    formats = text[text.index(">Formats</h2>") : text.index(">Layers</h2>")]
    assert formats.count(">mlp.up, mlp.down</td>") == 1
    assert ">8</td>" in formats and ">4</td>" in formats
    assert text.count('scope="rowgroup"') == 1
    assert "model.layers.0 to model.layers.3" in text
    check_alone(text)


def test_a_report_without_anything_to_show() -> None:
    text = render(Found(TorchReport(), Estimate(1, 1)))
    assert "<svg" not in text and "Layers quantized" in text
    check_alone(text)


@pytest.mark.parametrize(
    ("width", "dark"),
    [(1280, False), (390, False), (390, True)],
    ids=["desktop", "phone", "phone-dark"],
)
def test_a_browser_lays_it_out(
    run: Run, tmp_path: Path, width: int, dark: bool
) -> None:
    found, mixture = run
    noted = replace(found.report, notes=["a note with_a_name." + "that.is.long." * 20])
    write_page(
        replace(found, report=noted), tmp_path / "page.html", "folder → other", mixture
    )
    page = laid_out(tmp_path / "page.html", width, dark=dark)
    titles = [plot["title"].split()[0] for plot in page["plots"]]
    assert titles == ["Error", "Bits", "Divergence", "Tokens"]
    colours: dict[str, Any] = {
        shape["fill"]
        for shape in page["plots"][0]["shapes"]
        if shape["kind"] == "filled"
    }
    assert (
        len(colours) == 2
    )  # of the algorithms with dots; what works on blocks has lines


def test_a_browser_lays_out_many_blocks(tmp_path: Path) -> None:
    names = [
        f"model.layers.{block}.mlp.experts.{expert}.up_proj"
        for block in range(60)
        for expert in range(40)
    ]
    spec = scheme("mxfp4")
    outcomes = [
        Outcome(name, "gptq", 0.1, 0.001 * (1 + place % 7), f"{place} tokens")
        for place, name in enumerate(names)
    ]
    report = TorchReport(dict.fromkeys(names, spec), {}, [], outcomes)
    write_page(Found(report, Estimate(1, 1)), tmp_path / "page.html")
    for width in (1280, 390):
        assert len(laid_out(tmp_path / "page.html", width)["plots"]) == 2
