"""Options, YAML keys and the reference of the settings describe a field alike."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest
import yaml

from calibrators.readers.images import ImageSpec
from quark_onnx.cli import llm_settings, settings
from quark_onnx.cli.data import IMAGE_OPTIONS
from quark_onnx.cli.dispatch import parse
from quark_onnx.cli.field_options import FieldOption, field_texts
from quark_onnx.config import QConfig, TensorOverride
from quark_onnx.config.qconfig import FORMS
from quark_onnx.torch.config.language import KV_CACHES

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import reference

#: Options of ``quantize`` that set no field of a configuration or of images.
QUANTIZE = """
    --help --output --ranges --workers --resume --task --labels --html
    --data --random-data --batch-axis --dim --limit --input-layout
    --preset --config --recipe --weights-only --dynamic --auto-exclude --auto-mixed
    --accuracy --budget --advice --no-verdict --time --no-time --threads --engine --provider
    --json --overwrite --no-isolation --custom-op-library --quiet --verbose
"""
#: Options of ``llm ptq`` that set no field of a TorchConfig.
PTQ = """
    --help --output --recipe --target --bits --data --samples --length
    --evaluate --no-verdict --tasks --shots --limit
    --export --html --report --resume --spill --device --layout --pack --shard
    --trust-code --merge-adapter
    --json --overwrite --no-isolation --quiet --verbose
"""
#: Options with the words of a command line, and the YAML that means the same.
YAML = {
    "--calibrator": ("--calibrator entropy", "calibrator: entropy"),
    "--tensor-calibrator": (
        "--tensor-calibrator x=entropy",
        "tensors: [{tensors: x, calibrator: entropy}]",
    ),
    "--per-channel": (
        "--preset S8S8 --per-channel",
        "{preset: S8S8, per_channel: true}",
    ),
    "--per-tensor": ("--per-tensor", "per_channel: false"),
    "--exclude": ("--exclude /head/* re:x", "exclude: ['/head/*', 're:x']"),
    "--op-types": ("--op-types Conv MatMul", "op_types: [Conv, MatMul]"),
    "--nodes": ("--nodes a b", "nodes: [a, b]"),
    "--optimize": (
        "--optimize cle:relu6=bound bias_correction",
        "optimizers: ['cle:relu6=bound', bias_correction]",
    ),
    "--no-equalize": ("--no-equalize", "equalize: false"),
    "--unsafe": ("--unsafe", "safe: false"),
    "--keep-existing": ("--keep-existing", "keep_existing: true"),
    "--keep-initializer-inputs": (
        "--keep-initializer-inputs",
        "keep_initializer_inputs: true",
    ),
    "--form": ("--form vendor", "form: vendor"),
    "--max-opset": ("--max-opset 17", "max_opset: 17"),
    "--target": ("--preset XINT8 --target stx", "{preset: XINT8, target: stx}"),
    "--keep-sizes": ("--keep-sizes", "fix_sizes: false"),
    "--accuracy-level": ("--accuracy-level 4", "accuracy_level: 4"),
    "--no-functions": ("--no-functions", "functions: false"),
    "--no-prepare": ("--no-prepare", "prepare: false"),
    "--min-sqnr": ("--min-sqnr 20.5", "min_sqnr: 20.5"),
}

FIELDS = {
    "quantize": (*settings.OPTIONS.values(), *IMAGE_OPTIONS),
    "llm ptq": tuple(llm_settings.OPTIONS.values()),
}
EVERY = [
    pytest.param(command, option, id=f"{command} {option.flag}")
    for command, options in FIELDS.items()
    for option in options
]


def actions(command: str) -> dict[str, argparse.Action]:
    """Return the options of a command by their long name."""
    words = {"quantize": "quantize m -o o", "llm ptq": "llm ptq m -o o --scheme fp8"}
    parser = parse(words[command].split()).parser
    return {
        max(action.option_strings, key=len): action
        for action in parser.arguments
        if action.option_strings
    }


@pytest.mark.parametrize(
    ("command", "listed"), [("quantize", QUANTIZE), ("llm ptq", PTQ)]
)
def test_every_other_option_is_listed(command: str, listed: str) -> None:
    fields = {option.flag for option in FIELDS[command]}
    assert set(actions(command)) - fields == set(listed.split())
    assert fields <= set(actions(command))


@pytest.mark.parametrize(("command", "option"), EVERY)
def test_help_and_reference_have_one_text(command: str, option: FieldOption) -> None:
    """The help is a sentence of the row in the reference, which names the option."""
    rows = reference.settings_of(option.owner).splitlines()
    (row,) = [row for row in rows if row.startswith(f"| `{option.field}` |")]
    _, _, flags, _, meaning, _ = re.split(r"(?<!\\)\|", row)
    assert f"`{option.flag}`" in flags
    sentences = re.split(r"\.(?: |$)", meaning.strip())
    if option.arguments.get("const") is False:
        (sentence,) = [text[7:] for text in sentences if text.startswith("False: ")]
    else:
        sentence = sentences[0]
    text = actions(command)[option.flag].help
    assert text is not None
    # The help names other fields by their options.
    assert text.replace("--", "").startswith(sentence.replace("`", ""))


@pytest.mark.parametrize("flag", settings.OPTIONS)
def test_an_option_and_its_key_in_yaml_mean_the_same(flag: str) -> None:
    words, text = YAML[flag]
    options = parse(["quantize", "model.onnx", "-o", "out.onnx", *words.split()])
    config = settings.config_of(options)
    assert config == QConfig.of(yaml.safe_load(text))
    assert config != QConfig.of("A8W8")


def test_values_of_lists_are_added_to_those_of_the_base() -> None:
    base = QConfig.of("A8W8").with_(
        exclude=["a"], optimizers=["cle"], nodes=["b"], tensors=[{"tensors": "t"}]
    )
    words = (
        "--exclude c --optimize bias_correction --nodes d --tensor-calibrator u=entropy"
    )
    options = parse(["quantize", "m", "-o", "o", *words.split(), "--auto-mixed", "9"])
    config = settings.config_of(options, base)
    assert (config.exclude, config.nodes) == (("a", "c"), ("d",))
    names = [optimizer.name for optimizer in config.optimizers]
    assert names == ["auto_mixed_precision", "cle", "bias_correction"]
    assert config.tensors == (
        TensorOverride("t"),
        TensorOverride("u", calibrator="entropy"),
    )


def test_images_have_the_defaults_and_choices_of_the_library() -> None:
    found = actions("quantize")
    for option in IMAGE_OPTIONS:
        default = parse(["quantize", "m", "-o", "o"])
        value = getattr(default, option.dest)
        assert value == getattr(ImageSpec, option.field, None), option.flag
    assert found["--resize"].choices == (
        "stretch",
        "crop",
        "letterbox",
        "corner",
    )


@pytest.mark.parametrize(
    ("command", "flag", "values"),
    [("quantize", "--form", FORMS), ("llm ptq", "--kv-cache", KV_CACHES)],
)
def test_help_names_every_value(
    command: str, flag: str, values: tuple[str, ...]
) -> None:
    text = actions(command)[flag].help or ""
    assert set(values) <= set(re.split(r"[^\w-]+", text))


def test_texts_of_a_field_end_with_its_section() -> None:
    class Settings:
        """Settings.

        Attributes:
            first: one sentence. Another, which
                goes on.
            second: a text.

        Other text: no field.
        """

    assert field_texts(Settings) == {
        "first": "one sentence. Another, which goes on.",
        "second": "a text.",
    }
