"""What users of quantizers ran into, one test a thread: data, files, settings and number formats.

A test is named after the thread: its project, such as onnxruntime (ort), its examples (oie) or
Ryzen AI (rai), and its number. Those about the structure of graphs and about single numbers are in
``test_reproducers_graphs``.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import (
    QConfig,
    compare,
    quantize,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
)
from quark_onnx.cli import main
from quark_onnx.common.errors import AccuracyError, ConfigError, DataError, ModelError
from quark_onnx.measuring.held_out import held_out_of
from tests.models import Array, Feeds, interface, kinds, normal, parse, weight


def f32(values: Any) -> Array:
    return np.asarray(values, np.float32)


def i64(values: Any) -> Array:
    return np.asarray(values, np.int64)


CALIBRATORS = ["minmax", "percentile", "minmse", "entropy", "nonoverflow"]


def noise(
    model: ModelProto,
    quantized: ModelProto,
    data: Iterable[Feeds],
    *,
    optimize: bool = True,
) -> dict[str, float]:
    """SQNR of each float output over all samples, in dB.

    An output of another shape or of other integers fails.
    """
    before, after = (
        open_session(each, optimize=optimize) for each in (model, quantized)
    )
    names = [value.name for value in before.get_outputs()]
    floats = [
        value.name
        for value in before.get_outputs()
        if value.type in ("tensor(float)", "tensor(float16)")
    ]
    signal, error = dict.fromkeys(names, 0.0), dict.fromkeys(names, 1e-30)
    for feeds in data:
        for name, a, b in zip(
            names, before.run(names, feeds), after.run(names, feeds), strict=True
        ):
            assert a.shape == b.shape and a.dtype == b.dtype, name
            if name not in floats:
                np.testing.assert_array_equal(a, b)
                continue
            assert np.isfinite(b).all(), name
            signal[name] += float(np.square(a, dtype=np.float64).sum())
            error[name] += float(np.square(np.subtract(a, b, dtype=np.float64)).sum())
    return {
        name: float(10 * np.log10((signal[name] + 1e-30) / error[name]))
        for name in floats
    }


def sound(
    model: ModelProto,
    quantized: ModelProto,
    data: Iterable[Feeds],
    *,
    bound: float = 20.0,
) -> ModelProto:
    """``quantized``, which passes onnx's check, keeps the interface, and is near ``model`` however
    it is run.
    """
    data = list(data)
    onnx.checker.check_model(quantized, full_check=True)
    assert interface(quantized) == interface(model)
    assert any(
        kind.endswith(("quantizeLinear", "Integer", "NBits"))
        for kind in kinds(quantized)
    ), "nothing quantized"
    for optimize in (True, False):
        found = noise(model, quantized, data, optimize=optimize)
        assert min(found.values()) > bound, (optimize, found)
    return quantized


def static(
    model: ModelProto,
    data: Iterable[Feeds],
    config: Any = "A8W8",
    *,
    bound: float = 20.0,
    **changes: Any,
) -> ModelProto:
    """The model quantized with data, and found to be sound."""
    data = list(data)
    return sound(
        model,
        quantize_static(model, data, QConfig.of(config).with_(**changes)),
        data,
        bound=bound,
    )


def theirs(model: ModelProto, data: Iterable[Feeds], **options: Any) -> ModelProto:
    """The model quantized by a call in onnxruntime's spelling."""
    call: dict[str, Any] = {
        "model_input": model,
        "model_output": None,
        "calibration_data_reader": iter(list(data)),
    }
    return quantize_static(**call, **options)


def stored(model: ModelProto, kind: str) -> dict[str, Array]:
    """The initializers of one element type, such as "int8" or "float"."""
    wanted = TensorProto.DataType.Value(kind.upper())
    return {
        t.name: numpy_helper.to_array(t)
        for t in model.graph.initializer
        if t.data_type == wanted
    }


def dense(width: int = 8, batch: str = "N") -> ModelProto:
    return parse(
        f"""g (float[{batch},{width}] x) => (float[{batch},4] y) {{
            [first] h = MatMul (x, w)
            [relu] r = Relu (h)
            [second] y = MatMul (r, v)
        }}""",
        w=weight(width, width),
        v=weight(width, 4),
    )


def image_net() -> ModelProto:
    return parse(
        """g (float[N,3,8,8] x) => (float[N,5] y) {
            [conv] h = Conv <pads = [1,1,1,1]> (x, w, b)
            [relu] r = Relu (h)
            [pool] p = GlobalAveragePool (r)
            [flat] f = Flatten (p)
            [fc] y = Gemm <transB = 1> (f, v, c)
        }""",
        w=weight(6, 3, 3, 3),
        b=normal(6, scale=0.1),
        v=weight(5, 6),
        c=normal(5, scale=0.1),
    )


