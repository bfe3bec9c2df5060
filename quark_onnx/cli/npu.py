"""quark-onnx npu: models on Ryzen AI NPUs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from quark_onnx import npu
from quark_onnx.analysis.advise import TrialSettings, advise_report
from quark_onnx.cli.advice import (
    add_advice_options,
    advised,
    check_advice_options,
    refused,
    trying_of,
)
from quark_onnx.cli.check import answer_of
from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.next_command import (
    changes_data,
    verdict_with_commands,
    with_commands,
)
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    UsageError,
    add_html_option,
    add_model_argument,
    add_output_option,
    add_shape_option,
    input_path,
    output_file,
    output_folder,
    progress_of,
)
from quark_onnx.cli.settings import (
    AUTO,
    add_config_options,
    add_gate_option,
    configured,
)
from quark_onnx.cli.subcommands import Subcommand, add_subcommands
from quark_onnx.common.errors import AccuracyError
from quark_onnx.common.registry import NPU_RECIPES
from quark_onnx.config import QConfig
from quark_onnx.files.io import load
from quark_onnx.npu.deploy import is_coded
from quark_onnx.npu.options import compiled_for
from quark_onnx.npu.page import heading, write_bundle_page
from quark_onnx.npu.support import KINDS, RELEASE
from quark_onnx.page.blocks import Facts
from quark_onnx.page.browser import write_blocks
from quark_onnx.report import Report
from quark_onnx.report.verdict import NextStep
from quark_onnx.targets import format_of
from quark_onnx.targets.target import npu_names

NAME = "npu"
SUMMARY = "check, legalize, forecast and deploy models for Ryzen AI NPUs"
USAGE = "%(prog)s {check,legalize,preflight,cut,deploy} MODEL [OPTION ...]"
EXAMPLE = """\
examples:
  quark-onnx npu legalize model.onnx -o legal.onnx --shape input=1,3,224,224
  quark-onnx npu preflight model.onnx --target stx --html forecast.html
  quark-onnx npu check quantized.onnx --target phx
  quark-onnx npu deploy model.onnx -o bundle --target stx --data samples/ --recipe classifier

