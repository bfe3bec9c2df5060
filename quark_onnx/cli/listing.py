"""quark-onnx list: available choices, from the registries."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
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
from quark_onnx.config import to_dict
from quark_onnx.config.support import WAYS
from quark_onnx.dtypes import Block, Half, Scaled
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
    body, document = list[str | Table](), dict[str, Any]()
    # Rows are made here, and not at import: registries may grow until then.
    for kind, (header, rows_of) in chosen.items():
        try:
            rows = list(rows_of())
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


def _presets() -> Iterator[Row]:
    for name, config in PRESETS.items():
        # The text of a configuration has one setting in each line, as in YAML.
        lines = dict(line.split(": ", 1) for line in str(config).splitlines())
        activation, weight = lines.pop("activation"), lines.pop("weight")
        other = ", ".join(f"{key}={value}" for key, value in lines.items())
        # refusal() returns a reason, or nothing where the target takes the configuration.
        targets = [name for name, row in TARGETS.items() if not refusal(row, config)]
        item = {"name": name, "config": to_dict(config), "targets": targets}
        yield (name, activation, weight, " ".join(targets), other), item


def _operators() -> Iterator[Row]:
    for operator in sorted(RULES, key=str.lower):
        rule = RULES[operator]
        # The file is where a reader finds the rule; JSON keeps the module's name.
        module = rule.__module__.removeprefix("quark_onnx.")
        file = module.replace(".", "/") + ".py"
        about = _about(rule)
        item = {"name": operator, "rule": rule.__module__, "description": about}
        yield (operator, file, about), item


def _matrix() -> Iterator[Row]:
    """Return the uses of each format; the test of formats runs every cell."""
    for dtype in DTYPES.values():
        # A way without a configuration for the format does not support the format.
        offered = {way.name: way.config(dtype) is not None for way in WAYS}
        cells = (dtype.name, *(_YES_NO[is_offered] for is_offered in offered.values()))
        yield cells, {"name": dtype.name, "ways": offered}


def _formats() -> Iterator[Row]:
    for row in DTYPES.values():
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
        yield (row.name, family, str(row.bits), codes, str(row.min_opset)), item


def _classes(registry: Registry[type[Any]]) -> Iterator[Row]:
    """Return rows of frozen dataclasses, whose fields are the settings."""
    for name in sorted(registry):
        cls = registry[name]
        settings = {field.name: field.default for field in dataclasses.fields(cls)}
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        about = _about(cls)
        package = cls.__module__.partition(".")[0]
        if package not in ("calibrators", "quark_onnx"):
            about += f" (from {package})"
        item = {"name": name, "settings": settings, "description": about}
        yield (name, text, about), item


def _algorithms() -> Iterator[Row]:
    """Return rows of the algorithms for language models, if torch is installed."""
    # Raises an error that names the extra, where torch is missing.
    torch_side("quark_onnx.torch.algorithms.registered")
    for (name, settings, about), item in _classes(ALGORITHMS):
        data = getattr(ALGORITHMS[name], "needs_data", False)
        # Read from the class: a property depends on the settings of an instance.
        needs = "if trained" if isinstance(data, property) else _YES_NO[bool(data)]
        clients = clients_of_algorithm(name)
        item = {**item, "needs_data": needs, "loaded_by": clients}
        yield (name, needs, clients, settings, about), item


def _schemes() -> Iterator[Row]:
    """Return rows of the schemes for language models, for ``llm ptq --scheme``."""
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
        yield cells, item


def _targets() -> Iterator[Row]:
    for target in TARGETS.values():
        cells = (target.name, target.summary, " ".join(target.presets), target.source)
        yield cells, dataclasses.asdict(target)


def _rows_of_recipes(registry: Registry[Any]) -> Iterator[Row]:
    for recipe in registry.values():
        item = dataclasses.asdict(recipe)
        how = " ".join([recipe.preset, *recipe.optimizers])
        yield (recipe.name, recipe.models, how, recipe.advice), item


def _conversions() -> Iterator[Row]:
    for conversion in CONVERSIONS.values():
        item = {
            "name": conversion.name,
            "keeps_function": conversion.keeps,
            "description": conversion.summary,
        }
        yield (conversion.name, conversion.keeps, conversion.summary), item


def _about(thing: object) -> str:
    """Return the first paragraph of a docstring, without its markup."""
    # getdoc takes the docstring of a base class where a class has none.
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "")


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[], Iterator[Row]]]] = {
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
