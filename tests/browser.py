"""A browser without a window, where one is installed, and what it makes of a page."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
#: Attributes of drawings that are numbers.
_PLACES = ("x", "y", "cx", "cy", "x1", "x2", "y1", "y2", "width", "height", "r")
#: The frame that holds the page. Its size is the page's viewport, whatever the size of the
#: browser's window: ordinary Chromium opens no window narrower than 500 pixels,
#: chromium-headless-shell does.
_FRAME = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><meta name="color-scheme" content="light dark"></head>
<body style="margin: 0">
<script>
addEventListener("message", event => {{
  const out = document.createElement("pre");
  out.id = "measured"; out.textContent = event.data; document.body.append(out);
}});
</script>
<iframe src="{page}" style="border: 0; width: {width}px; height: {height}px"></iframe>
</body></html>
"""
#: A script that measures the page and sends the result to the frame, to be found in what the
#: browser prints.
_MEASURE = """
<script>
addEventListener("load", () => {
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const shown = e => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== "hidden";
  const plots = [...document.querySelectorAll("svg")].filter(shown).map(svg => ({
    box: box(svg), title: svg.querySelector("title").textContent,
    texts: [...svg.querySelectorAll("text")].map(t => ({
      text: t.textContent, class: t.getAttribute("class") || "", box: box(t),
      size: parseFloat(getComputedStyle(t).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width,
    })),
    shapes: [...svg.querySelectorAll("circle, path, rect, line, polyline")].map(e => ({
      kind: e.getAttribute("class"), fill: getComputedStyle(e).fill, box: box(e),
    })),
  }));
  const texts = [...document.querySelectorAll("h1, h2, h3, p, dt, dd, li, code, figcaption, summary")].filter(shown);
  const found = {
    width: innerWidth, scroll: document.documentElement.scrollWidth, plots,
    texts: texts.map(e => ({text: e.textContent.slice(0, 60), box: box(e)})),
    ground: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    loaded: performance.getEntriesByType("resource").map(e => e.name),
  };
  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""  # noqa: E501


def browser() -> str:
    """The path of a browser; without one the test is skipped."""
    found = next(
        (
            path
            for name in (os.environ.get("CHROMIUM", ""), *NAMES)
            if name and (path := shutil.which(name))
        ),
        "",
    )
    if not found:
        pytest.skip(
            "no browser is installed (apt-get install chromium-headless-shell, or name"
            " one in CHROMIUM)"
        )
    return found


def measured(
    page: Path, width: int, height: int = 1000, *, dark: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return what a browser lays out of a page in a viewport of this size, and its complaints on
    the console.
    """
    copy = page.with_name(f"measured_{page.name}")
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</body>", f"{_MEASURE}</body>"), encoding="utf-8")
    frame = page.with_name(f"frame_{page.name}")
    frame.write_text(
        _FRAME.format(page=copy.name, width=width, height=height), encoding="utf-8"
    )
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--window-size={max(width, 500)},{height}",
        f"--user-data-dir={page.parent / 'profile'}",
        "--virtual-time-budget=2000",
    ]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    run = subprocess.run(
        [browser(), *options, "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
        timeout=300,
    )
    result = re.search(r'<pre id="measured">(.*?)</pre>', run.stdout, re.DOTALL)
    assert result, "the page's script did not run"
    return json.loads(unescape(result[1])), [
        line for line in run.stderr.splitlines() if "CONSOLE" in line
    ]


def laid_out(page: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    """What a browser lays out of a page, with nothing from outside, no text over another, and all
    of it inside.
    """
    found, complaints = measured(page, width, dark=dark)
    assert complaints == [] and found["loaded"] == []
    assert found["width"] == width and found["scroll"] <= width
    for plot in found["plots"]:
        left, top, right, bottom = plot["box"]
        assert right - left > 200 and bottom - top > 60, plot["title"]
        assert plot["shapes"]
        for text in plot["texts"]:
            assert text["size"] >= 8.5, text
            x0, y0, x1, y1 = text["box"]
            assert (
                left - 1 <= x0
                and x1 <= right + 1
                and top - 1 <= y0
                and y1 <= bottom + 1
            ), (plot["title"], text)
        for one, other in combinations(plot["texts"], 2):
            assert not _overlap(one["box"], other["box"]), (plot["title"], one, other)
    for text in found["texts"]:
        assert text["box"][0] >= 0 and text["box"][2] <= width, text
    assert (_brightness(found["ground"]) < _brightness(found["ink"])) is dark
    return found


def _overlap(one: list[float], other: list[float]) -> bool:
    return all(
        min(one[i + 2], other[i + 2]) - max(one[i], other[i]) > 1.5 for i in range(2)
    )


def _brightness(color: str) -> int:
    return sum(int(part) for part in re.findall(r"\d+", color)[:3])


def check_alone(text: str) -> None:
    """A page asks for nothing from outside, and its drawings are well-formed."""
    assert not re.search(r"(?:src(?!=\"data:)|href|url\(|@import|https?:)", text)
    assert "<script" not in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        for element in ET.fromstring(drawing).iter():
            numbers = [value for key, value in element.attrib.items() if key in _PLACES]
            assert all(math.isfinite(float(number)) for number in numbers)
