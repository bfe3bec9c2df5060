"""Models from and to files: external data, broken files, and writing that leaves all or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from quark_onnx.common.errors import ModelError
from quark_onnx.files import io
from quark_onnx.files.io import has_external_data, load, staged
from quark_onnx.graph import Node
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
    model.graph.node[1].attribute[0].g.initializer.append(
        numpy_helper.from_array(normal(32, 32, seed=1), "v")
    )
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
    assert load(tmp_path / "m.onnx") == large()


def test_a_folder_may_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save(large(), tmp_path / "a" / "m.onnx")
    (tmp_path / "a").rename(tmp_path / "b")
    assert load(tmp_path / "b" / "m.onnx") == large()
    shutil.move(tmp_path / "b" / "m.onnx", tmp_path / "m.onnx")
    with pytest.raises(
        ModelError,
        match=r"tensor 'w': external data file .*m\.onnx\.data cannot be read: No such file",
    ):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "location", ["../secret", "a/../../secret", "/etc/hostname", "link/secret"]
)
def test_external_data_outside_the_folder_is_refused(
    tmp_path: Path, location: str
) -> None:
    (tmp_path / "secret").write_bytes(bytes(4096))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    point(large(), folder / "m.onnx", location=location)
    with pytest.raises(
        ModelError,
        match=r"tensor 'w': external data '.*' lies outside the model's folder",
    ):
        load(folder / "m.onnx")


def point(model: ModelProto, path: Path, **info: str) -> None:
    """Write a model whose first initializer lies where ``info`` says."""
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in info.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("cached", [True, False])
def test_a_cache_links_the_model_and_its_data_to_one_folder(
    tmp_path: Path, cached: bool
) -> None:
    """As Hugging Face lays it out; onnxruntime loads the same.

    Where the model is no link, one beside it is a leak.
    """
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir(), blobs.mkdir()
    save(large(), snapshot / "m.onnx")
    for name, blob in ("m.onnx", "a1"), ("m.onnx.data", "b2"):
        (snapshot / name).rename(blobs / blob)
        (snapshot / name).symlink_to(f"../blobs/{blob}")
    if cached:
        assert load(snapshot / "m.onnx") == large()
        return
    (snapshot / "copy.onnx").write_bytes((blobs / "a1").read_bytes())
    with pytest.raises(
        ModelError,
        match=r"external data 'm\.onnx\.data' lies outside the model's folder",
    ):
        load(snapshot / "copy.onnx")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (
            {"offset": "abc"},
            "the offset of its external data is 'abc'; it must be a number of bytes",
        ),
        ({"length": "1.5"}, "the length of its external data is '1.5'"),
        ({"length": "-5"}, "the length of its external data is '-5'"),
        ({"offset": "1" + "0" * 30}, "the offset of its external data is '10000"),
        ({"length": "1" + "0" * 18}, r"ends after 4096 of 10{18} bytes from offset 0"),
        ({"offset": "5000", "length": "4"}, "ends after 0 of 4 bytes from offset 5000"),
        ({"location": "a\0b"}, r"external data 'a\\x00b' is not the name of a file"),
        ({"location": "."}, "is a folder or a device, not a file"),
        ({"location": "circle"}, "circle"),
    ],
)
def test_forged_external_data(
    tmp_path: Path, info: dict[str, str], message: str
) -> None:
    (tmp_path / "data").write_bytes(bytes(4096))
    (tmp_path / "circle").symlink_to("circle")
    point(large(), tmp_path / "m.onnx", **{"location": "data", **info})
    with pytest.raises(ModelError, match=rf"tensor 'w': .*{message}"):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize("inside", [True, False], ids=["in the folder", "outside"])
def test_data_under_several_names_is_refused(inside: bool, tmp_path: Path) -> None:
    """A hard link is a file of another place under a harmless name.

    Symbolic ones can be followed, and are.

    The oracle is onnx 1.23, which refuses it, too. Caches of model hubs are made of symbolic links,
    and stay readable.
    """
    (tmp_path / "model").mkdir()
    save(large(), tmp_path / "model" / "m.onnx")
    other = tmp_path / "model" / "other" if inside else tmp_path / "other"
    other.hardlink_to(tmp_path / "model" / "m.onnx.data")
    with pytest.raises(onnx.checker.ValidationError, match="multiple hard links"):
        onnx.load(tmp_path / "model" / "m.onnx")
    with pytest.raises(
        ModelError,
        match=r"m\.onnx\.data has 2 hard links.*replace it by a copy of itself",
    ):
        load(tmp_path / "model" / "m.onnx")
    other.unlink()
    assert load(tmp_path / "model" / "m.onnx") == large()


@pytest.mark.parametrize("length", [4095, 4097, 10_000, 10**12])
def test_external_data_has_the_length_of_its_tensor(
    length: int, tmp_path: Path
) -> None:
    """However long the file is: what is read beyond the tensor is memory for nothing."""
    point(large(), tmp_path / "m.onnx", location="data", length=str(length))
    with (tmp_path / "data").open("wb") as file:
        file.truncate(2**40)  # a file of holes
    with pytest.raises(
        ModelError,
        match=f"'w' of shape .* needs 4,096 bytes, and its external data has the length {length:,}",
    ):
        load(tmp_path / "m.onnx")


@pytest.mark.skipif(
    not Path("/dev/zero").exists(), reason="there is no device that never ends"
)
def test_a_model_is_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "m.onnx"):
        with pytest.raises(
            ModelError, match=f"model file {path} cannot be read: it is no regular file"
        ):
            load(path)
    with (tmp_path / "holes.onnx").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(
        ModelError,
        match=r"holes.onnx has 1,099,511,627,776 bytes; a protobuf message ends at 2 GB",
    ):
        load(tmp_path / "holes.onnx")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    model = conv_relu().SerializeToString().replace(b"relu", b"r\xff\xfeu")
    (tmp_path / "m.onnx").write_bytes(model)
    with pytest.raises(
        ModelError,
        match=r"m\.onnx is damaged: the name of a Node is no UTF-8 text: b'r\\xff\\xfeu'",
    ):
        load(tmp_path / "m.onnx")


def test_names_that_are_no_text_in_python(tmp_path: Path) -> None:
    """protobuf's implementation in Python raises an error of its own where it parses them."""
    model = conv_relu().SerializeToString().replace(b"relu", b"r\xff\xfeu")
    (tmp_path / "m.onnx").write_bytes(model)
    finished = subprocess.run(
        [sys.executable, "-m", "quark_onnx", "explain", "m.onnx"],
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
        encoding="utf-8",
    )
    assert finished.returncode == 2, finished.stderr
    assert "model file m.onnx is truncated or not an ONNX model" in finished.stderr