def encoder(layers: int = 2, width: int = 16) -> ModelProto:
    """Attention and a feed-forward part with residuals and normalizations, ``layers`` times."""
    body, constants, x = "", dict[str, Any](), "x"
    for i in range(layers):
        body += f"""
            [q{i}] q{i} = MatMul ({x}, wq{i})
            [k{i}] k{i} = MatMul ({x}, wk{i})
            [v{i}] v{i} = MatMul ({x}, wv{i})
            [t{i}] t{i} = Transpose <perm = [0,2,1]> (k{i})
            [s{i}] s{i} = MatMul (q{i}, t{i})
            [d{i}] d{i} = Div (s{i}, root)
            [p{i}] p{i} = Softmax <axis = -1> (d{i})
            [a{i}] a{i} = MatMul (p{i}, v{i})
            [r{i}] r{i} = Add (a{i}, {x})
            [n{i}] n{i} = LayerNormalization <axis = -1> (r{i}, gamma)
            [u{i}] u{i} = MatMul (n{i}, wu{i})
            [f{i}] f{i} = Relu (u{i})
            [o{i}] o{i} = MatMul (f{i}, wo{i})
            [m{i}] m{i} = Add (o{i}, n{i})
            [x{i}] x{i} = LayerNormalization <axis = -1> (m{i}, gamma)"""
        constants |= {f"w{name}{i}": weight(width, width, seed=i) for name in "qkv"}
        constants |= {
            f"wu{i}": weight(width, 4 * width, seed=i),
            f"wo{i}": weight(4 * width, width, seed=i),
        }
        x = f"x{i}"
    text = (
        f"g (float[N,L,{width}] x) => (float[N,L,{width}] y) {{ {body} y = Identity"
        f" ({x}) }}"
    )
    return parse(
        text, root=np.float32(width**0.5), gamma=np.ones(width, np.float32), **constants
    )


def drawn(count: int, *shape: int) -> Iterator[Feeds]:
    for seed in range(count):
        yield {"x": normal(*shape, seed=seed)}


# 1-10: calibration data


#: Bytes of the held-out samples of 256, and of the float model's outputs on them.
HELD_OUT = held_out_of(256) * 2 * 64 * 16 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calibrator", "slack"),
    [
        ("percentile", HELD_OUT),
        ("entropy", HELD_OUT),
        ("minmse", 4_000_000),
    ],  # minmse looks at full bins, which few values leave empty
)
def test_ort_10503_bert_percentile_memory(calibrator: str, slack: int) -> None:
    """1: histograms held every intermediate of every sample, 256 GB for BERT.

    Here 256 samples take what 8 take.
    """
    model, config = encoder(), QConfig.of("A8W8").with_(calibrator=calibrator)
    peaks = []
    for count in (8, 8, 256):  # the first run only warms up
        gc.collect()  # what an earlier test has left in cycles is not freed during the measurement
        tracemalloc.start()
        quantize_static(model, drawn(count, 1, 64, 16), config)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (
        peaks[2] <= 1.1 * peaks[1] + slack
    )  # what 248 samples leave in between is 50 MB


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_ort_18792_ragged_lengths(calibrator: str) -> None:
    """2: histograms wanted outputs of one fixed shape.

    Here sequences of 5, 9 and 13 calibrate together.
    """
    data = [
        {"x": normal(1, length, 16, seed=seed)}
        for seed in range(4)
        for length in (5, 9, 13)
    ]
    static(encoder(1), data, calibrator=calibrator)


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_optimum_409_batches_of_eight(calibrator: str) -> None:
    """3: entropy and percentile failed for batches above 1.

    Here they find the same ranges as one by one.
    """
    rows = normal(8, 8)
    together = static(dense(), [{"x": rows}], calibrator=calibrator)
    apart = quantize_static(
        dense(),
        [{"x": row[None]} for row in rows],
        QConfig.of("A8W8").with_(calibrator=calibrator),
    )
    assert together.SerializeToString() == apart.SerializeToString()


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_ort_11928_output_has_a_range(calibrator: str) -> None:
    """4: "Quantization parameters are not specified" for a graph output; here it has a range."""
    model = parse(
        "g (float[N,3,4,4] x) => (float[N,2,4,4] y) { y = Conv (x, w) }",
        w=weight(2, 3, 1, 1),
    )
    quantized = static(model, drawn(8, 1, 3, 4, 4), calibrator=calibrator)
    assert [node.op_type for node in quantized.graph.node if "y" in node.output] == [
        "DequantizeLinear"
    ]


