"""A checkpoint is what its folder holds: nothing outside is read, and no output lies inside."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quark_onnx
from quark_onnx.cli.dispatch import main
from quark_onnx.common.errors import ConfigError, ModelError, QuarkError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.recast import recast
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.pipelines import estimate
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.ptq import ptq
from quark_onnx.torch.validate import repair, validate
from tests.torch_models import llama, made, saved, tokens

INT4, FP8 = config_for("int4_wo_32"), config_for("fp8")
LAYER = "model.layers.1.self_attn.q_proj"


def small() -> Any:
    return llama(hidden_size=32, intermediate_size=32, num_attention_heads=2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(made(small()), tmp_path / "base" / "hf")


def quantized(source: Path, output: Path, **settings: Any) -> Any:
    return quantize_checkpoint(source, None, INT4, output, progress=False, **settings)


def readers() -> dict[str, Callable[[Path, Path], object]]:
    """Everything that reads a folder, with a path for its output."""
    return {
        "quantize": quantized,
        "load": lambda source, _: load_checkpoint(source),
        "recast": lambda source, output: recast(source, output, "bfloat16"),
        "validate": lambda source, _: validate(source, "vllm"),
        "repair": lambda source, output: repair(source, "vllm", output),
        "gguf": lambda source, output: main(
            ["llm", "gguf", str(source), "-o", f"{output}.gguf"]
        ),
    }


LINKS = {
    "folder": ("assets", "../secret"),
    "file": ("tokenizer_config.json", "/etc/passwd"),
    "settings": ("config.json", "../secret/config.json"),
    "weights": ("model.safetensors", "../secret/model.safetensors"),
    "hidden": ("assets/.more", "../../secret/key"),
    "chain": ("a.txt", "b.txt"),
    "around": ("assets/again", "../.."),
}


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
@pytest.mark.parametrize("reader", readers())
@pytest.mark.parametrize("link", LINKS)
def test_links_that_leave_the_folder_are_refused(
    link: str, reader: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link is followed if it stays in the checkpoint, or leads to the hub's cache."""
    secret = source.parent / "secret"
    shutil.copytree(source, secret)
    (secret / "key").write_text("secret", encoding="utf-8")
    if link == "chain":
        (source / "b.txt").symlink_to(secret / "key")
    name, target = LINKS[link]
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(target)
    output, message = source.parent / "out", r"is a link to .*(outside|around)"
    if reader == "gguf":
        assert readers()[reader](source, output)
        assert "is a link to" in capsys.readouterr().err
    else:
        with pytest.raises(ModelError, match=message):
            readers()[reader](source, output)
    assert not output.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_of_the_cache_and_inside_the_folder_are_followed(
    source: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(source, blobs)
    (blobs / "license").write_text("free", encoding="utf-8")
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (snapshot / "copy").symlink_to("license")
    quantized(snapshot, tmp_path / "out")
    for name in ("license", "copy"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_text(encoding="utf-8") == "free"


@pytest.mark.parametrize("place", ["sub", "sub/deeper", "../hf/other"])
@pytest.mark.parametrize("role", ["output", "resume", "spill", "recast", "repair"])
def test_no_output_lies_in_the_source(role: str, place: str, source: Path) -> None:
    before = sorted(source.rglob("*"))
    inside, outside = source / place, source.parent / "out"
    with pytest.raises(ConfigError, match=r"lies in .*, the folder of the model"):
        if role == "output":
            quantized(source, inside)
        elif role == "recast":
            recast(source, inside, "bfloat16")
        elif role == "repair":
            repair(source, "vllm", inside)
        else:
            settings = {role: inside}
            quantized(source, outside, writing=Writing(**settings))
    assert sorted(source.rglob("*")) == before and not outside.exists()


def test_overwriting_a_folder_around_the_source(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source.parent / "config.json").write_text("{}", encoding="utf-8")
    line = ["llm", "ptq", source, "-o", source.parent, "--scheme", "int4_wo_32"]
    assert main([*map(str, line), "--overwrite"]) == 2
    assert "is replaced with all that it holds, such as DIR" in capsys.readouterr().err
    assert (source / "model.safetensors").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of a file's size there")
@pytest.mark.parametrize("written", ["out", "spill"])
def test_a_full_disk_is_named_with_its_reason(
    written: str, source: Path, tmp_path: Path
) -> None:
    """Every error of the system while a checkpoint is written has the file and the reason."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files stands for a full disk; Python ignores its signal.
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match=rf"{written}.* cannot be written: .*large"
        ):
            writing = Writing(spill=tmp_path / "spill" if written == "spill" else None)
            data, output = [torch.cat(tokens(8, 16))], tmp_path / "out"
            quantize_checkpoint(
                source, data, FP8, output, writing=writing, progress=False
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()


def test_free_space_is_compared_before_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(_: Path) -> Any:
        return shutil._ntuple_diskusage(10_000, 0, 5_000)  # type: ignore[attr-defined]

    monkeypatch.setattr(estimate.shutil, "disk_usage", usage)
    with pytest.raises(ConfigError, match=r"out takes about .* of disk .* are free"):
        ptq(source, None, INT4, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


DEEP = "[" * 100_000
#: A value that the parser takes, and writers of JSON do not.
NESTED = '{"a": ' * 500 + "1" + "}" * 500


@pytest.mark.parametrize("text", [DEEP, f'{{"a": {DEEP}', NESTED])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "tokenizer.json", "adapter"],
)
def test_deep_json_is_damage(name: str, text: str, source: Path) -> None:
    """No JSON file of a checkpoint ends in an error of Python, however deep it is."""
    if name == "adapter":
        (source / "adapter_config.json").write_text(text, encoding="utf-8")
    else:
        (source / name).write_text(text, encoding="utf-8")
    for reader, read in readers().items():
        if reader == "gguf":
            read(source, source.parent / reader)
            continue
        try:
            read(source, source.parent / reader)
        except QuarkError:
            continue
        assert name in ("tokenizer.json", "adapter") or reader in ("validate", "repair")
    verdict = validate(source, "vllm")
    assert name in ("tokenizer.json", "adapter") or not verdict.right
    if name == "config.json":
        with pytest.raises(ModelError, match=r"config\.json: the document is nested"):
            read_json(source / name)


def bits(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8)


def pickled(source: Path, shards: int = 1) -> dict[str, Any]:
    """Replace the safetensors of a folder by pickles, in some files."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, source / "pytorch_model.bin")
        return tensors
    names, places = list(tensors), dict[str, str]()
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        part = {name: tensors[name] for name in names[shard::shards]}
        torch.save(part, source / file)
        places |= dict.fromkeys(part, file)
    index = source / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    return tensors


@pytest.mark.parametrize("data", [None, tokens(1, 4)])
@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_give_the_same_result(
    shards: int, data: Any, source: Path, tmp_path: Path
) -> None:
    config = config_for("fp8" if data else "int4_wo_32")
    for output in ("one", "two"):
        report = quantize_checkpoint(
            source, data, config, tmp_path / output, progress=False
        )
        if output == "one":
            assert not report.notes
            pickled(source, shards)
    assert "are pickled (.bin)" in report.notes[0]
    one, two = (
        load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(bits(one[name]), bits(two[name])) for name in one)


def test_pickles_with_code_are_refused(source: Path, tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    pickled(source)
    torch.save({"a": Code()}, source / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"more than tensors .* it names .*; have .* as safetensors"
    ) as error:
        FloatCheckpoint(source)
    # torch's own text advises to run the code
    assert "weights_only" not in str(error.value)
    torch.save({"a": torch.eye(2).to_sparse()}, source / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"'a' is a tensor of .* and torch.sparse_coo"):
        FloatCheckpoint(source)
    torch.save([torch.ones(2)], source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds a list; tensors by name"):
        FloatCheckpoint(source)
    (source / "pytorch_model.bin").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelError, match="is damaged, or no file of tensors"):
        FloatCheckpoint(source)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("data", [None, tokens(1, 4)])
def test_doubles_are_cast_with_a_note(
    data: Any, key: str, source: Path, tmp_path: Path
) -> None:
    config = config_for("fp8" if data else "int4_wo_32")
    quantize_checkpoint(source, data, config, tmp_path / "one", progress=False)
    tensors = load_file(source / "model.safetensors")
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    save_file(doubles, source / "model.safetensors", {"format": "pt"})
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del content["dtype"]
    content[key] = "float64"
    (source / "config.json").write_text(json.dumps(content), encoding="utf-8")
    report = quantize_checkpoint(source, data, config, tmp_path / "two", progress=False)
    assert any("are float64 in" in note for note in report.notes)
    one, two = (
        load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")
    )
    assert all(torch.equal(bits(one[name]), bits(two[name])) for name in one)
    written = json.loads((tmp_path / "two/config.json").read_text(encoding="utf-8"))
    assert written[key] == "float32"


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
@pytest.mark.parametrize("data", [None, tokens(1, 4)])
def test_every_parameter_that_text_needs_is_in_the_files(
    data: Any, name: str, source: Path, tmp_path: Path
) -> None:
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = config_for("fp8" if data else "int4_wo_32")
    with pytest.raises(ModelError, match=f"has no tensor for {name}"):
        quantize_checkpoint(source, data, config, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("source", None, "out", INT4), "config is a "),
        (("source", INT4, tokens(), "out"), "config is a list"),
        (
            (INT4, tokens(), "source", "out"),
            "config is a PosixPath|config is a WindowsPath",
        ),
        ((tokens(), "source", INT4, "out"), "source is a list; it must be a folder"),
        (("source", "out", INT4, tokens()), "output is a list; it must be a folder"),
        (("source", "out", INT4, "data"), "data is a str; it must be batches"),
        ((None, None, INT4, "out"), "source is a NoneType"),
    ],
)
def test_swapped_arguments_have_a_text(
    arguments: Any, word: str, source: Path, tmp_path: Path
) -> None:
    places = {"source": source, "out": str(tmp_path / "out"), "data": "text.txt"}
    given = [
        places.get(each, each) if isinstance(each, str) else each for each in arguments
    ]
    with pytest.raises(ConfigError, match=rf"({word}).*model, data, config, output"):
        quantize_checkpoint(*given, progress=False)


def test_no_call_of_the_package_runs_code_of_a_checkpoint_by_default() -> None:
    """Each call of transformers' Auto classes says whether to; each parameter is off by default."""
    names = {"trust_remote_code", "trust_code"}
    calls = defaults = 0
    for file in Path(quark_onnx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value).rpartition(".")[2]
                if node.func.attr in ("from_pretrained", "from_config") and (
                    owner.startswith("Auto")
                ):
                    given = {each.arg for each in node.keywords}
                    assert "trust_remote_code" in given, (file, node.lineno)
                    calls += 1
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                pairs = [
                    *zip(arguments.args[::-1], arguments.defaults[::-1], strict=False),
                    *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
                ]
                for argument, default in pairs:
                    if argument.arg in names and default is not None:
                        assert ast.unparse(default) == "False", (file, node.name)
                        defaults += 1
    assert calls >= 6 and defaults >= 15