def test_an_attribute_may_hold_any_bytes() -> None:
    assert (
        Node(helper.make_node("Op", [], [], mode=b"r\xff")).attribute("mode")
        == r"r\xff"
    )


@pytest.mark.parametrize("where", ["sparse initializer", "attribute", "function"])
def test_no_tensor_of_a_model_is_overlooked(tmp_path: Path, where: str) -> None:
    model = conv_relu()
    outside = TensorProto(
        name="outside", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL
    )
    outside.external_data.add(key="location", value="../secret")
    node = helper.make_node("Constant", [], ["c"], value=outside)
    if where == "sparse initializer":
        indices = numpy_helper.from_array(np.int64([0]), "i")
        model.graph.sparse_initializer.append(
            helper.make_sparse_tensor(outside, indices, [4])
        )
    elif where == "attribute":
        model.graph.node.append(node)
    else:
        model.functions.append(
            helper.make_function(
                "own", "F", [], ["c"], [node], [helper.make_opsetid("", 17)]
            )
        )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(
        ModelError, match=r"tensor 'outside': external data '\.\./secret' lies outside"
    ):
        load(tmp_path / "m.onnx")


def test_truncated_external_data(tmp_path: Path) -> None:
    save(large(), tmp_path / "m.onnx")
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(
        ModelError,
        match=r"tensor '[vw]': external data file .* ends after \d+ of 4096 bytes",
    ):
        load(tmp_path / "m.onnx")


