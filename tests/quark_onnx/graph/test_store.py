"""Large tensors in files: what is put there comes back to the bit, and nothing is left behind."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from calibrators.onnx_runtime.external_tensors import (
    copy_values,
    is_stored,
    load_values,
    location,
    values,
)
from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.tensors import loaded
from quark_onnx.common.errors import ModelError
from quark_onnx.files.io import load, staged
from quark_onnx.graph import Graph, Store, store

TYPES = [np.float32, np.float16, np.float64, np.int8, np.uint8, np.int64, np.bool_]
SMALL_TYPES = [
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.int4,
    ml_dtypes.uint4,
    ml_dtypes.int2,
]


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LEAST", 64)
    monkeypatch.setattr(store, "LARGE_MODEL", 1000)


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(
    "dtype", [*TYPES, *SMALL_TYPES], ids=lambda dtype: np.dtype(dtype).name
)
def test_what_is_put_comes_back(dtype: type, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2, (37, 11)).astype(dtype)
    box = Store(tmp_path / "model.onnx")
    tensor = box.put("w", array)
    assert is_stored(tensor)
    assert not tensor.raw_data
    assert values(tensor).dtype == array.dtype
    np.testing.assert_array_equal(values(tensor), array)
    file = io.BytesIO()
    assert copy_values(tensor, file) == len(file.getvalue()) == location(tensor)[2]
    assert file.getvalue() == numpy_helper.from_array(array).raw_data
    load_values(tensor)
    assert (
        tensor.SerializeToString()
        == numpy_helper.from_array(array, "w").SerializeToString()
    )
    gc.collect()
    box.close()
    assert not list(tmp_path.iterdir())


def test_small_tensors_stay_in_memory(tmp_path: Path) -> None:
    box = Store(tmp_path / "x")
    assert not is_stored(box.put("w", np.ones(3, np.float32)))
    box.close()


def test_conversion_goes_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "PART", 100)
    array = np.random.default_rng(0).normal(size=(51, 7)).astype(np.float16)
    box = Store(tmp_path / "x")
    wide = box.converted(numpy_helper.from_array(array, "w"), array, np.float32)
    np.testing.assert_array_equal(values(wide), array.astype(np.float32))
    assert (wide.name, list(wide.dims), wide.data_type) == (
        "w",
        [51, 7],
        TensorProto.FLOAT,
    )
    box.close()


def model(folder: Path) -> Path:
    """Two products; one weight lies at an offset of a data file, the other one in another."""
    weights = [
        np.random.default_rng(i).normal(size=(16, 16)).astype(np.float32)
        for i in range(2)
    ]
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 16] x) => (float[N, 16] y) {'
    result = onnx.parser.parse_model(text + "a = MatMul (x, w0)  y = MatMul (a, w1) }")
    for place, weight in enumerate(weights):
        (folder / f"w{place}.bin").write_bytes(b"-" * 4096 * place + weight.tobytes())
        tensor = TensorProto(
            name=f"w{place}", data_type=TensorProto.FLOAT, dims=weight.shape
        )
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {
            "location": f"w{place}.bin",
            "offset": str(4096 * place),
            "length": "1024",
        }.items():
            tensor.external_data.add(key=key, value=value)
        result.graph.initializer.append(tensor)
    (folder / "m.onnx").write_bytes(result.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.usefixtures("everything_is_large")
def test_weights_stay_in_their_files_until_they_are_written(tmp_path: Path) -> None:
    path = model(tmp_path)
    found = load(path)
    assert all(map(is_stored, found.graph.initializer))
    feeds = {"x": np.ones((2, 16), np.float32)}
    [expected] = open_session(path).run(None, feeds)
    np.testing.assert_array_equal(
        open_session(found, optimize=False).run(None, feeds)[0], expected
    )
    graph = Graph.of(found)
    np.testing.assert_array_equal(
        graph.constant("w1"), np.random.default_rng(1).normal(size=(16, 16)).astype("f")
    )
    for external in (True, False):
        (tmp_path / "out").mkdir(exist_ok=True)
        with staged(found, tmp_path / "out" / "m.onnx", external=external):
            pass
        np.testing.assert_array_equal(
            open_session(tmp_path / "out" / "m.onnx").run(None, feeds)[0], expected
        )
        assert [
            numpy_helper.to_array(t).tobytes()
            for t in onnx.load(tmp_path / "out" / "m.onnx").graph.initializer
        ] == [t.raw_data for t in loaded(found).graph.initializer]
    assert not any(map(is_stored, loaded(found).graph.initializer))


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("shape", [(16, 15), (16, 17)])
def test_a_shape_that_does_not_fit_the_bytes_is_found_when_the_model_is_read(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    path = model(tmp_path)
    broken = onnx.load(path, load_external_data=False)
    broken.graph.initializer[0].dims[:] = shape
    path.write_bytes(broken.SerializeToString())
    with pytest.raises(
        ModelError, match=r"'w0' of shape .* and its external data has the length 1,024"
    ):
        load(path)


@pytest.mark.usefixtures("everything_is_large")
def test_a_data_file_that_is_too_short_is_found_when_the_model_is_read(
    tmp_path: Path,
) -> None:
    path = model(tmp_path)
    (tmp_path / "w1.bin").write_bytes(b"-" * 5000)
    with pytest.raises(
        ModelError,
        match=r"'w1': external data file .*w1.bin ends after 904 of 1024 bytes",
    ):
        load(path)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="there is no device that is full"
)
def test_a_full_disk_names_the_output(tmp_path: Path) -> None:
    """Not the temporary file beside it, which nobody has named."""
    box = Store(tmp_path / "q.onnx")
    box.weights_path = Path("/dev/full")
    with pytest.raises(
        ModelError,
        match=r"worked on in the folder of .*q\.onnx: No space left on device",
    ):
        box.put("w", np.zeros(store.LEAST, np.float32))
    box.close()
    assert list(tmp_path.iterdir()) == []
