"""Engines: where quantized models are judged and timed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from calibrators.onnx_runtime.providers import current_provider
from quark_onnx import QConfig, compare, convert, on_engine, quantize, search
from quark_onnx.common.errors import (
    AccuracyError,
    ConfigError,
    MissingDependency,
    RuntimeCrashError,
)
from quark_onnx.common.registry import ENGINES
from quark_onnx.engines import EngineRun, OpenVINO, selected
from quark_onnx.trials.latency import measure_latency
from tests.engines import Crashing, Half, Missing, Silent
from tests.models import conv_relu, normal, parse, residual, samples
from tests.settings import TENSOR

#: Providers of this onnxruntime besides the CPU's; Azure's runs no operator of a model.
OTHER_PROVIDERS = sorted(
    set(ort.get_available_providers())
    - {"CPUExecutionProvider", "AzureExecutionProvider"}
)
#: Half of a signal: the error is as large as the result.
HALF = 10 * np.log10(4)


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    before = dict(ENGINES.contents)
    for engine in (Half, Silent, Crashing, Missing):
        ENGINES.add(engine.name, engine)
    yield
    ENGINES.contents.clear()
    ENGINES.contents.update(before)


def test_a_comparison_is_that_of_the_engine() -> None:
    model = residual()
    with on_engine("half"):
        found = compare(model, model, samples(model, 5), time=True)
    # Both models are timed there; the float model's outputs are onnxruntime's.
    assert found.sqnr == pytest.approx(HALF, abs=1e-4)
    assert found.latency is not None and found.latency.engine.startswith("half")
    assert found.run is not None and found.run.counts == "1 of 2, in float 1 Product"
    assert compare(model, model, samples(model, 5)).run is None


def test_an_engine_ends_with_its_block() -> None:
    with on_engine("half"):
        with on_engine("silent"):
            assert selected() is not None and selected().engine is Silent
        assert selected() is not None and selected().engine is Half
        with on_engine():  # none of its own
            assert selected() is not None
    assert selected() is None


def test_quantize_judges_on_the_engine(tmp_path: Path) -> None:
    model, output = residual(), tmp_path / "q.onnx"
    with on_engine("half"):
        report = quantize(model, samples(model, 8), TENSOR, output).report
        # The codes add some error of their own.
        assert report.worst_sqnr == pytest.approx(HALF, abs=1)
        with pytest.raises(AccuracyError, match=r"reaches [56]\.\d+ dB"):
            quantize(model, samples(model, 8), TENSOR.with_(min_sqnr=20))
    assert any(
        "layers on integers: 1 of 2, in float 1 Product" in n for n in report.notes
    )
    # The file does not depend on where it is judged.
    assert output.read_bytes() == _bytes_without_engine(model, tmp_path)


def _bytes_without_engine(model: ModelProto, folder: Path) -> bytes:
    quantize(model, samples(model, 8), TENSOR, folder / "usual.onnx")
    return (folder / "usual.onnx").read_bytes()


def test_search_judges_on_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="of the extra search")
    model = residual()
    space = {"presets": ["A8W8", "A16W8"], "calibrators": [], "optimizers": []}
    journal = tmp_path / "journal"
    with on_engine("half"):
        found = search(model, samples(model, 8), space=space, journal=journal)
    assert [c.score for c in found.candidates] == pytest.approx([HALF] * 2, abs=1)
    # What an engine measured is no measurement of another one.
    usual = search(model, samples(model, 8), space=space, journal=journal)
    assert min(c.score for c in usual.candidates) > 20


def test_an_engine_need_not_say_how_it_runs() -> None:
    model = residual()
    with on_engine("silent"):
        found = compare(model, model, samples(model))
    assert found.run is not None
    assert found.run.counts == "not known: the engine does not say"


def test_a_crash_of_an_engine_is_an_error() -> None:
    model = residual()
    with (
        on_engine("crashing"),
        pytest.raises(RuntimeCrashError, match=r"Crashing's process .* the engine"),
    ):
        compare(model, model, samples(model))


@pytest.mark.parametrize(
    ("name", "provider", "error", "message"),
    [
        ("openvin", "", ConfigError, r"unknown engine 'openvin'.*openvino"),
        ("missing", "", MissingDependency, "pip install a_package"),
        ("", "CUDAA", ConfigError, r"no provider 'CUDAA'; it has .*CPU"),
        pytest.param(
            "",
            "azure",
            ConfigError,
            r"Azure .* runs no operator of a model; name .*CPU",
            marks=pytest.mark.skipif(
                "AzureExecutionProvider" not in ort.get_available_providers(),
                reason="this build of onnxruntime is without it",
            ),
        ),
        ("openvino", "CPU", ConfigError, "provider CPU is one of onnxruntime"),
    ],
)
def test_what_is_not_there(
    name: str, provider: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), on_engine(name, provider):
        pass


@pytest.mark.parametrize("name", ["cpu", "CPUExecutionProvider"])
def test_onnxruntime_on_a_provider(name: str) -> None:
    """Errors equal a session's of the application; layers are those of the graph that it runs."""
    model = conv_relu()
    data = samples(model, 3)
    quantized = quantize(model, data, TENSOR).model
    with on_engine("onnxruntime", provider=name):
        found = compare(model, quantized, data)
    before, after = (
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
        for m in (model, quantized)
    )
    outputs = [
        [np.stack([s.run(None, f)[0] for f in data]).astype(np.float64)]
        for s in (before, after)
    ]
    (x,), (y,) = outputs
    expected = 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())
    assert found.sqnr == pytest.approx(expected, abs=1e-6)
    assert found.run is not None
    assert (found.run.layers, found.run.integer_layers) == (1, 1)
    with on_engine("onnxruntime"):
        floating = compare(model, model, data).run
    assert floating is not None and floating.integer_layers == 0
    assert floating.layers == 1


