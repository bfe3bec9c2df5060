"""The folder that an application ships: complete, right on this machine, replaced as a whole or not
at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from calibrators.readers.open import ImageSpec, open_reader
from quark_onnx import QConfig, compare, npu, quantize, quantize_dynamic
from quark_onnx.cli import main
from quark_onnx.common.errors import (
    AccuracyError,
    ConfigError,
    ConstraintError,
    ModelError,
)
from quark_onnx.common.registry import NPU_RECIPES
from quark_onnx.report.verdict import THRESHOLDS, boxes
from tests.child import Run, forks
from tests.models import depthwise_layers, normal, parse, run, samples, weight


def network() -> ModelProto:
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4] y) { c = Conv <auto_pad = "SAME_UPPER"> (x, w) r = Relu (c)
        d = Conv (r, u) e = Relu (d) p = GlobalAveragePool (e) f = Flatten (p) y = Gemm (f, k) }""",  # noqa: E501
        w=weight(8, 3, 3, 3),
        u=weight(8, 8, 1, 1),
        k=weight(8, 4),
    )


def data(count: int = 12) -> list[dict[str, Any]]:
    return [{"x": normal(1, 3, 8, 8, seed=seed)} for seed in range(count)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> npu.Bundle:
    return npu.deploy(
        network(), data(), tmp_path_factory.mktemp("made") / "bundle", "stx"
    )


@pytest.fixture(scope="module")
def called() -> Iterator[Run]:
    """The programs of a bundle, as on a device, which has neither torch nor transformers."""
    with forks(
        """
import sys
sys.modules.update(torch=None, transformers=None)
import numpy, onnxruntime
try:
    import onnxruntime_extensions
except ImportError:
    pass
"""
    ) as run_program:
        yield run_program


FILES = {
    *(
        "model.onnx",
        "provider_options.json",
        "provider_options.hpp",
        "npu_session.py",
        "npu_engine.py",
        "npu_session.hpp",
        "npu_example.cpp",
        "CMakeLists.txt",
        "compare.py",
        "precompile.py",
    ),
    *(
        "samples",
        "outputs",
        "forecast.html",
        "report.json",
        "README.md",
        "bundle.json",
        "SHA256SUMS",
    ),
}


def test_everything_is_there_and_summed_up(bundle: npu.Bundle) -> None:
    assert {path.name for path in bundle.folder.iterdir()} == FILES
    assert [path.name for path in bundle.folder.parent.iterdir()] == ["bundle"], (
        "nothing is left beside it"
    )
    sums = dict(
        reversed(line.split("  "))
        for line in (bundle.folder / "SHA256SUMS").read_text().splitlines()
    )
    files = [
        path
        for path in bundle.folder.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    ]
    assert sums == {
        path.relative_to(bundle.folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in files
    }
    model = onnx.load(bundle.folder / "model.onnx")
    assert (
        not npu.check(model, "stx").findings
        and bundle.kind == "XINT8"
        and bundle.report is not None
    )
    report = json.loads((bundle.folder / "report.json").read_text())
    assert report["accuracy"]["outputs"][0]["sqnr"] == pytest.approx(
        bundle.report.worst_sqnr
    )
    assert report["forecast"]["subgraphs"] == bundle.forecast.subgraphs == 1


def test_the_readme_states_the_verdict(bundle: npu.Bundle) -> None:
    text = (bundle.folder / "README.md").read_text(encoding="utf-8")
    assert bundle.report is not None and bundle.report.verdict is not None
    verdict = bundle.report.verdict
    assert f"Verdict: **{bundle.band}**: {bundle.sentence}. Measured on" in text
    assert verdict.sentence in text and f"{bundle.forecast.sentence}." in text
    # Nobody calls a bundle good of which the accuracy is unclear.
    assert (verdict.band, bundle.forecast.band, bundle.band) == (
        "unclear",
        "good",
        "unclear",
    )
    assert text.count("**unclear**") == 1 and "**good**" not in text


def test_there_is_one_verdict(bundle: npu.Bundle) -> None:
    """The worse of accuracy and forecast, with both in its sentence, in every output."""
    text = str(bundle)
    assert text.count("verdict ") == 1
    assert f"verdict   {bundle.band}: {bundle.sentence}" in text
    document = bundle.to_dict()
    assert document["verdict"]["band"] == document["band"] == bundle.band
    assert document["verdict"]["sentence"] == bundle.sentence
    kept = json.loads((bundle.folder / "report.json").read_text(encoding="utf-8"))
    assert kept["verdict"] == {"band": bundle.band, "sentence": bundle.sentence}
    assert bundle.accuracy is not None
    for accuracy, forecast, band in (
        ("good", 6, "risky"),
        ("poor", 1, "poor"),
        ("good", 1, "good"),
        ("unclear", 6, "risky"),
    ):
        verdict = replace(bundle.accuracy, band=accuracy)
        pieces = tuple(place % forecast for place in range(len(bundle.forecast.pieces)))
        other = replace(
            bundle,
            report=replace(bundle.report, verdict=verdict),
            forecast=replace(bundle.forecast, pieces=pieces),
        )
        assert other.band == band


def test_progress_goes_to_a_function(tmp_path: Path) -> None:
    calls = list[tuple[str, float, int | None]]()
    npu.deploy(
        network(),
        data(),
        tmp_path / "b",
        progress=lambda name, done, total: calls.append((name, done, total)),
    )
    assert ("calibrating", 11) in [call[:2] for call in calls]
    with pytest.raises(ConfigError, match="progress is 'much'"):
        npu.deploy(network(), data(), tmp_path / "c", progress="much")  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()


def test_a_quantized_model_is_deployed_with_its_codes(tmp_path: Path) -> None:
    """Nothing is calibrated; the float model tells the accuracy, and without it nothing does."""
    config = QConfig.of("A8W8").with_(target="stx")
    quantized = quantize(network(), data(), config).model
    plain = npu.deploy(quantized, None, tmp_path / "plain")
    assert (plain.kind, plain.report, plain.band) == ("A8W8", None, "unclear")
    assert plain.sentence.startswith("the accuracy was not measured; forecast for stx")
    (step,) = plain.next_steps
    assert step.options == "--float-model FLOAT.onnx"
    written = onnx.load(plain.folder / "model.onnx")
    sample = data(1)[0]
    np.testing.assert_array_equal(run(written, sample)[0], run(quantized, sample)[0])
    # The one program that is no fork, but started as on a device.
    done = subprocess.run(
        [sys.executable, "-B", "compare.py", "--runs", "0"], cwd=plain.folder
    )
    assert done.returncode == 0
    measured = npu.deploy(
        quantized, data(), tmp_path / "measured", float_model=network()
    )
    expected = compare(network(), quantized, data())
    assert measured.worst_sqnr == pytest.approx(expected.sqnr)
    assert measured.accuracy is not None and expected.verdict is not None
    assert measured.accuracy.sentence == expected.verdict.sentence
    assert measured.next_steps == () and measured.accuracy.next_steps == ()
    forecast = npu.deploy_forecast(quantized, "stx")
    assert forecast.best.to_dict() == measured.forecast.to_dict()


@pytest.mark.parametrize("tensor", ["r", "e", "p"])
def test_a_quantized_model_is_cut_behind_a_pair(tensor: str, tmp_path: Path) -> None:
    """Quantization has dropped the Relu before ``r`` and ``e``: codes are not negative."""
    quantized = quantize(network(), data(), "A8W8").model
    parts = npu.cut(quantized, [tensor])
    made = npu.deploy(parts, data(), tmp_path / "b", float_model=network())
    front, tail = parts.first, parts.second
    reference = npu.cut(network(), [tensor]).first
    for feeds in data(3):
        [expected], [found] = run(reference, feeds), run(front, feeds)
        assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
        whole = run(quantized, feeds)[0]
        np.testing.assert_array_equal(run(tail, {tensor: found})[0], whole)
    assert made.cut_at == (tensor,)
    assert made.worst_sqnr == pytest.approx(compare(reference, front, data()).sqnr)


def test_quantized_models_that_are_refused(tmp_path: Path) -> None:
    config = QConfig.of("A8W8").with_(target="stx")
    quantized = quantize(network(), data(), config).model
    with pytest.raises(ConfigError, match=r"the model is A8W8, but phx .* takes XINT8"):
        npu.deploy(quantized, None, tmp_path / "b", "phx")
    assert "the model is A8W8" in npu.deploy_forecast(quantized, "phx").problem
    with pytest.raises(AccuracyError, match="the minimum is 90 dB"):
        npu.deploy(
            quantized, data(), tmp_path / "b", min_sqnr=90, float_model=network()
        )
    with pytest.raises(ConfigError, match="leave out float_model"):
        npu.deploy(network(), data(), tmp_path / "b", float_model=network())
    with pytest.raises(ConfigError, match="float_model needs data"):
        npu.deploy(quantized, None, tmp_path / "b", float_model=network())
    with pytest.raises(ConfigError, match="float_model is quantized"):
        npu.deploy(quantized, data(), tmp_path / "b", float_model=quantized)
    renamed = parse(
        "g (float[1,3,8,8] image) => (float[1,3,8,8] y) { y = Relu (image) }"
    )
    files = tmp_path / "q.onnx", tmp_path / "f.onnx"
    for model, file in zip((quantized, renamed), files, strict=True):
        onnx.save(model, file)
    whole = f"quantized model {files[0]} has the inputs x, and the float model {files[1]} has image"
    with pytest.raises(ConfigError, match=re.escape(whole)):
        npu.deploy(files[0], data(), tmp_path / "b", float_model=files[1])
    with pytest.raises(ConfigError, match="and the float model has image; give the"):
        npu.deploy(quantized, data(), tmp_path / "b", float_model=renamed)
    operators = quantize_dynamic(network())
    with pytest.raises(ConfigError, match="no Q/DQ pairs"):
        npu.deploy(operators, None, tmp_path / "b")
    assert npu.deploy_forecast(operators, "stx").problem
    assert not (tmp_path / "b").exists()


def test_a_model_that_hardly_runs_on_the_processor_is_no_good_bundle(
    tmp_path: Path,
) -> None:
    """Convolutions along one axis are not on images: on phx the Relu between them remains."""
    model = parse(
        """g (float[1,4,16] x) => (float[1,4,16] y) {
            a = Conv <pads = [1,1]> (x, w) b = Relu (a) y = Conv <pads = [1,1]> (b, w) }""",
        w=weight(4, 4, 3),
    )
    bundle = npu.deploy(model, samples(model, 4), tmp_path / "b", "phx", min_sqnr=None)
    assert bundle.forecast.share < 0.05 and bundle.band == "poor"
    assert bundle.to_dict()["band"] == "poor"
    text = (bundle.folder / "README.md").read_text(encoding="utf-8")
    assert "Verdict: **poor**" in text


def test_many_subgraphs_lead_to_a_format_with_fewer(tmp_path: Path) -> None:
    """And the forecast for it is what a deployment in the format gets."""
    model = depthwise_layers()
    first = npu.deploy(model, data(), tmp_path / "first", "stx", min_sqnr=None)
    assert first.forecast.subgraphs > 3
    (step,) = first.next_steps
    assert step.options == "--preset A8W8"
    assert f"in 1 subgraph (now {first.forecast.sentence})" in step.effect
    assert step.effect in str(first)
    known = {"model": model, "data": data(), "folder": tmp_path / "next"}
    again = eval(step.call, {"deploy": npu.deploy, **known})
    assert again.forecast.subgraphs == 1
    assert again.next_steps == ()


def test_a_good_deployment_proposes_no_other_format(bundle: npu.Bundle) -> None:
    assert bundle.report is not None and bundle.report.verdict is not None
    if bundle.report.verdict.band == "good":
        assert bundle.next_steps == ()
    assert bundle.forecast.band == "good"


def test_options_for_every_device_that_takes_the_format(bundle: npu.Bundle) -> None:
    settings = json.loads((bundle.folder / "provider_options.json").read_text())
    assert list(settings["devices"]) == ["stx", "phx", "krk"]
    assert (
        settings["devices"]["stx"]["target"] == "X2"
        and "xclbin" not in settings["devices"]["stx"]
    )
    assert (
        settings["devices"]["phx"]["target"] == "X1"
        and "phoenix/4x4.xclbin" in settings["devices"]["phx"]["xclbin"]
    )
    header = (bundle.folder / "provider_options.hpp").read_text()
    assert all(
        json.dumps(value) in header
        for options in settings["devices"].values()
        for value in options.values()
    )


def test_loader_and_comparison_run_here_and_say_where(
    called: Run, bundle: npu.Bundle
) -> None:
    done = called(bundle.folder, "npu_session.py", "samples/0000.npz")
    assert (
        done.returncode == 0
        and "on the CPU:" in done.stdout
        and "y (1, 4)" in done.stdout
    )
    assert (
        "running on the CPU: this onnxruntime has no VitisAIExecutionProvider"
        in done.stderr
    )
    done = called(bundle.folder, "compare.py")
    assert done.returncode == 0 and "4 samples: worst inf dB" in done.stdout
    done = called(
        bundle.folder, "npu_session.py", "samples/0000.npz", "--device", "npu"
    )
    assert done.returncode and "the NPU cannot be used" in done.stderr


def test_a_machine_that_computes_something_else_is_found_out(
    called: Run, bundle: npu.Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle.folder, folder)
    with np.load(folder / "outputs" / "0001.npz") as arrays:
        wrong = {name: arrays[name] + 1 for name in arrays.files}
    np.savez(folder / "outputs" / "0001.npz", **wrong)
    done = called(folder, "compare.py")
    assert (
        done.returncode == 1
        and "this machine computes something else; without VNNI" in done.stderr
    )
    for sample in (folder / "samples").glob("*.npz"):
        sample.unlink()
    done = called(folder, "compare.py")
    assert done.returncode == 2 and "has no samples" in done.stderr


PROVIDER = """
import json, sys, types, npu_session
seen = {}
class Options:
    def add_session_config_entry(self, key, value): seen[key] = value
def session(model, options=None, providers=None, provider_options=None):
    seen.update(model=model, providers=providers, options=provider_options)
ort = types.SimpleNamespace(get_available_providers=lambda: [npu_session.PROVIDER], SessionOptions=Options,
    InferenceSession=session, __version__="1.27.0")
sys.modules["onnxruntime"] = ort
npu_session.detect = lambda: sys.argv[1]
_, where = npu_session.open_session(strict=True)
print(json.dumps({**seen, "where": where}))
"""  # noqa: E501


@pytest.mark.parametrize("device", ["stx", "phx"])
def test_what_the_provider_is_told(
    called: Run, bundle: npu.Bundle, device: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("RYZEN_AI_INSTALLATION_PATH", str(tmp_path))
    monkeypatch.setenv("NPU_CACHE", str(tmp_path / "cache"))
    overlay = tmp_path / "voe-4.0-win_amd64" / "xclbins" / "phoenix" / "4x4.xclbin"
    if device == "phx":
        done = called(bundle.folder, "-c", PROVIDER, device)
        assert "there is no overlay" in done.stderr and "1.7.1" in done.stderr
        assert '"where": "cpu"' in done.stdout
    overlay.parent.mkdir(parents=True)
    overlay.touch()
    done = called(bundle.folder, "-c", PROVIDER, device)
    told = json.loads(done.stdout)
    assert told["where"] == "npu" and told["session.disable_cpu_ep_fallback"] == "1"
    [options] = told["options"]
    assert options["cache_dir"] == str(tmp_path / "cache")
    # The key ends in the versions of engine and driver, and the overlay's content.
    assert f"_{device}_1_27_0_" in options["cache_key"]
    assert ("xclbin" in options) == (device == "phx")
    overlay.write_bytes(b"of another release")
    again = json.loads(called(bundle.folder, "-c", PROVIDER, device).stdout)["options"]
    assert (again[0]["cache_key"] == options["cache_key"]) == (device == "stx")
    if device == "phx":
        assert Path(options["xclbin"]) == overlay


@pytest.mark.parametrize(
    ("driver", "words"),
    [("32.0.203.279", "the driver of the NPU is 32.0.203.279"), ("32.0.203.280", "")],
)
def test_a_driver_of_windows_that_is_too_old(
    called: Run, bundle: npu.Bundle, driver: str, words: str
) -> None:
    code = PROVIDER.replace(
        "_, where",
        f"npu_session.platform.system = lambda: 'Windows'\n"
        f"npu_session.driver_version = lambda: {driver!r}\n_, where",
    )
    done = called(bundle.folder, "-c", code, "stx")
    told = json.loads(done.stdout)
    assert told["where"] == ("cpu" if words else "npu")
    assert words in done.stderr and bool(words) == ("32.0.203.280" in done.stderr)


WINDOWS_ML = """
import json, sys, types, npu_session
from types import SimpleNamespace as Some
seen, library = {}, sys.argv[1]
NPU = Some(type="npu")
class Options:
    def add_provider_for_devices(self, devices, options): seen.update(devices=len(devices), options=options)
def session(model, options=None, providers=None): seen["providers"] = providers
found = [Some(ep_name="DmlExecutionProvider", device=NPU)]
def register(name, path):
    seen.update(name=name, path=path)
    found.append(Some(ep_name=name, device=Some(type="gpu")))
    found.append(Some(ep_name=name, device=NPU))
sys.modules["onnxruntime"] = Some(get_available_providers=lambda: [], get_ep_devices=lambda: found,
    register_execution_provider_library=register, OrtHardwareDeviceType=Some(NPU="npu"),
    SessionOptions=Options, InferenceSession=session, __version__="1.27.0")
npu_session.detect = lambda: "stx"
npu_session.platform.system = lambda: "Windows"
npu_session.driver_version = lambda: "32.0.203.280"
npu_session._printed = lambda command: library
seen["where"] = npu_session.open_session()[1]
print(json.dumps(seen))
"""  # noqa: E501


def test_the_provider_of_windows_ml_is_registered(
    called: Run, bundle: npu.Bundle
) -> None:
    """Its library is found by the catalog of Windows ML, and its NPU is taken."""
    done = called(bundle.folder, "-c", WINDOWS_ML, "C:/store/provider.dll")
    told = json.loads(done.stdout)
    assert (told["name"], told["path"]) == (
        "VitisAIExecutionProvider",
        "C:/store/provider.dll",
    )
    assert (told["where"], told["devices"], told["providers"]) == ("npu", 1, None)
    assert told["options"]["target"] == "X2" and "cache_key" in told["options"]
    done = called(bundle.folder, "-c", WINDOWS_ML, "")
    assert json.loads(done.stdout)["where"] == "cpu"
    assert "or Windows ML" in done.stderr


#: Stands for the engine: it logs and reports what the test gives, and computes on the CPU.
ENGINE = """
import json, os, pathlib, sys, npu_session, onnxruntime as ort
log, report = json.loads(sys.argv.pop(1))
real = ort.InferenceSession
def session(model, options=None, providers=(), provider_options=()):
    if npu_session.PROVIDER in providers:
        if options.log_severity_level <= 1: os.write(2, log.encode())
        folder = pathlib.Path(provider_options[0]["cache_dir"]) / provider_options[0]["cache_key"]
        folder.mkdir(parents=True, exist_ok=True)
        if report: (folder / os.environ["XLNX_ONNX_EP_REPORT_FILE"]).write_text(json.dumps(report))
    return real(model, providers=["CPUExecutionProvider"])
ort.InferenceSession = session
ort.get_available_providers = lambda: [npu_session.PROVIDER]
npu_session.detect = lambda: "stx"
npu_session.driver_version = lambda: "32.0.203.300"
import compare
sys.exit(compare.main())
"""
NEW_LOG = """[I:onnxruntime:, stat.cpp:198 stat.cpp] [Vitis AI EP] No. of Operators :
[I:onnxruntime:, stat.cpp:198 stat.cpp]    NPU   {npu}
[I:onnxruntime:, stat.cpp:198 stat.cpp] VITIS_EP_CPU     2
[I:onnxruntime:, stat.cpp:198 stat.cpp] [Vitis AI EP] No. of Subgraphs :
[I:onnxruntime:, stat.cpp:198 stat.cpp]    NPU     1
[I:onnxruntime:, stat.cpp:198 stat.cpp] Actually running on NPU      1
"""
OLD_LOG = """[Vitis AI EP] No. of Operators :   NPU     {npu} VITIS_EP_CPU     2
[Vitis AI EP] No. of Subgraphs :   NPU     1 Actually running on NPU     1
"""


def reported(bundle: npu.Bundle, moved: str = "") -> dict[str, Any]:
    """The engine's report where the forecast holds, but for a node that is on the CPU."""
    forecast = bundle.forecast
    counts = dict(forecast.counts)
    if moved:
        counts["NPU"] -= 1
        counts["CPU"] = counts.get("CPU", 0) + 1
    rows = [{"name": name, "nodeNum": str(count)} for name, count in counts.items()]
    nodes = [
        {
            "output": [placed.output],
            "opType": placed.op_type,
            "device": "CPU" if placed.output == moved else placed.device,
        }
        for placed in forecast.placements
    ]
    return {
        "deviceStat": [{"name": "all", "nodeNum": sum(counts.values())}, *rows],
        "nodeStat": [
            *nodes,
            {"output": ["q"], "opType": "QuantizeLinear", "device": "CPU"},
        ],
        "subgraphStat": [{"device": "DPU", "count": "1"}],
    }


@pytest.mark.parametrize("layout", [NEW_LOG, OLD_LOG])
@pytest.mark.parametrize("running", [0, 1])
@pytest.mark.parametrize("has_report", [True, False])
def test_subgraphs_that_are_placed_and_do_not_run_are_found_out(
    called: Run,
    bundle: npu.Bundle,
    layout: str,
    running: int,
    has_report: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of DenseNet121's 63 subgraphs on the NPU, 5 are "actually running" in AMD's logs."""
    monkeypatch.setenv("NPU_CACHE", str(tmp_path / "cache"))
    log = layout.format(npu=bundle.forecast.counts["NPU"])
    log = re.sub(r"(running on NPU +)1", rf"\g<1>{running}", log)
    report = reported(bundle) if has_report else None
    words = ["-c", ENGINE, json.dumps([log, report]), "--device", "npu", "--runs", "0"]
    done = called(bundle.folder, *words)
    assert f"running subgraphs: {running}, forecast 1" in done.stdout, done.stderr
    assert "subgraphs: 1, forecast 1" in done.stdout
    assert ("forecast: held" in done.stdout) == bool(running)
    assert done.returncode == (0 if running else 1)


@pytest.mark.parametrize("source", ["report", "log", "log of 1.6", "moved", "none", ""])
def test_operators_are_counted_and_the_forecast_is_judged(
    called: Run,
    bundle: npu.Bundle,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the engine's report, which names nodes, or by its log in both layouts."""
    monkeypatch.setenv("NPU_CACHE", str(tmp_path / "cache"))
    count = bundle.forecast.counts["NPU"]
    first = bundle.forecast.placements[0].output
    log, report = "", None
    if source.startswith("log"):
        log = (NEW_LOG if source == "log" else OLD_LOG).format(npu=count)
    elif source == "none":
        report = {"deviceStat": [{"name": "CPU", "nodeNum": 9}]}
    elif source:
        report = reported(bundle, first if source == "moved" else "")
    words = ["-c", ENGINE, json.dumps([log, report]), "--device", "npu", "--runs", "2"]
    done = called(bundle.folder, *words)
    assert "driver 32.0.203.300" in done.stdout and "latency: median" in done.stdout
    assert "agreement of the greatest value: 4 of 4" in done.stdout, done.stderr
    assert "stat.cpp" not in done.stderr
    if not source:
        assert "operators: unknown" in done.stdout and "--fresh" in done.stdout
        return
    assert done.returncode == (1 if source == "none" else 0), done.stderr
    held = source not in ("moved", "none")
    assert ("forecast: held" in done.stdout) == held
    if source == "none":
        assert "no operator runs on the NPU" in done.stderr
    else:
        now = count - (source == "moved")
        assert f"NPU: {now}, forecast {count}" in done.stdout
    assert (f"{first}: on the CPU, forecast on the NPU" in done.stdout) == (
        source == "moved"
    )


def test_a_fresh_comparison_takes_nothing_that_was_compiled_before(
    called: Run, bundle: npu.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_CACHE", str(tmp_path / "cache"))
    words = ["-c", ENGINE, json.dumps(["", reported(bundle)]), "--device", "npu"]
    done = called(bundle.folder, *words, "--fresh", "--runs", "0")
    assert done.returncode == 0 and "forecast: held" in done.stdout, done.stderr
    assert "latency" not in done.stdout and not (tmp_path / "cache").exists()


def test_the_accuracy_is_measured_with_labels(
    called: Run, bundle: npu.Bundle, tmp_path: Path
) -> None:
    """Of four samples, one has the label of another class."""
    rows = ["file,class"]
    for path in sorted((bundle.folder / "outputs").glob("*.npz")):
        with np.load(path) as arrays:
            best = int(arrays["output_0"].argmax())
        rows.append(f"{path.name},{best if len(rows) > 1 else (best + 1) % 4}")
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join(rows))
    words = ["--data", "samples", "--labels", str(labels), "--runs", "0"]
    done = called(bundle.folder, "compare.py", "--device", "cpu", *words)
    assert "top-1: 75.00 % on the CPU, of 4 samples" in done.stdout, done.stderr
    words = [
        "-c",
        ENGINE,
        json.dumps(["", reported(bundle)]),
        "--device",
        "npu",
        *words,
    ]
    done = called(bundle.folder, *words)
    assert "top-1: 75.00 % on the NPU, 75.00 % on the CPU" in done.stdout, done.stderr
    labels.write_text("file,class\n")
    done = called(bundle.folder, "compare.py", *words[-6:])
    assert done.returncode and "has no rows of a file name" in done.stderr
    labels.write_text("absent.npz,1\n")
    done = called(bundle.folder, "compare.py", *words[-6:])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "compare: FileNotFoundError" in done.stderr and "absent.npz" in done.stderr


@pytest.mark.parametrize("name", ["model.onnx", "provider_options.json", "samples"])
def test_damaged_bundles_are_compared_without_a_traceback(
    called: Run, name: str, bundle: npu.Bundle, tmp_path: Path
) -> None:
    folder = shutil.copytree(bundle.folder, tmp_path / "damaged")
    path = folder / name / "0000.npz" if name == "samples" else folder / name
    path.write_bytes(path.read_bytes()[:10])
    done = called(folder, "compare.py", "--runs", "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "compare: " in done.stderr


def test_a_limit_that_no_ratio_misses_is_refused(
    called: Run, bundle: npu.Bundle
) -> None:
    done = called(bundle.folder, "compare.py", "--least", "nan", "--runs", "0")
    assert done.returncode == 2 and "--least is no number" in done.stderr


COMPILING = (
    PROVIDER.replace("def session(", "import pathlib\ndef session(").replace(
        "    seen.update(",
        """    if seen.get("ep.context_enable"): pathlib.Path(seen["ep.context_file_path"]).touch()
    seen.update(""",
    )
    + """
import precompile
if sys.argv[2] == "compile":
    sys.exit(precompile.main())
"""
)


def test_a_compiled_model_is_used_where_engine_and_driver_fit(
    called: Run, bundle: npu.Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle.folder, folder)
    done = called(folder, "-c", COMPILING, "stx", "compile")
    assert done.returncode == 0 and "compiled: " in done.stdout, done.stderr
    told = json.loads(called(folder, "-c", COMPILING, "stx", "run").stdout)
    assert Path(told["model"]) == folder / "compiled" / "stx.onnx"
    later = COMPILING.replace("1.27.0", "1.28.0")
    done = called(folder, "-c", later, "stx", "run")
    assert Path(json.loads(done.stdout)["model"]) == folder / "model.onnx"
    assert "compiled with another engine" in done.stderr
    done = called(folder, "precompile.py")
    assert done.returncode == 1 and "VitisAIExecutionProvider" in done.stderr


def test_options_and_the_overlay_are_shipped(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.xclbin"
    overlay.write_bytes(b"xclbin2\0 overlay")
    (tmp_path / "empty.xclbin").touch()
    folder = tmp_path / "b"
    options = {"opt_level": "2"}
    npu.deploy(network(), data(), folder, "phx", ep_options=options, xclbin=overlay)
    devices = json.loads((folder / "provider_options.json").read_text())["devices"]
    assert devices["phx"]["opt_level"] == "2" and "opt_level" not in devices["stx"]
    assert devices["phx"]["xclbin"] == "{folder}/4x4.xclbin"
    assert (folder / "4x4.xclbin").read_bytes() == overlay.read_bytes()
    for target, wrong, words in (
        ("stx", {"xclbin": overlay}, "takes no overlay"),
        ("phx", {"xclbin": tmp_path / "none"}, "is no file"),
        ("phx", {"xclbin": tmp_path / "empty.xclbin"}, "is no overlay"),
        ("stx", {"ep_options": {"opt level": "2"}}, "it has a name of letters"),
        ("stx", {"ep_options": {"opt_level": ""}}, "and a value"),
        (
            "stx",
            {"ep_options": {"opt_level": "4"}},
            "is '4'; it is one of 0, 1, 2, 3, 65536",
        ),
        ("stx", {"ep_options": {"cache_dir": "x"}}, "set by the loader"),
        ("stx", {"ep_options": {"target": "X3"}}, "it is X1 or X2"),
        ("phx", {"ep_options": {"target": "X2"}}, "not for phx"),
        (
            "stx",
            {"config": "A8W8", "ep_options": {"target": "X1"}},
            "takes XINT8 alone",
        ),
        (
            "stx",
            {"config": "BF16", "ep_options": {"target": "X2"}},
            "chooses the compiler",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            npu.deploy(network(), data(), tmp_path / "c", target, **wrong)


def gates() -> ModelProto:
    """A SiLU between two convolutions, whose Sigmoid X2 runs on the CPU in XINT8."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,6,6] y) {
            c = Conv <pads = [1,1,1,1]> (x, w) s = Sigmoid (c) m = Mul (c, s) y = Conv (m, v) }""",
        w=weight(8, 3, 3, 3),
        v=weight(4, 8, 3, 3),
    )


def test_the_forecast_is_that_of_the_chosen_compiler(tmp_path: Path) -> None:
    """The option target=X1 on stx is the target stx-x1: forecast, checks and advice are its own."""
    bundles = {
        name: npu.deploy(
            gates(), data(), tmp_path / name, target, min_sqnr=None, ep_options=options
        )
        for name, target, options in (
            ("x2", "stx", {}),
            ("option", "stx", {"target": "X1"}),
            ("target", "stx-x1", {}),
        )
    }
    x2, option, target = bundles.values()
    assert (x2.forecast.subgraphs, option.forecast.subgraphs) == (2, 1)
    assert x2.forecast.share < option.forecast.share == 1.0
    assert option.forecast.to_dict() == target.forecast.to_dict()
    assert option.next_steps == target.next_steps == ()
    before = npu.deploy_forecast(gates(), "stx-x1", data=data())
    assert before.best.to_dict() == option.forecast.to_dict()
    for bundle in (option, target):
        text = (bundle.folder / "provider_options.json").read_text()
        settings = json.loads(text)["devices"]
        assert list(settings) == ["stx", "phx", "krk"]
        assert settings["stx"]["target"] == settings["krk"]["target"] == "X1"
        assert "xclbin" not in settings["stx"]
        report = json.loads((bundle.folder / "report.json").read_text())
        assert report["forecast"]["subgraphs"] == 1
    # Two convolutions are what the compiler of X1 wants, on any device.
    one = npu.cut(gates(), ["c"]).first
    with pytest.raises(ConstraintError, match="at least two convolutions"):
        npu.deploy(one, data(), tmp_path / "one", ep_options={"target": "X1"})


def test_other_options_have_another_cache(tmp_path: Path) -> None:
    """Bundles share a folder of caches, in which a key stands for what was compiled, and how."""
    keys = list[str]()
    for options in ({}, {}, {"target": "X1"}, {"opt_level": "2"}):
        folder = tmp_path / str(len(keys))
        npu.deploy(network(), data(), folder, "stx", ep_options=options)
        keys.append(
            json.loads((folder / "provider_options.json").read_text())["cache_key"]
        )
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_a_processor_that_it_is_not_for(
    called: Run, bundle: npu.Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    npu.deploy(network(), data(), folder, "krk", "A8W8")
    done = called(folder, "-c", PROVIDER, "phx")
    assert (
        "the model is for krk, stx, this processor is phx" in done.stderr
        and '"where": "cpu"' in done.stdout
    )


STUB = """
#pragma once
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING };
struct OrtApiBase { const char* (*GetVersionString)(); };
inline const OrtApiBase* OrtGetApiBase() { return nullptr; }
enum OrtHardwareDeviceType { OrtHardwareDeviceType_GPU, OrtHardwareDeviceType_NPU };
namespace Ort {
struct HardwareDevice { OrtHardwareDeviceType type; OrtHardwareDeviceType Type() const { return type; } };
struct ConstEpDevice {
  const char* name; OrtHardwareDeviceType type;
  const char* EpName() const { return name; }
  ::Ort::HardwareDevice HardwareDevice() const { return {type}; }
};
struct Env {
  Env(OrtLoggingLevel, const char*) {}
  std::vector<ConstEpDevice> GetEpDevices() const {
    return {{"DmlExecutionProvider", OrtHardwareDeviceType_NPU}, {"VitisAIExecutionProvider", OrtHardwareDeviceType_GPU},
            {"VitisAIExecutionProvider", OrtHardwareDeviceType_NPU}};
  }
};
struct KeyValuePairs { void Add(const char* key, const char* value) { std::cout << key << "=" << value << " "; } };
struct SessionOptions {
  SessionOptions& AppendExecutionProvider_V2(Env&, const std::vector<ConstEpDevice>& devices, const KeyValuePairs&) {
    std::cout << devices.size() << " " << devices[0].EpName() << " " << devices[0].type << "\\n"; return *this;
  }
  SessionOptions& AddConfigEntry(const char*, const char*) { return *this; }
  SessionOptions& RegisterCustomOpsLibrary(const char* name) { std::cout << name << " "; return *this; }
  SessionOptions& AppendExecutionProvider_VitisAI(const std::unordered_map<std::string, std::string>& = {}) { return *this; }
};
struct Session { Session(const Env&, const char* name, const SessionOptions&) { std::cout << name << "\\n"; } };
}
"""  # noqa: E501


MAIN = """
#include "npu_session.hpp"
#include <iostream>
int main() {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "app");
  bool on_npu = true;
  npu::open_session(env, "folder", on_npu);
  if (on_npu) return 1;
  for (const std::string& name : {npu::options::preprocess, npu::options::postprocess}) try {
      npu::open_on_cpu(env, "folder", name, "extensions.so");
    } catch (const std::exception& error) {
      std::cout << error.what() << "\\n";
    }
}
"""


@pytest.mark.images
def test_the_cpp_loader_opens_what_there_is(bundle: npu.Bundle, tmp_path: Path) -> None:
    """Against a stand-in for the part of onnxruntime's interface that it uses."""
    (tmp_path / "onnxruntime_cxx_api.h").write_text(STUB)
    (tmp_path / "main.cpp").write_text(MAIN)
    with_tail = npu.deploy(
        npu.Parts(network(), scores_behind(), (), False), data(), tmp_path / "tail"
    ).folder
    missing = "the folder has no such model: nothing stands there\n"
    opened = "folder/model.onnx\n"
    for folder, said in (
        (bundle.folder, opened + 2 * missing),
        (with_tail, opened + missing + "extensions.so folder/postprocess.onnx\n"),
    ):
        done = compiled(tmp_path, f"-I{folder}")
        assert (done.returncode, done.stdout) == (0, said)
        assert "running on the CPU" in done.stderr


def compiled(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Compile main.cpp against the stand-in for onnxruntime, and run it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", *options]
    made = subprocess.run(
        [*command, "-I.", "main.cpp", "-o", "app"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return subprocess.run(
        [str(folder / "app")], capture_output=True, text=True, check=False
    )


PRECOMPILED = """
#include "npu_session.hpp"
#include <iostream>
int main() {
  for (const char* device : {"stx", "krk"}) for (const char* key : {"a1_stx", "a1"})
    std::cout << npu::compiled_model(FOLDER, device, key).string() << ";";
  std::cout << npu::driver_version();
}
"""


def test_the_cpp_loader_takes_what_precompile_has_made(
    called: Run, bundle: npu.Bundle, tmp_path: Path
) -> None:
    """Where the record has its key: the engine that C++ programs ship cannot compile BF16."""
    (tmp_path / "onnxruntime_cxx_api.h").write_text(STUB)
    (tmp_path / "main.cpp").write_text(PRECOMPILED)
    model = tmp_path / "compiled" / "stx.onnx"
    model.parent.mkdir()
    model.touch()
    model.with_suffix(".json").write_text(json.dumps({"cache_key": "a1_stx"}, indent=2))
    done = compiled(tmp_path, f"-I{bundle.folder}", f'-DFOLDER="{tmp_path}"')
    words = "import npu_session; print(npu_session.driver_version(), end='')"
    driver = called(bundle.folder, "-c", words).stdout
    assert (done.returncode, done.stdout) == (0, f"{model};;;;{driver}")
    assert done.stderr.count("run precompile.py again") == 1


SEVERAL = """
#include "first/npu_session.hpp"
#define NPU_BUNDLE second
#include "second/provider_options.hpp"
#include <iostream>
int main() {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "app");
  bool on_npu = true;
  npu::open_session(env, "first", on_npu);
  npu::open_session<npu::second>(env, "second", on_npu);
  std::cout << (npu::options::cache_key != npu::second::cache_key);
  std::cout << (npu::numbers("32.0.203.280") > npu::numbers("32.0.99.999"));
  npu::Options chosen = {{"target", "X2"}};
  Ort::SessionOptions options;
  npu::append_provider(env, options, chosen);
}
"""


@pytest.mark.parametrize("windows_ml", [False, True])
def test_several_bundles_are_one_cpp_program(
    bundle: npu.Bundle, tmp_path: Path, *, windows_ml: bool
) -> None:
    """With the provider of onnxruntime, or the NPU of the one that Windows ML registers."""
    (tmp_path / "onnxruntime_cxx_api.h").write_text(STUB)
    (tmp_path / "win_onnxruntime_cxx_api.h").write_text(STUB)
    (tmp_path / "winrt").mkdir()
    (tmp_path / "winrt" / "Microsoft.Windows.AI.MachineLearning.h").write_text(CATALOG)
    (tmp_path / "main.cpp").write_text(SEVERAL)
    shutil.copytree(bundle.folder, tmp_path / "first")
    npu.deploy(network(), data(), tmp_path / "second", config="A8W8")
    done = compiled(tmp_path, *["-DNPU_WINDOWS_ML"] * windows_ml)
    said = "first/model.onnx\nsecond/model.onnx\n11"
    if windows_ml:
        said += "registered target=X2 1 VitisAIExecutionProvider 1\n"
    assert (done.returncode, done.stdout) == (0, said)


CATALOG = """
#include <iostream>
namespace winrt::Microsoft::Windows::AI::MachineLearning {
struct Action { void get() const {} };
struct ExecutionProviderCatalog {
  static ExecutionProviderCatalog GetDefault() { return {}; }
  Action EnsureAndRegisterCertifiedAsync() const { std::cout << "registered "; return {}; }
};
}
"""


def test_cmake_builds_the_example_and_an_application(
    bundle: npu.Bundle, tmp_path: Path
) -> None:
    """With the stand-in for onnxruntime, its headers and its library where Ryzen AI has them."""
    cmake, compiler = shutil.which("cmake"), shutil.which("g++")
    if cmake is None or compiler is None:
        pytest.skip("no CMake or no C++ compiler")
    headers = tmp_path / "onnxruntime" / "include" / "onnxruntime" / "core" / "session"
    library = tmp_path / "onnxruntime" / "lib"
    headers.mkdir(parents=True)
    library.mkdir()
    (headers / "onnxruntime_cxx_api.h").write_text(STUB)
    (tmp_path / "empty.cpp").write_text("")
    name = "libonnxruntime.dylib" if sys.platform == "darwin" else "libonnxruntime.so"
    words = ["-shared", str(tmp_path / "empty.cpp"), "-o", str(library / name)]
    subprocess.run([compiler, *words], check=True)
    application = tmp_path / "application"
    application.mkdir()
    shutil.copytree(bundle.folder, application / "model")
    (application / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.19)\nproject(app LANGUAGES CXX)\n"
        "add_subdirectory(model)\nadd_executable(app model/npu_example.cpp)\n"
        "target_link_libraries(app PRIVATE npu_bundle)\nnpu_ship(app)\n"
    )
    environment = {**os.environ, "RYZEN_AI_INSTALLATION_PATH": str(tmp_path)}
    for source, program in ((bundle.folder, "npu_example"), (application, "app")):
        build = tmp_path / f"build {program}"
        for step in (["-S", str(source), "-B", str(build)], ["--build", str(build)]):
            made = subprocess.run(
                [cmake, *step], env=environment, capture_output=True, text=True
            )
            assert made.returncode == 0, made.stdout + made.stderr
        done = subprocess.run(
            [str(build / program), "bundle"], cwd=build, capture_output=True, text=True
        )
        assert done.stdout == "bundle/model.onnx\non the CPU\n"
    assert (tmp_path / "build app" / "bundle" / "model.onnx").is_file()


def test_bf16_ships_the_float_model_and_what_its_compiler_reads(
    called: Run, tmp_path: Path
) -> None:
    options = {"preferred_data_storage": "vectorized", "encryption_key": "0" * 64}
    made = npu.deploy(
        network(), data(), tmp_path / "bundle", "stx", "BF16", ep_options=options
    )
    # The error of tensors with 8 bits, which is measured where there is data.
    assert made.kind == "BF16" and made.report is not None
    assert 30 < made.report.worst_sqnr < 60 and made.report.verdict is not None
    text = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "with tensors rounded to bfloat16 on a CPU." in text
    config = json.loads((tmp_path / "bundle" / "vitisai_config.json").read_text())
    assert config["passes"][1]["vaiml_config"] == {
        "optimize_level": 1,
        "preferred_data_storage": "vectorized",
    }
    with pytest.raises(AccuracyError, match="the minimum is 90 dB"):
        npu.deploy(network(), data(), tmp_path / "b", "stx", "BF16", min_sqnr=90)
    for wrong, words in (
        ({"config": "A8W8", "ep_options": options}, "option of the BF16 compiler"),
        ({"config": "BF16", "ep_options": {"opt_level": "2"}}, "compiler for integers"),
        (
            {"config": "BF16", "ep_options": {"optimize_level": "4"}},
            "is '4'; it is one of 1, 2, 3",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            npu.deploy(network(), data(), tmp_path / "b", "stx", **wrong)
    without = npu.deploy(network(), None, tmp_path / "without", "stx", "BF16")
    assert without.report is None
    text = (tmp_path / "without" / "README.md").read_text(encoding="utf-8")
    assert "Verdict: **unclear**: the accuracy was not measured; forecast for" in text
    config = json.loads((tmp_path / "bundle" / "vitisai_config.json").read_text())
    assert config["targets"] == [{"name": "VAIML", "pass": ["init", "vaiml_partition"]}]
    feeds = data(1)[0]
    np.testing.assert_allclose(
        run(onnx.load(tmp_path / "bundle" / "model.onnx"), feeds)[0],
        run(network(), feeds)[0],
        1e-5,
        1e-6,
    )
    settings = json.loads((tmp_path / "bundle" / "provider_options.json").read_text())
    assert settings["devices"]["stx"]["encryption_key"] == "0" * 64
    assert "preferred_data_storage" not in settings["devices"]["stx"]
    assert (
        list(settings["devices"]) == ["stx", "krk"]
        and "config_file" in settings["devices"]["stx"]
    )
    assert called(tmp_path / "bundle", "compare.py").returncode == 0


def test_an_earlier_bundle_is_replaced_and_another_folder_is_not(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "bundle"
    npu.deploy(network(), data(), folder)
    (folder / "cache").mkdir()
    npu.deploy(network(), data(), folder, config="A8W8")
    assert {path.name for path in folder.iterdir()} == FILES
    assert json.loads((folder / "bundle.json").read_text())["format"] == "A8W8"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds \'thesis\.tex\'"):
        npu.deploy(network(), data(), tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "mine"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"target": "phx", "config": "A8W8"},
            ConfigError,
            "config is A8W8, but phx .* takes XINT8",
        ),
        ({"config": "INT4"}, ConfigError, "config is W4, but stx"),
        ({"config": "MXINT8"}, ConfigError, "config is MXINT8, but stx"),
        (
            {"config": "BFP16"},
            ConfigError,
            "config is BFP16, but stx .* npu deploy --preset BF16",
        ),
        ({"config": "DYNAMIC"}, ConfigError, "config is dynamic A8W8, but stx"),
        ({"min_sqnr": 90.0}, AccuracyError, "the minimum is 90 dB"),
        ({"target": "sty"}, ConfigError, "unknown target"),
    ],
    ids=str,
)
def test_what_is_not_deployed_leaves_nothing(
    arguments: Any, error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        npu.deploy(
            network(), data(), tmp_path / "new" / "folder" / "bundle", **arguments
        )
    assert not list(tmp_path.iterdir())


def test_folders_above_it_are_made(tmp_path: Path) -> None:
    made = npu.deploy(network(), data(), tmp_path / "new" / "folder" / "bundle").folder
    assert {path.name for path in made.iterdir()} == FILES
    assert [path.name for path in made.parent.iterdir()] == ["bundle"]


def test_data_that_can_be_read_once(tmp_path: Path) -> None:
    npu.deploy(network(), iter(data()), tmp_path / "bundle")
    assert [path.name for path in (tmp_path / "bundle" / "samples").iterdir()] == [
        "0000.npz"
    ]


def test_a_file_called_like_the_mark_makes_no_bundle_of_a_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "bundle.json").write_text("{}")
    (tmp_path / "web" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds \'bundle\.json\'"):
        npu.deploy(network(), data(), tmp_path / "web")
    npu.deploy(network(), data(), tmp_path / "bundle")
    onnx.save(network(), tmp_path / "bundle" / "float.onnx")
    with pytest.raises(ConfigError, match=r"holds, such as model .*float\.onnx"):
        npu.deploy(tmp_path / "bundle" / "float.onnx", data(), tmp_path / "bundle")
    assert (tmp_path / "web" / "thesis.txt").is_file() and (
        tmp_path / "bundle" / "float.onnx"
    ).is_file()


def test_a_bundle_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu.deploy(network(), data(), tmp_path / "bundle")
    before, real = (tmp_path / "bundle" / "model.onnx").read_bytes(), Path.replace

    def full(self: Path, target: Path) -> Path:
        if self.name == "bundle" and Path(target) == tmp_path / "bundle":
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ModelError, match="bundle cannot be written: No space left"):
        npu.deploy(network(), data(), tmp_path / "bundle", config="A8W8")
    assert (tmp_path / "bundle" / "model.onnx").read_bytes() == before


@pytest.mark.parametrize(
    "folder", ["q/../../..", "/proc/foo", "a\0b", "x" * 300, "file/inside"]
)
def test_folders_that_cannot_be(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr(
        sys.modules["quark_onnx.npu.deploy"],
        "legalize",
        lambda *a, **k: pytest.fail("work was done"),
    )
    with pytest.raises(ConfigError, match="output"):
        npu.deploy(network(), data(), folder)


def test_names_that_numpy_takes_for_its_own(called: Run, tmp_path: Path) -> None:
    model = network()
    model.graph.input[0].name = model.graph.node[0].input[0] = "file"
    npu.deploy(model, [{"file": sample["x"]} for sample in data()], tmp_path / "bundle")
    assert called(tmp_path / "bundle", "compare.py").returncode == 0


def with_last(node: onnx.NodeProto, kind: onnx.TypeProto) -> ModelProto:
    """The network with a last node that reads ``y``, and its result as the only output."""
    model = network()
    model.graph.node.append(node)
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    del model.graph.output[:]
    model.graph.output.add(name=node.output[0]).type.CopyFrom(kind)
    return model


NUMBERS = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
MAPS = helper.make_sequence_type_proto(
    helper.make_map_type_proto(onnx.TensorProto.STRING, NUMBERS)
)


@pytest.mark.parametrize(
    "node, kind, labels",
    [
        (
            helper.make_node(
                "ZipMap",
                ["y"],
                ["z"],
                domain="ai.onnx.ml",
                classlabels_strings=["d", "a/b", "c", "b"],
            ),
            MAPS,
            ["z[0].keys", "z[0].values"],
        ),
        (
            helper.make_node("SequenceConstruct", ["y", "f"], ["z"]),
            helper.make_sequence_type_proto(NUMBERS),
            ["z[0]", "z[1]"],
        ),
        (
            helper.make_node(
                "LabelEncoder",
                ["y"],
                ["z"],
                domain="ai.onnx.ml",
                keys_floats=[0.0],
                values_strings=["none"],
                default_string="some",
            ),
            helper.make_tensor_type_proto(onnx.TensorProto.STRING, None),
            ["z"],
        ),
    ],
    ids=["maps", "sequence", "texts"],
)
def test_outputs_other_than_arrays_of_numbers_are_shipped_and_compared(
    called: Run,
    node: onnx.NodeProto,
    kind: onnx.TypeProto,
    labels: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "bundle"
    npu.deploy(with_last(node, kind), data(), folder, "stx", min_sqnr=None)
    assert "does not run" not in caplog.text
    done = called(folder, "compare.py")
    assert done.returncode == 0 and "worst inf dB" in done.stdout
    assert all(f"0000.npz {label}: inf dB" in done.stdout for label in labels)
    with np.load(folder / "outputs" / "0000.npz") as arrays:
        [*_, last] = arrays.files
        others = {name: arrays[name] for name in arrays.files if name != last}
    np.savez(folder / "outputs" / "0000.npz", **others)
    done = called(folder, "compare.py")
    assert done.returncode == 1 and f"{labels[-1]}: computed alone" in done.stdout


def test_inputs_other_than_tensors_are_refused(tmp_path: Path) -> None:
    model = with_last(
        helper.make_node("SequenceInsert", ["s", "y"], ["z"]),
        helper.make_sequence_type_proto(NUMBERS),
    )
    model.graph.input.add(name="s").type.CopyFrom(model.graph.output[0].type)
    with pytest.raises(ConfigError, match="input 's' is no tensor"):
        npu.deploy(model, data(), tmp_path / "bundle")


def test_an_output_without_values_is_compared(called: Run, tmp_path: Path) -> None:
    """A detector that finds nothing has no greatest value."""
    model = network()
    model.graph.node.append(helper.make_node("Compress", ["y", "none"], ["z"], axis=0))
    model.graph.initializer.append(numpy_helper.from_array(np.array([False]), "none"))
    model.graph.output.add(name="z").type.CopyFrom(NUMBERS)
    npu.deploy(model, data(), tmp_path / "bundle", min_sqnr=None)
    done = called(tmp_path / "bundle", "compare.py")
    assert done.returncode == 0 and "0000.npz z: inf dB" in done.stdout


def test_a_machine_that_computes_no_numbers_is_found_out(
    called: Run, bundle: npu.Bundle
) -> None:
    script = "import compare, numpy as np; e = np.float32([1, 2, np.nan]);"
    script += (
        "print([float(compare.sqnr(e, np.float32(f))) for f in ([1, 2, np.nan],"
        " [np.nan] * 3, [1, np.inf, np.nan])],"
    )
    script += "compare.sqnr(np.array([True, False]), np.array([True, True])) < 5)"
    assert called(bundle.folder, "-c", script).stdout == "[inf, -inf, -inf] True\n"


@pytest.mark.parametrize("name", NPU_RECIPES)
def test_every_recipe_makes_a_bundle(name: str, tmp_path: Path) -> None:
    recipe = NPU_RECIPES[name]
    made = npu.deploy(network(), data(24), tmp_path / "bundle", "stx", recipe.config)
    assert made.kind == recipe.preset and recipe.source and recipe.advice


@pytest.mark.slow
@pytest.mark.images
def test_images_are_read_as_the_calibration_data_was(
    called: Run, tmp_path: Path
) -> None:
    from PIL import Image

    (tmp_path / "images").mkdir()
    random = np.random.default_rng(0)
    for place in range(6):
        pixels = random.integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{place}.png")
    spec = ImageSpec(
        size=(8, 8),
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.2),
        resize="crop",
        resize_to=10,
    )
    made = npu.deploy(
        network(),
        partial(open_reader, tmp_path / "images", images=spec),
        tmp_path / "bundle",
    )
    assert {path.name for path in made.folder.iterdir()} == FILES | {
        "preprocess.onnx",
        "encoded.py",
    } and made.images == spec
    assert (
        "preprocess.onnx"
        in (made.folder / "README.md").read_text()
        + (made.folder / "SHA256SUMS").read_text()
    )
    with (
        np.load(made.folder / "samples" / "0000.npz") as sample,
        np.load(made.folder / "outputs" / "0000.npz") as outputs,
    ):
        first, wanted = sample["x"], outputs["output_0"]
    code = (
        "import sys, numpy as np; from npu_session import open_session, read_image;"
        " image = read_image(sys.argv[1]); np.savez('seen.npz', image,"
        " open_session('cpu')[0].run(None, {'x': image})[0])"
    )
    done = called(made.folder, "-c", code, str(tmp_path / "images" / "0.png"))
    assert done.returncode == 0, done.stderr
    with np.load(made.folder / "seen.npz") as seen:
        np.testing.assert_array_equal(seen["arr_0"], first)
        np.testing.assert_allclose(seen["arr_1"], wanted, rtol=1e-6)
    (tmp_path / "0.jpg").write_bytes(b"no image")
    (tmp_path / "2.jpg").write_bytes(
        b"\xff\xd8\xff\xe0" + b"x" * 500
    )  # over which the decoder ends the process
    (tmp_path / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "4.npz").write_bytes(b"PK\x03\x04garbage")
    np.savez(tmp_path / "5.NPZ", x=np.zeros((1, 3, 7, 7), np.float32))
    (tmp_path / "5.NPZ.npz").rename(tmp_path / "5.NPZ")
    cases = {
        "images/0.png": "on the CPU",
        "0.jpg": "ValueError: ",
        "1.jpg": "No such file",
        "2.jpg": "is cut short, damaged, or neither RGB nor grey",
        "3.png": "is cut short, damaged, or neither RGB nor grey",
        "4.npz": "npu_session: BadZipFile: ",
        "5.NPZ": "npu_session: InvalidArgument: ",
    }
    for file, said in cases.items():
        done = called(
            made.folder, "npu_session.py", str(tmp_path / file), "--device", "cpu"
        )
        assert said in done.stdout + done.stderr and "Traceback" not in done.stderr


MADE_OF_ARRAYS = "this model was not made with images; give it a .npz file"


def test_a_bundle_of_arrays_reads_no_images(
    called: Run, bundle: npu.Bundle, tmp_path: Path
) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    done = called(
        bundle.folder, "npu_session.py", str(tmp_path / "photo.jpg"), "--device", "cpu"
    )
    assert (
        done.returncode == 1
        and done.stderr == f"npu_session: RuntimeError: {MADE_OF_ARRAYS}\n"
    )


def scores_behind(kind: str = "y", elem: str = "float") -> ModelProto:
    """The greatest score and its place, and a text of them by an operator of
    onnxruntime-extensions.
    """
    model = parse(
        f"""g ({elem}[N,4] {kind}) => (int64[N] best, int64[2] sizes) {{ f = Cast <to = 1> ({kind})
        best = ArgMax <axis = 1, keepdims = 0> (f) sizes = Shape (f) }}"""
    )
    words = onnx.helper.make_node(
        "StringJoin", ["names", "dash", "axis"], ["text"], domain="ai.onnx.contrib"
    )
    model.graph.node.append(words)
    for name, values in (("names", [b"a", b"b"]), ("dash", [b"-"])):
        model.graph.initializer.append(
            onnx.helper.make_tensor(
                name, onnx.TensorProto.STRING, [len(values)], values
            )
        )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("text", onnx.TensorProto.STRING, [1])
    )
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.contrib", 1))
    return model


@pytest.mark.images
def test_what_stands_behind_is_shipped_and_run(called: Run, tmp_path: Path) -> None:
    made = npu.deploy(
        npu.Parts(network(), scores_behind(), (), False), data(), tmp_path / "bundle"
    )
    assert {path.name for path in made.folder.iterdir()} == FILES | {"postprocess.onnx"}
    assert "postprocess.onnx" in (made.folder / "README.md").read_text()
    code = (
        "import numpy as np; from npu_session import open_session, postprocess; "
        "postprocess({'y': np.zeros((2, 4), 'f')}); "
        "y = np.load('outputs/0000.npz')['output_0']; found = postprocess({'y': y}); "
        "print(found['best'] == y.argmax(1), found['sizes'], found['text'])"
    )
    done = called(made.folder, "-c", code)
    assert done.stdout == "[ True] [1 4] ['a-b']\n", done.stderr
    done = called(made.folder, "npu_session.py", "samples/0000.npz", "--device", "cpu")
    assert done.returncode == 0 and "behind it, on the CPU:\n  best (1,)" in done.stdout


def test_the_head_of_a_model_is_cut_off_and_put_behind(
    called: Run, tmp_path: Path
) -> None:
    whole = parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) { c = Conv (x, w) e = Exp (c) y = Sigmoid (e) }""",  # noqa: E501
        w=weight(4, 3, 1, 1),
    )
    source = tmp_path / "model.onnx"
    onnx.save(whole, source)
    samples = tmp_path / "samples"
    samples.mkdir()
    for place, sample in enumerate(data()):
        np.savez(samples / f"{place:02}.npz", **sample)
    options = [
        "-o",
        str(tmp_path / "bundle"),
        "--data",
        str(samples),
        "--cut",
        "--quiet",
    ]
    assert main(["npu", "deploy", str(source), *options]) == 0
    kinds = {
        node.op_type
        for node in onnx.load(tmp_path / "bundle" / "postprocess.onnx").graph.node
    }
    assert kinds == {"Exp", "Sigmoid"}
    x = data()[0]["x"]
    code = (
        "import numpy as np; from npu_session import open_session, postprocess; x ="
        " np.load('samples/0000.npz')['x']; session = open_session('cpu')[0]; outputs ="
        " dict(zip(['c'], session.run(['c'], {'x': x}))); np.savez('seen.npz', x=x,"
        " **postprocess({'x': x, **outputs}))"
    )
    assert called(tmp_path / "bundle", "-c", code).returncode == 0
    with np.load(tmp_path / "bundle" / "seen.npz") as seen:
        np.testing.assert_array_equal(seen["x"], x)
        np.testing.assert_allclose(seen["y"], run(whole, {"x": x})[0], atol=0.1)


def boxes_of_a_map() -> ModelProto:
    """A detector: 64 boxes in pixels with the scores of two classes, most of them low."""
    return parse(
        """g (float[1,3,8,8] x) => (float[1,6,64] y) {
            h = Conv (x, w, b) box, score = Split <axis = 1> (h, sizes) e = Sigmoid (box)
            scaled = Mul (e, stride) p = Sigmoid (score) c = Concat <axis = 1> (scaled, p)
            y = Reshape (c, shape) }""",
        w=2 * weight(6, 3, 1, 1),
        b=np.float32([0, 0, 0, 0, -3, -3]),
        sizes=np.int64([4, 2]),
        stride=np.float32([320.0]),
        shape=np.int64([0, 6, 64]),
    )


COMPARE = ("compare.py", "--device", "cpu", "--runs", "0")


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_boxes_of_a_detector_decide(
    called: Run, is_cut: bool, tmp_path: Path
) -> None:
    """Not the decibels: other classes hardly change them, boxes of low scores do."""
    model = boxes_of_a_map()
    parts = npu.cut(model) if is_cut else model
    made = npu.deploy(parts, data(), tmp_path / "b", "stx", "A8W8", min_sqnr=None)
    shipped = (made.folder / "boxes.py").read_text(encoding="utf-8")
    assert shipped == Path(boxes.__file__).read_text(encoding="utf-8")
    found = called(made.folder, *COMPARE)
    assert (
        found.returncode == 0 and "0 new: F1 1.000, mean overlap 1.000" in found.stdout
    )
    assert [limit.good for limit in THRESHOLDS["detector"]] == [0.9, 0.85]
    if is_cut:
        return
    record = made.folder / "outputs" / "0000.npz"
    with np.load(record) as arrays:
        y = arrays["output_0"]
    low = y[0, 4:].max(axis=0) < 0.04
    assert 8 < low.sum() < 60
    other = y.copy()
    other[0, :4, low] /= 3
    np.savez(record, output_0=other)
    found = called(made.folder, *COMPARE)
    ratios = re.findall(r"worst ([\d.]+) dB", found.stdout)
    assert found.returncode == 0 and float(ratios[0]) < 20
    for sample in (made.folder / "outputs").iterdir():
        with np.load(sample) as arrays:
            y = arrays["output_0"]
        np.savez(sample, output_0=y[:, [0, 1, 2, 3, 5, 4]])
    found = called(made.folder, *COMPARE)
    assert found.returncode == 1 and "compare: other boxes" in found.stderr


def test_a_cut_model_says_where_it_was_cut(tmp_path: Path) -> None:
    """And is judged by the tensors there, which are signals and no classes or boxes."""
    parts = npu.cut(boxes_of_a_map())
    made = npu.deploy(parts, data(), tmp_path / "b", "stx", "A8W8", min_sqnr=None)
    behind = len(parts.second.graph.node)
    assert made.cut_at == ("h",) and made.to_dict()["cut_at"] == ["h"]
    line = f"at h; {behind} nodes behind run on the CPU (postprocess.onnx)"
    assert made.cut_line == line and f"cut       {line}" in str(made)
    assert f"Cut {line}." in (made.folder / "README.md").read_text(encoding="utf-8")
    assert made.accuracy is not None and made.accuracy.task == "signal"
    assert made.sentence.startswith("at 1 cut tensor: ")
    expected = compare(parts.first, made.folder / "model.onnx", data()[-2:])
    assert [error.name for error in expected.outputs] == ["h"]
    assert made.worst_sqnr == pytest.approx(expected.sqnr, abs=3)


def test_a_list_that_is_made_behind_is_shown(called: Run, tmp_path: Path) -> None:
    tail = parse(
        "g (float[N,4] y) => (seq(float[N,4]) all) { all = SequenceConstruct (y) }"
    )
    made = npu.deploy(
        npu.Parts(network(), tail, (), False), data(), tmp_path / "bundle"
    )
    done = called(made.folder, "npu_session.py", "samples/0000.npz", "--device", "cpu")
    assert (
        done.returncode == 0
        and "behind it, on the CPU:\n  all: [array([[" in done.stdout
    ), done.stderr


def of_type(number: int) -> ModelProto:
    model = parse("g (float[N,4] y) => (float[N,4] z) { z = Neg (y) }")
    model.graph.input[0].type.tensor_type.elem_type = number
    return model


@pytest.mark.parametrize("config", ["XINT8", "BF16"])
def test_a_model_of_16_bits_is_cut_and_put_together_again(
    called: Run, config: str, tmp_path: Path
) -> None:
    whole = parse(
        "g (float16[1,3,8,8] x) => (float16[1,4] y) { c = Conv (x, w) e = Exp (c) "
        "y = ReduceMean <axes = [2, 3], keepdims = 0> (e) }",
        w=weight(4, 3, 1, 1).astype(np.float16),
    )
    samples = [{"x": sample["x"].astype(np.float16)} for sample in data()]
    made = npu.deploy(
        npu.cut(whole, ["c"]), samples, tmp_path / "bundle", config=config
    )
    assert called(made.folder, "compare.py").returncode == 0
    front = run(onnx.load(made.folder / "model.onnx"), samples[0])[0]
    [found] = run(onnx.load(made.folder / "postprocess.onnx"), {"c": front})
    np.testing.assert_allclose(found, run(whole, samples[0])[0], rtol=0.02)
    npu.deploy(
        npu.cut(whole, ["c"]).first, iter(samples), tmp_path / "bundle", config=config
    )


def without_its_weights() -> ModelProto:
    model = parse("g (float[N,4] y) => (float[N,4] z) { z = Mul (y, k) }", k=normal(4))
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "gone.bin")
    model.graph.initializer[0].ClearField("raw_data")
    return model


@pytest.mark.parametrize(
    ("tail", "error", "message"),
    [
        (
            lambda: scores_behind("logits"),
            ConfigError,
            "reads 'logits', but the one in front computes y; rename it",
        ),
        (
            lambda: scores_behind(elem="double"),
            ConfigError,
            "reads 'y' as double, but it is float",
        ),
        (lambda: of_type(77), ConfigError, "reads 'y' as type 77, but it is float"),
        (
            lambda: of_type(0),
            ConfigError,
            "reads 'y' as no tensor of a known type, but it is float",
        ),
        (
            lambda: parse(
                "g (float[N,4] y) => (float[N,5] z) { z = Reshape (y, five) }",
                five=np.array([-1, 5]),
            ),
            ModelError,
            "cannot be run on what the one in front computes",
        ),
        (network, ConfigError, "reads no output of the one in front, which computes y"),
        (without_its_weights, ModelError, r"not loaded, they lie in \['gone.bin'\]"),
    ],
    ids=[
        "name",
        "type",
        "unknown type",
        "no type",
        "shape",
        "nothing",
        "weights elsewhere",
    ],
)
def test_what_does_not_fit_behind_leaves_nothing(
    tail: Any, error: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["quark_onnx.npu.deploy"], "run", None
    )  # it is said before that
    with pytest.raises(error, match=message):
        npu.deploy(npu.Parts(network(), tail(), (), False), data(), tmp_path / "bundle")
    assert not any(tmp_path.iterdir())


@pytest.mark.images
def test_operators_that_are_not_installed_are_named(
    called: Run, tmp_path: Path
) -> None:
    made = npu.deploy(
        npu.Parts(network(), scores_behind(), (), False), data(), tmp_path / "bundle"
    )
    code = (
        "import sys; sys.modules['onnxruntime_extensions'] = None; import numpy as np; "
        "from npu_session import postprocess; postprocess({'y': np.zeros((1, 4), 'f')})"
    )
    done = called(made.folder, "-c", code)
    assert (
        "RuntimeError: postprocess.onnx cannot be opened; if it has operators of"
        in done.stderr
    )


def test_a_bundle_with_nothing_behind_says_so(called: Run, bundle: npu.Bundle) -> None:
    code = "from npu_session import postprocess; postprocess({})"
    done = called(bundle.folder, "-c", code)
    assert "RuntimeError: nothing stands behind this model" in done.stderr


def test_names_of_outputs_are_escaped(called: Run, tmp_path: Path) -> None:
    """A name in a model must not reach the terminal as a command."""
    model = network()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "y\x1b[31m"
    folder = npu.deploy(model, data(), tmp_path / "bundle").folder
    for script, *words in (
        ["compare.py"],
        ["npu_session.py", "samples/0000.npz", "--device", "cpu"],
    ):
        done = called(folder, script, *words)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout and "y\\x1b[31m" in done.stdout
