"""Models that decode images or split texts themselves: operators of onnxruntime-extensions stand
before the layers.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, helper

from calibrators.onnx_runtime import extensions
from calibrators.onnx_runtime.cpu_features import SATURATION, saturates
from calibrators.onnx_runtime.session import PRECISE
from quark_onnx import (
    QConfig,
    compare,
    quantize,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
)
from quark_onnx.cli import main
from quark_onnx.common.errors import AccuracyError, ModelError
from tests.models import Feeds, interface, normal, parse, weight

pytestmark = pytest.mark.images

#: A preset, and the least signal-to-noise ratio in dB: that of one rounding (41 with 8 bits, 35
#: with powers of two, 21 with 4 bits in blocks, 42 with bfp16), less what some eight roundings add
#: up to (9) or two or three (5), less 4.
LEAST = {"A8W8": 28, "XINT8": 22, "INT4": 12, "DYNAMIC": 28, "BFP16": 29}
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "big",
    "small",
    "red",
    "old",
    "new",
]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


# Images


def picture(seed: int) -> NDArray[np.uint8]:
    """Levels of 32 x 32 pixels in squares, which JPEG keeps well."""
    levels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3))
    return np.kron(levels, np.ones((8, 8, 1))).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """The file, by its specification: header, rows that each begin with the number of no filter,
    end.
    """
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + name
        + data
        + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    pytest.importorskip("PIL.Image", reason="Pillow writes the JPEG files").fromarray(
        pixels
    ).save(file, "JPEG")
    return file.getvalue()


def images() -> ModelProto:
    """A network that takes the bytes of an image file."""
    return parse(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft.extensions" : 1]>
        g (uint8[n] encoded) => (float[1,5] y) {
            [decode] pixels = com.microsoft.extensions.DecodeImage <color_space = "rgb"> (encoded)
            [cast] levels = Cast <to = 1> (pixels)
            [scale] scaled = Mul (levels, fraction)
            [turn] turned = Transpose <perm = [2,0,1]> (scaled)
            [batch] x = Unsqueeze (turned, zero)
            [conv] c = Conv <strides = [2,2], pads = [1,1,1,1]> (x, k, b)
            [relu] r = Relu (c)
            [pool] p = MaxPool <kernel_shape = [8,8], strides = [8,8]> (r)
            [flat] f = Flatten (p)
            [head] y = Gemm (f, w, d)
        }""",
        fraction=np.float32(1 / 255),
        zero=np.int64([0]),
        k=2 * weight(32, 3, 3, 3),
        b=normal(32, scale=0.1),
        w=weight(5, 128).T.copy(),
        d=normal(5, scale=0.1),
    )


# Texts


def sentences(seed: int) -> NDArray[Any]:
    return np.array(
        [" ".join(np.random.default_rng([seed, i]).choice(WORDS, 5)) for i in range(2)],
        object,
    )


