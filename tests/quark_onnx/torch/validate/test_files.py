"""Files: headers against the safetensors library, damage of every kind, and the index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.runtime.safetensors_header import read_header, values_of
from quark_onnx.torch.validate import Validation, validate
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import write_safetensors

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def rules(verdict: Validation) -> list[str]:
    return sorted({finding.rule for finding in verdict.findings})


def edit(file: Path, **changes: Any) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**found, **changes}), encoding="utf-8")


def test_a_header_is_what_the_library_reads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    file = drafts.quark("int8").write(tmp_path / "int8") / "model.safetensors"
    header = read_header(file)
    with safetensors.safe_open(file, "numpy") as library:
        assert {*library.keys()} == header.tensors.keys()
        assert library.metadata() == header.metadata
        for name, tensor in header.tensors.items():
            found = library.get_slice(name)
            assert (found.get_dtype(), tuple(found.get_shape())) == (
                tensor.dtype,
                tensor.shape,
            )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values(dtype: str, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    values = np.array([0.5, -2, 1e-3], dtype)
    numpy.save_file(
        {"other": np.ones(3, "int32"), "values": values}, tmp_path / "file.safetensors"
    )
    tensors = read_header(tmp_path / "file.safetensors").tensors
    np.testing.assert_array_equal(
        values_of(tensors["values"]), values.astype("float64")
    )
    with pytest.raises(ModelError, match="other: I32"):
        values_of(tensors["other"])


def test_values_of_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    values = torch.tensor([0.1, -3.0, 1e30], dtype=torch.bfloat16)
    library.save_file({"values": values}, tmp_path / "file.safetensors")
    found = values_of(read_header(tmp_path / "file.safetensors").tensors["values"])
    assert found.tolist() == values.double().tolist()


def test_whole_in_two_files(tmp_path: Path) -> None:
    assert (
        validate(drafts.quark().write_in_two(tmp_path / "two"), "vllm").findings == ()
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100_000])
def test_config_is_no_object(text: str, tmp_path: Path) -> None:
    folder = drafts.plain().write(tmp_path / "plain")
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert rules(validate(folder, "vllm")) == ["config-json"]
    (folder / "config.json").unlink()
    assert rules(validate(folder, "transformers")) == ["config-json"]


def test_config_is_no_text(tmp_path: Path) -> None:
    folder = drafts.plain().write(tmp_path / "plain")
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    assert rules(validate(folder, "vllm")) == ["config-json"]


def test_generation_config(tmp_path: Path) -> None:
    folder = drafts.plain().write(tmp_path / "plain")
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    assert validate(folder, "vllm").findings == ()
    (folder / "generation_config.json").write_text("{]", encoding="utf-8")
    verdict = validate(folder, "vllm")
    assert rules(verdict) == ["generation-config"] and verdict.right


def test_no_weights(tmp_path: Path) -> None:
    folder = drafts.plain().write(tmp_path / "plain")
    (folder / "model.safetensors").unlink()
    assert rules(validate(folder, "vllm")) == ["no-weights"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {"a": 1}}',
        '{"weight_map": []}',
        '{"weight_map": {}}',
    ],
)
def test_index_is_damaged(text: str, tmp_path: Path) -> None:
    folder = drafts.quark().write_in_two(tmp_path / "two")
    (folder / INDEX).write_text(text, encoding="utf-8")
    assert rules(validate(folder, "vllm")) == ["index-json"]


def test_file_of_the_index_is_missing(tmp_path: Path) -> None:
    folder = drafts.quark().write_in_two(tmp_path / "two")
    (folder / SECOND).unlink()
    verdict = validate(folder, "vllm")
    assert "file-missing" in rules(verdict) and verdict.word == "refused"
    assert SECOND in {finding.place for finding in verdict.findings}


def test_tensor_of_the_index_is_missing(tmp_path: Path) -> None:
    folder = drafts.quark().write_in_two(tmp_path / "two")
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    edit(folder / INDEX, weight_map={**weight_map, "model.more.weight": FIRST})
    assert rules(validate(folder, "vllm")) == ["tensor-missing"]


def test_index_says_where_tensors_are_not(tmp_path: Path) -> None:
    folder = drafts.quark().write_in_two(tmp_path / "two")
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    edit(folder / INDEX, weight_map={**weight_map, "lm_head.weight": SECOND})
    verdict = validate(folder, "vllm")
    assert rules(verdict) == ["tensor-misplaced"] and verdict.right
    del weight_map["lm_head.weight"]
    edit(folder / INDEX, weight_map=weight_map)
    assert rules(validate(folder, "vllm")) == ["tensor-misplaced"]


def test_tensor_in_two_files(tmp_path: Path) -> None:
    folder = drafts.quark().write_in_two(tmp_path / "two")
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    draft = drafts.quark()
    both = {
        name: draft.tensors[name]
        for name in draft.tensors
        if weight_map[name] == SECOND or name == "lm_head.weight"
    }
    write_safetensors(folder / SECOND, both, {})
    verdict = validate(folder, "vllm")
    assert rules(verdict) == ["tensor-twice"] and verdict.word == "loads but wrong"


def test_truncated_everywhere(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    folder = drafts.plain().write(tmp_path / "plain")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in {
        0,
        1,
        7,
        8,
        9,
        100,
        *range(0, len(whole), len(whole) // 40),
        len(whole) - 1,
    }:
        file.write_bytes(whole[:length])
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(file, "numpy")
        assert rules(validate(folder, "vllm")) == ["file-damaged"], length


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fill"),
        ({"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}, "unknown type"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "gap or an overlap"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "lacks"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "of 0 or more"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "lacks"),
        ({"dtype": "F32", "shape": [1]}, "lacks"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "lacks"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "truncated"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "unknown type"),
        ([], "lacks"),
        (["a" * 10000], r"lacks.{0,80}$"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_headers_that_lie(entry: Any, found: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    file = tmp_path / "file.safetensors"
    text = json.dumps({"a": entry}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(file, "numpy")
    with pytest.raises(ModelError, match=found):
        read_header(file)


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}, {"a": 1}, {"a": None}, []])
def test_metadata_that_the_library_reads(metadata: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    file = tmp_path / "file.safetensors"
    text = json.dumps({"__metadata__": metadata}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        with safetensors.safe_open(file, "numpy") as opened:
            wanted = opened.metadata() or {}
    except safetensors.SafetensorError:
        with pytest.raises(ModelError, match=r"__metadata__ .* object of strings"):
            read_header(file)
    else:
        assert read_header(file).metadata == wanted


@given(data=st.data())
def test_bits_that_flip(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Damage never raises anything but a finding, whatever it hits."""
    folder = drafts.quark().write(tmp_path_factory.mktemp("flip"))
    name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    file = folder / name
    content = bytearray(file.read_bytes())
    end = min(len(content), 2000)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    for client in ("vllm", "transformers"):
        assert validate(folder, client).word in ("loads", "loads but wrong", "refused")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.sampled_from(["", "fp8_e4m3", "int4", "per_group", "re:([", "*"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["weight", "a"]), inner, max_size=2)
    ),
    max_leaves=3,
)