'quark-onnx npu ACTION --help' has the options of an action. No processor is needed."""

#: Deprecated names of options, by action.
RENAMED = {
    "preflight": {"--page": "--html", "--kind": "--preset", "--report": "--ep-report"},
}
#: Default minimum signal-to-noise ratio of a deployed model in dB.
_GATE = 10.0
_MODEL = "an .onnx file, float or quantized by any tool"
_SHAPE = "shape of a dynamic input; a batch without one becomes 1"


def add_arguments(parser: Parser) -> None:
    add_subcommands(parser, _ACTIONS, sessions=True)


def run(options: Namespace) -> Answer:
    answer: Answer = options.perform(options)
    document = {"model": options.model, **answer.document}
    return Answer(answer.body, document, answer.failure)


def _add_target(parser: Parser) -> None:
    parser.add_argument(
        "--target",
        metavar="NAME",
        default="npu",
        help=f"device: {', '.join(npu_names())}; see 'quark-onnx list targets'",
    )


def _add_recipe(parser: Parser) -> None:
    parser.add_argument(
        "--recipe",
        choices=[AUTO, *NPU_RECIPES],
        help=f"settings by model type ({AUTO} detects it), see 'quark-onnx list npu-recipes'",
    )


def _add_preset(parser: Parser) -> None:
    parser.add_argument(
        "--preset",
        choices=list(KINDS),
        help="format that a float model will be quantized to",
    )


def _check_options(parser: Parser) -> None:
    add_model_argument(parser, _MODEL)
    _add_target(parser)
    parser.add_argument(
        "--fix",
        metavar="OUT.onnx",
        type=output_file,
        help="write a copy with repairs, and check that",
    )


def _check(options: Namespace) -> Answer:
    model, notes = options.model, tuple[str, ...]()
    if options.fix is not None:
        # The repaired copy is checked.
        model = options.fix
        notes = npu.legalize(options.model, options.target, output=model).notes
    result = npu.check(model, options.target)
    document = {**result.to_dict(), "repaired": list(notes)}
    return answer_of(result, document, notes)


def _legalize_options(parser: Parser) -> None:
    add_model_argument(parser, _MODEL)
    add_output_option(parser, "legalized")
    _add_target(parser)
    add_shape_option(parser, _SHAPE)
    _add_preset(parser)
    parser.add_argument(
        "--nhwc",
        action="store_true",
        help="make 4-D inputs and outputs channels-last",
    )


def _legalize(options: Namespace) -> Answer:
    result = npu.legalize(
        options.model,
        options.target,
        shapes=dict(options.shape),
        kind=options.preset or "",
        output=options.output,
        nhwc=options.nhwc,
    )
    models = Facts((), {"model": [f"{options.model} -> {options.output}"]})
    document = {"output": options.output, **result.to_dict()}
    return Answer([models, *result.blocks()], document)


def _preflight_options(parser: Parser) -> None:
    add_model_argument(parser, _MODEL)
    add_shape_option(parser, _SHAPE)
    add_data_options(parser)
    add_config_options(parser, note="; the first of --target without --recipe")
    _add_recipe(parser)
    parser.add_argument(
        "--release",
        metavar="VERSION",
        default=RELEASE,
        help="Ryzen AI software release",
    )
    add_html_option(parser, "write a page with a drawing of the partition")
    parser.add_argument(
        "--ep-report",
        metavar="FILE",
        type=input_path,
        help="vitisai_ep_report.json of a real run, to compare with",
    )
    # Options of deploy alone that its settings depend on.
    parser.set_defaults(target="npu", ep_option=[])


def _preflight(options: Namespace) -> Answer:
    choice, config = _deployed(options)
    if is_coded(load(options.model), config):
        _refuse_settings(options, "recipe", "config")
    both = npu.deploy_forecast(
        options.model,
        options.target,
        config=config,
        release=options.release,
        shapes=dict(options.shape),
        data=data_of(options, needed=False),
    )
    # A float model has two forecasts: as it is, and as deploy would legalize it.
    blocks, document = both.blocks(), both.to_dict()
    if choice is not None:
        blocks = [_recipe_fact(choice), *blocks]
        document |= _recipe_document(choice)
    if options.ep_report is not None:
        scored = npu.score(both.as_is, npu.read_report(options.ep_report))
        # The model as it is, since that is what the run of the report has seen.
        blocks += scored.blocks()
        document["reported"] = scored.to_dict()
    if options.html is not None:
        title = f"{options.model.name}: forecast for {both.best.target.name}"
        page = [heading(both.best, options.model.name), *blocks]
        write_blocks(options.html, title, page)
    return Answer(blocks, document)


def _cut_options(parser: Parser) -> None:
    add_model_argument(parser, _MODEL)
    parser.add_argument(
        "-o",
        "--output",
        metavar=("FIRST.onnx", "SECOND.onnx"),
        nargs=2,
        type=output_file,
        required=True,
        help="write the two models here; earlier files are replaced",
    )
    parser.add_argument(
        "--at",
        metavar="TENSOR",
        nargs="+",
        action="extend",
        default=[],
        help="tensors to cut at; after the last Conv or MatMul unless given",
    )


def _cut(options: Namespace) -> Answer:
    first, second = options.output
    parts = npu.cut(options.model, options.at, first=first, second=second)
    models = Facts((), {"model": [f"{options.model} -> {first}, {second}"]})
    document = {"first": first, "second": second, **parts.to_dict()}
    return Answer([models, *parts.blocks()], document)


def _deploy_options(parser: Parser) -> None:
    add_model_argument(parser, _MODEL)
    parser.add_argument(
        "--float-model",
        metavar="FLOAT.onnx",
        type=input_path,
        help="float model of a quantized MODEL, to measure its accuracy on --data",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=output_folder,
        required=True,
        help="folder of the bundle; an earlier bundle is replaced",
    )
    add_shape_option(parser, _SHAPE)
    add_data_options(parser)
    add_config_options(parser, note="; XINT8 without --recipe")
    _add_recipe(parser)
    add_gate_option(parser, f"nothing is written; {_GATE:g} unless given")
    behind = parser.add_mutually_exclusive_group()
    behind.add_argument(
        "--cut",
        metavar="TENSOR",
        nargs="*",
        action="extend",
        help="cut at these tensors; the second part runs on the CPU",
    )
    behind.add_argument(
        "--postprocess",
        metavar="TAIL.onnx",
        type=input_path,
        help="model that reads the outputs; it runs on the CPU",
    )
    parser.add_argument(
        "--ep-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="option of the provider or BF16 compiler, as opt_level=2; may be repeated",
    )
    parser.add_argument(
        "--xclbin",
        metavar="FILE",
        type=input_path,
        help="ship a copy of the overlay of phx, which releases after 1.7.1 lack",
    )
    add_advice_options(parser)
    add_html_option(parser, "write a page with the forecast and the report")
    # add_config_options has --target without a default; deploy needs a device.
    parser.set_defaults(target="stx")


def _deploy(options: Namespace) -> Answer:
    check_advice_options(options)
    ep_options = _ep_options(options.ep_option)
    choice, config = _deployed(options)
    coded = is_coded(load(options.model), config)
    _check_coded(options, coded=coded)
    # BF16 and quantized models have no ranges to measure, and need no data.
    data = data_of(options, needed=config.measures and not coded)
    if config.min_sqnr is None:
        config = config.with_(min_sqnr=_GATE)
    start = perf_counter()
    try:
        bundle = npu.deploy(
            _model(options),
            data,
            options.output,
            options.target,
            config,
            shapes=dict(options.shape),
            progress=progress_of(options),
            ep_options=ep_options,
            xclbin=options.xclbin,
            float_model=options.float_model,
        )
    except AccuracyError as error:
        if coded or format_of(config) == "BF16":
            return Answer([], {}, AccuracyError(error.reason))
        trial_settings = trying_of(options, perf_counter() - start, _deployed)
        return Answer([], {}, refused(error, options, data, config, trial_settings))
    seconds = perf_counter() - start
    bundle = _advised(bundle, options, data, config, seconds)
    if bundle.report is not None:
        verdict = verdict_with_commands(bundle.report.verdict, options)
        bundle = replace(bundle, report=replace(bundle.report, verdict=verdict))
    steps = bundle.next_steps
    if data is None:
        # Any other format has ranges to measure.
        steps = tuple(
            replace(step, options=f"{step.options} --data PATH") for step in steps
        )
    bundle = replace(bundle, next_steps=tuple(with_commands(steps, options)))
    if options.html is not None:
        write_bundle_page(bundle, options.html, options.model.name)
    if choice is None:
        return Answer(bundle.blocks(), bundle.to_dict())
    document = {**bundle.to_dict(), **_recipe_document(choice)}
    return Answer([_recipe_fact(choice), *bundle.blocks()], document)


def _recipe_fact(choice: npu.Choice) -> Facts:
    return Facts((), {"recipe": [choice.described]})


def _recipe_document(choice: npu.Choice) -> dict[str, str]:
    return {"recipe": choice.recipe.name, "reason": choice.reason}


def _refuse_settings(options: Namespace, *names: str) -> None:
    """Raise UsageError for options that have no effect on a quantized model."""
    for name in names:
        if getattr(options, name) is not None:
            raise UsageError(
                f"{options.model} is quantized already: --{name} has no effect; leave it out, or"
                " give the float model"
            )


def _check_coded(options: Namespace, *, coded: bool) -> None:
    """Raise UsageError for options that do not fit a quantized model, or a float one.

    Args:
        coded: whether the model is quantized already.
    """
    if coded:
        _refuse_settings(options, "recipe", "preset", "config")
    if options.float_model is None:
        return
    if not coded:
        raise UsageError(f"{options.model} is a float model: leave out --float-model")
    if options.data is None:
        raise UsageError("--float-model needs --data, to compare the models on")


def _ep_options(pairs: list[str]) -> dict[str, str]:
    """Return the options of the execution provider by name."""
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(
                f"--ep-option is {pair!r}; it is KEY=VALUE, such as opt_level=2"
            )
    return dict(pair.split("=", 1) for pair in pairs)


def _model(options: Namespace) -> Path | npu.Parts:
    """Return the model to deploy: a file, or the parts of a model with a tail for the CPU."""
    if options.cut is not None:
        return npu.cut(options.model, options.cut)
    if options.postprocess is not None:
        # No cut tensors, and not verified: the two models were separate before.
        return npu.Parts(load(options.model), load(options.postprocess), (), False)
    model: Path = options.model
    return model


def _deployed(options: Namespace) -> tuple[npu.Choice | None, QConfig]:
    """Return the recipe that was chosen for the model, if any, and the configuration."""
    # argparse excludes --preset and --config from each other; --recipe is of two commands alone.
    for name in ("preset", "config"):
        if options.recipe is not None and getattr(options, name) is not None:
            raise UsageError(
                f"--recipe and --{name} both name a configuration; give one of them",
            )
    target = compiled_for(options.target, _ep_options(options.ep_option))
    choice, config = configured(options, target, NPU_RECIPES, npu.choose)
    return choice, config.with_(target=target)


def _advised(
    bundle: npu.Bundle, options: Namespace, data: Any, config: QConfig, seconds: float
) -> npu.Bundle:
    """Return the result of a deployment with the advice that --advice asks for.

    Args:
        data: the calibration data; None for none.
        config: the configuration of the deployment.
        seconds: its runtime, the default budget.
    """
    legal, report, formats = bundle.legal, bundle.report, bundle.next_steps
    if options.advice == "none":
        bundle = replace(bundle, next_steps=())
    if not isinstance(report, Report) or report.verdict is None or legal is None:
        return bundle
    verdict = report.verdict
    # The changes of a quantization are none of the float model that ships as BF16.
    own = bundle.kind != "BF16"
    if not own:
        verdict = replace(verdict, next_steps=())
    # What is proposed for its partition need not gain accuracy.
    partition = formats if bundle.forecast.band != "good" else ()
    further = formats if not partition else ()

    def attempt(trial_settings: TrialSettings) -> tuple[NextStep, ...]:
        file = bundle.folder / "model.onnx"
        return advise_report(
            legal,
            file,
            data,
            report,
            config,
            trial_settings,
            further,
            useful=partition,
            own=own,
        )

    # A poor forecast asks for advice as well.
    asking = replace(verdict, band=bundle.band)
    steps = advised(asking, options, trying_of(options, seconds, _deployed), attempt)
    others = bundle.next_steps
    # A format that was tried is among the steps if it helps; on wrong inputs nothing is proposed.
    if steps != verdict.next_steps or any(map(changes_data, steps)):
        others = ()
    verdict = replace(verdict, next_steps=steps)
    return replace(bundle, report=replace(report, verdict=verdict), next_steps=others)


_ACTIONS: tuple[Subcommand, ...] = (
    Subcommand(
        "check",
        "list the NPU rules that a model breaks",
        "%(prog)s MODEL [OPTION ...]",
        _check_options,
        _check,
    ),
    Subcommand(
        "legalize",
        "rewrite a model into the form that the NPU compiler accepts",
        "%(prog)s MODEL -o OUT.onnx [OPTION ...]",
        _legalize_options,
        _legalize,
    ),
    Subcommand(
        "preflight",
        "forecast which nodes run on the NPU, in how many subgraphs, and why",
        "%(prog)s MODEL [OPTION ...]",
        _preflight_options,
        _preflight,
    ),
    Subcommand(
        "cut",
        "split a model in two, for a tail that the NPU does not support",
        "%(prog)s MODEL -o FIRST.onnx SECOND.onnx [--at TENSOR ...] [OPTION ...]",
        _cut_options,
        _cut,
    ),
    Subcommand(
        "deploy",
        "legalize, quantize, check, and write a deployment bundle",
        "%(prog)s MODEL -o DIR --data PATH [OPTION ...]",
        _deploy_options,
        _deploy,
    ),
)
