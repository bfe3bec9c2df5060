"""quark-onnx llm ptq and gguf: quantize a language model for a runtime."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from argparse import SUPPRESS, Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from calibrators.scratch import written
from quark_onnx.cli.llm_settings import (
    OPTIONS,
    TEXT,
    add_device_option,
    add_folders,
    add_text_options,
    add_trust_option,
    check_files,
    text_of,
)
from quark_onnx.cli.next_command import next_command, shell_line
from quark_onnx.cli.output import Answer, say
from quark_onnx.cli.parsing import (
    PROGRAM,
    OutputPath,
    Parser,
    UsageError,
    add_html_option,
    add_model_argument,
    count,
    input_name,
    number,
    output_file,
    path,
    progress_of,
)
from quark_onnx.cli.torch_side import torch_side
from quark_onnx.common.progress_bars import INTERVAL, clock
from quark_onnx.common.reported import to_json
from quark_onnx.common.wording import counted
from quark_onnx.config.checks import refuse_first, require_known
from quark_onnx.page.blocks import Block, Facts, Notes
from quark_onnx.page.browser import write_page
from quark_onnx.torch.config.algorithm_names import check_algorithm, learns_from_data
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.language_recipes import (
    EFFORTS,
    RECIPES,
    LanguageRecipe,
    recipe_for,
)
from quark_onnx.torch.config.scheme_clients import LAYOUT_NAMES
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig, matches
from quark_onnx.torch.runtime.checkpoint_folder import check_free
from quark_onnx.torch.runtime.text_source import has_tokenizer

#: Help of the model of both actions.
_SOURCE = "folder of a Hugging Face model with safetensors files"
#: Number of windows of the data for the choice of schemes.
#: Each window is run with every scheme, which would take too long on all windows.
_MEASURED = 8


def ptq_options(parser: Parser) -> None:
    add_folders(parser, _SOURCE)
    parser.add_argument(
        "--recipe",
        choices=EFFORTS,
        help="scheme and algorithms for --target; fast needs no data",
    )
    parser.add_argument(
        "--target",
        choices=list(RECIPES),
        help="program that will run the model, for --recipe",
    )
    parser.add_argument(
        "--bits",
        type=number,
        metavar="X",
        help="average bits per weight, scales included, for a mix of schemes",
    )
    for option in OPTIONS.values():
        option.add(parser)
    add_text_options(parser, f"calibration data: {TEXT}")
    _evaluation_options(parser)
    _result_options(parser)


def _evaluation_options(parser: Parser) -> None:
    parser.add_argument(
        "--evaluate",
        metavar="TEXT",
        type=input_name,
        help="report the perplexity of this text, float and quantized",
    )
    parser.add_argument(
        "--no-verdict",
        action="store_true",
        help="skip the comparison with the float model on held-out text",
    )
    parser.add_argument(
        "--tasks",
        type=lambda text: text.split(","),
        action="extend",
        metavar="A,B",
        help="report scores on lm-eval tasks, float and quantized",
    )
    parser.add_argument(
        "--shots",
        type=count,
        metavar="N",
        help="few-shot examples per question of --tasks",
    )
    parser.add_argument(
        "--limit",
        type=count,
        metavar="N",
        help="most questions per task",
    )


def _result_options(parser: Parser) -> None:
    parser.add_argument(
        "--export",
        nargs="+",
        action="extend",
        choices=["hf_format", "gguf", "onnx"],
        help="checkpoint (hf_format unless given), model.gguf, model.onnx",
    )
    add_html_option(parser, "write a page with plots")
    parser.add_argument(
        "--report",
        type=OutputPath(path, files=("report.json", "report.html")),
        metavar="DIR",
        help=SUPPRESS,
    )
    parser.add_argument(
        "--resume",
        type=OutputPath(path, files=("state.json",)),
        metavar="DIR",
        help="folder for finished blocks; the same command continues from it",
    )
    parser.add_argument(
        "--spill",
        type=OutputPath(path, files=("hidden",)),
        metavar="DIR",
        help="keep hidden states in this folder instead of in memory",
    )
    add_device_option(parser)
    parser.add_argument(
        "--layout",
        default="quark",
        metavar="NAME",
        help=", ".join(LAYOUT_NAMES),
    )
    parser.add_argument(
        "--pack",
        choices=["reorder", "order"],
        default="reorder",
        help="order of packed 4-bit codes in the layout quark",
    )
    parser.add_argument(
        "--shard",
        type=number,
        default=4.0,
        metavar="GB",
        help="largest size of one file, in GB",
    )
    add_trust_option(parser)
    parser.add_argument(
        "--merge-adapter",
        action="store_true",
        help="merge the LoRA adapter in the folder into the weights first",
    )


def _check(options: Namespace) -> None:
    """Check the options that do not depend on the model, before importing torch."""
    # scheme() raises for an unknown name, with the nearest one.
    for name in (*_schemes(options), *(name for _, name in options.layer)):
        scheme(name)
    for text in options.algorithm:
        check_algorithm(text)
    require_known(options.layout, LAYOUT_NAMES, "unknown layout")
    # Without the algorithms and the model's exclusions: enough to see a scheme that needs data.
    _check_data(options, _config_without_algorithms(options, ()))
    check_files(options)


def _check_data(options: Namespace, config: TorchConfig) -> None:
    """Check that data is given if the configuration needs data.

    Raises:
        UsageError: data is missing.
    """
    if options.data is not None:
        return
    # The classes of algorithms need torch; a plug-in is asked when its class is known.
    learns = any(map(learns_from_data, options.algorithm))
    needs = (
        (
            len(_schemes(options)) > 1,
            f"--scheme {options.scheme} is chosen from by what the model predicts on"
            " data",
        ),
        (
            options.recipe is not None and (learns or config.measures),
            f"--recipe {options.recipe} for {options.target} learns from data",
        ),
        (
            config.measures,
            f"{_asking(options, config)} has scales that only data can tell",
        ),
        (
            learns or config.needs_data,
            f"--algorithm {' '.join(options.algorithm)} learns from data",
        ),
    )
    refuse_first(((need, f"{why}; give --data") for need, why in needs), UsageError)


def _apply_recipe(options: Namespace) -> LanguageRecipe | None:
    """Set the options of a recipe.

    Raises:
        UsageError: neither a recipe nor a scheme is named, or both are.
    """
    # One of the two without the other.
    if (options.recipe is None) != (options.target is None):
        raise UsageError(
            "--recipe and --target belong together: --recipe balanced --target"
            f" {next(iter(RECIPES))}; targets: {', '.join(RECIPES)}",
        )
    if options.recipe is None:
        if options.scheme is None:
            raise UsageError(
                "name a scheme with --scheme ('quark-onnx list schemes'), or a recipe"
                " and a target: --recipe fast --target vllm-cuda",
            )
        return None
    fixed = {
        "--scheme": options.scheme,
        "--algorithm": options.algorithm,
        "--kv-cache": options.kv_cache,
        "--export": options.export,
        "--layout": options.layout != "quark",
    }
    # The recipe sets all of these; an own value would silently be lost.
    given = next((name for name, value in fixed.items() if value), None)
    if given is not None:
        raise UsageError(f"{given} is part of --recipe; leave out one of the two")
    recipe = recipe_for(options.target, options.recipe)
    options.scheme = recipe.scheme
    options.algorithm = list(recipe.algorithms)
    options.kv_cache = recipe.kv_cache
    options.export = list(recipe.exports)
    options.layout = recipe.layout
    return recipe


def _fitted(
    recipe: LanguageRecipe | None, options: Namespace, source: Any
) -> LanguageRecipe | None:
    """Return a recipe with the greatest groups that divide the inputs of the model's layers.

    Only layouts with whole groups ask for that. A recipe for which nothing fits stays; the layout
    refuses it and names the layers.
    """
    layouts = torch_side("quark_onnx.torch.checkpoints.layouts")
    if recipe is None or not layouts.layout_named(recipe.layout).whole_groups:
        return recipe
    group_choice = torch_side("quark_onnx.torch.pipelines.group_choice")
    names = group_choice.fitting_schemes(source, _config(options, source))
    if not names or recipe.scheme in names:
        return recipe
    options.scheme = names[0]
    reason = f"{recipe.reason}; {recipe.scheme} does not fit the layers of this model"
    return replace(recipe, scheme=names[0], reason=reason)


def silence_helper(options: Namespace) -> None:
    """Let only the first of several processes print, write and score.

    torchrun numbers the processes by RANK. The others calibrate, on their part of the data.
    """
    # Without torchrun there is one process, of rank 0.
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        return
    # A folder of its own: several processes must not write the same files.
    options.output = options.output.with_name(f".{options.output.name}.{rank}")
    options.overwrite, options.quiet = False, True
    options.json = options.html = options.report = None
    options.tasks = options.shots = options.limit = None
    options.export = ["hf_format"]


def ptq(options: Namespace) -> Answer:
    # Imports and further formats are part of what somebody waits for.
    start = monotonic()
    recipe = _apply_recipe(options)
    _check(options)
    if not options.quiet and sys.stderr.isatty():
        # imports, the empty model and the estimate take seconds without another line
        say(f"{PROGRAM}: reading {options.model}", sys.stderr)
    module = torch_side("quark_onnx.torch.pipelines.ptq")
    options.export = exports = options.export or ["hf_format"]
    source = torch_side(
        "quark_onnx.torch.checkpoints.float_checkpoint",
    ).FloatCheckpoint(
        options.model,
        trust_code=options.trust_code,
        merge_adapter=options.merge_adapter,
    )
    recipe = _fitted(recipe, options, source)
    config = _config(options, source)
    tasks, scores = _tasks(options), {}
    if options.report is not None:
        # A folder with a report and a page was replaced by one option for each of them.
        warnings.warn(
            "--report is deprecated; write --html FILE and --json FILE",
            stacklevel=2,
        )
        options.report.mkdir(parents=True, exist_ok=True)
    mixture = _mixture(options, source, config)
    if mixture is not None:
        config = mixture.config
    notes = list[str]()
    # Clients that read the checkpoint; GGUF and ONNX are checked by their writers.
    refused = list[Any]()
    if "hf_format" in exports:
        refused = _warn_of_clients(options, source, config)
    exported = torch_side("quark_onnx.torch.exports.kinds").exported
    device = torch_side("quark_onnx.torch.runtime.devices").device_named(options.device)
    processes = torch_side("quark_onnx.torch.runtime.distributed").process_group(device)
    # The context removes a temporary checkpoint, and writes the other formats, after the body.
    with (
        processes,
        exported(exports, source, config, options.output, notes) as folder,
    ):
        found = module.ptq(
            source,
            text_of(options, options.data, options.samples),
            config,
            folder,
            evaluate=text_of(options, options.evaluate, None),
            writing=module.Writing(
                pack_method=options.pack,
                # GB, as on model hubs, and not GiB.
                max_shard=int(options.shard * 1e9),
                trust_code=options.trust_code,
                resume=options.resume,
                layout=options.layout,
                spill=options.spill,
                device=options.device,
            ),
            progress=progress_of(options),
            # Called with the estimate, before the long work begins.
            announce=None if options.quiet else _announce,
            verdict=not options.no_verdict,
        )
        if tasks is not None:
            # Inside the context, while the checkpoint exists.
            scores = tasks.compared(
                options.model,
                folder,
                trust_code=options.trust_code,
            )
    if not options.quiet:
        _say_runtime(monotonic() - start)
    found.report.notes.extend(notes)
    _explain_floats(options, config, found.report)
    verdict = _sized(_refused(found.verdict, refused), options)
    verdict = _with_command(verdict, options)
    found = replace(found, verdict=verdict, mixture=mixture)
    blocks = _blocks(options, found, scores)
    facts = {"model": [f"{options.model} -> {options.output}"]}
    document = _document(options, found, scores)
    if recipe is not None:
        picked = f"{options.recipe} for {options.target}: {recipe.options}"
        facts["recipe"] = [f"{picked} ({recipe.reason})"]
        document["recipe"] = recipe.options
    if options.report is not None:
        whole = {"command": "llm", "action": "ptq", **document}
        with written(options.report / "report.json") as written_file:
            written_file.write(to_json(whole).encode())
    # Both, if both are given.
    pages = [options.html, options.report and options.report / "report.html"]
    names = f"{options.model} \N{RIGHTWARDS ARROW} {options.output}"
    for file in pages:
        write_page(file, "Quantization report", names, blocks)
    return Answer([Facts((), facts), *blocks], document)


def _warn_of_clients(options: Namespace, source: Any, config: TorchConfig) -> list[Any]:
    """Warn of clients that would refuse the checkpoint, and return the refusals."""
    layouts = torch_side("quark_onnx.torch.checkpoints.layouts")
    layout = layouts.layout_named(options.layout, options.pack)
    check = torch_side("quark_onnx.torch.pipelines.client_check")
    refused: list[Any] = check.refusals(source, config, layout)
    for refusal in refused:
        warnings.warn(str(refusal), stacklevel=2)
    return refused


def _refused(verdict: Any, refused: list[Any]) -> Any:
    """Return a verdict that says what the client does with the checkpoint, and the change."""
    if verdict is None or not refused:
        return verdict
    first = refused[0]
    advice, changes = first.findings[0].broken.fix, ""
    if first.alternatives:
        advice, changes = "a checkpoint that the client reads", first.alternatives[0]
    return replace(verdict, refused=first.consequence, advice=advice, options=changes)


def _config(options: Namespace, source: Any) -> TorchConfig:
    """Return the configuration; with several schemes, the first stands for all."""
    exclude = (
        # lm_head and the like stay float unless --layer names a scheme for them.
        *source.usually_float(glob for glob, _ in options.layer),
        *options.exclude,
    )
    config = _config_without_algorithms(options, exclude)
    config = config.with_(algorithms=tuple(options.algorithm))
    # Again, now with the algorithms, which may learn from data.
    _check_data(options, config)
    return config


def _config_without_algorithms(
    options: Namespace, exclude: tuple[str, ...]
) -> TorchConfig:
    return config_for(
        _schemes(options)[0],
        group_size=options.group_size,
        kv_cache=options.kv_cache,
        least_kv_scale=options.min_kv_scale,
        attention=options.attention,
        layers=tuple(options.layer),
        exclude=exclude,
    )


def _asking(options: Namespace, config: Any) -> str:
    """Return the option that requires scales from data."""
    if config.default.measures:
        return f"--scheme {options.scheme}"
    for words, (_, spec) in zip(options.layer, config.layers, strict=True):
        if spec.measures:
            return f"--layer {'='.join(words)}"
    if options.kv_cache:
        return f"--kv-cache {options.kv_cache}"
    return f"--attention {options.attention}"


def _schemes(options: Namespace) -> list[str]:
    """Return the names in --scheme without duplicates."""
    # dict.fromkeys keeps the order, of which the first scheme stands for all.
    schemes = list(dict.fromkeys(options.scheme.split("+")))
    several = len(schemes) > 1
    contradictions = (
        (
            several and options.bits is None,
            f"--scheme {options.scheme} names several schemes; give --bits, what a"
            " weight may take",
        ),
        (
            not several and options.bits is not None,
            "--bits chooses among several schemes; name them: --scheme mxfp4+mxfp8",
        ),
        (
            several and options.group_size is not None,
            "--group-size belongs to a single scheme; write it into the names:"
            " int4_wo_32+int4_wo_128",
        ),
    )
    refuse_first(contradictions, UsageError)
    return schemes


def _mixture(options: Namespace, source: Any, config: Any) -> Any:
    """Return the scheme by layer; None for a single scheme."""
    schemes = _schemes(options)
    if len(schemes) == 1:
        return None
    mixed = torch_side("quark_onnx.torch.pipelines.mixed_precision")
    check_free(options.output)
    layouts = torch_side("quark_onnx.torch.checkpoints.layouts")
    layout = layouts.layout_named(options.layout, options.pack)
    for name in schemes:  # refuse unknown and unsupported schemes before the work
        # The measurement takes long; a scheme that the layout cannot store would fail after it.
        layouts.check_config(layout, config.with_(default=scheme(name)))
    text = text_of(options, options.data, min(options.samples, _MEASURED))
    return mixed.mix_checkpoint(
        source,
        schemes,
        options.bits,
        text,
        config=config,
        progress=progress_of(options),
    )


def _tasks(options: Namespace) -> Any:
    """Return the tasks for scoring; None without tasks."""
    if options.tasks is None:
        for name in ("shots", "limit"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} belongs to --tasks")
        return None
    if options.merge_adapter:
        raise UsageError(
            "--tasks score the folder of the float model, without the adapter; save the"
            " merged model as a folder of its own, or leave out --tasks"
        )
    return torch_side("quark_onnx.torch.calibration.eval_tasks").Tasks(
        options.tasks,
        shots=options.shots,
        limit=options.limit,
    )


def _blocks(options: Namespace, found: Any, scores: dict[str, Any]) -> list[Block]:
    """Return the result with the scores on tasks and the exported files as blocks.

    Args:
        found: result of the pipeline.
        scores: task -> metric -> the scores of the float and of the quantized model.
    """
    tasks = [
        f"{task}: {name} {was:.4f} float, {now:.4f} quantized"
        for task, metrics in scores.items()
        for name, (was, now) in metrics.items()
    ]
    return [
        *found.blocks(),
        Notes("Tasks", tasks, "tasks"),
        Notes("Files", _export_lines(options), "files"),
    ]


def _document(options: Namespace, found: Any, scores: dict[str, Any]) -> dict[str, Any]:
    """Return the result of ``llm ptq`` as a JSON document.

    Args:
        found: result of the pipeline.
        scores: task -> metric -> the scores of the float and of the quantized model.
    """
    mixture = found.mixture
    return {
        "model": options.model,
        "output": options.output,
        "exports": options.export,
        **found.to_dict(),
        "tasks": _scores_document(scores),
        "mixture": None if mixture is None else _mixture_document(mixture),
    }


def _scores_document(scores: dict[str, Any]) -> dict[str, Any]:
    """Return the scores on tasks as part of a JSON document."""
    document = dict[str, Any]()
    for task, metrics in scores.items():
        document[task] = {}
        for name, (was, now) in metrics.items():
            document[task][name] = {"before": was, "after": now}
    return document


def _export_lines(options: Namespace) -> list[str]:
    """Return a line for each exported model file, whose size the verdict does not know."""
    file_size = torch_side("quark_onnx.torch.pipelines.verdict").file_size
    end = ""
    if "hf_format" in options.export:
        end = "; the sizes of the verdict are those of the checkpoint"
    sizes = _export_sizes(options)
    return [f"{path}: {file_size(size)}{end}" for path, size in sizes.items()]


def _with_command(verdict: Any, options: Namespace) -> Any:
    """Return a verdict with the complete command for its advice, if there is one."""
    # Without advice there is no command to try.
    if verdict is None or not verdict.advice:
        return verdict
    # The change for a client needs no comparison with the float model.
    if verdict.skipped and not verdict.refused:
        return verdict
    if verdict.options:
        options_text = verdict.options
        if "gguf" in options.export:
            # GGUF has no place for fp8, and for integers of 8 bits
            options_text = options_text.replace("ptpc_fp8", "int8_per_channel")
        if options_text.startswith("--algorithm") and options.data is None:
            options_text = f"{options_text} --data {_kind_of_data(options.model)}"
        verdict = replace(verdict, options=options_text)
        return replace(verdict, command=_next_command(verdict, options))
    # Advice for which there is no option has no command, except for the validation.
    if "llm validate" in verdict.advice:
        if command := _validation(options):
            return replace(verdict, command=command)
        # The export has run the model.
        path = options.output / "model.onnx"
        advice = f"run {path} in onnxruntime; its tokenizer is that of {options.model}"
        return replace(verdict, advice=advice)
    return verdict


def _next_command(verdict: Any, options: Namespace) -> str:
    """Return the command of this run with other options; empty if data is missing."""
    changes, without = shlex.split(verdict.options), list[str]()
    if changes[0] == "--algorithm" and options.data is None:
        return ""
    # A mix of schemes: the advice is for a single one.
    if changes[0] == "--scheme" and options.bits is not None:
        return ""
    if changes[0] == "--scheme":
        # A size for the earlier scheme.
        without = ["--group-size"]
    if options.recipe is not None and verdict.refused:
        # A recipe sets scheme and layout.
        return ""
    if options.recipe is not None:
        # Within a recipe, the next effort replaces single algorithms.
        efforts = EFFORTS[EFFORTS.index(options.recipe) + 1 :]
        if not efforts or options.data is None:
            return ""
        changes = ["--recipe", efforts[0]]
    elif changes[0] == "--algorithm":
        without = ["--algorithm"]
    if not options.overwrite:
        # The output of this run exists now.
        changes.append("--overwrite")
    # Of several --layer, the first match wins.
    first = changes[0] == "--layer"
    return next_command(options.words, options.parser, changes, without, first=first)


def _sized(verdict: Any, options: Namespace) -> Any:
    """Return a verdict with the size of the exported files if no checkpoint is kept."""
    if verdict is None or "hf_format" in options.export:
        return verdict
    size = sum(_export_sizes(options).values())
    # Types of tensors differ from those of the checkpoint.
    return replace(verdict, bytes_after=size, quantized_bits=None)


def _export_sizes(options: Namespace) -> dict[Path, int]:
    """Return the size of each exported model file with its external data."""
    sizes = dict[Path, int]()
    for suffix in ("gguf", "onnx"):
        path = options.output / f"model.{suffix}"
        if suffix in options.export and path.is_file():
            files = options.output.glob(f"{path.name}*")
            sizes[path] = sum(file.stat().st_size for file in files)
    return sizes


def _explain_floats(options: Namespace, config: TorchConfig, report: Any) -> None:
    """Say which option quantizes a layer that stays float by default."""
    # The names of the layers that are usually float, and the user's globs.
    usual = config.exclude
    for name, reason in report.kept.items():
        if reason == "nothing asks for it":
            report.kept[name] = "stays float unless --layer names it"
        elif name in usual and not matches(name, options.exclude):
            report.kept[name] = (
                "a head or another part stays float unless --layer names it"
            )


def _kind_of_data(model: Path) -> str:
    """Return the placeholder of the calibration data that a model takes."""
    return "TEXT" if has_tokenizer(model) else "TOKENS.npy"


def _validation(options: Namespace) -> str:
    """Return the command that validates the result; empty for an ONNX model."""
    exports = options.export
    if "hf_format" in exports:
        # vLLM reads all layouts but this one, which is that of transformers.
        client = "transformers" if options.layout == "finegrained-fp8" else "vllm"
        words = [str(options.output), "--for", client]
    elif "gguf" in exports:
        words = [str(options.output / "model.gguf"), "--for", "llama.cpp"]
    else:
        return ""
    return shell_line([PROGRAM, "llm", "validate", *words])


def _mixture_document(mixture: Any) -> dict[str, Any]:
    groups = list[dict[str, Any]]()
    for group in mixture.groups:
        choices = {
            choice.scheme: {"bits": choice.bits, "divergence": choice.divergence}
            for choice in group.options
        }
        groups.append(
            {
                "layers": list(group.layers),
                "weights": group.weights,
                "scheme": group.chosen.scheme,
                "options": choices,
            },
        )
    return {"bits": mixture.bits, "divergence": mixture.divergence, "groups": groups}


def _announce(expected: Any) -> None:
    """Print the estimated memory and disk space."""
    say(f"{PROGRAM}: quantization takes {expected}", sys.stderr)


def _say_runtime(seconds: float) -> None:
    """Print the runtime of a run that somebody waited for."""
    if seconds >= INTERVAL:
        say(f"{PROGRAM}: took {clock(seconds)}", sys.stderr)


def gguf_options(parser: Parser) -> None:
    add_model_argument(parser, _SOURCE, "DIR")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT.gguf",
        type=output_file,
        required=True,
        help="file of the result; an earlier file is replaced",
    )
    parser.add_argument(
        "--kind",
        choices=["q4_1", "q4_0", "q8_0", "mxfp4", "f16", "f32"],
        default="q4_1",
        help="tensor type of the linear layers",
    )


def gguf(options: Namespace) -> Answer:
    if options.output.suffix != ".gguf":
        raise UsageError(f"{options.output}: the name of a GGUF file ends in .gguf")
    check_files(options)
    written = torch_side("quark_onnx.torch.exports.gguf").write_gguf(
        options.model,
        options.output,
        options.kind,
    )
    counts = Counter(written.types.values())
    tensors = [f"{counted(count, 'tensor')} {kind}" for kind, count in counts.items()]
    path = Path(written.path)
    file_size = torch_side("quark_onnx.torch.pipelines.verdict").file_size
    words = [PROGRAM, "llm", "validate", str(path), "--for", "llama.cpp"]
    facts = {
        "model": [f"{options.model} -> {path}"],
        "tensors": [", ".join(tensors)],
        "size": [file_size(path.stat().st_size)],
        "notes": written.notes,
        "next": ["check it", shell_line(words)],
    }
    document = {
        "model": options.model,
        "output": path,
        "tensors": written.types,
        "notes": written.notes,
    }
    return Answer([Facts((), facts)], document)
