"""QConfig and Override: composing them, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrators import Entropy, Percentile
from quark_onnx import Override, QConfig, QuantizationSpec, TensorOverride
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import PRESETS


def test_short_cuts_go_where_they_belong() -> None:
    config = QConfig.of("a8w8").with_(calibrator="entropy", per_channel=False)
    assert config.activation == QConfig.of("A8W8").activation.with_(
        calibrator=Entropy()
    )
    assert config.weight == QConfig.of("A8W8").weight.with_(per_channel=False)


def test_a_short_cut_refines_a_spec_that_changes_too() -> None:
    config = QConfig().with_(
        activation=QuantizationSpec("int16"), calibrator="percentile"
    )
    assert config.activation == QuantizationSpec("int16", calibrator=Percentile())


def test_composing_changes_no_preset() -> None:
    before = {name: str(PRESETS[name]) for name in PRESETS}
    QConfig.of("XINT8").with_(
        calibrator="nonoverflow", per_channel=True, exclude="head"
    )
    assert {name: str(PRESETS[name]) for name in PRESETS} == before


@pytest.mark.parametrize(
    ("name", "activation", "weight"),
    [
        ("A8W8", "uint8 asymmetric best", "int8 symmetric per_channel narrow minmax"),
        (
            "S8S8",
            "int8 symmetric best",
            "int8 symmetric per_channel narrow minmax",
        ),
        (
            "A16W8",
            "uint16 asymmetric minmax",
            "int8 symmetric per_channel narrow minmax",
        ),
        ("XINT8", "int8 symmetric pow2 minmse", "int8 symmetric pow2 minmse"),
    ],
)
def test_presets(name: str, activation: str, weight: str) -> None:
    config = QConfig.of(name)
    assert (str(config.activation), str(config.weight)) == (activation, weight)


def test_of_takes_what_a_user_may_write(tmp_path: Any) -> None:
    (tmp_path / "settings.yaml").write_text(
        "preset: S8S8\nper_channel: true\n", encoding="utf-8"
    )
    wanted = QConfig.of("S8S8").with_(per_channel=True)
    assert QConfig.of(wanted) is wanted
    assert QConfig.of({"preset": "S8S8", "per_channel": True}) == wanted
    assert (
        QConfig.of(tmp_path / "settings.yaml")
        == QConfig.of(str(tmp_path / "settings.yaml"))
        == wanted
    )


def test_one_name_is_a_list_of_one() -> None:
    assert QConfig(exclude="head", nodes="a").exclude == ("head",)
    assert Override(["a", "b"], op_types="Conv", keep=True).op_types == ("Conv",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclud": "x"}, "QConfig has no setting 'exclud'; did you mean 'exclude'?"),
        ({"exclude": [1]}, "exclude is [1]; it must be a name or a list of names"),
        ({"nodes": 3}, "nodes is 3; it must be a name or a list of names"),
        ({"op_types": "Convv"}, "unknown operator 'Convv'; did you mean 'Conv'?"),
        (
            {"activation": "int81"},
            "unknown number format 'int81'; did you mean 'int8'?",
        ),
        (
            {"bias": None},
            "bias is None; it must be true, false or one of: int32, int16",
        ),
        ({"safe": 1}, "safe is 1; it must be true or false"),
        ({"overrides": ["x"]}, "an override is 'x'; it must be a mapping of settings"),
        ({"search": True}, "search is True; it must be a number of samples, 0 or more"),
        ({"search": -1}, "search is -1; it must be a number of samples, 0 or more"),
        ({"min_sqnr": "30"}, "min_sqnr is '30'; it must be a number of decibels"),
        (
            {
                "activation": QuantizationSpec(
                    "uint8", symmetric=False, dynamic=True, per_channel=True
                )
            },
            "each run computes one scale for a tensor; per_channel cannot be set",
        ),
        (
            {
                "embedding": QuantizationSpec("uint8", symmetric=False, dynamic=True),
            },
            "weight of embedding: the scale of a weight is known beforehand",
        ),
        (
            {
                "form": "vendor",
                "overrides": [Override("x", activation=QuantizationSpec("float16"))],
            },
            "saturate is false; the vendor's float16 saturates",
        ),
        (
            {"activation": None, "calibrator": "minmax"},
            "calibrator cannot be set: activation is None",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    import quark_onnx.rules  # noqa: F401  (the known operators)

    with pytest.raises(ConfigError) as error:
        QConfig().with_(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("A8W9", "unknown preset 'A8W9'; did you mean 'A8W8'?"),
        (
            8,
            "config is a int; it must be a preset's name, a YAML file, a dict or a QConfig",
        ),
        ("nowhere.yaml", "config file nowhere.yaml cannot be read: No such file"),
    ],
)
def test_no_config_at_all(config: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        QConfig.of(config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": True}, "an override names no nodes; give nodes, op_types or between"),
        (
            {"nodes": "a"},
            "the override for a changes nothing; give keep, activation or weight",
        ),
        (
            {
                "nodes": "a",
                "op_types": "Conv",
                "keep": True,
                "weight": QuantizationSpec(),
            },
            "the override for a, Conv both keeps nodes float and quantizes them",
        ),
        (
            {"between": [["a"]], "keep": True},
            "between of an override has 1 set of names; it takes two",
        ),
        (
            {"nodes": "a", "weight": "int8"},
            "weight of the override for a is 'int8', not a QuantizationSpec",
        ),
        (
            {"nodes": 5, "keep": True},
            "nodes of an override is 5; it must be a name or a list of names",
        ),
    ],
)
def test_wrong_overrides(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Override(**settings)
    assert message in str(error.value)


def test_an_override_says_where_it_applies() -> None:
    assert (
        Override("a*", op_types="Add", between=(("x", "y"), ("z",)), keep=True).where
        == "a*, Add, x,y .. z"
    )


def test_text_shows_the_specs_and_what_differs_from_the_default() -> None:
    config = QConfig.of("A8W8").with_(
        exclude=("head", "tail"),
        activation=None,
        overrides=(
            Override("a", keep=True),
            Override(op_types="Add", weight=QuantizationSpec("int4")),
        ),
        tensors=(
            TensorOverride("x", low=0, high=6),
            TensorOverride("y", dtype="int16"),
        ),
    )
    assert str(config) == (
        "activation: float\n"
        "weight: int8 symmetric per_channel narrow minmax\n"
        "overrides: a: float; Add: weight int4 symmetric minmax\n"
        "tensors: x: low (0.0,), high (6.0,); y: dtype int16\n"
        "exclude: head; tail"
    )


@pytest.mark.parametrize("name", ["cfg.json", "A8W8.txt", Path("A8W8")])
def test_a_file_that_is_no_yaml(name: str | Path) -> None:
    with pytest.raises(
        ConfigError, match=r"is neither a preset's name nor a .yaml or .yml file"
    ):
        QConfig.of(name)


#: Weights, and how a table is quantized by default: as they are, but with 8 bits at least.
TABLES = {
    "int4": "int8 symmetric per_channel narrow minmax",
    "int2": "int8 symmetric per_channel narrow minmax",
    "int8": "int8 symmetric minmax",
    "int16": "int16 symmetric minmax",
    "bfloat16": "bfloat16",
}


@pytest.mark.parametrize("dtype", TABLES)
def test_tables_have_eight_bits_at_least(dtype: str) -> None:
    config = QConfig(None, QuantizationSpec(dtype))
    assert str(config.table) == TABLES[dtype]
    blocks = QuantizationSpec("int4", block_size=32)
    assert config.with_(embedding=blocks).table == blocks
    assert config.with_(embedding=None).table is None
    assert config.with_(weight=None).table is None


def test_a_wrong_embedding() -> None:
    with pytest.raises(ConfigError, match="embedding is 'int5'"):
        QConfig(embedding="int5")
