"""Large initializers of a file come into arrays, and the rest of the model as protobuf reads it."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto, helper, numpy_helper

from calibrators.onnx_runtime.external_tensors import (
    file_of,
    held_values,
    is_held,
    locate,
    location,
    values,
)
from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.tensors import loaded, model_bytes, write_external
from quark_onnx.common.errors import ModelError
from quark_onnx.files import model_file
from quark_onnx.files.io import open_model
from quark_onnx.files.model_file import (
    mentions,
    read_model,
    write_model,
    written_by_reference,
)
from quark_onnx.graph import Graph, model_key, native, store
from quark_onnx.graph.native import run_onnx_check
from tests.models import parse, weight

SIDE = 256


@pytest.fixture(autouse=True)
def _no_file_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "LEAST_FILE", 0)


def large() -> ModelProto:
    """Return a model with three large constants and a small one."""
    w = weight(SIDE, SIDE)
    return parse(
        f"""g (float[N,{SIDE}] x) => (float[N,{SIDE}] y) {{
            a = MatMul (x, w) b = Add (a, c) d = MatMul (b, v) y = MatMul (d, w)
        }}""",
        w=w,
        c=weight(SIDE),
        v=weight(SIDE, SIDE, seed=1),
    )


def saved(model: ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_the_model_is_the_same(tmp_path: Path) -> None:
    model = large()
    found = read_model(saved(model, tmp_path))
    assert found is not None
    light, arrays = found
    held = {tensor.name for tensor in light.graph.initializer if is_held(tensor)}
    assert held == {"w", "v"}
    assert len(arrays) == 2
    assert len(light.SerializeToString()) < 4096
    assert loaded(light) == model
    assert model_key(light) == model_key(model)
    np.testing.assert_array_equal(
        values(light.graph.initializer[0]),
        numpy_helper.to_array(model.graph.initializer[0]),
    )


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, np.int8, np.uint8, np.int64, np.bool_, ml_dtypes.int4],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_every_type(dtype: type, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2, (401, 397)).astype(dtype)
    model = large()
    model.graph.initializer.append(numpy_helper.from_array(array, "more"))
    found = read_model(saved(model, tmp_path))
    assert found is not None
    tensor = found[0].graph.initializer[3]
    assert is_held(tensor) == (dtype is not ml_dtypes.int4)
    assert loaded(found[0]) == model
    np.testing.assert_array_equal(values(tensor), array)


def test_values_in_other_fields_stay(tmp_path: Path) -> None:
    model = large()
    numbers = np.arange(30_000, dtype=np.float32)
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [30_000], numbers)
    model.graph.initializer.append(typed)
    found = read_model(saved(model, tmp_path))
    assert found is not None
    assert not is_held(found[0].graph.initializer[3])
    assert loaded(found[0]) == model


def test_a_graph_in_two_parts(tmp_path: Path) -> None:
    """Fields of a message may come in parts, which protobuf merges."""
    first, second = large(), ModelProto()
    second.graph.initializer.append(numpy_helper.from_array(weight(300, 300), "more"))
    path = tmp_path / "model.onnx"
    path.write_bytes(first.SerializeToString() + second.SerializeToString())
    found = read_model(path)
    assert found is not None
    assert is_held(found[0].graph.initializer[3])
    assert loaded(found[0]) == onnx.load(path)


def test_two_initializers_of_one_name(tmp_path: Path) -> None:
    """A session gets held values by name, and would lack those of the first one."""
    model = large()
    model.graph.initializer.add().CopyFrom(
        numpy_helper.from_array(2 * weight(SIDE, SIDE), "w")
    )
    path = saved(model, tmp_path)
    assert read_model(path) is None
    x = np.ones((1, SIDE), np.float32)
    found = open_session(open_model(path, hold=True).model).run(None, {"x": x})
    np.testing.assert_array_equal(found[0], open_session(path).run(None, {"x": x})[0])


@pytest.mark.parametrize("dims", [[SIDE, SIDE + 1], [-SIDE, -SIDE], []])
def test_a_shape_that_does_not_fit_is_refused(dims: list[int], tmp_path: Path) -> None:
    model = large()
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)
    with pytest.raises(ModelError, match="'w'"):
        open_model(saved(model, tmp_path), hold=True)


@pytest.mark.parametrize("length", [1, 1000, -1])
def test_what_is_damaged_is_left_to_protobuf(length: int, tmp_path: Path) -> None:
    path = saved(large(), tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    assert read_model(path) is None
    with pytest.raises(ModelError, match="truncated or not an ONNX model"):
        open_model(path, hold=True)


def test_a_small_file_is_read_as_always(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_file, "LEAST_FILE", 1 << 30)
    path = saved(large(), tmp_path)
    assert read_model(path) is None
    opened = open_model(path, hold=True)
    assert opened.model == large()
    assert opened.arrays == []


def test_weights_of_a_model_that_is_worked_on_in_files_are_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """protobuf would hold them twice while it reads the file."""
    monkeypatch.setattr(store, "LARGE_MODEL", 1000)
    opened = open_model(saved(large(), tmp_path), hold=True)
    assert opened.arrays and loaded(opened.model) == large()


def test_texts_are_not_sought_in_weights(tmp_path: Path) -> None:
    model = large()
    text = b"a text of the weights and of nothing else"
    raw = model.graph.initializer[0].raw_data
    model.graph.initializer[0].raw_data = text + raw[len(text) :]
    path = saved(model, tmp_path)
    assert mentions(path, b"MatMul")
    assert not mentions(path, text)
    assert not mentions(tmp_path / "absent.onnx", b"MatMul")


def test_a_graph_keeps_the_arrays(tmp_path: Path) -> None:
    model, arrays = read_model(saved(large(), tmp_path)) or (ModelProto(), [])
    graph = Graph.of(model).copy()
    del model
    arrays.clear()
    x = np.ones((1, SIDE), np.float32)
    (expected,) = open_session(large()).run(None, {"x": x})
    (found,) = open_session(graph.to_model()).run(None, {"x": x})
    np.testing.assert_array_equal(found, expected)


def test_held_values_are_written(tmp_path: Path) -> None:
    model, arrays = read_model(saved(large(), tmp_path)) or (ModelProto(), [])
    write_external(model, tmp_path / "out.onnx", tmp_path / "out.data")
    assert len(arrays) == 2
    written = onnx.load(tmp_path / "out.onnx").graph
    assert written.node == large().graph.node
    for tensor, original in zip(
        written.initializer, large().graph.initializer, strict=True
    ):
        np.testing.assert_array_equal(values(tensor), values(original))
    assert model_bytes(model) == model_bytes(large())


def test_the_arrays_are_mapped_from_the_file(tmp_path: Path) -> None:
    """Their place in the file is known; a lean session maps it, and computes the same."""
    path = saved(large(), tmp_path)
    model, arrays = read_model(path) or (ModelProto(), [])
    data = path.read_bytes()
    for tensor, original in zip(
        model.graph.initializer, large().graph.initializer, strict=True
    ):
        if is_held(tensor):
            place = file_of(held_values(tensor))
            assert place is not None
            file, offset, length = place
            assert file == path
            assert data[offset : offset + length] == original.raw_data
    assert len(arrays) == 2 and file_of(np.zeros(3)) is None
    feeds = {"x": np.ones((1, SIDE), np.float32)}
    (expected,) = open_session(large(), optimize=False).run(None, feeds)
    (found,) = open_session(model, lean=True, optimize=False).run(None, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    sys.platform == "win32", reason="Windows does not remove a file that is mapped"
)
def test_a_lean_session_needs_no_file_that_is_gone(tmp_path: Path) -> None:
    path = saved(large(), tmp_path)
    model, arrays = read_model(path) or (ModelProto(), [])
    path.unlink()
    assert len(arrays) == 2
    feeds = {"x": np.ones((1, SIDE), np.float32)}
    (expected,) = open_session(large(), optimize=False).run(None, feeds)
    (found,) = open_session(model, lean=True, optimize=False).run(None, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_stored_values_are_written_as_protobuf_writes_them(tmp_path: Path) -> None:
    """Held and located tensors, also packed ones, ones in bodies, and ones with texts."""
    model = large()
    codes = np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 8
    int4 = numpy_helper.from_array(codes.astype(ml_dtypes.int4), "codes")
    int4.doc_string = "after the values"
    model.graph.initializer.insert(1, int4)
    model.graph.doc_string = "after the initializers"
    model.doc_string = "before the graph"
    helper.set_model_props(model, {"after": "the graph"})
    then = parse(
        "g () => (float[2] t) <float[2] c = {1, 2}> { t = Identity (c) }"
    ).graph
    then.initializer.append(numpy_helper.from_array(weight(SIDE), "far"))
    condition = helper.make_node(
        "If", ["flag"], ["z"], then_branch=then, else_branch=then
    )
    model.graph.node.append(condition)
    expected = model.SerializeToString()
    with closing(store.Store(tmp_path / "x")) as folder:
        path = saved(model, tmp_path)
        stored, arrays = read_model(path) or (ModelProto(), [])
        body = stored.graph.node[-1].attribute[0].g
        for tensor in [*stored.graph.initializer, *body.initializer]:
            if tensor.raw_data:
                array = numpy_helper.to_array(tensor)
                located = folder.put_parts(tensor.name, array.shape, [array])
                locate(tensor, *location(located))
        assert len(arrays) == 2
        before = stored.SerializeToString()
        write_model(stored, tmp_path / "written.onnx")
        assert stored.SerializeToString() == before
    assert (tmp_path / "written.onnx").read_bytes() == expected


def test_the_size_of_a_model_with_values_in_files_is_that_of_its_file(
    tmp_path: Path,
) -> None:
    model = large()
    with closing(store.Store(tmp_path / "x")) as folder:
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(folder.put(tensor.name, array))
        assert model_bytes(model) == model_bytes(large()) == large().ByteSize()


def test_a_file_beside_another_reads_its_values_there(tmp_path: Path) -> None:
    path = saved(large(), tmp_path)
    beside = written_by_reference(path)
    assert beside.parent == path.parent and beside != path
    assert beside.stat().st_size < 10_000
    onnx.checker.check_model(str(beside), full_check=True)
    feeds = {"x": np.ones((1, SIDE), np.float32)}
    (expected,) = open_session(path, optimize=False).run(None, feeds)
    (found,) = open_session(beside, lean=True, optimize=False).run(None, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    small = saved(parse("g (float[2] x) => (float[2] y) { y = Relu (x) }"), tmp_path)
    assert written_by_reference(small) == small


def test_a_model_beyond_a_message_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, arrays = read_model(saved(large(), tmp_path)) or (ModelProto(), [])
    monkeypatch.setattr(model_file, "MESSAGE", arrays[0].nbytes)
    with pytest.raises(EncodeError, match="2 GB"):
        write_model(model, tmp_path / "written.onnx")
    assert not (tmp_path / "written.onnx").exists()


@pytest.mark.parametrize("temporary", ["", "absent"])
def test_a_model_with_stored_tensors_is_checked_without_their_values(
    temporary: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A temporary folder that cannot be written to costs memory, and nothing else."""
    monkeypatch.setattr(native, "gettempdir", lambda: str(tmp_path / temporary))
    model, arrays = read_model(saved(large(), tmp_path)) or (ModelProto(), [])
    assert arrays
    run_onnx_check(model, full=True)
    model.graph.node[0].input[0] = "nowhere"
    with pytest.raises(onnx.checker.ValidationError, match="nowhere"):
        run_onnx_check(model, full=True)
