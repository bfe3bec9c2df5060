"""README of a deployment folder."""

from __future__ import annotations

from collections.abc import Collection

from calibrators.shown import printable
from quark_onnx.npu.options import LEAST_DRIVER
from quark_onnx.npu.preflight import Preflight
from quark_onnx.report import Report
from quark_onnx.report.verdict.verdict import BANDS

_TEXT = """\
# A model for {summary}

Format {kind}, made for Ryzen AI {release}.{quality}

| file | what it is |
|---|---|
| `model.onnx` | the model{float} |{others}
| `provider_options.json`, `provider_options.hpp` | options of the execution provider, for each device |
| `npu_session.py`, `npu_session.hpp` | open a session on the NPU; if that fails, on the CPU with a warning |
| `precompile.py` | compile the model on a device, so that applications need not |
| `compare.py`, `npu_engine.py`, `samples/`, `outputs/` | compare the outputs on this machine with outputs recorded on a CPU; latency; operators by device, against the forecast |
| `CMakeLists.txt`, `npu_example.cpp` | build a C++ application with the model, and ship the libraries that it needs |
| `forecast.html`, `report.json` | forecast of the nodes on the NPU, with reasons; accuracy |
| `SHA256SUMS` | checksums: `sha256sum -c SHA256SUMS` |

## On the machine with the NPU

1. Install Ryzen AI {release} and its driver, {driver} or later on Windows, and use its Python environment.{overlay}
   With Windows ML instead (`pip install` of its packages, winml/installation.rst), the loader finds the provider by the
   catalog of Windows ML.
2. `python compare.py --device npu`. Running on the NPU does not guarantee correct results: the script compares the
   outputs with the recorded ones, measures the latency, and counts the operators by device and the subgraphs that run, in
   the engine's report (since 1.5, modelrun.rst) or log (at severity 1 since 1.7, inst.rst). It says whether the forecast
   held, and fails if the NPU runs nothing. With
   `--fresh` it compiles anew, as a model from a cache is not counted; with `--data FOLDER --labels FILE.csv` (file name,
   class number) it measures the accuracy, on the NPU and on the CPU.
3. Node by node: `quark-onnx npu preflight model.onnx --target {target}{preset} --ep-report REPORT` compares the report,
   `vitisai_ep_report.json` in the cache of step 5, with the forecast.
4. {compiled}
5. Ship this folder. Each device keeps its cache in a folder that the user may write to (`%LOCALAPPDATA%/npu_bundles`, on
   Linux `~/.cache/npu_bundles`; the variable `NPU_CACHE` names another). A cache serves only this model, its options, this
   engine, driver and overlay. `npu_session.hpp` takes a compiled model of `precompile.py` as well, but on Phoenix.

C++: `cmake -S . -B ../build && cmake --build ../build` builds `npu_example`; `CMakeLists.txt` says how an application takes
the model, and has the list of libraries that it ships (app_development.rst of 1.8).

Several models in one program: `open_session(folder=OTHER_BUNDLE)` in Python, `npu_session.hpp` says how in C++. Open the
largest first (amd/RyzenAI-SW#336), and compare outputs while all of them run: with 1.5 later sessions crashed
(amd/RyzenAI-SW#223), with 1.8 running one made the results of another NaN (amd/RyzenAI-SW#402).

Without an NPU `python npu_session.py samples/0000.npz` runs on the CPU, and says so.
"""

_COMPILED = {
    True: (
        "`python precompile.py` on each kind of processor, with the whole Ryzen AI installed: the"
        " engine that applications ship\n   cannot compile BF16 (app_development.rst, 1.4 to 1.8)."
    ),
    False: "Optional: `python precompile.py`, so that the first start of an application is fast.",
}
#: Descriptions by the names in the settings.
_OTHERS = {
    "preprocess": (
        "\n| `preprocess.onnx`, `encoded.py` | make the model's input of a JPEG or PNG"
        " file, as the calibration data was read; on the CPU, with"
        " onnxruntime-extensions: `python npu_session.py photo.jpg` |"
    ),
    "postprocess": (
        "\n| `postprocess.onnx` | what is made of the model's outputs, by their names,"
        " on the CPU: `npu_session.postprocess`, in C++ `npu::open_on_cpu(env, folder,"
        " npu::options::postprocess)` |"
    ),
}


def readme(
    forecast: Preflight,
    kind: str,
    *,
    report: Report | None,
    band: str,
    others: Collection[str] = (),
) -> str:
    """Return the README in Markdown.

    Args:
        forecast: the forecast.
        kind: number format of the model.
        report: accuracy, as in ``Bundle``.
        band: the worse band of accuracy and forecast.
        others: models that run before and after the model: "preprocess", "postprocess".
    """
    target = forecast.target
    overlay = ""
    if target.xclbin:
        overlay = (
            " Phoenix and Hawk Point need the overlay 4x4.xclbin, which release 1.7.1 installs and"
            " 1.8 does not\n   (amd/RyzenAI-SW#400); `quark-onnx npu deploy --xclbin FILE` ships a copy."
        )
    return _TEXT.format(
        summary=target.summary,
        kind=kind,
        release=forecast.release,
        quality=_quality(report, kind) + _placement(forecast, band, report),
        others="".join(text for name, text in _OTHERS.items() if name in others),
        float=", in float32: its compiler converts it" if kind == "BF16" else "",
        overlay=overlay,
        driver=LEAST_DRIVER,
        target=target.name,
        preset=" --preset BF16" if kind == "BF16" else "",
        compiled=_COMPILED[kind == "BF16"],
    )


def _quality(report: Report | None, kind: str) -> str:
    """Return the accuracy and the verdict as paragraphs; empty without a report."""
    if report is None:
        return ""
    text = f" Worst output against the float model: {report.worst_sqnr:.1f} dB"
    text += f"{', with tensors rounded to bfloat16 on a CPU' * (kind == 'BF16')}."
    if report.verdict is None:
        return text
    verdict = report.verdict
    text += f"\n\nVerdict: **{verdict.band}**. {verdict.sentence}, on {verdict.measured_on}."
    if report.warnings:
        lines = [f"Warning: {warning}." for warning in report.warnings]
        text += "\n\n" + "\n".join(lines)
    # Warnings hold names from the model, which may hold control characters.
    return printable(text, lines=True)


def _placement(forecast: Preflight, band: str, report: Report | None) -> str:
    """Return the share on the processor, and the verdict on the bundle, as paragraphs."""
    text = f"\n\nForecast: **{forecast.band}**. {forecast.sentence}."
    doubts = [f"In doubt: {doubt}." for doubt in forecast.doubts]
    reason = "by the forecast alone: nothing tells the accuracy"
    if report is not None and report.verdict is not None:
        is_clear = report.verdict.band in BANDS
        reason = (
            "the worse of both"
            if is_clear
            else "by the forecast alone: the accuracy is unclear"
        )
    verdict = f"Verdict on the bundle: **{band}**, {reason}."
    return printable("\n\n".join([text, *doubts, verdict]), lines=True)