@given(
    layout=st.sampled_from(["quark", "awq", "gptq", "fp8", "compressed", "quark_kv"]),
    data=st.data(),
)
def test_any_value_in_the_configuration(
    layout: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands in the configuration, there is a verdict."""
    draft = getattr(drafts, layout)()
    entries = draft.quantization if data.draw(st.booleans()) else draft.config
    while True:
        key = data.draw(st.sampled_from(sorted(entries)))
        if (
            not isinstance(entries[key], dict)
            or not entries[key]
            or data.draw(st.booleans())
        ):
            break
        entries = entries[key]
    entries[key] = data.draw(VALUES)
    folder = draft.write(tmp_path_factory.mktemp("any"))
    for client in ("vllm", "transformers"):
        assert json.dumps(validate(folder, client).document)


SETTINGS = ("quantize_config.json", "quant_config.json")


@pytest.mark.parametrize("file", SETTINGS)
@pytest.mark.parametrize("client", ["vllm", "transformers"])
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_settings_in_two_files(
    layout: str, client: str, file: str, tmp_path: Path
) -> None:
    """GPTQModel reads the other file, and the clients config.json."""
    draft: drafts.Draft = getattr(drafts, layout)()
    folder = draft.write(tmp_path / "two")
    (folder / file).write_text(json.dumps(draft.quantization), encoding="utf-8")
    assert validate(folder, client).findings == ()
    # AutoAWQ's own names
    edit(folder / file, w_bit=4, q_group_size=32)
    assert validate(folder, client).findings == ()
    for key, value in (("bits", 8), ("group_size", -1), ("quant_method", "other")):
        contrary = {**draft.quantization, key: value}
        (folder / file).write_text(json.dumps(contrary), encoding="utf-8")
        (finding,) = validate(folder, client).findings
        assert finding.place == f"{file}, {key}"
        assert finding.severity == "warning" and repr(value) in finding.found
    (folder / file).write_text("{", encoding="utf-8")
    (finding,) = validate(folder, client).findings
    assert (finding.rule, finding.place) == ("settings-differ", file)


def test_settings_that_config_json_lacks(tmp_path: Path) -> None:
    draft = drafts.gptq()
    settings = draft.config.pop("quantization_config")
    folder = draft.write(tmp_path / "one")
    (folder / SETTINGS[0]).write_text(json.dumps(settings), encoding="utf-8")
    assert rules(validate(folder, "vllm")) == ["settings-differ", "undeclared"]


@pytest.mark.parametrize("client", ["vllm", "transformers"])
@pytest.mark.parametrize(
    "damage", ["gone", "folder", "link", "empty", "cut", "pointer"]
)
def test_a_part_that_is_damaged_is_the_only_finding(
    damage: str, client: str, tmp_path: Path
) -> None:
    """What its tensors are is not known: nothing else is said of them."""
    folder = drafts.quark().write_in_two(tmp_path / "two")
    file = folder / FIRST
    content = file.read_bytes()
    file.unlink()
    changes: dict[str, Callable[[], object]] = {
        "gone": lambda: None,
        "folder": file.mkdir,
        "link": lambda: file.symlink_to("nowhere"),
        "empty": file.touch,
        "cut": lambda: file.write_bytes(content[:-1]),
        "pointer": lambda: file.write_text(
            "version https://git-lfs.github.com/spec/v1"
        ),
    }
    changes[damage]()
    (finding,) = validate(folder, client).findings
    assert (finding.place, finding.severity) == (FIRST, "refused")
    assert ("git lfs pull" in finding.found) is (damage == "pointer")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_folder_in_place_of_a_configuration(name: str, tmp_path: Path) -> None:
    folder = drafts.quark().write(tmp_path / "quark")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    places = [finding.place for finding in validate(folder, "vllm").findings]
    # clients do not look for a file there that they can do without
    assert places == (["config.json"] if name == "config.json" else [])


def test_damage_names_the_tensor(tmp_path: Path) -> None:
    """A file that is cut, and a header that has a name twice."""
    folder = drafts.plain().write(tmp_path / "plain")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    last = [*drafts.plain().tensors][-1]
    file.write_bytes(whole[:-1])
    (finding,) = validate(folder, "vllm").findings
    assert finding.place == file.name and repr(last) in finding.found
    text = b'{"a": 1, "twice": 2, "twice": 3}'
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    (finding,) = validate(folder, "vllm").findings
    assert finding.place == file.name and "'twice'" in finding.found


def test_a_header_that_is_longer_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="truncated, or no safetensors"):
        read_header(file)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no folder"):
        validate(tmp_path / "absent", "vllm")
    with pytest.raises(ModelError, match="no Hugging Face checkpoint"):
        validate(tmp_path, "vllm")
    with pytest.raises(ConfigError, match=r"unknown client 'vlm'.*vllm"):
        validate(tmp_path, "vlm")


def test_original_weights_beside_the_others_are_not_read(tmp_path: Path) -> None:
    folder = drafts.quark().write(tmp_path / "quark")
    write_safetensors(
        folder / "consolidated.safetensors", {"layers.0.w": ("F32", (1,))}, {}
    )
    assert validate(folder, "vllm").findings == ()


def test_verdict_as_text_and_document(tmp_path: Path) -> None:
    draft = drafts.quark()
    draft.drop(".weight_scale")
    verdict = validate(draft.write(tmp_path / "none"), "vllm")
    assert (
        verdict.count("wrong") == len(drafts.LINEARS)
        and verdict.loads
        and not verdict.right
    )
    lines = verdict.text().splitlines()
    assert lines[0].endswith(": quark checkpoint (14 × fp8)")
    assert lines[1] == "wrong     scale-missing: each quantized weight has its scales"
    assert lines[2].endswith(" and 11 more: there is no such tensor")
    assert lines[-1] == (
        "verdict   poor: loads but wrong by the rules of vLLM 0.33.0 (the client was not"
        " run)"
    )
    assert len(lines) == 6 and str(verdict) == verdict.text()
    lines = verdict.text(complete=True).splitlines()
    places = [line for line in lines if line.endswith(": there is no such tensor")]
    assert len(places) == math.prod((2, 7))
    finding = verdict.document["findings"][0]
    assert finding.keys() == {
        "rule",
        "severity",
        "place",
        "found",
        "demanded",
        "fix",
        "source",
    }
    assert verdict.document["verdict"] == "loads but wrong" and verdict.document[
        "schemes"
    ] == {"fp8": 14}