def test_calibration_on_a_provider(tmp_path: Path) -> None:
    model, output = residual(), tmp_path / "q.onnx"
    with on_engine(provider="CPU"):
        assert current_provider() == "CPUExecutionProvider"
        quantize(model, samples(model, 8), TENSOR, output)
        latency = measure_latency(model, output, samples(model)[0])
    assert latency.engine == "onnxruntime, CPU"
    assert current_provider() == ""
    assert output.read_bytes() == _bytes_without_engine(model, tmp_path)


@pytest.mark.parametrize("provider", OTHER_PROVIDERS)
def test_calibration_and_comparison_on_another_provider(
    provider: str, tmp_path: Path
) -> None:
    """A model that was calibrated there is as near to the float model as one of the CPU."""
    model, data = residual(), samples(residual(), 8)
    with on_engine(provider=provider):
        there = quantize(model, data, TENSOR, tmp_path / "there.onnx").model
        found = compare(model, there, data).sqnr
    here = quantize(model, data, TENSOR).model
    assert found == pytest.approx(compare(model, here, data).sqnr, abs=1)


def test_a_plug_in_brings_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quark_onnx.common.registry import Registry
    from tests.plugins import install

    module = """
        from quark_onnx.common.registry import ENGINES
        from tests.engines import Half

        class Ours(Half):
            name = "ours"

        registry_for_the_test = ENGINES
    """
    install(tmp_path, "an-engine", {"an_engine": module}, engines="ours = an_engine")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry[Any]("engine", plugins="quark_onnx.engines")
    assert registry.plugins == ["an-engine 1.0"]
    import an_engine  # type: ignore[import-not-found]

    ENGINES.add("ours", an_engine.Ours)
    model = residual()
    with on_engine("ours"):  # the other process finds the module by the same path
        assert compare(model, model, samples(model)).sqnr == pytest.approx(
            HALF, abs=1e-4
        )


@pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")
class TestOpenVINO:
    def test_outputs_are_those_of_onnx(self) -> None:
        model = residual()
        with on_engine("openvino"):
            engine = selected()
            assert engine is not None
            session = engine.open(model)
            reference = ReferenceEvaluator(model)
            for sample in samples(model, 3):
                (found,) = session.run(["y"], sample)
                (expected,) = reference.run(["y"], sample)
                assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)
        (value,) = session.get_outputs()
        assert (value.name, value.type) == ("y", "tensor(float)")

    def test_layers_on_integers(self) -> None:
        model = conv_relu()
        data = samples(model, 4)
        quantized = quantize(model, data, TENSOR).model
        with on_engine("openvino"):
            found = compare(model, quantized, data)
            latency = measure_latency(model, quantized, data[0], threads=1)
        assert found.run is not None
        assert (found.run.layers, found.run.integer_layers) == (1, 1)
        assert found.sqnr > 25
        assert latency.engine.startswith("openvino 20")


@pytest.mark.parametrize(
    ("preset", "remarks"),
    [
        ("A8W8", []),
        ("S8S8", [r"activations? (is|are) int8.* --to u8s8"]),
        ("U8U8", [r"weights? (is|are) uint8, whose layers run in float.* --to u8s8"]),
    ],
)
def test_remarks_on_codes_that_openvino_does_not_take(
    preset: str, remarks: list[str]
) -> None:
    """The command that they name leaves nothing to remark."""
    model = conv_relu()
    quantized = quantize(model, samples(model, 4), preset).model
    found = OpenVINO.remarks(quantized)
    assert len(found) == len(remarks)
    for pattern, remark in zip(remarks, found, strict=True):
        assert re.search(pattern, remark)
    assert OpenVINO.remarks(convert(quantized, to="u8s8").model) == []


@pytest.mark.parametrize(
    "body",
    [
        "h = MatMul (x, w)  y = MatMul (h, w)",
        """i = Reshape (x, image)  c = Neg (i)
        y = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1> (c)""",
    ],
)
def test_a_remark_on_operators_that_openvino_computes_wrongly(body: str) -> None:
    """The command that it names leaves nothing to remark."""
    constants = {"w": normal(4, 4), "image": np.int64([1, 1, 2, 2])}
    model = parse(
        f"g (float[1,4] x) => (y) {{ {body} }}",
        **{name: value for name, value in constants.items() if f" {name})" in body},
    )
    model.graph.output[0].type.tensor_type.elem_type = 1
    data = samples(model, 4)
    [remark] = OpenVINO.remarks(quantize(model, data, "A8W8").model)
    assert "1 operator is computed wrongly" in remark
    for_openvino = QConfig.of("A8W8").with_(target="openvino")
    assert OpenVINO.remarks(quantize(model, data, for_openvino).model) == []


def test_counts_are_words() -> None:
    run = EngineRun("an engine", 5, 2, {"Conv": 2, "MatMul": 1})
    assert run.counts == "2 of 5, in float 2 Conv, 1 MatMul"
