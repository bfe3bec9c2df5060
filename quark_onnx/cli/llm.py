"""quark-onnx llm: language models in PyTorch's formats."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark_onnx.cli import llm_oga, llm_ptq, llm_search
from quark_onnx.cli.next_command import shell_line
from quark_onnx.cli.output import Answer
from quark_onnx.cli.overwrite import overwriting
from quark_onnx.cli.parsing import (
    PROGRAM,
    Parser,
    UsageError,
    add_model_argument,
    output_folder,
)
from quark_onnx.cli.subcommands import Subcommand, add_subcommands
from quark_onnx.cli.torch_side import torch_side
from quark_onnx.common.errors import ConstraintError, QuarkError
from quark_onnx.page.blocks import Action

NAME = "llm"
#: Deprecated names of options, by action.
RENAMED = {"search": {"--time": "--budget", "--report": "--journal"}}
SUMMARY = "quantize language models, and validate checkpoints for vLLM and others"
USAGE = "%(prog)s {ptq,search,oga,gguf,validate} DIR [OPTION ...]"
EXAMPLE = """\
examples:
  quark-onnx llm ptq llama/ -o llama-fp8/ --scheme fp8 --kv-cache fp8 --data text.txt
  quark-onnx llm ptq llama/ -o llama-int4/ --scheme uint4_wo_128 --evaluate held-out.txt
  quark-onnx llm ptq llama/ -o llama-q4/ --recipe balanced --target llama.cpp --data text.txt
  quark-onnx llm ptq llama/ -o llama-5/ --scheme mxfp4+mxfp6_e2m3+fp8 --bits 5 --data text.txt --html report.html
  quark-onnx llm search llama/ -o llama-best/ --for vllm --bits 5 --data text.txt --budget 2h --journal search/
  quark-onnx llm oga llama/ -o llama-oga/ --algorithm awq --data text.txt
  quark-onnx llm gguf llama/ -o llama.gguf --kind q4_1
  quark-onnx llm validate llama-fp8/ --for vllm
  quark-onnx llm validate llama-fp8/ --for vllm --fix --output llama-fixed/
  quark-onnx llm validate model.gguf --for llama.cpp --json