def tokens() -> ModelProto:
    """A tokenizer that makes ids of a pair of sentences, and a network with an embedding."""
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.contrib" : 1]>
        g (string[n] text) => (float[1,4] y) {
            [tokenize] ids, kinds, mask = ai.onnx.contrib.HfBertTokenizer (text)
            [embed] e = Gather (table, ids)
            [norm] h = LayerNormalization <axis = -1> (e, gamma, beta)
            [first] a = MatMul (h, w)
            [relu] r = Relu (a)
            [mean] p = ReduceMean <axes = [1], keepdims = 0> (r)
            [second] y = MatMul (p, v)
        }""",
        table=normal(len(VOCABULARY), 32),
        gamma=np.ones(32, np.float32),
        beta=np.zeros(32, np.float32),
        w=weight(64, 32).T.copy(),
        v=weight(4, 64).T.copy(),
    )
    [tokenizer] = custom_nodes(model)
    tokenizer.attribute.append(
        helper.make_attribute("vocab_file", "\n".join(VOCABULARY) + "\n")
    )
    return model


def buckets() -> ModelProto:
    """Texts that go from one operator on texts to the next, a constant of which one reads."""
    return parse(
        """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.contrib" : 1]>
        g (string[n] text) => (float[n,4] y, string[n] upper) {
            [upper] upper = ai.onnx.contrib.StringUpper (text)
            [hash] ids = ai.onnx.contrib.StringToHashBucketFast (upper, count)
            [embed] e = Gather (table, ids)
            [first] a = MatMul (e, w)
            [relu] r = Relu (a)
            [second] y = MatMul (r, v)
        }""",
        count=np.int64([64]),
        table=normal(64, 32),
        w=weight(64, 32).T.copy(),
        v=weight(4, 64).T.copy(),
    )


# Both


@dataclass(frozen=True)
class Sample:
    """A model, data for it, and its outputs on all samples."""

    model: ModelProto
    data: list[Feeds]
    outputs: NDArray[np.float64]


@cache
def sample(name: str) -> Sample:
    model = {"png": images, "jpeg": images, "tokens": tokens, "buckets": buckets}[
        name
    ]()
    onnx.checker.check_model(model)
    if name in ("png", "jpeg"):
        encode = {"png": png, "jpeg": jpeg}[name]
        data: list[Feeds] = [
            {"encoded": np.frombuffer(encode(picture(seed)), np.uint8)}
            for seed in range(8)
        ]
    else:
        data = [{"text": sentences(seed)} for seed in range(8)]
    return Sample(model, data, outputs(model, data))


def custom_nodes(model: ModelProto) -> list[onnx.NodeProto]:
    return [
        node
        for node in model.graph.node
        if node.domain in ("ai.onnx.contrib", "com.microsoft.extensions")
    ]


def session(model: ModelProto | Path, *, library: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if saturates():
        options.add_session_config_entry(PRECISE, "1")
    if library:
        options.register_custom_ops_library(extensions.library())
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def outputs(model: ModelProto | Path, data: list[Feeds]) -> NDArray[np.float64]:
    opened = session(model)
    return np.concatenate([opened.run(["y"], feeds)[0] for feeds in data]).astype(
        np.float64
    )


def check(model: ModelProto | Path, name: str, preset: str) -> None:
    """It runs where the library is registered, near the float model, and its operators of the
    library are the same.
    """
    floats = sample(name)
    result = onnx.load(model) if isinstance(model, Path) else model
    assert interface(result) == interface(floats.model)
    assert custom_nodes(result) == custom_nodes(floats.model)
    imports = {entry.domain: entry.version for entry in result.opset_import}
    assert {node.domain for node in custom_nodes(result)} <= {
        domain for domain in imports if imports[domain] == 1
    }
    found = outputs(model, floats.data)
    noise = np.square(found - floats.outputs).sum()
    assert 10 * np.log10(np.square(floats.outputs).sum() / noise) > LEAST[preset]


names = pytest.mark.parametrize("name", ["png", "jpeg", "tokens", "buckets"])
#: Operators whose results a Gather reads as indices.
LOOKED_UP = ("HfBertTokenizer", "StringToHashBucketFast")


@pytest.mark.parametrize("name", ["png", "tokens", "buckets"])
def test_without_the_library_the_float_models_do_not_load(name: str) -> None:
    with pytest.raises(Exception, match="is not a registered function/op"):
        session(sample(name).model, library=False)


@pytest.mark.parametrize("preset", LEAST)
@names
def test_a_model_is_quantized_behind_the_operators_of_the_library(
    name: str, preset: str, tmp_path: Path
) -> None:
    floats = sample(name)
    before = floats.model.SerializeToString(deterministic=True)
    result = quantize(floats.model, floats.data, preset, tmp_path / "out.onnx")
    assert floats.model.SerializeToString(deterministic=True) == before
    assert onnx.load(tmp_path / "out.onnx") == result.model
    weighted = (
        {"Conv": (1, 1), "Gemm": (1, 1)}
        if name in ("png", "jpeg")
        else {"MatMul": (2, 2), "Gather": (1, 1)}
    )
    assert {kind: result.report.operators[kind] for kind in weighted} == weighted
    # Presets of weights alone ask nothing of an activation.
    indices = () if preset in ("INT4", "DYNAMIC") else LOOKED_UP
    for node in custom_nodes(floats.model):
        reason = result.report.kept_nodes[node.name]
        if node.op_type in indices:
            assert reason.startswith("it is read only as an integer"), node.op_type
        else:
            assert reason == "no quantization rule for this operator", node.op_type
    check(tmp_path / "out.onnx", name, preset)


@names
def test_samples_are_sharded_and_compared_like_any_others(name: str) -> None:
    floats = sample(name)
    serial = quantize_static(floats.model, floats.data, "A8W8")
    with ThreadPoolExecutor(2) as executor:
        sharded = quantize_static(floats.model, floats.data, "A8W8", executor=executor)
    assert sharded.SerializeToString(deterministic=True) == serial.SerializeToString(
        deterministic=True
    )
    noise = np.square(outputs(serial, floats.data) - floats.outputs).sum()
    expected = 10 * np.log10(np.square(floats.outputs).sum() / noise)
    [measured] = [
        output
        for output in compare(floats.model, serial, floats.data).outputs
        if output.name == "y"
    ]
    assert measured.sqnr == pytest.approx(expected, abs=0.01)


# Without data


@pytest.mark.parametrize("preset", ["INT4", "DYNAMIC", "BFP16"])
@pytest.mark.parametrize("name", ["tokens", "buckets"])
def test_a_model_of_texts_needs_no_data_where_nothing_is_measured(
    name: str, preset: str
) -> None:
    floats = sample(name)
    strategy = quantize_dynamic if preset == "DYNAMIC" else quantize_weights
    config = QConfig.of(preset)
    model = (
        strategy(floats.model, config)
        if preset != "BFP16"
        else quantize(floats.model, None, config).model
    )
    check(model, name, preset)


def test_no_error_is_reported_where_none_was_measured() -> None:
    """Texts cannot be made up."""
    report = quantize(sample("tokens").model, None, "INT4").report
    assert any("the model runs on no random sample" in note for note in report.notes)
    assert [output.name for output in report.outputs if output.sqnr is not None] == []
    assert "error     on one random sample" not in str(report)


def test_no_gate_is_passed_where_nothing_was_measured(tmp_path: Path) -> None:
    config = QConfig.of("INT4").with_(min_sqnr=90.0)
    with pytest.raises(AccuracyError, match="90 dB"):
        quantize_weights(sample("tokens").model, config, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("preset", "least"), [("INT8", 25), ("INT4", 10)])
def test_an_opset_that_changes_the_meaning_is_not_raised_unseen(
    preset: str, least: float
) -> None:
    """Hardmax means something else from opset 13 on, and onnx's converter does not see to that."""
    model = parse(
        """<ir_version: 7, opset_import: ["" : 12, "ai.onnx.contrib" : 1]> g (string[n] text) => (float[n,4,3] y) {
            ids = ai.onnx.contrib.StringToHashBucketFast (text, count)
            e = Gather (table, ids)
            r = Reshape (e, shape)
            h = Hardmax (r)
            y = MatMul (h, w)
        }""",  # noqa: E501
        count=np.int64([64]),
        table=normal(64, 32),
        shape=np.int64([-1, 4, 8]),
        w=weight(3, 8).T.copy(),
    )
    data: list[Feeds] = [{"text": sentences(seed)} for seed in range(8)]
    expected = outputs(model, data)
    config = QConfig.of(preset).with_(
        exclude=("Gather_e",)
    )  # a table of codes may have another greatest value
    try:
        result = quantize_weights(model, config)
    except ModelError as error:
        assert re.search(
            r"needs opset \d+, and the model's opset 12 cannot be raised", str(error)
        )
    else:
        noise = np.square(outputs(result, data) - expected).sum()
        assert 10 * np.log10(np.square(expected).sum() / noise) > least


