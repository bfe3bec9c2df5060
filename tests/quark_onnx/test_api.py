"""quantize_static from the outside: what goes in, what comes out, and what is left on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

import calibrators.onnx_runtime.runner
from quark_onnx import Override, QConfig, compare, quantize, quantize_static
from quark_onnx.common.errors import (
    AccuracyError,
    ConfigError,
    DataError,
    ModelError,
    QuarkError,
)
from quark_onnx.files import io
from tests.models import (
    MODELS,
    Factory,
    Feeds,
    conv_relu,
    interface,
    kinds,
    normal,
    parse,
    residual,
    run,
    samples,
    weight,
)
from tests.settings import ALL, CHANNEL, TENSOR

PRESETS = ["A8W8", "S8S8", "A16W8", "XINT8"]


def saved(model: ModelProto, folder: Path, **options: Any) -> Path:
    path = folder / "float.onnx"
    onnx.save_model(model, str(path), **options)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# What goes in


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_any_model_becomes_a_valid_one_with_the_same_interface(
    make: Factory, preset: str
) -> None:
    model = make()
    data = samples(model)
    result = quantize(model, data, preset)
    onnx.checker.check_model(result.model, full_check=True)
    assert interface(result.model) == interface(model)
    assert model == make(), "the caller's model is never changed"
    assert quantize_static(model, data, preset) == result.model, (
        "the same model again gives the same result"
    )
    for value, found in zip(
        run(model, data[0]), run(result.model, data[0]), strict=True
    ):
        assert value.shape == found.shape and value.dtype == found.dtype


def test_a_path_and_a_model_are_the_same(tmp_path: Path) -> None:
    model = residual()
    data = samples(model)
    path = saved(model, tmp_path)
    assert (
        quantize_static(path, data)
        == quantize_static(str(path), data)
        == quantize_static(model, data)
    )


@pytest.mark.parametrize(
    "config",
    ["A8W8", "a8w8", {"preset": "A8W8"}, QConfig.of("A8W8")],
    ids=["name", "lower case", "dictionary", "value"],
)
def test_a_configuration_may_be_written_in_many_ways(config: Any) -> None:
    model = conv_relu()
    assert quantize_static(model, samples(model), config) == quantize_static(
        model, samples(model)
    )


def test_a_configuration_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("preset: S8S8\n", encoding="utf-8")
    model = conv_relu()
    assert quantize_static(
        model, samples(model), tmp_path / "c.yaml"
    ) == quantize_static(model, samples(model), "S8S8")


def test_a_generator_is_read_once() -> None:
    model = residual()
    reads: list[int] = []

    def reader() -> Iterator[Feeds]:
        for index, feeds in enumerate(samples(model, 30)):
            reads.append(index)
            yield feeds

    result = quantize(model, reader())
    assert reads == list(range(30))
    assert (result.report.samples, result.report.held_out) == (28, 2)


def test_batches_and_dynamic_dimensions_may_differ() -> None:
    model = parse(
        "g (float[N,C,H,W] x) => (float[N,2,H,W] y) { y = Conv (x, w) }",
        w=weight(2, 3, 1, 1),
    )
    data = [
        {"x": normal(n, 3, h, w, seed=n)}
        for n, h, w in ((1, 4, 4), (3, 5, 7), (2, 9, 1))
    ]
    for calibrator in ("minmax", "percentile", "entropy", "minmse"):
        found = quantize(model, data, QConfig().with_(calibrator=calibrator)).model
        assert compare(model, found, data[:1]).sqnr > 25


@pytest.mark.parametrize(
    ("model", "data", "error", "message"),
    [
        (3, [], ModelError, "model is a int; it must be a path or a ModelProto"),
        ("nowhere.onnx", [], ModelError, "model file nowhere.onnx cannot be read"),
        (conv_relu(), None, DataError, "no calibration data was given"),
        (conv_relu(), [], DataError, "no sample"),
        (
            conv_relu(),
            [{"y": np.zeros((1, 3, 8, 8), np.float32)}],
            DataError,
            "the model has no input 'y'; known: x",
        ),
        (conv_relu(), [{"x": np.zeros((1, 8, 8, 3), np.float32)}], DataError, "NHWC"),
        (
            conv_relu(),
            [{"x": np.full((1, 3, 8, 8), np.nan, np.float32)}],
            DataError,
            "sample 0",
        ),
    ],
    ids=["no model", "no file", "no data", "empty", "name", "layout", "nan"],
)
def test_what_cannot_be_used(
    model: Any, data: Any, error: type[QuarkError], message: str
) -> None:
    with pytest.raises(error) as raised:
        quantize_static(model, data)
    assert message in str(raised.value)


# What comes out


def test_with_everything_excluded_the_function_is_unchanged() -> None:
    model = residual()
    data = samples(model)
    for config in (QConfig(exclude="*"), QConfig(activation=None, weight=None)):
        result = quantize(model, data, config)
        assert kinds(result.model) == kinds(model) and result.report.quantized == 0
        np.testing.assert_array_equal(
            run(result.model, data[0])[0], run(model, data[0])[0]
        )
        assert "nothing in this model could be quantized" in str(result.report)


def test_weights_alone() -> None:
    model = residual()
    result = quantize(model, samples(model), QConfig(activation=None))
    assert (
        "QuantizeLinear" not in kinds(result.model)
        and kinds(result.model).count("DequantizeLinear") == 3
    )
    assert result.report.worst_sqnr > 35


@pytest.mark.parametrize("pattern", ["conv1", "con*1", "re:^conv1$"])
def test_an_excluded_layer_stays_float(pattern: str) -> None:
    model = residual()
    after = quantize_static(model, samples(model), TENSOR.with_(exclude=pattern))
    floats = {t.name for t in after.graph.initializer}
    assert {"w1", "b1"} <= floats and not {"w2", "b2"} & floats


@pytest.mark.parametrize(
    "optimizer", ["bias_correction", "adaround", "adaquant", "gptq"]
)
def test_a_single_row_is_enough_for_other_layers(optimizer: str) -> None:
    """One sample with one row is all that a Gemm may get to see: nothing would judge it, so it is
    left alone.
    """
    result = quantize(
        residual(),
        samples(residual(), 1),
        QConfig.of("A8W8").with_(optimizers=optimizer),
    )
    assert result.report.worst_sqnr > 20


def test_mixed_precision() -> None:
    model = residual()
    wide = TENSOR.activation.with_(dtype="uint16")
    mixed = quantize(
        model,
        samples(model),
        TENSOR.with_(overrides=(Override(op_types=("Gemm",), activation=wide),)),
    )
    types = {
        t.data_type
        for t in mixed.model.graph.initializer
        if t.name.endswith("_zero_point")
    }
    assert {
        onnx.TensorProto.UINT8,
        onnx.TensorProto.UINT16,
    } <= types and mixed.report.worst_sqnr > 25


@pytest.mark.slow
def test_no_scale_in_a_model_is_degenerate() -> None:
    for make in MODELS.values():
        model = make()
        for config in ALL.values():
            after = quantize_static(model, samples(model), config)
            for tensor in after.graph.initializer:
                if tensor.name.endswith("_scale"):
                    scale = numpy_helper.to_array(tensor)
                    assert (
                        np.isfinite(scale).all()
                        and (scale >= np.finfo(np.float32).tiny).all()
                    )


# What is written


@pytest.mark.parametrize("preset", PRESETS)
def test_the_file_is_the_model(tmp_path: Path, preset: str) -> None:
    model = residual()
    output = tmp_path / "new" / "out.onnx"
    result = quantize_static(model, samples(model), preset, output)
    assert onnx.load(output) == result
    assert [path.name for path in output.parent.iterdir()] == ["out.onnx"]


def test_input_and_earlier_output_are_handled_with_care(tmp_path: Path) -> None:
    path = saved(residual(), tmp_path)
    before, data = path.read_bytes(), samples(residual())
    for _ in range(2):
        quantize_static(path, data, "A8W8", tmp_path / "out.onnx")
        after = contents(tmp_path)
        assert after.pop("float.onnx") == before
        assert list(after) == ["out.onnx"]
    again = contents(tmp_path)["out.onnx"]
    assert after["out.onnx"] == again


@pytest.mark.parametrize("spelling", ["float.onnx", "../{}/float.onnx", "link.onnx"])
def test_the_input_is_never_overwritten(tmp_path: Path, spelling: str) -> None:
    path = saved(conv_relu(), tmp_path)
    (tmp_path / "link.onnx").symlink_to(path)
    before = path.read_bytes()
    with pytest.raises(
        ConfigError,
        match="is the input model itself",
    ):
        quantize_static(
            path,
            samples(conv_relu()),
            "A8W8",
            tmp_path / spelling.format(tmp_path.name),
        )
    assert path.read_bytes() == before


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="is a folder; give the name of the \\.onnx file to write"
    ):
        quantize_static(conv_relu(), samples(conv_relu()), "A8W8", tmp_path)


def test_a_result_that_is_too_bad_is_not_written(tmp_path: Path) -> None:
    model = residual()
    reached = quantize(model, samples(model), TENSOR).report.worst_sqnr
    with pytest.raises(
        AccuracyError,
        match=rf"output 'y' reaches {reached:.2f} dB SQNR, the minimum is 90 dB",
    ):
        quantize_static(
            model, samples(model), TENSOR.with_(min_sqnr=90), tmp_path / "out.onnx"
        )
    assert not list(tmp_path.iterdir())
    quantize_static(
        model,
        samples(model),
        TENSOR.with_(min_sqnr=reached - 0.01),
        tmp_path / "out.onnx",
    )
    assert (tmp_path / "out.onnx").exists()


def heavy() -> ModelProto:
    return parse("g (float[N,64] x) => (float[N,64] y) { h = MatMul (x, w) y = MatMul (h, v) }",
                 w=weight(64, 64), v=weight(64, 64, seed=1))  # fmt: skip


def test_external_data_goes_with_external_data(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = saved(
        heavy(),
        tmp_path / "in",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    before = contents(tmp_path / "in")
    quantize_static(path, samples(heavy()), "A8W8", tmp_path / "out" / "q.onnx")
    assert contents(tmp_path / "in") == before
    assert list(contents(tmp_path / "out")) == ["q.onnx", "q.onnx.data"]
    assert io.load(tmp_path / "out" / "q.onnx") == quantize_static(
        heavy(), samples(heavy())
    )


def test_a_model_beyond_the_limit_of_protobuf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "EXTERNAL_DATA_LIMIT", 6000)  # twice 4096 codes do not fit
    results = []
    for _ in range(2):
        quantize_static(heavy(), samples(heavy()), "A8W8", tmp_path / "q.onnx")
        results.append(contents(tmp_path))
    assert list(results[0]) == ["q.onnx", "q.onnx.data"] and results[0] == results[1]
    (tmp_path / "q.onnx").rename(
        tmp_path / "moved.onnx"
    )  # the data is found by its relative name
    feeds = samples(heavy())[0]
    expected = run(quantize_static(heavy(), samples(heavy())), feeds)[0]
    np.testing.assert_array_equal(
        run(io.load(tmp_path / "moved.onnx"), feeds)[0], expected
    )


# Parallel


@pytest.mark.parametrize("calibrator", ["minmax", "percentile", "entropy"])
@pytest.mark.parametrize(
    "pool",
    [
        ThreadPoolExecutor,
        lambda workers: ProcessPoolExecutor(workers, mp_context=get_context("spawn")),
    ],
    ids=["threads", "processes"],
)
def test_an_executor_gives_the_same_bytes(
    pool: Callable[[int], Any], calibrator: str
) -> None:
    model = residual()
    data = samples(model, 24)
    config = CHANNEL.with_(calibrator=calibrator)
    serial = quantize_static(model, data, config)
    with pool(2) as executor:
        parallel = quantize_static(model, data, config, executor=executor)
    assert parallel.SerializeToString(deterministic=True) == serial.SerializeToString(
        deterministic=True
    )


def test_the_number_of_threads_does_not_change_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = residual()
    results = set()
    for threads in (1, 2, 4):
        monkeypatch.setattr(
            calibrators.onnx_runtime.runner,
            "open_session",
            _with_threads(calibrators.onnx_runtime.runner.open_session, threads),
        )
        results.add(
            quantize_static(model, samples(model), CHANNEL).SerializeToString(
                deterministic=True
            )
        )
        monkeypatch.undo()
    assert len(results) == 1


def _with_threads(opener: Callable[..., Any], threads: int) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return opener(*arguments, **{**options, "threads": threads})

    return wrapped


@pytest.mark.parametrize(
    "optimizers", [(), ("bias_correction",)], ids=["none", "one that reads again"]
)
@pytest.mark.parametrize(
    ("bad", "said"),
    [(np.full((2, 8), np.nan), "nan"), (np.zeros((0, 8)), "a batch of nothing")],
)
def test_a_bad_sample_is_the_datas_fault_whoever_reads_it(
    optimizers: tuple[str, ...], bad: Any, said: str
) -> None:
    model = parse(
        "g (float[N,8] x) => (float[N,6] y) { y = MatMul (x, w) }",
        w=weight(6, 8).T.copy(),
    )
    data = [
        {"x": np.ones((2, 8), np.float32)},
        {"x": bad.astype(np.float32)},
        {"x": np.ones((2, 8), np.float32)},
    ]
    with pytest.raises(
        DataError, match=f"sample 1: input 'x'.*{said}|sample 1.*{said}"
    ):
        quantize(model, data, QConfig.of("A8W8").with_(optimizers=optimizers))