def language_model(path: Path) -> None:
    """A folder as transformers writes one."""
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).touch()


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.onnx", conv_relu().SerializeToString())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (zipped, "is a zip archive, unpack it first"),
        (
            lambda path: path.write_text("just text\n" * 9),
            "is truncated or not an ONNX model",
        ),
        (
            lambda path: path.write_bytes(conv_relu().SerializeToString()[:-40]),
            "is truncated or not an ONNX model",
        ),
        (lambda path: path.write_bytes(b""), "holds no graph; is it an ONNX model?"),
        (lambda path: path.mkdir(), "is a folder; give the .onnx file in it"),
        (language_model, "is a folder; for a language model, 'quark-onnx llm ptq"),
        (lambda path: None, "cannot be read: No such file or directory"),
    ],
    ids=["zip", "text", "truncated", "empty", "folder", "language", "missing"],
)
def test_what_is_no_model(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "m.onnx"
    make(path)
    with pytest.raises(ModelError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


# Writing


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    save(large(), tmp_path / "new" / "m.onnx", external=False)
    assert files(tmp_path / "new") == ["m.onnx"] and not has_external_data(
        tmp_path / "new" / "m.onnx"
    )


def test_above_the_limit_tensors_move_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "EXTERNAL_DATA_LIMIT", 4000)
    save(large(), tmp_path / "m.onnx", external=False)
    assert files(tmp_path) == ["m.onnx", "m.onnx.data"]
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    info = {
        entry.key: entry.value for entry in stored.graph.initializer[0].external_data
    }
    assert info["location"] == "m.onnx.data"
    feeds = samples(large())[0]
    np.testing.assert_array_equal(
        run(load(tmp_path / "m.onnx"), feeds)[0], run(large(), feeds)[0]
    )


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        save(large(), tmp_path / "m.onnx")
        contents.append(
            [(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
        )
    assert contents[0] == contents[1]


@pytest.mark.parametrize("name", ["m.json", "m.textproto", "m.onnx"])
def test_the_suffix_says_nothing_of_the_format(tmp_path: Path, name: str) -> None:
    for external in (False, True):
        save(large(), tmp_path / name, external=external)
        assert (
            has_external_data(tmp_path / name) == external
            and load(tmp_path / name) == large()
        )


def test_a_file_of_the_current_folder_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        save(large(), Path("m.onnx"))
    assert load(Path("m.onnx")) == large()


def test_both_files_may_be_read_by_the_same_people(tmp_path: Path) -> None:
    save(large(), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_mode == (
        tmp_path / "m.onnx"
    ).stat().st_mode


def test_data_of_an_earlier_version_goes(tmp_path: Path) -> None:
    save(large(), tmp_path / "m.onnx")
    save(residual(), tmp_path / "m.onnx", external=False)
    assert files(tmp_path) == ["m.onnx"]


def test_a_file_of_that_name_that_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "m.onnx.data").write_text("mine")
    save(residual(), tmp_path / "m.onnx", external=False)
    assert (tmp_path / "m.onnx.data").read_text() == "mine"


@pytest.mark.parametrize("failure", [ModelError("no good"), KeyboardInterrupt()])
def test_a_failing_check_leaves_nothing_behind(
    tmp_path: Path, failure: BaseException
) -> None:
    save(residual(), tmp_path / "m.onnx", external=False)
    before = (tmp_path / "m.onnx").read_bytes()

    with (
        pytest.raises(type(failure)),
        staged(large(), tmp_path / "m.onnx", external=True) as path,
    ):
        assert (
            path.name == "m.onnx" and has_external_data(path) and load(path) == large()
        )
        raise failure
    assert (
        files(tmp_path) == ["m.onnx"] and (tmp_path / "m.onnx").read_bytes() == before
    )


def test_the_model_that_is_written_stays_as_it_is(tmp_path: Path) -> None:
    model = large()
    save(model, tmp_path / "m.onnx")
    assert model == large()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"file/m\.onnx cannot be written"):
        save(residual(), tmp_path / "file" / "m.onnx")


def test_a_disk_that_is_full_before_the_check_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(io, "written_by_reference", full)
    with (
        pytest.raises(ModelError, match=r"q.onnx cannot be written: No space left"),
        staged(conv_relu(), tmp_path / "q.onnx", external=False, lean=True),
    ):
        raise AssertionError("the body is not reached")
    assert list(tmp_path.iterdir()) == []
