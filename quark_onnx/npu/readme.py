"""README of a deployment folder."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from calibrators.shown import printable
from quark_onnx.npu.options import LEAST_DRIVER

if TYPE_CHECKING:
    from quark_onnx.npu.deploy import Bundle

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
   outputs with the recorded ones (of a detector the boxes decide, by `boxes.py`), measures the latency, and counts the
   operators by device and the subgraphs that run, in the engine's report (since 1.5, modelrun.rst) or log (at severity 1
   since 1.7, inst.rst). It says whether the forecast held, and fails if the NPU runs nothing. With
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


def readme(bundle: Bundle, others: Collection[str] = ()) -> str:
    """Return the README in Markdown.

    Args:
        bundle: the bundle.
        others: models that run before and after the model: "preprocess", "postprocess".
    """
    kind, forecast = bundle.kind, bundle.forecast
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
        quality=_quality(bundle),
        others="".join(text for name, text in _OTHERS.items() if name in others),
        float=", in float32: its compiler converts it" if kind == "BF16" else "",
        overlay=overlay,
        driver=LEAST_DRIVER,
        target=target.name,
        preset=" --preset BF16" if kind == "BF16" else "",
        compiled=_COMPILED[kind == "BF16"],
    )


def _quality(bundle: Bundle) -> str:
    """Return the verdict, the accuracy and the doubts about the forecast as paragraphs."""
    text = ""
    if bundle.worst_sqnr is not None:
        text = f" Worst output against the float model: {bundle.worst_sqnr:.1f} dB"
        text += f"{', with tensors rounded to bfloat16 on a CPU' * (bundle.kind == 'BF16')}."
    measured_on = ""
    if bundle.accuracy is not None:
        measured_on = f" Measured on {bundle.accuracy.measured_on}."
    paragraphs = [text, f"Verdict: **{bundle.band}**: {bundle.sentence}.{measured_on}"]
    if bundle.cut_at:
        paragraphs.append(f"Cut {bundle.cut_line}.")
    if bundle.report is not None:
        paragraphs += [f"Warning: {warning}." for warning in bundle.report.warnings]
    paragraphs += [f"In doubt: {doubt}." for doubt in bundle.forecast.doubts]
    # Warnings hold names from the model, which may hold control characters.
    return printable("\n\n".join(paragraphs), lines=True)
