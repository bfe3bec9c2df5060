"""Write the reference pages of the documentation from the code: command line, settings,
registries, error messages.

``scripts/docs_hooks.py`` puts the texts into the pages of docs/ while the site is built, in place
of ``<!-- reference: NAME -->`` and the line after it, which is for readers of the repository.
Nothing here is committed, so that it never lags behind the code.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import causes

import quark_onnx.optimizers  # noqa: F401  (importing registers them)
import quark_onnx.rules  # noqa: F401  (importing registers them)
from calibrators import CALIBRATORS
from calibrators.readers.images import ImageSpec
from quark_onnx import QConfig, QuantizationSpec, TensorOverride
from quark_onnx.cli import llm_settings, main, settings
from quark_onnx.cli.data import IMAGE_OPTIONS
from quark_onnx.cli.field_options import field_texts
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
from quark_onnx.config import Override
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig

ROOT = Path(__file__).parents[1]
#: Packages whose error messages the page of errors lists.
SOURCES = ("calibrators", "quark_onnx")
#: Nested commands, which ``quark-onnx COMMAND --help`` names as positional arguments.
GROUPS = ("npu", "llm")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; bars and line breaks in cells are escaped."""
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        lines.append([" ".join(cell.replace("|", r"\|").split()) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("``", "`")


def help_text(*command: str) -> str:
    """Return what ``quark-onnx COMMAND --help`` prints on a terminal of 100 columns."""
    printed = io.StringIO()
    environment = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with contextlib.redirect_stdout(printed):
            main([*command, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue().rstrip()


def subcommands(text: str) -> list[str]:
    """Return the commands that a help text lists, in its order.

    They stand indented by four spaces below the metavariable ``COMMAND``.
    """
    _, _, listed = text.partition("  COMMAND\n")
    names = []
    for line in listed.splitlines():
        match = re.match(r" {4}([a-z][\w-]*)(\s|$)", line)
        if match:
            names.append(match[1])
        elif line and not line.startswith("     "):
            break
    return names


def commands() -> Iterator[tuple[str, ...]]:
    """Yield every command, nested ones after their group."""
    for name in subcommands(help_text()):
        yield (name,)
        if name in GROUPS:
            for nested in subcommands(help_text(name)):
                yield name, nested


def cli() -> str:
    """Return the help text of every command."""
    parts = [f"```text\n{help_text()}\n```"]
    for command in commands():
        level = "#" * (len(command) + 1)
        parts.append(
            f"{level} {' '.join(command)}\n\n```text\n{help_text(*command)}\n```"
        )
    return "\n\n".join(parts)


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field as it is written in Python."""
    value = field.default
    if (
        value is dataclasses.MISSING
        and field.default_factory is not dataclasses.MISSING
    ):
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, QuantizationSpec):
        return f"`{value}`"
    name = getattr(value, "name", None)
    return f"`{name}`" if isinstance(name, str) else f"`{value!r}`"


#: Options that set fields.
OPTIONS = (*settings.OPTIONS.values(), *llm_settings.OPTIONS.values(), *IMAGE_OPTIONS)


def settings_of(cls: type[Any]) -> str:
    """Return the settings of a dataclass with their options and defaults."""
    texts = field_texts(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if not field.name.startswith("_"):
            flags = [
                f"`{option.flag}`"
                for option in OPTIONS
                if (option.owner, option.field) == (cls, field.name)
            ]
            rows.append(
                (
                    f"`{field.name}`",
                    " ".join(flags),
                    default_text(field),
                    texts.get(field.name, ""),
                )
            )
    return table(("key", "option", "default", "meaning"), rows)


def summary(thing: object) -> str:
    """Return the first paragraph of a docstring."""
    doc = inspect.getdoc(thing) or ""
    return " ".join(doc.partition("\n\n")[0].split()).replace("``", "`")


def classes(found: Mapping[str, Any]) -> str:
    """Return a section for each class that is its own settings."""
    parts = []
    for name in sorted(found):
        cls = found[name]
        text = f"### `{name}`\n\n{summary(cls)}"
        fields = [f for f in dataclasses.fields(cls) if not f.name.startswith("_")]
        texts = field_texts(cls)
        if fields:
            rows = (
                (f"`{f.name}`", default_text(f), texts.get(f.name, "")) for f in fields
            )
            text += "\n\n" + table(("setting", "default", "meaning"), rows)
        parts.append(text)
    return "\n\n".join(parts)


def presets() -> str:
    """Return each preset with the settings that differ from the defaults."""
    rows = []
    for name in PRESETS:
        lines = dict(line.split(": ", 1) for line in str(PRESETS[name]).splitlines())
        activation, weight = lines.pop("activation"), lines.pop("weight")
        other = ", ".join(f"`{key}: {value}`" for key, value in lines.items())
        rows.append((f"`{name}`", activation, weight, other))
    return table(("preset", "activations", "weights", "other settings"), rows)


def formats() -> str:
    """Return each number format."""
    rows = []
    for name in DTYPES:
        dtype = DTYPES[name]
        family = type(dtype).__name__.lower()
        rows.append((f"`{name}`", family, str(dtype.bits), str(dtype.min_opset)))
    return table(("format", "family", "bits", "least opset"), rows)


def operators() -> str:
    """Return each operator that has a rule, with what is quantized."""
    rows = (
        (f"`{name}`", summary(RULES[name])) for name in sorted(RULES, key=str.lower)
    )
    return table(("operator", "what is quantized"), rows)


def targets() -> str:
    """Return each processor."""
    found = [TARGETS[name] for name in TARGETS]
    rows = (
        (f"`{target.name}`", target.summary, " ".join(target.presets), target.source)
        for target in found
    )
    return table(("target", "processors", "presets", "source"), rows)


def recipes() -> str:
    """Return each recipe: a preset and optimizers for a kind of model."""
    return _recipe_table(RECIPES)


def npu_recipes() -> str:
    """Return each recipe for Ryzen AI processors."""
    return _recipe_table(NPU_RECIPES)


def _recipe_table(registry: Any) -> str:
    rows = []
    for name in registry:
        recipe = registry[name]
        how = " ".join([recipe.preset, *recipe.optimizers])
        rows.append((f"`{name}`", recipe.models, f"`{how}`", recipe.advice))
    return table(("recipe", "models", "configuration", "advice"), rows)


def conversions() -> str:
    """Return each conversion."""
    found = [CONVERSIONS[name] for name in CONVERSIONS]
    rows = ((f"`{each.name}`", each.summary, each.keeps) for each in found)
    return table(("conversion", "effect", "function kept"), rows)


def schemes() -> str:
    """Return each scheme for language models."""
    from quark_onnx.torch.config.schemes import SCHEMES

    rows = []
    for name, spec in SCHEMES.items():
        rows.append((f"`{name}`", str(spec.weight), str(spec.input or "float")))
    return table(("scheme", "weights", "inputs"), rows)


def algorithms() -> str:
    """Return each algorithm for language models with its settings."""
    return classes({name: ALGORITHMS[name] for name in ALGORITHMS})


def torch_api() -> str:
    """Return a directive of mkdocstrings for each name of ``quark_onnx.torch``."""
    from quark_onnx.torch import NATIVE

    directives = []
    for name, (module, attribute) in NATIVE.items():
        options = f"    options: {{ heading: {name} }}"
        directives.append(f"::: quark_onnx.torch.{module}.{attribute}\n{options}")
    return "\n\n".join(directives)


#: The schema of the documents that ``--json`` writes.
SCHEMA = ROOT / "quark_onnx" / "cli" / "answers.schema.json"


def type_text(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in a JSON schema, in words."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    variants = schema.get("anyOf") or schema.get("oneOf")
    if variants:
        return " or ".join(type_text(variant) for variant in variants)
    kind = schema.get("type", "any")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    items = schema.get("items")
    return f"{text} of {type_text(items)}" if items else text


def json_keys() -> str:
    """Return the keys of each document, and of the objects in it."""
    definitions = json.loads(SCHEMA.read_text(encoding="utf-8"))["$defs"]
    parts = []
    for name, schema in definitions.items():
        required = schema.get("required", [])
        rows = []
        for key, value in schema.get("properties", {}).items():
            always = "yes" if key in required else ""
            rows.append(
                (f"`{key}`", type_text(value), always, value.get("description", ""))
            )
        if rows:
            head = ("key", "type", "always", "meaning")
            parts.append(f"### {name}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def message_template(node: ast.expr) -> str:
    """Return the text of an error message; computed parts become names in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(message_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message_template(node.left) + message_template(node.right)
    return "{" + ast.unparse(node) + "}"


def is_error(name: str) -> bool:
    """Return whether a class name is that of an error of this project."""
    return name.endswith(("Error", "Crash")) or name == "MissingDependency"


@cache
def error_messages() -> dict[str, list[tuple[str, str]]]:
    """Return message templates and files by the name of the error's class."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Raise) or not isinstance(
                    node.exc, ast.Call
                ):
                    continue
                function = node.exc.func
                name = getattr(function, "id", getattr(function, "attr", ""))
                arguments = node.exc.args
                if name == "reading_error":  # of a class and a message
                    name, arguments = ast.unparse(arguments[0]), arguments[1:]
                if is_error(name) and name not in BUILT_IN and arguments:
                    found[name].append((message_template(arguments[0]), place))
    return dict(found)


#: Errors of Python itself, which only point at a mistake in a call.
BUILT_IN = frozenset([*dir(builtins), "ArgumentTypeError"])


def explained(name: str, text: str) -> causes.Rule:
    """Return cause and cure of a message: of the first rule for its text, or of its class."""
    own = causes.Rule("", *causes.CLASSES[name])
    if name not in GENERAL:
        return own
    matching = (rule for rule in causes.RULES if re.search(rule.pattern, text))
    return next(matching, own)


#: Classes of errors whose messages have different causes.
GENERAL = (
    "AccuracyError",
    "CalibrationError",
    "ConfigError",
    "DataError",
    "ModelError",
)


def errors() -> str:
    """Return every error message of the source with cause and cure, by class and cause."""
    parts = []
    messages_by_class = error_messages()
    for name, (cause, cure) in causes.CLASSES.items():
        parts.append(f"### {name}\n\n{cause} {cure}")
        by_rule: dict[causes.Rule, set[str]] = defaultdict(set)
        for text, place in messages_by_class.get(name, []):
            by_rule[explained(name, text)].add(f"{code(text)} <small>{place}</small>")
        for rule in (*causes.RULES, causes.Rule("", cause, cure)):
            found = by_rule.get(rule)
            if found:
                count = f"{len(found)} message{'s' if len(found) > 1 else ''}"
                items = "\n".join(f"    - {item}" for item in sorted(found))
                title = f"{count}: {rule.cause}" if rule.pattern else f"{count}"
                body = f"    {rule.cure}\n\n" if rule.pattern else ""
                parts.append(f'??? note "{title}"\n\n{body}{items}')
    return "\n\n".join(parts)


def code(text: str) -> str:
    """Return an inline code span; backticks of the text become apostrophes."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


PARTS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "calibrators": lambda: classes(CALIBRATORS),
    "cli": cli,
    "conversions": conversions,
    "errors": errors,
    "formats": formats,
    "image-spec": lambda: settings_of(ImageSpec),
    "json": json_keys,
    "kv-cache": lambda: settings_of(KVCache),
    "operators": operators,
    "optimizers": lambda: classes({name: OPTIMIZERS[name] for name in OPTIMIZERS}),
    "override": lambda: settings_of(Override),
    "presets": presets,
    "qconfig": lambda: settings_of(QConfig),
    "recipes": recipes,
    "npu-recipes": npu_recipes,
    "schemes": schemes,
    "spec": lambda: settings_of(QuantizationSpec),
    "targets": targets,
    "torch-api": torch_api,
    "torch-config": lambda: settings_of(TorchConfig),
    "tensor-override": lambda: settings_of(TensorOverride),
}


def filled(text: str) -> str:
    """Return a page with its reference parts in place."""
    return re.sub(
        r"<!-- reference: ([\w-]+) -->\n_The site has .*_",
        lambda match: PARTS[match[1]](),
        text,
    )
