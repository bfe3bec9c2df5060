"""fix: what it repairs loads afterwards, with the same bytes, and the checkpoint itself stays as it
was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.runtime.safetensors_header import read_header
from quark_onnx.torch.validate import repair, validate
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import Draft

DOWN = [f"model.layers.{n}.mlp.down_proj" for n in range(2)]


def old_names(draft: Draft) -> None:
    draft.rename(".weight_scale", ".weight_quantizer.scale")
    draft.rename(".input_scale", ".input_quantizer.scale")
    draft.rename("_proj.weight_zero_point", "_proj.weight_quantizer.zero_point")


def floated(draft: Draft) -> None:
    for name in DOWN:
        draft.tensors = {
            key: entry
            for key, entry in draft.tensors.items()
            if not key.startswith(f"{name}.")
        }
        draft.tensors[f"{name}.weight"] = ("BF16", drafts.LINEARS[name])


def globbed(draft: Draft) -> None:
    floated(draft)
    draft.quantization["exclude"] = ["*down_proj", "lm_hea?"]


def bare(draft: Draft) -> None:
    for key in ("exclude", "export", "layer_type_quant_config"):
        draft.quantization[key] = None


def without_keys(draft: Draft) -> None:
    layer = draft.quantization["global_quant_config"]
    del layer["output_tensors"], layer["bias"]
    for key in ("weight", "input_tensors"):
        for name in (
            "observer_cls",
            "round_method",
            "scale_type",
            "ch_axis",
            "group_size",
        ):
            del layer[key][name]


BROKEN: dict[str, tuple[Callable[[], Draft], Callable[[Draft], object], str]] = {
    "names": (drafts.quark, old_names, "vllm"),
    "names of zero points": (lambda: drafts.quark("int8"), old_names, "vllm"),
    "patterns": (drafts.quark, globbed, "vllm"),
    "floats": (drafts.quark, floated, "transformers"),
    "null": (drafts.quark, bare, "vllm"),
    "keys": (lambda: drafts.quark("int8"), without_keys, "transformers"),
    "more keys": (
        drafts.quark,
        lambda draft: draft.quantization["export"].update(own=1),
        "transformers",
    ),
    "cache": (drafts.quark_kv, lambda draft: draft.quantization.pop("export"), "vllm"),
}


def digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.is_file()
    }


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("files", ["write", "write_in_two"])
def test_repaired(name: str, files: str, tmp_path: Path) -> None:
    whole, change, client = BROKEN[name]
    draft = whole()
    change(draft)
    folder = getattr(draft, files)(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    before = digests(folder)
    assert validate(folder, client).word != "loads"
    repaired = repair(folder, client)
    assert digests(folder) == before
    assert repaired.folder == tmp_path / "model-fixed" and repaired.notes
    assert (
        repaired.verdict.findings == ()
        and validate(repaired.folder, client).findings == ()
    )
    assert (repaired.folder / "tokenizer.json").read_text(encoding="utf-8") == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model-fixed"}


def test_names_alone_change(tmp_path: Path) -> None:
    draft = drafts.quark_kv()
    old_names(draft)
    folder = draft.write(tmp_path / "model")
    copy = repair(folder, "vllm").folder
    assert copy is not None
    old, new = (
        read_header(folder / "model.safetensors"),
        read_header(copy / "model.safetensors"),
    )
    assert [tensor.size for tensor in old.tensors.values()] == [
        tensor.size for tensor in new.tensors.values()
    ]
    contents = [(each / "model.safetensors").read_bytes() for each in (folder, copy)]
    assert contents[0][old.start :] == contents[1][new.start :]
    assert old.metadata == new.metadata == {"format": "pt"}
    assert "model.layers.0.mlp.up_proj.weight_scale" in new.tensors
    library = pytest.importorskip("safetensors")
    with library.safe_open(copy / "model.safetensors", "numpy") as opened:
        assert opened.get_tensor("model.layers.1.self_attn.v_proj.output_scale") == 2.25


def test_patterns_become_names(tmp_path: Path) -> None:
    draft = drafts.quark()
    globbed(draft)
    draft.quantization["exclude"].append("re:.*router")
    copy = repair(
        draft.write(tmp_path / "model"), "vllm", tmp_path / "deep" / "copy"
    ).folder
    assert copy == tmp_path / "deep" / "copy"
    exclude = json.loads((copy / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]["exclude"]
    assert exclude[0] == "re:.*router" and sorted(exclude[1:]) == ["lm_head", *DOWN]


def test_the_index_is_written_anew(tmp_path: Path) -> None:
    folder = drafts.quark().write_in_two(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    index.write_text("{", encoding="utf-8")
    repaired = repair(folder, "vllm")
    assert repaired.folder is not None and repaired.verdict.findings == ()
    found = json.loads((repaired.folder / index.name).read_text(encoding="utf-8"))
    assert found["weight_map"] == whole
    assert found["metadata"]["total_size"] == sum(
        tensor.size
        for part in folder.glob("*.safetensors")
        for tensor in read_header(part).tensors.values()
    )


def test_nothing_to_repair(tmp_path: Path) -> None:
    repaired = repair(drafts.quark().write(tmp_path / "model"), "vllm")
    assert repaired.folder is None and repaired.notes == () and repaired.verdict.right
    assert not (tmp_path / "model-fixed").exists()
    assert "nothing can be repaired" in str(repaired)


def test_what_cannot_be_repaired_is_said(tmp_path: Path) -> None:
    draft = drafts.quark("int4_wo_per_channel")
    draft.quantization["exclude"] = None
    repaired = repair(draft.write(tmp_path / "model"), "vllm")
    assert repaired.folder is not None
    assert {finding.rule for finding in repaired.verdict.findings} == {"quark-scheme"}


def test_bad_input(tmp_path: Path) -> None:
    draft = drafts.quark()
    bare(draft)
    folder = draft.write(tmp_path / "model")
    (tmp_path / "model-fixed").mkdir()
    with pytest.raises(ConfigError, match="model-fixed exists"):
        repair(folder, "vllm")
    with pytest.raises(ConfigError, match="cannot be repaired"):
        repair(folder, "llama.cpp")
    with pytest.raises(ModelError, match="is no folder"):
        repair(tmp_path / "absent", "vllm")


def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafts.quark()
    old_names(draft)
    folder = draft.write(tmp_path / "model")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        repair(folder, "vllm")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