def test_ort_13044_tuple_of_operator_types() -> None:
    """5: a trailing comma hid behind "Histogram has not been collected".

    Here any collection works, or it is named.
    """
    data = list(drawn(4, 2, 8))
    expected = static(dense(), data, op_types="MatMul").SerializeToString()
    for collection in (("MatMul",), ["MatMul"], {"MatMul"}, frozenset({"MatMul"})):
        assert (
            quantize_static(
                dense(), data, QConfig(op_types=collection)
            ).SerializeToString()
            == expected
        )  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=r"op_types is \(\['MatMul'\],\); it must be a name or a list of names",
    ):
        QConfig(op_types=(["MatMul"],))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=r"op_types_to_quantize is \(\['MatMul'\],\); it must be a list of names",
    ):
        theirs(dense(), data, op_types_to_quantize=(["MatMul"],))
    with pytest.raises(ConfigError, match="'MatMull'; did you mean 'MatMul'"):
        QConfig(op_types="MatMull")  # type: ignore[arg-type]


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_ppq_122_smaller_last_batch(calibrator: str) -> None:
    """6: the last, smaller batch of a loader broke calibration; here it counts like the others."""
    static(
        image_net(),
        [{"x": normal(size, 3, 8, 8, seed=size)} for size in (8, 8, 3)],
        calibrator=calibrator,
    )


def test_ppq_468_batch_frozen_into_a_reshape() -> None:
    """7: a Reshape held batch 1, data came in batches.

    Here they are split, or the error names the Reshape.
    """
    text = """g (float[{0},2,4] x) => (float[{0},3] y) {{ [freeze] h = Reshape (x, shape) [fc] y = MatMul (h, w) }}"""  # noqa: E501
    constants: dict[str, Any] = {"shape": np.array([1, 8]), "w": weight(8, 3)}
    fixed, batch = parse(text.format(1), **constants), normal(6, 2, 4)
    split = quantize_static(fixed, [{"x": batch}])
    sound(fixed, split, [{"x": row[None]} for row in batch])
    assert split == quantize_static(fixed, [{"x": row[None]} for row in batch])
    with pytest.raises(
        (DataError, ModelError), match=r"Reshape.*freeze|freeze.*Reshape"
    ):
        quantize_static(parse(text.format("N"), **constants), [{"x": batch}])


class Reader:
    """onnxruntime's protocol without rewind."""

    def __init__(self, data: Iterable[Feeds]) -> None:
        self.data = iter(data)

    def get_next(self) -> Feeds | None:
        return next(self.data, None)


def test_yolov5s_android_23_empty_reader(tmp_path: Path) -> None:
    """8: an empty reader was reported as "Empty min/max".

    Here each way of being empty says which one it is.
    """
    used = Reader(drawn(2, 1, 8))
    quantize_static(dense(), used)
    empty: list[tuple[Any, str]] = [
        ([], "^the calibration data holds no sample"),
        (iter(()), "^the iterator has nothing left to give"),
        (Reader(()), r"^get_next\(\) returned None at once"),
        (used, r"a reader that was read before needs a rewind\(\)"),
        (None, "no calibration data was given"),
        (tmp_path, f"{tmp_path}"),
    ]
    for data, message in empty:
        with pytest.raises(DataError, match=message):
            quantize_static(dense(), data)


