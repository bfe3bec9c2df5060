"""A QConfig survives its dictionary and YAML forms; files that hold none are named."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import quark_onnx.rules  # noqa: F401  (the known operators)
from calibrators import CALIBRATORS, CalibrationError, Percentile
from quark_onnx import Override, QConfig, QuantizationSpec
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import DTYPES, OPTIMIZERS, PRESETS, RULES
from quark_onnx.config import TensorOverride, from_dict, load_yaml, to_dict, to_yaml
from quark_onnx.config.yaml_file import read_yaml
from quark_onnx.optimizers import AutoMixedPrecision
from tests.cases import loop_over

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
    base = QConfig.of("A8W8").with_(calibrator=Percentile(99.9), per_channel=True)
    assert base.activation is not None
    assert load_yaml(path) == base.with_(
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
        # Values that their tags do not fit.
        *(
            (b"safe: !!%s" % value, "is not valid YAML")
            for value in (b"bool maybe", b"timestamp 1", b"int ''", b"float x")
        ),
        (b"!!bool safe: true", "is not valid YAML"),
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


#: Values of the settings of optimizers and calibrators; those that are refused are left out.
VALUES: tuple[Any, ...] = (
    False,
    True,
    0,
    1,
    3,
    0.25,
    1e-7,
    50.0,
    99.5,
    np.float64(0.5),
    "auto",
    "all",
    "bound",
    "float",
    "8bit_weights",
    "depthwise",
    "cpu",
    "analytic",
    "keep",
    "head",
    "8",
    "true",
    "a,b=c",
    " head ",
    "",
    ("head",),
    ("/head/*", "re:^a,b"),
    ("1", "true"),
    QuantizationSpec("uint16", symmetric=False, calibrator="percentile:percentile=99"),
    QuantizationSpec("int4", block_size=32),
)


#: Settings that another setting needs.
TOGETHER: dict[str, dict[str, Any]] = {"sweeps": {"activations": False}}


def with_one_setting(cls: type[Any]) -> list[Any]:
    """Return objects with every accepted value of each setting."""
    objects = [cls()]
    for field in fields(cls):
        for value in VALUES:
            try:
                objects.append(
                    cls(**{field.name: value}, **TOGETHER.get(field.name, {}))
                )
            except (CalibrationError, ConfigError):
                continue
    return objects


def reread(config: QConfig, path: Path) -> QConfig:
    path.write_text(to_yaml(config), encoding="utf-8")
    return load_yaml(path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_optimizers_survive(name: str, tmp_path: Path) -> None:
    optimizers = with_one_setting(OPTIMIZERS[name])
    for field in fields(OPTIMIZERS[name]):
        values = [getattr(optimizer, field.name) for optimizer in optimizers]
        changed = any(value != field.default for value in values)
        # Functions have no text, see below.
        assert changed or field.name in ("metric", "distance"), field.name
    config = QConfig(optimizers=tuple(optimizers))
    assert reread(config, tmp_path / "config.yaml") == config


@pytest.mark.parametrize("name", CALIBRATORS)
def test_settings_of_calibrators_survive(name: str, tmp_path: Path) -> None:
    for calibrator in with_one_setting(CALIBRATORS[name]):
        config = QConfig().with_(calibrator=calibrator)
        assert reread(config, tmp_path / "config.yaml") == config


@loop_over("name", tuple(PRESETS))
def test_presets_survive(name: str, tmp_path: Path) -> None:
    assert reread(PRESETS[name], tmp_path / "config.yaml") == PRESETS[name]


def test_numbers_of_numpy_survive(tmp_path: Path) -> None:
    config = QConfig(min_sqnr=np.float64(20), tensors=(TensorOverride("x", axis=1),))
    assert reread(config, tmp_path / "config.yaml") == config


def test_keys_of_a_merged_mapping_may_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
        activation: &first {dtype: uint8, symmetric: false}
        weight: {<<: *first, dtype: int8, per_channel: true}
        overrides:
          - {op_types: Conv, activation: {<<: *first, symmetric: true}}
        """,
        encoding="utf-8",
    )
    config = load_yaml(path)
    assert config.weight is not None
    assert config.weight.dtype.name == "int8"
    assert not config.weight.symmetric
    assert config.overrides[0].activation is not None
    assert config.overrides[0].activation.symmetric


@pytest.mark.parametrize("text", ["{1: a, 0x1: b}", "{a: {<<: {}, b: 1, b: 2}}"])
def test_duplicate_keys_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is given twice"):
        read_yaml(path)


@pytest.mark.parametrize(
    "text", ["{[1]: a}", "{{b: 1}: a}", "{<<: 1}", "{? !!set 1: a}"]
)
def test_odd_keys_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_yaml(path)


