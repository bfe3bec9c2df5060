"""Describe the target devices."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.common.registry import TARGETS


@dataclass(frozen=True)
class Target:
    """A device, or a family of devices.

    Attributes:
        name: name as in ``--target``.
        summary: description in words.
        architecture: the engine, "XDNA1" or "XDNA2"; empty for any.
        compiler: value of the provider option ``target``, "X1" or "X2"; empty if omitted.
        presets: presets that run on the device, the recommended one first.
        integer_engine: power-of-two scales have to satisfy the constraints C1 to C10.
        opset: greatest recommended opset.
        xclbin: the provider needs the path of an overlay.
        source: source of the row, with its date.
    """

    name: str
    summary: str
    architecture: str
    compiler: str
    presets: tuple[str, ...]
    integer_engine: bool
    opset: int
    xclbin: bool
    source: str


_DOCS = (
    "Ryzen AI documentation 1.8 (2026-07-23): relnotes.rst, modelrun.rst,"
    " model_quantization.rst"
)
_XDNA2 = ("XINT8", "A8W8", "A16W8", "BF16")
# Only XDNA1 (phx, hpt) takes an overlay; a session on XDNA2 must not set one since release 1.6.
_ROWS = (
    Target("npu", "any Ryzen AI processor", "", "", ("XINT8",), True, 17, False, _DOCS),
    Target("phx", "Phoenix (XDNA1)", "XDNA1", "X1", ("XINT8",), True, 17, True, _DOCS),
    Target(
        "hpt", "Hawk Point (XDNA1)", "XDNA1", "X1", ("XINT8",), True, 17, True, _DOCS
    ),
    Target(
        "stx",
        "Strix and Strix Halo (XDNA2)",
        "XDNA2",
        "X2",
        _XDNA2,
        True,
        17,
        False,
        _DOCS,
    ),
    Target("krk", "Krackan (XDNA2)", "XDNA2", "X2", _XDNA2, True, 17, False, _DOCS),
    Target(
        "stx-x1",
        "Strix and Strix Halo (XDNA2) with the older compiler X1",
        "XDNA2",
        "X1",
        ("XINT8",),
        True,
        17,
        False,
        _DOCS,
    ),
    Target(
        "krk-x1",
        "Krackan (XDNA2) with the older compiler X1",
        "XDNA2",
        "X1",
        ("XINT8",),
        True,
        17,
        False,
        _DOCS,
    ),
)
for _row in _ROWS:
    TARGETS.add(_row.name, _row)

#: Names that users of the vendor's tools may mistake for a target, with advice.
_ELSEWHERE = {
    "x1": (
        "that is the compiler of phx and hpt, whose provider options name it, and the older one"
        " of stx and krk: take stx-x1 or krk-x1"
    ),
    "x2": "that is the compiler of stx and krk, whose provider options name it",
    "bfp16": (
        "the provider makes BFP16 itself of a float model: take --target stx and"
        " --preset BF16 of 'npu deploy'; 'quantize --preset BFP16' without a target"
        " measures what it costs"
    ),
    "llm": (
        "language models run through OnnxRuntime GenAI, whose model builder reads the"
        " checkpoint of 'quark-onnx llm ptq MODEL -o OUT --scheme uint4_wo_128 --layout"
        " oga'"
    ),
}
# A declined name gets its advice in place of a guess at the nearest target.
for _name, _instead in _ELSEWHERE.items():
    TARGETS.decline(_name, _instead)