'quark-onnx llm ACTION --help' has the options of an action."""  # noqa: E501

_CLIENTS = ("vllm", "transformers", "llama.cpp", "onnxruntime-genai")


def add_arguments(parser: Parser) -> None:
    add_subcommands(parser, _ACTIONS, sessions=False)


def run(options: Namespace) -> Answer:
    if options.action == "ptq":
        # Before the output is moved aside: helpers of torchrun must not move it again.
        llm_ptq.silence_helper(options)
    folder = _output(options)
    wanted = options.overwrite and folder is not None
    with overwriting(folder or Path(), wanted=wanted):
        answer: Answer = options.perform(options)
    return answer


def _output(options: Namespace) -> Path | None:
    """Return the output of an action; None if it writes nothing."""
    output: Path | None = options.output
    # Only validate has an optional output, and --fix.
    if output is None and options.fix:
        # absolute: the name of "." is empty.
        model: Path = options.model.absolute()
        return model.with_name(f"{model.name}-fixed")
    return output


def _validate_options(parser: Parser) -> None:
    add_model_argument(
        parser, "checkpoint folder, .gguf file, or folder of genai_config.json", "DIR"
    )
    parser.add_argument(
        "--for",
        dest="client",
        choices=_CLIENTS,
        required=True,
        help="program that will load the checkpoint",
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="write a repaired copy, and check that",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=output_folder,
        help="folder of the repaired copy (DIR-fixed); an earlier one needs --overwrite",
    )


def _validate(options: Namespace) -> Answer:
    from quark_onnx.torch import validate  # other commands do not need it

    if options.output is not None and not options.fix:
        raise UsageError(
            "--output is the folder of the repaired copy; it needs --fix",
        )
    result: Any
    if options.fix:
        result = validate.repair(options.model, options.client, _output(options))
        verdict = result.verdict
    else:
        result = verdict = validate.validate(options.model, options.client)
    failure = None
    # A checkpoint that the client refuses is an answer with an exit code of 1, and not bad input.
    if not verdict.right:
        failure = ConstraintError(f"{verdict.release}, {verdict.place}: {verdict.word}")
    judgement, *details = result.blocks()
    if action := _writing_action(verdict):
        judgement = replace(judgement, actions=(action,))
    document = {"model": options.model, **result.to_dict()}
    return Answer([judgement, *details], document, failure)


def _writing_action(verdict: Any) -> Action | None:
    """Return how to write what a client reads from a checkpoint; None if that is not known.

    A command is tried by the rules of the action that it names.
    """
    from quark_onnx.torch.validate import checkpoint, genai

    folder = Path(verdict.place)
    rules = {finding.rule for finding in verdict.findings}
    # A GGUF file or an ONNX folder: the source of another format is not known.
    if not (folder / checkpoint.CONFIG).is_file():
        return None
    words = [PROGRAM, "llm"]
    found = checkpoint.read(folder)
    # The rules "genai-none" and "gguf-none": the folder lacks the files of this client altogether.
    if "genai-none" in rules:
        if reason := genai.unreadable(found):
            return _from_float_model("oga", reason, found.method)
        command = [*words, "oga", str(folder), "-o", f"{folder}-oga"]
    elif "gguf-none" in rules:
        if reason := _unwritable_gguf(found):
            return _from_float_model("gguf", reason, found.method)
        command = [*words, "gguf", str(folder), "-o", f"{folder}.gguf"]
    else:
        return None
    return Action("write one", shell_line(command))


def _unwritable_gguf(found: Any) -> str:
    """Return why 'llm gguf' takes no checkpoint of this content; empty if it does."""
    if found.method != "float":
        return f"{found.folder} is quantized already ({found.method})"
    try:
        torch_side("quark_onnx.torch.exports.gguf.export").check_writable(found.folder)
    except QuarkError as error:
        return str(error)
    return ""


def _from_float_model(action: str, reason: str, method: str) -> Action:
    """Return what to do with a checkpoint that an action does not take, without a command."""
    if method == "float":
        return Action(f"'quark-onnx llm {action}' does not take this model: {reason}")
    return Action(
        f"give the folder of the float model to 'quark-onnx llm {action}': {reason}"
    )


_ACTIONS: tuple[Subcommand, ...] = (
    Subcommand(
        "ptq",
        "quantize a model, block by block, into a checkpoint for vLLM and others",
        (
            "%(prog)s DIR -o OUT {--scheme SCHEME | --recipe EFFORT --target TARGET}"
            " [--data TEXT] [OPTION ...]"
        ),
        llm_ptq.ptq_options,
        llm_ptq.ptq,
    ),
    Subcommand(
        "search",
        (
            "try schemes and algorithms within a budget of bits and time, and write the"
            " one that is closest to the float model"
        ),
        "%(prog)s DIR -o OUT --for CLIENT --bits X --data TEXT --journal DIR",
        llm_search.search_options,
        llm_search.search,
    ),
    Subcommand(
        "oga",
        "quantize a model for onnxruntime-genai, also on Ryzen AI",
        "%(prog)s DIR -o OUT [--scheme SCHEME] [OPTION ...]",
        llm_oga.oga_options,
        llm_oga.oga,
    ),
    Subcommand(
        "gguf",
        "write a model as a GGUF file for llama.cpp",
        "%(prog)s DIR -o OUT.gguf [--kind KIND]",
        llm_ptq.gguf_options,
        llm_ptq.gguf,
    ),
    Subcommand(
        "validate",
        "check a checkpoint by the rules of vLLM or another client, without loading it",
        f"%(prog)s DIR --for {{{','.join(_CLIENTS)}}} [OPTION ...]",
        _validate_options,
        _validate,
    ),
)