class Key:
    """A key that counts its comparisons."""

    compared = 0

    def __init__(self, text: str) -> None:
        self.text = text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return isinstance(other, Key) and self.text == other.text


def test_each_key_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(f"key{index}: 1" for index in range(500)))
    monkeypatch.setattr(
        yaml.SafeLoader,
        "yaml_constructors",
        {
            **yaml.SafeLoader.yaml_constructors,
            "tag:yaml.org,2002:str": lambda loader, node: Key(node.value),
        },
    )
    assert len(read_yaml(path)) == 500
    # Keys with equal hashes are compared, which are few.
    assert Key.compared < 1000


@pytest.mark.slow
def test_an_override_of_each_tensor_of_a_large_model_survives(tmp_path: Path) -> None:
    config = QConfig(
        tensors=tuple(
            TensorOverride(f"/layer.{index}/Conv_output_0", low=-1, high=1)
            for index in range(4000)
        )
    )
    assert reread(config, tmp_path / "config.yaml") == config


def test_an_optimizer_as_a_mapping() -> None:
    settings = {
        "name": "auto_mixed_precision",
        "nodes": ["/head/*", "/neck/*"],
        "activation": {"dtype": "int16"},
    }
    expected = AutoMixedPrecision(
        nodes=("/head/*", "/neck/*"), activation=QuantizationSpec("int16")
    )
    assert from_dict({"optimizers": [settings]}).optimizers == (expected,)
    assert from_dict({"optimizers": settings}).optimizers == (expected,)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"nodes": ["a"]}, "an optimizer has no name"),
        ({"name": "cl"}, "unknown optimizer 'cl'; did you mean 'cle'?"),
        ({"name": 3}, "name of an optimizer is 3"),
        ({"name": "cle", "sweep": 1}, "CLE has no setting 'sweep'; did you mean"),
        (
            {"name": "auto_mixed_precision", "activation": 3},
            "activation of auto_mixed_precision is 3; it must be a QuantizationSpec",
        ),
    ],
)
def test_wrong_mappings_of_optimizers(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict({"optimizers": [optimizer]})
    assert message in str(error.value)


@dataclass(frozen=True)
class Unregistered:
    """An optimizer that no file can name."""

    name: ClassVar[str] = "unregistered"
    stage: ClassVar[str] = "float"


def measure(model: object) -> float:
    """Return a metric of a model."""
    return float(model is not None)


@pytest.mark.parametrize(
    "optimizer",
    [
        AutoMixedPrecision(metric=measure),
        AutoMixedPrecision(distance=partial(max, key=len)),
        Unregistered(),
    ],
)
def test_what_no_text_describes_is_refused(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=f"{optimizer.name}.* cannot be written"):
        to_yaml(QConfig(optimizers=(optimizer,)))


CHANGES: tuple[dict[str, Any], ...] = (
    {"activation": "int16"},
    {"activation": {"reduce_range": True}, "calibrator": "minmax"},
    {"weight": {"dtype": "int16", "per_channel": False}},
    {"weight": "int8", "per_channel": True},
    {"embedding": {"dtype": "int8"}},
    {"exclude": ["a"], "optimizers": "cle"},
    {"tensors": [{"tensors": "x", "low": 0, "high": 1}]},
    {"overrides": [{"nodes": "x", "weight": {"dtype": "int8"}}], "weight": "int16"},
    {"overrides": [{"nodes": "x", "activation": {"dtype": "int16"}}]},
    {"overrides": [{"nodes": "x", "activation": "uint8"}], "activation": None},
)


@loop_over("changes", CHANGES)
@loop_over("name", tuple(PRESETS))
def test_a_dictionary_changes_a_preset_as_with_does(
    name: str, changes: dict[str, Any]
) -> None:
    # Presets are shared values: neither they nor the dictionary may change.
    preset = to_yaml(PRESETS[name])
    given = deepcopy(changes)
    try:
        expected = PRESETS[name].with_(**changes)
    except ConfigError as error:
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            from_dict({"preset": name, **changes})
    else:
        assert from_dict({"preset": name, **changes}) == expected
        assert from_dict({"preset": PRESETS[name], **changes}) == expected
    assert to_yaml(PRESETS[name]) == preset
    assert changes == given


def test_overrides_change_the_specs_of_their_own_configuration() -> None:
    config = from_dict(
        {
            "activation": {"dtype": "int16", "symmetric": True},
            "calibrator": "entropy",
            "weight": {"reduce_range": True},
            "overrides": [
                {"nodes": "x", "activation": {"reduce_range": True}},
                {"nodes": "y", "weight": "int16"},
            ],
        }
    )
    assert config.activation is not None
    assert config.weight is not None
    first, second = config.overrides
    assert first.activation == config.activation.with_(reduce_range=True)
    assert second.weight == config.weight.with_(dtype="int16")
