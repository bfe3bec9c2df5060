"""quark-onnx llm: the verdict as text, JSON and exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quark_onnx.cli.dispatch import parse
from quark_onnx.common.errors import ConstraintError
from tests.child import child
from tests.quark_onnx.torch.validate import drafts

if TYPE_CHECKING:
    from tests.quark_onnx.cli.conftest import CommandLine


def test_loads(cli: CommandLine, folder: Path) -> None:
    drafts.quark().write(folder / "llama")
    run = cli("llm", "validate", "llama", "--for", "vllm")
    assert (run.code, run.err) == (0, "")
    assert run.out == (
        "model     llama: quark checkpoint (14 × fp8)\n"
        "verdict   good: passes all rules of vLLM 0.33.0 (the client was not run)\n"
    )


def test_refused(cli: CommandLine, folder: Path) -> None:
    draft = drafts.quark()
    draft.quantization["layer_type_quant_config"] = None
    draft.write(folder / "llama")
    run = cli("llm", "validate", "llama", "--for", "vllm")
    assert run.code == 1
    assert run.error == "vLLM 0.33.0, llama: refused"
    assert "\nrefused   quark-layer-types: " in run.out
    assert "\n            quantization_config.layer_type_quant_config: " in run.out
    assert cli("llm", "validate", "llama", "--for", "transformers").code == 0


def test_json(cli: CommandLine, folder: Path) -> None:
    draft = drafts.quark("nvfp4")
    draft.write(folder / "llama")
    run = cli("llm", "validate", "llama", "--for", "transformers", "--json")
    assert run.code == 1
    assert run.json["verdict"] == "loads but wrong" and run.json["wrong"] == 14
    assert (run.json["command"], run.json["action"], run.json["model"]) == (
        "llm",
        "validate",
        "llama",
    )
    assert {finding["rule"] for finding in run.json["findings"]} == {"quark-two-stages"}
    assert run.json["error"]["kind"] == "ConstraintError"


def test_fix(cli: CommandLine, folder: Path) -> None:
    draft = drafts.quark()
    draft.rename(".weight_scale", ".weight_quantizer.scale")
    draft.write(folder / "llama")
    assert cli("llm", "validate", "llama", "--for", "vllm").code == 1
    run = cli("llm", "validate", "llama", "--for", "vllm", "--fix")
    assert run.code == 0 and "repaired  14 scales have the names of today" in run.out
    assert cli("llm", "validate", "llama-fixed", "--for", "vllm").code == 0
    run = cli(
        "llm", "validate", "llama", "--for", "vllm", "--fix", "-o", "other", "--json"
    )
    assert run.json["output"] == "other" and run.json["repaired"] == [
        "14 scales have the names of today"
    ]
    assert cli("llm", "validate", "llama", "--for", "vllm", "--fix").code == 2


def test_nothing_to_fix(cli: CommandLine, folder: Path) -> None:
    drafts.quark().write(folder / "llama")
    run = cli("llm", "validate", "llama", "--for", "vllm", "--fix")
    assert run.code == 0 and "nothing is written" in run.out
    assert not (folder / "llama-fixed").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["validate", "absent", "--for", "vllm"], "absent is no folder"),
        (["validate", "absent.gguf", "--for", "llama.cpp"], "there is no absent.gguf"),
        (["validate", "q.gguf", "--for", "vllm"], "q.gguf is a GGUF file"),
        (["validate", "data", "--for", "vllm"], "no Hugging Face checkpoint"),
        (["validate", "data"], "--for"),
        (["validate", "data", "--for", "sglang"], "invalid choice: 'sglang'"),
        (["validate", "data", "--for", "vllm", "--output", "x"], "it needs --fix"),
        (["oga", "data", "-o", "out", "--scheme", "fp8"], "builder of onnxruntime"),
        (["oga", "data", "-o", "out", "--scheme", "int4"], "'int4_wo_128'"),
        (["oga", "data", "-o", "out", "--kv-cache", "int8"], "give --data"),
        ([], "{ptq,search,oga,gguf,validate}"),
    ],
)
def test_bad_input(cli: CommandLine, arguments: list[str], text: str) -> None:
    run = cli("llm", *arguments)
    assert run.code == 2 and text in run.error


def test_llama_cpp(cli: CommandLine, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGML")
    run = cli("llm", "validate", "model.gguf", "--for", "llama.cpp")
    assert run.code == 1 and "gguf-damaged" in run.out and "next:" not in run.out


@pytest.mark.parametrize(
    ("client", "command"),
    [
        ("llama.cpp", "llm gguf llama -o llama.gguf"),
        ("onnxruntime-genai", "llm oga llama -o llama-oga"),
    ],
)
def test_a_float_model_leads_to_the_command_that_writes_what_a_client_reads(
    cli: CommandLine, folder: Path, client: str, command: str
) -> None:
    """The command is complete: its options are accepted."""
    pytest.importorskip("transformers")
    drafts.plain().write(folder / "llama")
    (folder / "llama" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    run = cli("llm", "validate", "llama", "--for", client)
    assert run.code == 1 and "(the client was not run)" in run.out
    assert run.out.splitlines()[-2:] == [
        "try       write one",
        f"          quark-onnx {command}",
    ]
    parse(command.split())


_BUILDER = "onnxruntime-genai"


@pytest.mark.parametrize("client", ["llama.cpp", _BUILDER])
@pytest.mark.parametrize("scheme", ["float", "fp8", "int4", "uint4", "gpt2", "narrow"])
def test_a_command_that_its_action_refuses_is_not_proposed(
    cli: CommandLine,
    folder: Path,
    client: str,
    scheme: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What 'llm validate' proposes is what 'llm oga' and 'llm gguf' accept."""
    pytest.importorskip("transformers")
    from quark_onnx.torch.config.language import config_for
    from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
    from tests.torch_families import config_of
    from tests.torch_models import llama, made, saved

    family = config_of("gpt2") if scheme == "gpt2" else llama()
    if scheme == "narrow":
        family = llama(hidden_size=80, intermediate_size=100)
    saved(made(family), folder / "llama")
    if scheme in ("int4", "uint4"):
        layout = "oga" if scheme == "uint4" else "quark"
        (folder / "llama").rename(folder / "float")
        quantize_checkpoint(
            folder / "float",
            None,
            config_for(f"{scheme}_wo_32", exclude=("lm_head",)),
            folder / "llama",
            writing=Writing(layout=layout),
            progress=False,
        )
    if scheme == "fp8":
        drafts.quark().write(folder / "llama")
    (folder / "llama" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    run = cli("llm", "validate", "llama", "--for", client)
    last = run.out.splitlines()[-1]
    monkeypatch.setattr("quark_onnx.cli.llm_oga.require_builder", lambda: None)
    monkeypatch.setattr("quark_onnx.torch.exports.oga.check_oga", lambda _: None)
    action, output = ("oga", "out") if client == _BUILDER else ("gguf", "out.gguf")
    # the checkpoint is accepted if the work begins: the model builder, or writing
    monkeypatch.setattr("quark_onnx.torch.exports.oga.run_builder", _began)
    monkeypatch.setattr("quark_onnx.torch.exports.gguf.container.writer", _began)
    run = cli("llm", action, "llama", "-o", output)
    accepted = "the work began" in run.err
    assert last.startswith("          quark-onnx llm") == accepted, (last, run.err)
    assert accepted == (scheme == "float" or (client, scheme) == (_BUILDER, "uint4"))


def _began(*_: object) -> None:
    raise ConstraintError("the work began")


def test_verbose_shows_every_finding(cli: CommandLine, folder: Path) -> None:
    draft = drafts.quark()
    draft.drop(".weight_scale")
    draft.write(folder / "llama")
    words = ("llm", "validate", "llama", "--for", "vllm")
    assert cli(*words).out.count(".weight_scale") == 3
    assert cli(*words, "--verbose").out.count(".weight_scale") == 14
    assert (
        json.loads(cli("llm", "validate", "llama", "--for", "vllm", "--json").out)[
            "wrong"
        ]
        == 14
    )


def test_an_action_names_its_own_help(cli: CommandLine, folder: Path) -> None:
    run = cli("llm", "ptq", "llama", "-o", "out", "--scheme", "fp8", "--layer", "x")
    assert run.code == 2
    assert (
        run.error
        == "argument --layer: 'x' is not of the form GLOB=SCHEME; see quark-onnx llm ptq --help"
    )


@pytest.mark.parametrize(
    ("layout", "scheme", "client"),
    [
        ("compressed-tensors", "ptpc_fp8", "transformers"),
        ("awq", "uint4_wo_32", "vllm"),
        ("oga", "int4_wo_32", "transformers"),
    ],
)
def test_layouts(
    cli: CommandLine, folder: Path, layout: str, scheme: str, client: str
) -> None:
    pytest.importorskip("transformers")
    from tests.torch_models import llama, made, saved

    saved(made(llama()), folder / "llama")
    run = cli(
        "llm", "ptq", "llama", "-o", "out", "--scheme", scheme, "--layout", layout
    )
    assert run.code == 0
    assert (
        "model     llama -> out\nlayers    14 layers are quantized, 2 stay float\n"
        in run.out
    )
    assert re.search(
        "^verdict   [a-z]+: 0.3 MiB before, 0.1 MiB after: ", run.out, re.M
    )
    method = json.loads((folder / "out" / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert method["quant_method"] == {"oga": "quark"}.get(layout, layout)
    assert cli("llm", "validate", "out", "--for", client).code == 0
    run = cli(
        "llm",
        "ptq",
        "llama",
        "-o",
        "other",
        "--scheme",
        "mxfp6_e2m3",
        "--layout",
        layout,
    )
    assert (
        run.code == 2
        and "these have one: quark" in run.error
        and not (folder / "other").exists()
    )
    run = cli(
        "llm", "ptq", "llama", "-o", "other", "--scheme", scheme, "--layout", "gguf"
    )
    assert run.code == 2 and run.error.startswith("unknown layout 'gguf'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "int4"], "did you mean 'int4_wo_128'"),
        (["--scheme", "fp8"], "--scheme fp8 has scales that only data can tell"),
        (["--scheme", "mxfp4", "--layer", "*=int4"], "did you mean 'int4_wo_128'"),
        (["--scheme", "mxfp4", "--algorithm", "gptk"], "did you mean 'gptq'"),
        (["--scheme", "mxfp4", "--layout", "ct"], "unknown layout 'ct'"),
        (["--scheme", "mxfp4"], "absent is no folder"),
    ],
)
def test_options_are_checked_before_torch_is_imported(
    options: list[str], message: str, tmp_path: Path, ask: Callable[[Any], Any]
) -> None:
    check_early(["ptq", "absent", "-o", "out", *options], message, tmp_path, ask)


_INT4 = ["--scheme", "int4_wo_32"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ptq", "llama", "-o", "out", *_INT4, "--data", "no.txt"], "no.txt is not"),
        (["ptq", "llama", "-o", "out", *_INT4, "--evaluate", "no.npy"], "no.npy is"),
        (["ptq", "llama", "-o", "out", *_INT4, "--data", "empty.txt"], "is empty"),
        (["ptq", "llama", "-o", "out", *_INT4, "--data", "t.txt"], "no tokenizer"),
        (["ptq", "llama", "-o", "full", *_INT4], "full exists already"),
        (["gguf", "llama", "-o", "out"], "ends in .gguf"),
        (["gguf", "absent", "-o", "out.gguf"], "absent is no folder"),
        (["oga", "llama", "-o", "full"], "full exists already"),
        (["oga", "llama", "-o", "out", "--data", "no.txt"], "no.txt is not there"),
        (["oga", "llama", "-o", "out", "--algorithm", "awq"], "give --data"),
        (["ptq", "Qwen/Qwen3-0.6B", "-o", "out", *_INT4], "hf download Qwen/Qwen3"),
        (
            ["ptq", "llama", "-o", "o", "--recipe", "best", "--target", "vllm-cuda"],
            "--recipe best for vllm-cuda learns from data; give --data",
        ),
        (
            [
                "search",
                "llama",
                "-o",
                "full",
                "--for",
                "vllm",
                "--bits",
                "5",
                "--data",
                "ids.npy",
                "--journal",
                "j",
            ],
            "full exists already",
        ),
    ],
)
def test_files_are_checked_before_torch_is_imported(
    words: list[str], message: str, tmp_path: Path, ask: Callable[[Any], Any]
) -> None:
    drafts.plain().write(tmp_path / "llama")
    drafts.plain().write(tmp_path / "full")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "t.txt").write_text("text", encoding="utf-8")
    (tmp_path / "ids.npy").write_text("ids", encoding="utf-8")
    check_early(words, message, tmp_path, ask)


