"""Draw the pictures of README and docs/ as SVG: ``python scripts/diagrams.py [--check]``.

Pictures adapt to light and dark by a media query. With ``--check`` nothing is written, and the exit
code is 1 if a file differs; a test runs that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import figures  # noqa: E402

from quark_onnx.page.svg import linear, tag  # noqa: E402

ASSETS = ROOT / "docs" / "assets"

STYLE = """
svg { font: 13px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.paper { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e }
.line { stroke: #59636e; fill: none } .strong { font-weight: 600 }
.small { font-size: 11px } .mono { font-family: ui-monospace, Menlo, Consolas, monospace }
.float { fill: #ddf4ff; stroke: #54aeff } .data { fill: #fff8c5; stroke: #d4a72c }
.decide { fill: #fbefff; stroke: #c297ff } .code { fill: #dafbe1; stroke: #4ac26b }
.sign { fill: #ffcecb; stroke: #ff8182 }
.ours { fill: #0969da } .theirs { fill: #8c959f } .grid { stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117 } .ink { fill: #f0f6fc } .soft { fill: #9198a1 }
.line { stroke: #9198a1 }
.float { fill: #0c2d6b; stroke: #388bfd } .data { fill: #4b2900; stroke: #bb8009 }
.decide { fill: #3c1e70; stroke: #a371f7 } .code { fill: #04260f; stroke: #2ea043 }
.sign { fill: #67060c; stroke: #f85149 }
.ours { fill: #4493f8 } .theirs { fill: #656c76 } .grid { stroke: #3d444d }
}
"""


def text(x: float, y: float, content: str, class_: str = "ink", **more: str) -> str:
    """Return a line of text."""
    return tag("text", escape(content), x=x, y=y, class_=class_, **more)


def centered(x: float, y: float, content: str, class_: str = "ink") -> str:
    """Return a line of text around its middle."""
    return text(x, y, content, class_, text_anchor="middle")


def box(x: float, y: float, width: float, height: float, class_: str) -> str:
    """Return a rounded rectangle."""
    return tag("rect", x=x, y=y, width=width, height=height, rx=6.0, class_=class_)


def labelled(
    x: float, y: float, width: float, height: float, label: str, class_: str
) -> str:
    """Return a rectangle with a label in its middle."""
    label_text = centered(x + width / 2, y + height / 2 + 5, label, "ink strong")
    return box(x, y, width, height, class_) + label_text


def arrow(points: Sequence[tuple[float, float]]) -> str:
    """Return a line with an arrow head at its end."""
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    return tag("path", d=path, class_="line", marker_end="url(#head)")


HEAD = tag(
    "marker",
    tag("path", d="M0 0 L8 4 L0 8 z", class_="soft"),
    id="head",
    viewBox="0 0 8 8",
    refX=7.0,
    refY=4.0,
    markerWidth=7.0,
    markerHeight=7.0,
    orient="auto",
)


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return an SVG file."""
    content = "".join(
        [
            tag("title", escape(title)),
            f"<style>{STYLE}</style>",
            tag("defs", HEAD),
            tag("rect", width=width, height=height, class_="paper"),
            *parts,
        ]
    )
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{content}</svg>\n'
    )


#: Stages in their order: name, what happens, class.
STAGES = (
    ("load", "check the model", "float"),
    ("prepare", "fold, clean", "float"),
    ("optimize", "CLE, rotations", "float"),
    ("mix", "choose formats", "decide"),
    ("plan", "decide per tensor", "decide"),
    ("calibrate", "measure ranges", "data"),
    ("guard", "keep nodes float", "decide"),
    ("solve", "scales, zero points", "decide"),
    ("search", "move scales", "data"),
    ("refine", "GPTQ, AdaRound", "data"),
    ("insert", "Q/DQ pairs", "code"),
    ("fuse", "integer operators", "code"),
    ("finish", "run, measure, rename", "code"),
)


def stages() -> str:
    """Draw the line of stages."""
    columns, width, height, gap = 5, 132.0, 52.0, 18.0
    parts = []
    for index, (name, what, class_) in enumerate(STAGES):
        row, column = divmod(index, columns)
        x, y = 12 + column * (width + gap), 14 + row * (height + 30)
        middle = x + width / 2
        parts.append(box(x, y, width, height, class_))
        parts.append(centered(middle, y + 22, name, "ink strong"))
        parts.append(centered(middle, y + 40, what, "soft small"))
        if index == len(STAGES) - 1:
            continue
        if column < columns - 1:
            parts.append(arrow([(x + width, y + 26), (x + width + gap, y + 26)]))
        else:
            turn = y + height + 15
            first = 12 + width / 2
            corners = [(middle, y + height), (middle, turn), (first, turn)]
            parts.append(arrow([*corners, (first, turn + 15)]))
    legend = (
        ("float graph", "float"),
        ("decision", "decide"),
        ("reads samples", "data"),
        ("quantized graph", "code"),
    )
    for index, (name, class_) in enumerate(legend):
        y = 184.0 + index * 15
        parts.append(box(478.0, y, 14.0, 11.0, class_))
        parts.append(text(500.0, y + 10, name, "soft small"))
    title = "The stages of one quantization, from load to finish"
    return picture(762, 252, title, parts)


def qdq_placement() -> str:
    """Draw a Conv with Relu before and after the insertion of Q/DQ pairs."""
    parts = [text(16, 24, "float graph", "soft"), text(16, 128, "quantized", "soft")]
    y = 40.0
    names = (("x", 16.0, 40.0), ("Conv", 96.0, 72.0), ("Relu", 200.0, 72.0))
    for name, x, width in names:
        parts.append(labelled(x, y, width, 34, name, "float"))
    parts.append(labelled(304, y, 72, 34, "Add", "float"))
    for start, end in ((56.0, 96.0), (168.0, 200.0), (272.0, 304.0), (376.0, 412.0)):
        parts.append(arrow([(start, y + 17), (end, y + 17)]))
    parts.append(text(420, y + 22, "y"))
    parts.append(text(96, y + 50, "weight, bias", "soft small"))
    y = 144.0
    parts.append(labelled(16, y, 40, 34, "x", "float"))
    pairs = (76.0, 332.0, 524.0)
    for x in pairs:
        parts.append(labelled(x, y, 28, 34, "Q", "code"))
        parts.append(labelled(x + 40, y, 36, 34, "DQ", "code"))
        parts.append(arrow([(x + 28, y + 17), (x + 40, y + 17)]))
    parts.append(labelled(180, y, 128, 34, "Conv + Relu", "float"))
    parts.append(labelled(436, y, 64, 34, "Add", "float"))
    for start, end in (
        (56.0, 76.0),
        (152.0, 180.0),
        (308.0, 332.0),
        (408.0, 436.0),
        (500.0, 524.0),
        (600.0, 628.0),
    ):
        parts.append(arrow([(start, y + 17), (end, y + 17)]))
    parts.append(text(636, y + 22, "y"))
    constants = (
        (76.0, "weight: int8 codes", "scale per channel"),
        (256.0, "bias: int32 codes", "scale = x scale × weight scale"),
    )
    for x, name, scale in constants:
        parts.append(labelled(x, 208, 160, 30, name, "data"))
        parts.append(text(x, 254, scale, "soft small"))
    parts.append(arrow([(172, 208), (222, 178)]))
    parts.append(arrow([(320, 208), (268, 178)]))
    note = "Weight and bias pass a DQ. onnxruntime fuses DQ, Conv, Relu and Q into QLinearConv."
    parts.append(text(16, 280, note, "soft small"))
    title = "Q/DQ pairs around a Conv with a Relu, and an Add"
    return picture(662, 296, title, parts)


#: Formats: name, sign, exponent and mantissa bits, values that share a scale, kind of scale.
FORMATS = (
    ("int8", 0, 0, 8, "tensor or channel", "float32 scale, zero point"),
    ("int4", 0, 0, 4, "block of 32 to 128", "float scale, zero point"),
    ("fp8e4m3", 1, 4, 3, "tensor or channel", "float32 scale"),
    ("fp8e5m2", 1, 5, 2, "tensor or channel", "float32 scale"),
    ("float16", 1, 5, 10, "", "no scale"),
    ("bfloat16", 1, 8, 7, "", "no scale"),
    ("bfp16", 1, 0, 7, "block of 8", "8-bit exponent"),
    ("mx9", 1, 0, 7, "block of 16", "8-bit exponent, 1 bit per 2 values"),
    ("mxfp8e4m3", 1, 4, 3, "block of 32", "8-bit exponent (E8M0)"),
    ("mxfp6e2m3", 1, 2, 3, "block of 32", "8-bit exponent (E8M0)"),
    ("mxfp4e2m1", 1, 2, 1, "block of 32", "8-bit exponent (E8M0)"),
    ("mxint8", 1, 0, 7, "block of 32", "8-bit exponent (E8M0)"),
    ("nvfp4", 1, 2, 1, "block of 16", "fp8 scale, global float32 scale"),
)


def formats() -> str:
    """Draw the bits of one value of each format, and what its scale is."""
    cell, top, step = 17.0, 44.0, 25.0
    parts = [
        text(12, 26, "format", "soft"),
        text(112, 26, "bits of one value", "soft"),
        text(404, 26, "shared by", "soft"),
        text(548, 26, "scale", "soft"),
    ]
    for row, (name, sign, exponent, mantissa, block, scale) in enumerate(FORMATS):
        y = top + row * step
        parts.append(text(12, y + 13, name, "ink mono"))
        kinds = ["sign"] * sign + ["data"] * exponent + ["code"] * mantissa
        for bit, kind in enumerate(kinds):
            x = 112 + bit * cell
            square = tag("rect", x=x, y=y, width=cell - 2, height=17.0, class_=kind)
            parts.append(square)
        parts.append(text(404, y + 13, block, "ink small"))
        parts.append(text(548, y + 13, scale, "ink small"))
    bottom = top + len(FORMATS) * step + 8
    legend = (("sign", "sign"), ("exponent", "data"), ("integer or mantissa", "code"))
    x = 112.0
    for name, class_ in legend:
        parts.append(box(x, bottom, 14, 11, class_))
        parts.append(text(x + 20, bottom + 10, name, "soft small"))
        x += 100
    return picture(762, bottom + 24, "Number formats bit by bit", parts)


def accuracy_chart() -> str:
    """Draw the loss of accuracy of A8W8 and of onnxruntime on the tasks of README."""
    parts = []
    left, right, top, step = 172.0, 640.0, 58.0, 46.0
    losses = []
    for task in figures.FIRST_TASKS:
        floating = float(figures.value("accuracy", f"{task}/float/float"))
        ours = floating - float(figures.preset_accuracy(task, "A8W8"))
        theirs = floating - float(figures.onnxruntime_best(task))
        losses.append((task, ours, theirs))
    largest = max(max(ours, theirs) for _, ours, theirs in losses)
    place = linear(0, largest, left, right)
    bottom = top + step * len(losses)
    for tick in range(0, int(largest) + 1, 2):
        x = place(tick)
        parts.append(tag("path", d=f"M{x:g} {top - 8:g}V{bottom:g}", class_="grid"))
        parts.append(centered(x, bottom + 16, str(tick), "soft small"))
    for row, (task, ours, theirs) in enumerate(losses):
        y = top + row * step
        parts.append(text(12, y + 18, TITLES[task], "ink"))
        bars = ((ours, "ours", 0), (theirs, "theirs", 17))
        for loss, class_, offset in bars:
            width = max(place(max(loss, 0)) - left, 1.5)
            y_bar = y + offset
            bar = tag("rect", x=left, y=y_bar, width=width, height=14.0, class_=class_)
            parts.append(bar)
            label = text(left + width + 6, y_bar + 11, f"{loss:.1f}", "ink small")
            parts.append(label)
    heading = "Points lost to INT8 (A8W8), shorter is better"
    parts.append(text(12, 22, heading, "ink strong"))
    for x, name, class_ in (
        (420.0, "quark_onnx", "ours"),
        (520.0, "onnxruntime", "theirs"),
    ):
        parts.append(box(x, 13, 14, 11, class_))
        parts.append(text(x + 20, 23, name, "soft small"))
    return picture(720, bottom + 26, heading, parts)


TITLES = {
    "mobilenetv2": "MobileNetV2, top-1",
    "squeezenet": "SqueezeNet, top-1",
    "yolox_nano": "YOLOX-nano, mAP",
    "minilm-sst2": "MiniLM, SST-2",
    "resnet44": "ResNet-44, top-1",
}
PICTURES: dict[str, Callable[[], str]] = {
    "accuracy.svg": accuracy_chart,
    "formats.svg": formats,
    "qdq_placement.svg": qdq_placement,
    "stages.svg": stages,
}


def main() -> int:
    """Write the pictures that have changed, or only name them."""
    check = sys.argv[1:] == ["--check"]
    differ = False
    for name, draw in PICTURES.items():
        path = ASSETS / name
        content = draw()
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            differ = True
            print(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(content, encoding="utf-8", newline="\n")
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
