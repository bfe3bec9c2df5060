"""Every extra option with an effect names itself in the error about a wrong value."""

from __future__ import annotations

import pytest

from quark_onnx.common.errors import ConfigError
from quark_onnx.onnx import ModelQuantizer, QuantizationConfig
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.options import ROWS, apply_options
from tests.cases import loop_over
from tests.models import parse

OBEYED = [row.name for row in ROWS if row.apply is not None]
NO_MATMUL = parse("g (float[2,8] x) => (float[2,8] y) { [act] y = Relu (x) }")


def draft() -> Draft:
    """Return the draft of a configuration without options."""
    # Algorithms are compared by identity: without CLE there are none.
    return QuantizationConfig(include_cle=False).draft()


@loop_over("name", OBEYED)
@loop_over("value", [float("nan"), -2.5, [float("inf")], object()])
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^extra option {name} is .*; it must be "):
        apply_options(draft(), {name: object() if _fits(name, value) else value})


def _fits(name: str, value: object) -> bool:
    # Thresholds of CLE may be negative, and lists of pairs are checked entry by entry.
    negative = name in ("CLEWeightThreshold", "CLETotalLayerDiffThreshold")
    return (negative and value == -2.5) or (
        name == "SubgraphsToExclude" and isinstance(value, list)
    )


@loop_over("name", OBEYED)
def test_none_is_not_set(name: str) -> None:
    changed = draft()
    apply_options(changed, {name: None})
    assert changed == draft()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SubgraphsToExclude", [3]),
        ("FastFinetune", {"OptimAlgorithm": "junk"}),
        ("FixShapes", "junk"),
        ("Percentile", 200.0),
        ("CalibDataSize", 0),
        ("RandomDataReaderInputShape", {"x": "junk"}),
        ("WeightCalibrateMethod", "junk"),
        ("MixedPrecisionTensor", {"QInt8": 1}),
        ("ActivationSymmetric", "False"),
    ],
)
def test_values_inside_are_named(name: str, value: object) -> None:
    config = QuantizationConfig(calibrate_method="Percentile")
    with pytest.raises(ConfigError, match=f"extra option {name}"):
        apply_options(config.draft(), {name: value})


def test_a_single_name_is_a_list_of_one() -> None:
    changed = draft()
    apply_options(changed, {"InputNodes": "act", "OpTypesToQuantize": "Relu"})
    assert changed.input_nodes == ["act"]
    assert changed.op_types == ("Relu",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"UseMatMulNBits": True}, "UseMatMulNBits.*nothing would be quantized"),
        (
            {"NodesToQuantize": ["junk"]},
            "nodes_to_quantize.*nothing would be quantized",
        ),
        ({"InputNodes": ["junk"]}, "input_nodes: no node"),
    ],
)
def test_choices_without_a_match(options: dict[str, object], message: str) -> None:
    config = QuantizationConfig(extra_options={"UseRandomData": True, **options})
    with pytest.raises(ConfigError, match=message):
        ModelQuantizer(config).quantize_model(NO_MATMUL)
