"""quark-onnx list: available choices, from the registries."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Callable
from textwrap import fill
from typing import Any

import quark_onnx.optimizers  # noqa: F401
import quark_onnx.rules  # noqa: F401  (importing registers them)
from calibrators import CALIBRATORS
from calibrators.registry import Registry
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import Parser, add_common_options
from quark_onnx.cli.torch_side import torch_side
from quark_onnx.common.errors import MissingDependency
from quark_onnx.common.registry import (
    ALGORITHMS,
    CONVERSIONS,
    DTYPES,
    NPU_RECIPES,
    OPTIMIZERS,
    PRESETS,
    RECIPES,
    RULES,
    TARGETS,
)
from quark_onnx.config import QConfig, to_dict
from quark_onnx.config.support import WAYS
from quark_onnx.dtypes import Block, DType, Half, Scaled
from quark_onnx.page.terminal import Table
from quark_onnx.targets import refusal
from quark_onnx.torch.config.algorithm_names import clients_of_algorithm
from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS, weight_bits
from quark_onnx.torch.config.schemes import SCHEMES

NAME = "list"
SUMMARY = "list presets, formats, calibrators, optimizers, schemes, targets, and more"
USAGE = "%(prog)s [KIND] [OPTION ...]"
EXAMPLE = """\
example:
  quark-onnx list calibrators"""

#: Cells of a row, and its JSON form.
#: The cells are for people; the JSON form holds values of their own types.
Row = tuple[tuple[str, ...], dict[str, Any]]
#: Names of a kind that the table of kinds shows.
_NAMED = 3
_YES_NO = {True: "yes", False: "-"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "kind",
        nargs="?",
        choices=list(_KINDS),
        metavar="KIND",
        help="what to list; the kinds with their numbers of names unless given",
    )
    add_common_options(parser, sessions=False)
    kinds = fill(", ".join(_KINDS), 90, initial_indent="  ", subsequent_indent="  ")
    # The kinds are defined at the end of this file, after the functions that list them.
    parser.epilog = f"kinds:\n{kinds}\n\n{EXAMPLE}"


def run(options: Namespace) -> Answer:
    chosen = {kind: _KINDS[kind] for kind in _KINDS if options.kind in (None, kind)}
    body, document = list[str | Table](), dict[str, Any]({"command": NAME})
    # Rows are made here, and not at import: registries may grow until then.
    for kind, (header, rows_of) in chosen.items():
        try:
            rows = rows_of()
        except MissingDependency as error:
            # Asked for by name, the missing extra is an error; among all kinds, it is a line.
            if options.kind is not None:
                raise
            body += [kind, f"  {error}", ""]
            document[kind] = []
            continue
        # Names that users look for among the targets, with the command that serves them.
        elsewhere = TARGETS.elsewhere if kind == "targets" else {}
        notes = [
            f"  {name} is no target: {instead}" for name, instead in elsewhere.items()
        ]
        table = Table([header, *(cells for cells, _ in rows)])
        body += [kind, table, *notes, ""]
        document[kind] = [item for _, item in rows]
    if options.kind is None:
        body = _counts(document)
    # Without the empty line after the last table.
    return Answer(body[:-1], document)


def _counts(document: dict[str, Any]) -> list[str | Table]:
    """Return the kinds with the number of names of each, and the command that lists them."""
    rows = list[tuple[str, ...]]()
    for kind in _KINDS:
        names = [item["name"] for item in document[kind]]
        shown = ", ".join(names[:_NAMED])
        if len(names) > _NAMED:
            shown += ", ..."
        rows.append((kind, str(len(names)), shown or "not installed"))
    return [
        Table([("kind", "names", "such as"), *rows]),
        "",
        "the names of a kind: quark-onnx list KIND",
        "",
    ]


def _presets() -> list[Row]:
    return [_preset(name, PRESETS[name]) for name in PRESETS]


def _preset(name: str, config: QConfig) -> Row:
    # The text of a configuration has one setting in each line, as in YAML.
    lines = dict(line.split(": ", 1) for line in str(config).splitlines())
    activation, weight = lines.pop("activation"), lines.pop("weight")
    other = ", ".join(f"{key}={value}" for key, value in lines.items())
    # refusal() returns a reason, or nothing where the target takes the configuration.
    targets = [target for target in TARGETS if not refusal(TARGETS[target], config)]
    item = {"name": name, "config": to_dict(config), "targets": targets}
    return (name, activation, weight, " ".join(targets), other), item


def _operators() -> list[Row]:
    rows: list[Row] = []
    for operator in sorted(RULES, key=str.lower):
        rule = RULES[operator]
        # The file is where a reader finds the rule; JSON keeps the module's name.
        module = rule.__module__.removeprefix("quark_onnx.")
        file = module.replace(".", "/") + ".py"
        about = _about(rule)
        item = {"name": operator, "rule": rule.__module__, "description": about}
        rows.append(((operator, file, about), item))
    return rows


def _formats() -> list[Row]:
    return [_format(DTYPES[name]) for name in DTYPES]


def _matrix() -> list[Row]:
    """Return the uses of each format; the test of formats runs every cell."""
    rows: list[Row] = []
    for name in DTYPES:
        dtype = DTYPES[name]
        # A way without a configuration for the format does not support the format.
        offered = {way.name: way.config(dtype) is not None for way in WAYS}
        cells = (dtype.name, *(_YES_NO[is_offered] for is_offered in offered.values()))
        rows.append((cells, {"name": dtype.name, "ways": offered}))
    return rows


def _format(row: DType) -> Row:
    family = type(row).__name__.lower()
    item: dict[str, Any] = {
        "name": row.name,
        "family": family,
        "bits": row.bits,
        "min_opset": row.min_opset,
    }
    codes = ""
    if isinstance(row, Scaled):
        item |= {"qmin": row.qmin, "qmax": row.qmax}
        codes = f"{row.qmin}..{row.qmax}"
    elif isinstance(row, Half):
        item["largest"] = row.largest
        codes = f"up to {row.largest:.5g}"
    elif isinstance(row, Block):
        item |= {"block_size": row.block_size, "node": row.op_type}
        codes = f"blocks of {row.block_size}"
    return (row.name, family, str(row.bits), codes, str(row.min_opset)), item


def _classes(registry: Registry[type[Any]]) -> list[Row]:
    """Return rows of frozen dataclasses, whose fields are the settings."""
    rows: list[Row] = []
    for name in sorted(registry):
        cls = registry[name]
        settings = {field.name: field.default for field in dataclasses.fields(cls)}
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        about = _about(cls) + _from_plugin(cls)
        item = {"name": name, "settings": settings, "description": about}
        rows.append(((name, text, about), item))
    return rows


def _from_plugin(cls: type[Any]) -> str:
    """Return the package of a plug-in that a class is from; empty for one of ours."""
    package = cls.__module__.partition(".")[0]
    return "" if package in ("calibrators", "quark_onnx") else f" (from {package})"


def _algorithms() -> list[Row]:
    """Return rows of the algorithms for language models, if torch is installed."""
    # Raises an error that names the extra, where torch is missing.
    torch_side("quark_onnx.torch.algorithms.registered")
    rows: list[Row] = []
    for (name, settings, about), item in _classes(ALGORITHMS):
        data = getattr(ALGORITHMS[name], "needs_data", False)
        # Read from the class: a property depends on the settings of an instance.
        needs = "if trained" if isinstance(data, property) else _YES_NO[bool(data)]
        clients = clients_of_algorithm(name)
        item = {**item, "needs_data": needs, "loaded_by": clients}
        rows.append(((name, needs, clients, settings, about), item))
    return rows


def _schemes() -> list[Row]:
    """Return rows of the schemes for language models, for ``llm ptq --scheme``."""
    rows: list[Row] = []
    for name, spec in SCHEMES.items():
        clients = SCHEME_CLIENTS[name]
        bits = weight_bits(name)
        activation = "float" if spec.input is None else str(spec.input)
        item = {
            "name": name,
            "weight": str(spec.weight),
            "activation": activation,
            "weight_bits": bits,
            "needs_data": spec.measures,
            "loaded_by": clients,
        }
        cells = (
            name,
            f"{bits:.3g}",
            "float" if spec.input is None else spec.input.dtype.name,
            _YES_NO[spec.measures],
            " ".join(clients),
        )
        rows.append((cells, item))
    return rows


def _targets() -> list[Row]:
    rows: list[Row] = []
    for name in TARGETS:
        target = TARGETS[name]
        cells = (target.name, target.summary, " ".join(target.presets), target.source)
        rows.append((cells, dataclasses.asdict(target)))
    return rows


def _rows_of_recipes(registry: Registry[Any]) -> list[Row]:
    rows: list[Row] = []
    for name in registry:
        recipe = registry[name]
        item = dataclasses.asdict(recipe)
        how = " ".join([recipe.preset, *recipe.optimizers])
        rows.append(((recipe.name, recipe.models, how, recipe.advice), item))
    return rows


def _conversions() -> list[Row]:
    rows: list[Row] = []
    for name in CONVERSIONS:
        conversion = CONVERSIONS[name]
        item = {
            "name": conversion.name,
            "keeps_function": conversion.keeps,
            "description": conversion.summary,
        }
        rows.append(((conversion.name, conversion.keeps, conversion.summary), item))
    return rows


def _about(thing: object) -> str:
    """Return the first paragraph of a docstring, without its markup."""
    # getdoc takes the docstring of a base class where a class has none.
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "")


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[], list[Row]]]] = {
    "presets": (
        ("name", "activations", "weights", "targets that take it", "other"),
        _presets,
    ),
    "operators": (("operator", "rule", "what is quantized"), _operators),
    "formats": (("name", "family", "bits", "values", "least opset"), _formats),
    "matrix": (("format", *(way.name for way in WAYS)), _matrix),
    "calibrators": (
        ("name", "settings", "what it does"),
        lambda: _classes(CALIBRATORS),
    ),
    "optimizers": (
        ("name", "settings", "what it does"),
        lambda: _classes(OPTIMIZERS),
    ),
    "schemes": (
        ("name", "bits a weight", "activations", "needs data", "loaded by"),
        _schemes,
    ),
    "algorithms": (
        ("name", "needs data", "loaded by", "settings", "what it does"),
        _algorithms,
    ),
    "targets": (("name", "processors", "presets", "source"), _targets),
    "recipes": (
        ("name", "models", "configuration", "advice"),
        lambda: _rows_of_recipes(RECIPES),
    ),
    "npu-recipes": (
        ("name", "models", "configuration", "advice"),
        lambda: _rows_of_recipes(NPU_RECIPES),
    ),
    "conversions": (("name", "function kept", "what it does"), _conversions),
}
