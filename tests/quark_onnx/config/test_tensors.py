"""Overrides of single tensors: what may be written, and how several of them are merged."""

from __future__ import annotations

import fnmatch
import math
from fnmatch import fnmatchcase
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_onnx import QConfig, QuantizationSpec, TensorOverride
from quark_onnx.common.errors import ConfigError
from quark_onnx.config import TensorOverrides, from_dict, to_dict


def test_what_is_written_becomes_tuples() -> None:
    found = TensorOverride(
        "x", dtype="uint16", scale=[0.5, 0.25], zero_point=3, readers="conv"
    )
    assert (found.tensors, found.readers, found.scale, found.zero_point) == (
        ("x",),
        ("conv",),
        (0.5, 0.25),
        (3,),
    )
    assert found.dtype is not None and found.dtype.name == "uint16"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensors": ()}, "an override of tensors names none"),
        ({"tensors": 5}, "it must be a name or a list of names"),
        ({"dtype": "int7"}, "unknown number format 'int7'"),
        ({"dtype": 7}, "dtype of the override of tensor x is 7"),
        ({"scale": 1.0}, "has a scale or a zero_point; both belong together"),
        ({"scale": 0.0, "zero_point": 0}, "it must be greater than 0"),
        ({"scale": 1.0, "zero_point": 0.5}, "it must be a whole number"),
        (
            {"scale": 1.0, "zero_point": 0, "high": 1.0},
            "has a scale, and high, from which a scale would follow",
        ),
        (
            {"scale": 1.0, "zero_point": 0, "symmetric": True},
            "has a scale, and symmetric",
        ),
        ({"low": "a"}, "low of the override of tensor x is 'a'"),
        ({"axis": 0.5}, "axis of the override of tensor x is 0.5"),
        ({"min_range": -1}, "min_range of the override of tensor x is -1"),
        ({"min_range": math.inf}, "min_range of the override of tensor x is inf"),
        ({"low": math.nan}, "low of the override of tensor x is (nan,)"),
        ({"high": [1, math.inf]}, "high of the override of tensor x is (1.0, inf)"),
        (
            {"low": [-1, 5], "high": 3},
            "low of the override of tensor x is (-1.0, 5.0), above high (3.0,)",
        ),
        ({"stored": "yes"}, "stored of the override of tensor x is 'yes'"),
        ({"symmetric": "yes"}, "symmetric of the override of tensor x is 'yes'"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TensorOverride(**({"tensors": "x"} | settings))
    assert message in str(error.value)


def test_a_later_one_changes_what_it_speaks_of() -> None:
    found = TensorOverrides(
        [TensorOverride("*", min_range=0.1), TensorOverride("h*", dtype="int16")]
    )
    first, second = found.of("x"), found.of("head")
    assert first is not None and (first.dtype, first.min_range) == (None, 0.1)
    assert second is not None and second.dtype is not None and second.min_range == 0.1


@pytest.mark.parametrize("other", [{"low": -1, "high": 1}, {"symmetric": True}])
def test_a_later_scale_replaces_what_a_scale_follows_from(
    other: dict[str, Any],
) -> None:
    scale = TensorOverride("x", scale=0.1, zero_point=3)
    ends = TensorOverride("*", **other)
    assert ends.merged(scale).scale == (0.1,)
    assert not ends.merged(scale).ranged and ends.merged(scale).symmetric is None
    assert not scale.merged(ends).scale and not scale.merged(ends).zero_point


def test_readers_are_meant_alone() -> None:
    found = TensorOverrides([TensorOverride("x", readers=["conv"], dtype="int16")])
    assert found.of("x", "conv") is not None
    assert found.of("x", "add") is None and found.of("x") is None


def test_specs_are_changed_where_something_is_said() -> None:
    spec = QuantizationSpec("uint8", symmetric=False)
    assert TensorOverride("x", symmetric=True).applied(spec) == spec.with_(
        symmetric=True
    )
    with pytest.raises(
        ConfigError, match="has a scale or a range, which bfloat16 does not have"
    ):
        TensorOverride("x", scale=1.0, zero_point=0, dtype="bfloat16").applied(spec)


def test_they_are_read_back_from_what_is_written() -> None:
    config = QConfig(
        tensors=(TensorOverride("x", scale=0.5, zero_point=1, dtype="uint8"),),
        movers=True,
        contrib=True,
    )
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ConfigError, match="TensorOverride has no setting 'tensor'"):
        from_dict({"tensors": [{"tensor": "x"}]})
    with pytest.raises(ConfigError, match="an override of tensors names none"):
        from_dict({"tensors": [{"scale": 1.0}]})


PATTERN = st.text("ab*?[]", min_size=1, max_size=3)


@given(
    st.lists(
        st.builds(
            TensorOverride,
            st.lists(PATTERN, min_size=1, max_size=2),
            readers=st.sampled_from(["", "conv"]).map(
                lambda name: [name][: bool(name)]
            ),
            low=st.integers(-9, -1),
        ),
        max_size=5,
    ),
    st.text("ab[]", min_size=1, max_size=3),
    st.sampled_from(["", "conv", "add"]),
)
def test_those_that_match_are_merged_in_order(
    overrides: list[TensorOverride], tensor: str, reader: str
) -> None:
    expected: TensorOverride | None = None
    for override in overrides:
        if override.readers and reader not in override.readers:
            continue
        if any(
            tensor == each or fnmatchcase(tensor, each) for each in override.tensors
        ):
            expected = expected.merged(override) if expected else override
    assert TensorOverrides(overrides).of(tensor, reader) == expected


def test_names_are_looked_up_and_not_compared_with_every_override(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"/layer.{index}/Conv_output_0" for index in range(200)]
    overrides = TensorOverrides(
        [TensorOverride(name, low=-1) for name in (*names, "*")]
    )
    matches = Mock(wraps=fnmatchcase)
    monkeypatch.setattr(fnmatch, "fnmatchcase", matches)
    assert all(overrides.of(name) for name in names)
    assert matches.call_count <= len(names)