def test_quark_faq_nhwc_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """9: NHWC data for an NCHW model was "Got: 224 Expected: 3".

    Here the message says so, and what repairs it.
    """
    model = tmp_path / "model.onnx"
    onnx.save(image_net(), model)
    images = normal(4, 8, 8, 3)
    np.save(tmp_path / "data.npy", images)
    with pytest.raises(DataError, match=r"'x'.*looks like NHWC data for an NCHW input"):
        quantize_static(model, [{"x": image[None]} for image in images])
    command = [
        "quantize",
        str(model),
        "-o",
        str(tmp_path / "q.onnx"),
        "--data",
        str(tmp_path / "data.npy"),
        "--quiet",
    ]
    assert main(command) == 2
    assert (
        "looks like NHWC data for an NCHW input; add --input-layout nhwc"
        in capsys.readouterr().err.replace("\n", " ")
    )
    assert main([*command, "--input-layout", "nhwc"]) == 0
    data = [{"x": image[None].transpose(0, 3, 1, 2)} for image in images]
    sound(image_net(), onnx.load(tmp_path / "q.onnx"), data)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_user_voice_nan_sample(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10: NaN in the data became NaN scales.

    Here the error has the sample, the input and the place.
    """
    rows = normal(20, 8)
    rows[13, 5] = value
    with pytest.raises(
        DataError,
        match=(
            r"sample 13, input 'x': 1 of 8 values are NaN or infinite, the first at"
            r" \[0, 5\]"
        ),
    ):
        quantize_static(
            dense(), [{"x": row[None]} for row in rows], output=tmp_path / "q.onnx"
        )
    onnx.save(dense(), tmp_path / "model.onnx")
    np.save(tmp_path / "data.npy", rows)
    paths = [str(tmp_path / name) for name in ("model.onnx", "q.onnx", "data.npy")]
    assert (
        main(["quantize", paths[0], "-o", paths[1], "--data", paths[2], "--quiet"]) == 2
    )
    assert "sample 13, input 'x'" in capsys.readouterr().err
    assert not (tmp_path / "q.onnx").exists()


# 11-16: files


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protobuf messages end at 1 MB instead of 2 GB."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("quark_onnx.", "calibrators.")):
            for limit in ("EXTERNAL_DATA_LIMIT", "PROTOBUF_LIMIT"):
                if hasattr(module, limit):
                    monkeypatch.setattr(module, limit, 1_000_000)


def large() -> ModelProto:
    """8 MB of weights in float, 2 MB in 8 bits."""
    text = (
        "g (float[N,1024] x) => (float[N,1024] y) { h = MatMul (x, w) r = Relu (h) y ="
        " MatMul (r, v) }"
    )
    return parse(text, w=weight(1024, 1024), v=weight(1024, 1024, seed=1))


def save(model: ModelProto, path: Path, data: str | None = None) -> None:
    """Write a model, its weights into ``data`` beside it.

    Onnx moves them out of what it is given.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    onnx.save(
        copy,
        path,
        save_as_external_data=data is not None,
        location=data,
        size_threshold=0,
    )


def places(path: Path) -> list[dict[str, str]]:
    """Where the tensors of a stored model lie that are not in the file itself."""
    model = onnx.load(path, load_external_data=False)
    found = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    return [
        {entry.key: entry.value for entry in tensor.external_data} for tensor in found
    ]


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("external", [False, True])
def test_ort_7017_external_data_without_a_flag(tmp_path: Path, external: bool) -> None:
    """11: models above 2 GB needed a flag, which was then ignored.

    Here large weights go beside by themselves.
    """
    model, data = large(), list(drawn(3, 2, 1024))
    save(model, tmp_path / "m.onnx", "m.data" if external else None)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    quantized = quantize_static(tmp_path / "m.onnx", data, "A8W8", tmp_path / "q.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {
        *before,
        "q.onnx",
        "q.onnx.data",
    }
    assert all(
        (tmp_path / name).read_bytes() == content for name, content in before.items()
    )
    assert {place["location"] for place in places(tmp_path / "q.onnx")} == {
        "q.onnx.data"
    }
    assert (tmp_path / "q.onnx").stat().st_size < 100_000
    [expected], [found] = (
        open_session(each).run(None, data[0])
        for each in (quantized, tmp_path / "q.onnx")
    )
    np.testing.assert_array_equal(expected, found)
    sound(model, quantized, data)


@pytest.mark.usefixtures("small_limit")
def test_ort_7017_weights_as_float_data(tmp_path: Path) -> None:
    """11: weights that stay float go beside the model in whichever of protobuf's fields they came."""  # noqa: E501
    model = large()
    for tensor, node in zip(
        model.graph.initializer, (model.graph.node[0], model.graph.node[2]), strict=True
    ):
        node.name = tensor.name
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(
            helper.make_tensor(
                tensor.name, TensorProto.FLOAT, values.shape, values.ravel()
            )
        )
    data = list(drawn(2, 2, 1024))
    quantize_static(model, data, QConfig(exclude=("w",)), tmp_path / "q.onnx")
    sound(model, onnx.load(tmp_path / "q.onnx"), data)
    assert (tmp_path / "q.onnx").stat().st_size < 1_000_000


@pytest.mark.usefixtures("small_limit")
def test_ort_7017_tensors_beside_the_model_start_at_pages(tmp_path: Path) -> None:
    """11: ONNX wants offsets that are multiples of 4096, so that runtimes can map them into memory."""  # noqa: E501
    quantize_weights(large(), "INT8", tmp_path / "q.onnx")
    offsets = [int(place["offset"]) for place in places(tmp_path / "q.onnx")]
    assert len(offsets) >= 3
    assert not any(offset % 4096 for offset in offsets)


def branching(width: int, size: int) -> ModelProto:
    """A weight outside, width x size, and one inside a branch, size x size."""
    model = parse(
        f"""g (float[N,{width}] x, bool c) => (float[N,{size}] y) {{
            h = MatMul (x, w)
            y = If (c) <
                then_branch = a () => (float[N,{size}] t) {{ t = MatMul (h, inner) }},
                else_branch = b () => (float[N,{size}] e) {{ e = Relu (h) }}
            >
        }}""",
        w=weight(width, size),
    )
    branch = next(a.g for a in model.graph.node[1].attribute if a.name == "then_branch")
    branch.initializer.append(
        numpy_helper.from_array(weight(size, size, seed=1), "inner")
    )
    return model


def both_ways(size: int) -> list[Feeds]:
    return [
        {"x": normal(2, size, seed=seed), "c": np.array(seed % 2 == 0)}
        for seed in range(4)
    ]


def test_ort_7017_external_data_in_a_subgraph(tmp_path: Path) -> None:
    """12: tensors of subgraphs were forgotten.

    Here they are read from their file and written beside the output.
    """
    model, data = branching(64, 64), both_ways(64)
    save(model, tmp_path / "m.onnx", "m.data")
    branch = (
        onnx.load(tmp_path / "m.onnx", load_external_data=False)
        .graph.node[1]
        .attribute[0]
        .g
    )
    assert branch.initializer[0].data_location == TensorProto.EXTERNAL
    quantized = quantize_static(tmp_path / "m.onnx", data, "A8W8", tmp_path / "q.onnx")
    sound(model, quantized, data)
    (tmp_path / "m.data").unlink()
    sound(model, onnx.load(tmp_path / "q.onnx"), data)
    assert (
        (tmp_path / "q.onnx").stat().st_size
        < 64 * 64
        < 2 * 64 * 64
        <= (tmp_path / "q.onnx.data").stat().st_size
    )


@pytest.mark.usefixtures("small_limit")
def test_ort_7017_large_subgraph(tmp_path: Path) -> None:
    """12: a model whose subgraphs alone are too large for one message is written all the same."""
    model, data = branching(8, 1024), both_ways(8)
    quantize_static(model, data, "A8W8", tmp_path / "q.onnx")
    assert (tmp_path / "q.onnx").stat().st_size < 1_000_000
    sound(model, onnx.load(tmp_path / "q.onnx"), data)


@pytest.mark.usefixtures("small_limit")
def test_oie_375_output_can_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13: files were looked for where they were made.

    Here a moved folder loads, and a second run is the same.
    """
    first, data = tmp_path / "first", list(drawn(2, 1, 1024))
    quantize_static(large(), data, "A8W8", first / "q.onnx")
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    quantize_static(large(), data, "A8W8", first / "q.onnx")  # over its own output
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    moved = first.rename(tmp_path / "moved to another place")
    monkeypatch.chdir("/")
    sound(large(), onnx.load(moved / "q.onnx"), data)
    assert str(tmp_path).encode() not in b"".join(before.values())
    assert compare(large(), moved / "q.onnx", data).sqnr > 20


def test_user_voice_truncated_external_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """14: a short or missing weight file was a bad allocation.

    Here tensor, file, and both sizes are named.
    """
    path, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    save(dense(64), path, "m.data")
    size = (tmp_path / "m.data").stat().st_size
    os.truncate(tmp_path / "m.data", 5000)
    where = r"tensor 'w': external data file .*m\.data"
    with pytest.raises(
        ModelError, match=f"{where} ends after 5000 of {64 * 64 * 4} bytes"
    ):
        quantize_static(path, drawn(2, 1, 64), "A8W8", output)
    assert size > 5000 and not output.exists()
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError, match=f"{where} cannot be read: No such file"):
        quantize_static(path, drawn(2, 1, 64), "A8W8", output)
    assert main(["explain", str(path)]) == 2
    assert "tensor 'w'" in capsys.readouterr().err


def test_user_voice_output_over_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15: a run in place destroyed the float model.

    Here it is refused however the path is spelled.
    """
    path = tmp_path / "m.onnx"
    onnx.save(dense(), path)
    (tmp_path / "link.onnx").symlink_to(path)
    (tmp_path / "hard.onnx").hardlink_to(path)
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    for output in (
        path,
        "m.onnx",
        tmp_path / "." / "m.onnx",
        tmp_path / "link.onnx",
        tmp_path / "hard.onnx",
    ):
        with pytest.raises(
            ConfigError,
            match="is the input model itself",
        ):
            quantize_static(path, drawn(2, 1, 8), "A8W8", output)
    assert (
        main(["quantize", "m.onnx", "-o", "m.onnx", "--random-data", "2", "--quiet"])
        == 2
    )
    assert path.read_bytes() == before


def test_ort_14213_zip_instead_of_a_model(tmp_path: Path) -> None:
    """16: a zipped model was a raw DecodeError; here the message says that it is an archive."""
    with zipfile.ZipFile(tmp_path / "m.onnx", "w") as archive:
        archive.writestr("inner.onnx", dense().SerializeToString())
    for call in (
        lambda path: quantize_static(path, drawn(2, 1, 8)),
        quantize_weights,
        quantize_dynamic,
    ):
        with pytest.raises(
            ModelError, match=r"m\.onnx is a zip archive, unpack it first"
        ):
            call(tmp_path / "m.onnx")


# 31, 33, 44, 51, 60: settings and other input


def test_optimum_1418_and_ort_12556_exclude(caplog: pytest.LogCaptureFixture) -> None:
    """31: exclusions crashed or silently excluded nothing; here patterns work, or are errors."""
    data = list(drawn(4, 2, 8))
    for pattern in ("second", "sec*", "re:^sec.nd$", ["second"], {"second"}):
        quantized = static(dense(), data, exclude=pattern)
        assert "v" in stored(quantized, "float") and "w" not in stored(
            quantized, "float"
        )
    assert "v" in stored(theirs(dense(), data, nodes_to_exclude=["second"]), "float")
    for nothing, hint in (
        ("secnd", "second"),
        ("re:^third", ""),
        ("encoder.layer.0", ""),
    ):
        with pytest.raises(
            ConfigError,
            match=f"no node of the model matches '{re.escape(nothing)}'.*{hint}",
        ):
            quantize_static(dense(), data, QConfig(exclude=(nothing,)))
    with caplog.at_level(
        logging.WARNING
    ):  # what onnxruntime ignores is a warning in its spelling
        theirs(dense(), data, nodes_to_exclude=["secnd"])
    assert "secnd" in caplog.text and "second" in caplog.text


def test_aimet_4041_same_model_twice() -> None:
    """33: a second run found the names of the first in the user's model.

    Here it stays unchanged.
    """
    model, data = encoder(1), list(drawn(4, 1, 5, 16))
    before = model.SerializeToString(deterministic=True)
    runs: tuple[Callable[[], ModelProto], ...] = (
        lambda: quantize_static(model, data),
        lambda: quantize_static(model, data, "XINT8"),
        lambda: quantize_dynamic(model),
        lambda: quantize_weights(model, "INT4"),
    )
    for each in runs:
        assert each().SerializeToString() == each().SerializeToString()
        assert model.SerializeToString(deterministic=True) == before


def test_oie_319_wrong_normalization_misses_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """44: ResNet50 fell from 70 % to 0.10 % and nothing said so.

    Here the gate ends with exit code 1.
    """
    images = normal(12, 3, 8, 8)
    model, output = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(image_net(), model)
    np.save(tmp_path / "pixels.npy", images)
    np.save(tmp_path / "normalized.npy", images / np.float32(255))
    calibrate = ["quantize", str(model), "-o", str(output), "--quiet", "--data"]
    check = ["compare", str(model), str(output), "--min-sqnr", "20", "--json", "--data"]
    assert main([*calibrate, str(tmp_path / "normalized.npy")]) == 0
    capsys.readouterr()
    assert main([*check, str(tmp_path / "pixels.npy")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["worst_sqnr"] < 10 and document["error"]["kind"] == "AccuracyError"
    assert main([*calibrate, str(tmp_path / "pixels.npy")]) == 0
    assert main([*check, str(tmp_path / "pixels.npy")]) == 0


def test_oie_319_collapsed_model_is_not_written(tmp_path: Path) -> None:
    """44: a model of which quantization leaves nothing is an error, and no file."""
    model = parse(
        "g (float[N,2,4,4] x) => (float[N,2,4,4] y, float[N,1,4,4] small) { y = Conv"
        " (x, w) small = Conv (y, v) }",
        w=np.array([[1000, 0], [0, 0.01]], np.float32).reshape(2, 2, 1, 1),
        v=np.array([0, 1], np.float32).reshape(1, 2, 1, 1),
    )
    data, output = list(drawn(4, 2, 2, 4, 4)), tmp_path / "q.onnx"
    with pytest.raises(
        AccuracyError, match=r"output 'small' reaches .* dB SQNR, the minimum is 20 dB"
    ):
        quantize_static(model, data, QConfig(min_sqnr=20.0), output)
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=data[0]["x"])
    command = [
        "quantize",
        str(tmp_path / "m.onnx"),
        "-o",
        str(output),
        "--data",
        str(tmp_path / "data.npz"),
        "--quiet",
    ]
    assert main([*command, "--min-sqnr", "20"]) == 1
    assert not output.exists()
    with pytest.raises(AccuracyError, match="'small'"):
        quantize_dynamic(model, QConfig.of("DYNAMIC").with_(min_sqnr=20.0), output)


def test_user_voice_quantized_input() -> None:
    """51: a quantized model was quantized again.

    Here it is refused with what was found, unless it is to be kept.
    """
    model, data = encoder(), list(drawn(6, 1, 5, 16))
    half = quantize_static(model, data, QConfig(exclude=("re:1$",)))
    calls: tuple[Callable[[], ModelProto], ...] = (
        lambda: quantize_static(half, data),
        lambda: quantize_dynamic(half),
        lambda: quantize_weights(half),
    )
    for call in calls:
        with pytest.raises(
            ModelError,
            match=(
                r"quantized already: it has .*QuantizeLinear.*keep_existing,"
                r" --keep-existing"
            ),
        ):
            call()
    assert {"wu1", "wo1"} <= stored(half, "float").keys()
    more = sound(model, quantize_static(half, data, QConfig(keep_existing=True)), data)
    assert not {"wu1", "wo1"} & stored(more, "float").keys()
    for name, codes in stored(half, "int8").items():
        np.testing.assert_array_equal(stored(more, "int8")[name], codes)


OUTSIDE = ["../secret.bin", "inside/../../secret.bin", "{absolute}", "link.bin"]


@pytest.mark.parametrize(
    "place", ["initializer", "sparse", "attribute", "subgraph", "function"]
)
@pytest.mark.parametrize("location", OUTSIDE)
def test_cve_2025_51480_and_2024_27318_traversal(
    tmp_path: Path, location: str, place: str
) -> None:
    """60: a model read or overwrote files outside its folder.

    Here such a path is refused wherever it is hidden.
    """
    folder, secret = tmp_path / "model", tmp_path / "secret.bin"
    (folder / "inside").mkdir(parents=True)
    secret.write_bytes(bytes(4 * 8 * 8))
    (folder / "link.bin").symlink_to(secret)
    tensor = TensorProto(
        name="w",
        data_type=TensorProto.FLOAT,
        dims=[8, 8],
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in {
        "location": location.format(absolute=secret),
        "offset": "0",
        "length": "256",
    }.items():
        tensor.external_data.add(key=key, value=value)
    model = parse("g (float[N,8] x) => (float[N,8] y) { y = MatMul (x, w) }")
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    if place == "initializer":
        model.graph.initializer.append(tensor)
    elif place == "sparse":
        tensor.dims[:] = [64]
        indices = numpy_helper.from_array(np.arange(64), "indices")
        model.graph.sparse_initializer.append(
            helper.make_sparse_tensor(tensor, indices, [8, 8])
        )
    elif place == "attribute":
        model.graph.node.insert(0, constant)
    elif place == "subgraph":
        result = helper.make_tensor_value_info("w", TensorProto.FLOAT, [8, 8])
        body = helper.make_graph([constant], "body", [], [result])
        choice = helper.make_node(
            "If", ["c"], ["w"], then_branch=body, else_branch=body
        )
        model.graph.node.insert(0, choice)
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    else:
        opsets = [helper.make_opsetid("", 17)]
        model.functions.append(
            helper.make_function("own", "Table", [], ["w"], [constant], opsets)
        )
        model.graph.node.insert(0, helper.make_node("Table", [], ["w"], domain="own"))
        model.opset_import.append(helper.make_opsetid("own", 1))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(
        ModelError,
        match=r"tensor 'w': external data .* lies outside the model's folder",
    ):
        quantize_static(folder / "m.onnx", drawn(2, 1, 8), "A8W8", folder / "q.onnx")
    assert main(["explain", str(folder / "m.onnx"), "--quiet"]) == 2
    assert secret.read_bytes() == bytes(256) and not (folder / "q.onnx").exists()


# 46-50: types and opsets


def halved(model: ModelProto, kind: int) -> ModelProto:
    """The model in a 16-bit type throughout."""
    result = ModelProto()
    result.CopyFrom(model)
    for value in (*result.graph.input, *result.graph.output):
        value.type.tensor_type.elem_type = kind
    for tensor in result.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(
            helper.tensor_dtype_to_np_dtype(kind)
        )
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return result


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "A16W8"])
def test_ort_15341_float16_model(preset: str) -> None:
    """46: a float16 model was not supported.

    Here it is quantized, and its inputs and outputs stay float16.
    """
    data = [{"x": feeds["x"].astype(np.float16)} for feeds in drawn(6, 2, 8)]
    quantized = static(halved(dense(), TensorProto.FLOAT16), data, preset)
    assert set(stored(quantized, "int8")) >= {"w_quantized", "v_quantized"}


def test_ort_15341_bfloat16_model() -> None:
    """46: so is a bfloat16 model, which no CPU kernel runs in float."""
    model = halved(dense(), TensorProto.BFLOAT16)
    result = quantize(model, [{"x": normal(4, 8)}])
    onnx.checker.check_model(result.model, full_check=True)
    assert interface(result.model) == interface(model)
    assert result.report.operators["MatMul"] == (2, 2) and result.report.worst_sqnr > 20


def test_ort_15341_bfloat16_data() -> None:
    """46: samples of the type that the model itself declares for its input are what it takes."""
    model = halved(dense(), TensorProto.BFLOAT16)
    x = normal(4, 8).astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
    assert quantize(model, [{"x": x}]).report.operators["MatMul"] == (2, 2)


def test_ort_15341_mixed_model() -> None:
    """46: parts in float16 between Casts are quantized like the others."""
    model = parse(
        """g (float[N,8] x) => (float[N,4] y) {
            h = MatMul (x, w)
            n = Cast <to = 10> (h)
            r = Relu (n)
            s = MatMul (r, v)
            y = Cast <to = 1> (s)
        }""",
        w=weight(8, 8),
        v=weight(8, 4).astype(np.float16),
    )
    quantized = static(model, drawn(6, 2, 8))
    assert (
        len([codes for codes in stored(quantized, "int8").values() if codes.ndim == 2])
        == 2
    )


@pytest.mark.parametrize("opset", [11, 13, 17, 20, 21, 22])
def test_ort_25223_a16w8_at_any_opset(opset: int) -> None:
    """47: 16 bits came out invalid below opset 21.

    Here the opset is raised, and the result is close to float.
    """
    model = image_net()
    model.opset_import[0].version = opset
    data = list(drawn(6, 2, 3, 8, 8))
    quantized = static(model, data, "A16W8", bound=40.0)
    assert {
        node.domain for node in quantized.graph.node if node.op_type == "QuantizeLinear"
    } == {""}
    assert quantized.opset_import[0].version == max(opset, 21)
    assert stored(quantized, "uint16")


@pytest.mark.parametrize("preset", ["INT4", "UINT4", "A16W4"])
@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((2, 33), (33, 6)),
        ((2, 5), (5, 7)),
        ((2, 1), (1, 4)),
        ((2, 3, 40), (2, 40, 5)),
        ((3, 2, 33), (33, 6)),
    ],
    ids=["odd K", "K below the block", "K of 1", "3-D B", "3-D A"],
)
def test_ort_25631_int4_of_odd_shapes(
    preset: str, x: tuple[int, ...], w: tuple[int, ...]
) -> None:
    """48: 4 bits gave invalid models.

    Here any width, also below a block and in a stack of matrices, runs.
    """
    shape = ",".join(map(str, x[:-1]))
    model = parse(
        f"g (float[{shape},{x[-1]}] x) => (float[{shape},{w[-1]}] y) {{ y = MatMul (x,"
        " w) }",
        w=weight(*w),
    )
    data = list(drawn(6, *x))
    if preset == "A16W4":
        static(model, data, preset, bound=14.0)
    elif w[-2] == 1:  # a scale for each value takes more space than the floats
        assert quantize_weights(model, preset) == model
    else:
        sound(
            model, quantize_weights(model, preset), data, bound=14.0
        )  # blocks of 32 in 4 bits reach about 19 dB


@pytest.mark.parametrize("preset", ["FP8E4M3", "FP8E5M2"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_ort_21090_fp8_per_channel(preset: str, per_channel: bool) -> None:
    """50: float8 failed per channel; here it loads and runs with one scale a channel."""
    data = list(drawn(6, 2, 3, 8, 8))
    quantized = static(image_net(), data, preset, bound=20.0, per_channel=per_channel)
    scales = stored(quantized, "float")
    assert scales["w_scale"].shape == ((6,) if per_channel else ())
    assert set(
        stored(quantized, "float8e4m3fn" if preset == "FP8E4M3" else "float8e5m2")
    ) >= {"w_quantized"}
