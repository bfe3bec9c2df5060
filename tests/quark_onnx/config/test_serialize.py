"""A QConfig survives its dictionary and YAML forms; files that hold none are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import quark_onnx.rules  # noqa: F401  (the known operators)
from calibrators import CALIBRATORS, Percentile
from quark_onnx import Override, QConfig, QuantizationSpec
from quark_onnx.config import from_dict, load_yaml, to_dict, to_yaml
from quark_onnx.errors import ConfigError
from quark_onnx.registry import DTYPES, RULES

CALIBRATOR = st.sampled_from(sorted(CALIBRATORS)).map(
    lambda name: CALIBRATORS[name]()
) | st.floats(50, 100).map(Percentile)
SPEC = st.builds(
    QuantizationSpec,
    st.sampled_from([DTYPES[name] for name in DTYPES if DTYPES[name].bits > 2]),
    symmetric=st.booleans(),
    pow2=st.booleans(),
    narrow=st.booleans(),
    reduce_range=st.booleans(),
    calibrator=CALIBRATOR,
)
WEIGHT = st.builds(QuantizationSpec.with_, SPEC, per_channel=st.booleans())
NAMES = st.lists(st.text(min_size=1), max_size=2).map(tuple)
SOME_NAMES = st.lists(st.text(min_size=1), min_size=1, max_size=2).map(tuple)
TYPES = st.lists(st.sampled_from(sorted(RULES)), max_size=2).map(tuple)
OVERRIDE = st.builds(
    Override,
    SOME_NAMES,
    op_types=TYPES,
    between=st.just(()) | st.tuples(NAMES, NAMES),
    weight=WEIGHT,
)
CONFIG = st.builds(
    QConfig,
    st.none() | SPEC,
    st.none() | WEIGHT,
    bias=st.booleans(),
    overrides=st.lists(
        OVERRIDE | st.builds(Override, SOME_NAMES, keep=st.just(True)), max_size=2
    ).map(tuple),
    op_types=TYPES,
    nodes=NAMES,
    exclude=NAMES,
    safe=st.booleans(),
    search=st.integers(0, 9),
    prepare=st.booleans(),
    min_sqnr=st.none() | st.floats(-100, 100),
)


@given(CONFIG)
def test_a_config_survives_its_dictionary(config: QConfig) -> None:
    assert from_dict(to_dict(config)) == config


@given(CONFIG)
def test_a_config_survives_yaml(config: QConfig) -> None:
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
        preset: A8W8
        calibrator: percentile:percentile=99.9
        per_channel: true
        overrides:
          - {nodes: "/head/*", keep: true}
          - {op_types: [Softmax], activation: uint16}
          - {between: [[x], [y]], activation: {dtype: int8, symmetric: true}}
        """,
        encoding="utf-8",
    )
    base = QConfig.of("A8W8")
    assert base.activation is not None
    assert load_yaml(path) == base.with_(
        calibrator=Percentile(99.9),
        per_channel=True,
        overrides=(
            Override("/head/*", keep=True),
            Override(
                op_types=("Softmax",), activation=base.activation.with_(dtype="uint16")
            ),
            Override(
                between=(("x",), ("y",)),
                activation=base.activation.with_(dtype="int8", symmetric=True),
            ),
        ),
    )


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert load_yaml(tmp_path / "empty.yaml") == QConfig.of("A8W8")


def test_none_leaves_float() -> None:
    assert from_dict({"activation": None}).activation is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"exclud": []}, "QConfig has no setting 'exclud'; did you mean 'exclude'?"),
        ({"preset": "XINT9"}, "unknown preset 'XINT9'; did you mean 'XINT8'?"),
        (
            {"weight": {"dtyp": "int8"}},
            "QuantizationSpec has no setting 'dtyp'; did you mean 'dtype'?",
        ),
        ({"weight": 3}, "weight is 3; it must be a mapping of settings"),
        ({"overrides": "x"}, "overrides is 'x'; it must be a list"),
        ({"overrides": ["x"]}, "an override is 'x'; it must be a mapping of settings"),
        (
            {"overrides": [{"node": "x"}]},
            "Override has no setting 'node'; did you mean 'nodes'?",
        ),
        ([1], "the config is [1]; it must be a mapping of settings"),
    ],
)
def test_wrong_dictionaries(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(data)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is not valid YAML: while parsing"),
        (b"\xff\xfe\xfa", "is not valid YAML"),
        (b"- 1", "the config is [1]; it must be a mapping"),
        (b"preset: A8W7", "unknown preset 'A8W7'; did you mean"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    assert str(error.value).startswith(f"config file {path}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "auto"),
        (None, None),
        ("int8", QuantizationSpec("int8")),
        ({"dtype": "int4", "block_size": 32}, QuantizationSpec("int4", block_size=32)),
    ],
)
def test_embeddings(given: object, expected: object) -> None:
    config = from_dict({"preset": "INT4", "embedding": given})
    assert config.embedding == expected
    assert from_dict(to_dict(config)) == config
