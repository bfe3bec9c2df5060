"""Models from and to files: external data, broken files, and writing that leaves all or nothing."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from quark_onnx.errors import ModelError
from quark_onnx.graph import io
from quark_onnx.graph.io import has_external_data, read, staged
from tests.models import conv_relu, normal, parse, residual, run, samples


def large() -> ModelProto:
    """Tensors above the size at which they move out, one inside a subgraph."""
    model = parse(
        """g (float[N,32] x, bool c) => (float[N,32] y) {
            h = MatMul (x, w)
            y = If (c) <
                then_branch = a () => (float[N,32] t) { t = MatMul (h, v) },
                else_branch = b () => (float[N,32] e) { e = Relu (h) }
            >
        }""",
        w=normal(32, 32),
    )
    model.graph.node[1].attribute[0].g.initializer.append(numpy_helper.from_array(normal(32, 32, seed=1), "v"))
    return model


def save(model: ModelProto, path: Path, *, external: bool = True) -> None:
    """Write a model without looking at it."""
    with staged(model, path, external=external):
        pass


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Reading


def test_external_data_comes_in(tmp_path: Path) -> None:
    save(large(), tmp_path / "m.onnx")
    assert files(tmp_path) == ["m.onnx", "m.onnx.data"]
    assert has_external_data(tmp_path / "m.onnx")
    assert read(tmp_path / "m.onnx") == large()


def test_a_folder_may_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save(large(), tmp_path / "a" / "m.onnx")
    (tmp_path / "a").rename(tmp_path / "b")
    assert read(tmp_path / "b" / "m.onnx") == large()
    shutil.move(tmp_path / "b" / "m.onnx", tmp_path / "m.onnx")
    with pytest.raises(
        ModelError, match=r"tensor 'w': external data file .*m\.onnx\.data cannot be read: No such file"
    ):
        read(tmp_path / "m.onnx")


@pytest.mark.parametrize("location", ["../secret", "a/../../secret", "/etc/hostname", "link/secret"])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(4096))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    model = large()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"tensor 'w': external data '.*' lies outside the model's folder"):
        read(folder / "m.onnx")


@pytest.mark.parametrize("where", ["sparse initializer", "attribute", "function"])
def test_no_tensor_of_a_model_is_overlooked(tmp_path: Path, where: str) -> None:
    model = conv_relu()
    outside = TensorProto(name="outside", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="../secret")
    node = helper.make_node("Constant", [], ["c"], value=outside)
    if where == "sparse initializer":
        indices = numpy_helper.from_array(np.int64([0]), "i")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(outside, indices, [4]))
    elif where == "attribute":
        model.graph.node.append(node)
    else:
        model.functions.append(helper.make_function("own", "F", [], ["c"], [node], [helper.make_opsetid("", 17)]))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"tensor 'outside': external data '\.\./secret' lies outside"):
        read(tmp_path / "m.onnx")


def test_truncated_external_data(tmp_path: Path) -> None:
    save(large(), tmp_path / "m.onnx")
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"tensor '[vw]': external data file .* ends after \d+ of 4096 bytes"):
        read(tmp_path / "m.onnx")


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.onnx", conv_relu().SerializeToString())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (zipped, "is a zip archive, unpack it first"),
        (lambda path: path.write_text("just text\n" * 9), "is truncated or not an ONNX model"),
        (lambda path: path.write_bytes(conv_relu().SerializeToString()[:-40]), "is truncated or not an ONNX model"),
        (lambda path: path.write_bytes(b""), "holds no graph; is it an ONNX model?"),
        (lambda path: path.mkdir(), "is a folder; give the .onnx file in it"),
        (lambda path: None, "cannot be read: No such file or directory"),
    ],
    ids=["zip", "text", "truncated", "empty", "folder", "missing"],
)
def test_what_is_no_model(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "m.onnx"
    make(path)
    with pytest.raises(ModelError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


# Writing


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    save(large(), tmp_path / "new" / "m.onnx", external=False)
    assert files(tmp_path / "new") == ["m.onnx"] and not has_external_data(tmp_path / "new" / "m.onnx")


def test_above_the_limit_tensors_move_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "EXTERNAL_DATA_LIMIT", 4000)
    save(large(), tmp_path / "m.onnx", external=False)
    assert files(tmp_path) == ["m.onnx", "m.onnx.data"]
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    info = {entry.key: entry.value for entry in stored.graph.initializer[0].external_data}
    assert info["location"] == "m.onnx.data"
    feeds = samples(large())[0]
    np.testing.assert_array_equal(run(read(tmp_path / "m.onnx"), feeds)[0], run(large(), feeds)[0])


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        save(large(), tmp_path / "m.onnx")
        contents.append([(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())])
    assert contents[0] == contents[1]


def test_data_of_an_earlier_version_goes(tmp_path: Path) -> None:
    save(large(), tmp_path / "m.onnx")
    save(residual(), tmp_path / "m.onnx", external=False)
    assert files(tmp_path) == ["m.onnx"]


def test_a_file_of_that_name_that_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "m.onnx.data").write_text("mine")
    save(residual(), tmp_path / "m.onnx", external=False)
    assert (tmp_path / "m.onnx.data").read_text() == "mine"


@pytest.mark.parametrize("failure", [ModelError("no good"), KeyboardInterrupt()])
def test_a_failing_check_leaves_nothing_behind(tmp_path: Path, failure: BaseException) -> None:
    save(residual(), tmp_path / "m.onnx", external=False)
    before = (tmp_path / "m.onnx").read_bytes()

    with pytest.raises(type(failure)), staged(large(), tmp_path / "m.onnx", external=True) as path:
        assert path.name == "m.onnx" and has_external_data(path) and read(path) == large()
        raise failure
    assert files(tmp_path) == ["m.onnx"] and (tmp_path / "m.onnx").read_bytes() == before


def test_the_model_that_is_written_stays_as_it_is(tmp_path: Path) -> None:
    model = large()
    save(model, tmp_path / "m.onnx")
    assert model == large()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"file/m\.onnx cannot be written"):
        save(residual(), tmp_path / "file" / "m.onnx")