def test_algorithms_that_need_data_are_known_without_torch() -> None:
    pytest.importorskip("torch")
    from quark_onnx.torch.config.algorithm_names import (
        ALGORITHM_SETTINGS,
        learns_from_data,
    )
    from quark_onnx.torch.config.language import config_for

    config = config_for("int4_wo_32")
    for text in (*ALGORITHM_SETTINGS, "rotation:trained=true", "quarot:trained=false"):
        needs = config.with_(algorithms=(text,)).needs_data
        assert learns_from_data(text) == needs, text


#: Answers with the exit code of a command, the packages that are imported by then, and stderr.
COMMAND = """
import contextlib, io, os, sys
from quark_onnx.cli.dispatch import main
def answer(question):
    folder, words = question
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    return [code, [name for name in ("torch", "transformers") if name in sys.modules], errors.getvalue()]
"""  # noqa: E501


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[Any], Any]]:
    with child(COMMAND) as asked:
        yield asked


def check_early(
    words: list[str], message: str, folder: Path, ask: Callable[[Any], Any]
) -> None:
    """Check that a command ends with an error before torch and transformers are imported."""
    code, imported, errors = ask([str(folder), ["llm", *words]])
    assert (code, imported) == (2, []) and message in errors


def test_a_name_of_the_hub_is_downloaded_first(cli: CommandLine) -> None:
    words = ("llm", "ptq", "Qwen/Qwen3-0.6B", "-o", "out", "--scheme", "int4_wo_128")
    finished = cli(*words)
    assert finished.code == 2
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in finished.error
    assert "hf download" not in cli("llm", "ptq", "absent", *words[3:]).error