def test_bytes_that_are_no_image_are_not_made_up(tmp_path: Path) -> None:
    """The command runs in a process of its own, because the library's decoder ends the process."""
    onnx.save(sample("png").model, tmp_path / "model.onnx")
    command = [
        "quantize",
        str(tmp_path / "model.onnx"),
        "-o",
        str(tmp_path / "out.onnx"),
        "--preset",
        "INT4",
    ]
    finished = subprocess.run(
        [sys.executable, "-m", "quark_onnx", *command], capture_output=True, text=True
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    check(tmp_path / "out.onnx", "png", "INT4")


# Command line


@pytest.mark.parametrize("preset", ["A8W8", "INT4", "DYNAMIC"])
@pytest.mark.parametrize("stored", ["files", "rows"])
@names
def test_the_command_line_reads_bytes_and_texts_from_arrays(
    name: str,
    stored: str,
    preset: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a .npz file for each sample.

    Or as the rows of one array, which bytes are filled up with zeros for.
    """
    floats = sample(name)
    [key] = floats.data[0]
    values = [
        feeds[key] if key == "encoded" else feeds[key].astype(str)
        for feeds in floats.data
    ]
    (tmp_path / "data").mkdir()
    if stored == "files":
        for index, value in enumerate(values):
            np.savez(tmp_path / "data" / f"{index}.npz", **{key: value})
    else:
        length = max(map(len, values))
        rows = np.stack(
            [
                np.pad(value, (0, length - len(value))) if key == "encoded" else value
                for value in values
            ]
        )
        np.save(tmp_path / "data" / "all.npy", rows)
    onnx.save(floats.model, tmp_path / "model.onnx")
    arguments = [
        "quantize",
        tmp_path / "model.onnx",
        "-o",
        tmp_path / "out.onnx",
        "--data",
        tmp_path / "data",
    ]
    code = main([*map(str, arguments), "--preset", preset, "--json"])
    printed = capsys.readouterr()
    assert (
        code,
        [line for line in printed.err.splitlines() if SATURATION not in line],
    ) == (0, [])
    document = json.loads(printed.out)
    assert document["samples"] == len(values)
    assert document["worst_sqnr"] > LEAST[preset] - 3  # of fewer samples
    check(tmp_path / "out.onnx", name, preset)


@pytest.mark.parametrize("name", ["png", "tokens"])
def test_the_command_line_explains_and_compares_them(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floats = sample(name)
    model, result = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(floats.model, model)
    quantize_static(floats.model, floats.data, "A8W8", result)
    [node] = custom_nodes(floats.model)
    assert main(["explain", str(model)]) == 0
    assert node.op_type in capsys.readouterr().out
    for index, feeds in enumerate(floats.data):
        arrays = {
            key: value.astype(str) if value.dtype == object else value
            for key, value in feeds.items()
        }
        np.savez(tmp_path / f"{index}.npz", **arrays)
    assert (
        main(["compare", str(model), str(result), "--data", str(tmp_path), "--json"])
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["worst_sqnr"] > LEAST["A8W8"]


# Operators that nobody knows


@pytest.mark.parametrize(
    ("domain", "op_type"),
    [
        ("my.own", "NegPos"),
        ("ai.onnx.contrib", "NegPoss"),
        ("com.microsoft.extensions", "DecodeImages"),
    ],
)
def test_an_operator_that_nobody_knows_is_named_with_its_node(
    domain: str, op_type: str
) -> None:
    model = parse(
        f"""<ir_version: 8, opset_import: ["" : 17, "{domain}" : 1]> g (float[2,4] x) => (float[2,4] y) {{
            [first] h = MatMul (x, w)
            [the_odd_one] p = {domain}.{op_type} (h)
            [second] y = MatMul (p, w)
        }}""",  # noqa: E501
        w=weight(4, 4),
    )
    data = [{"x": normal(2, 4, seed=seed)} for seed in range(2)]
    for run in (
        lambda: quantize_static(model, data, "A8W8"),
        lambda: compare(model, model, data),
    ):
        with pytest.raises(ModelError) as raised:
            run()
        assert f"{domain}:{op_type}" in str(raised.value)
    # Without a static range, nothing has to be run.
    for config in ("INT4", "DYNAMIC"):
        notes = " ".join(quantize(model, None, config).report.notes)
        assert f"{domain}:{op_type}" in notes
        assert "the_odd_one" in notes
