"""Configurations of tensors in AMD Quark's spelling mean what they say, and what cannot be computed
is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from calibrators import MinMSE, Percentile
from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.quark_json import layer_to_json
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.quantization import (
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantizationConfig,
    QuantizationSpec,
)
from quark_onnx.torch.quantization.config import config
from quark_onnx.torch.quantization.config.type import Dtype, QSchemeType, ScaleType
from quark_onnx.torch.quantization.observer.observer import PerTensorMinMaxObserver
from tests.cases import loop_over

WEIGHTS = [
    ("Int8PerTensorSpec", {}, TensorSpec("int8")),
    ("Uint8PerTensorSpec", {}, TensorSpec("uint8", symmetric=False)),
    (
        "Int4PerTensorSpec",
        {"scale_type": "float32"},
        TensorSpec("int4", scale="float32"),
    ),
    ("Uint4PerTensorSpec", {}, TensorSpec("uint4", symmetric=False)),
    ("Int8PerTensorSpec", {"scale_type": "pof2"}, TensorSpec("int8", pow2=True)),
    (
        "Int8PerChannelSpec",
        {"ch_axis": 0},
        TensorSpec("int8", symmetric=False, per_channel=True),
    ),
    (
        "Int8PerChannelSpec",
        {"ch_axis": 0, "symmetric": True},
        TensorSpec("int8", per_channel=True),
    ),
    ("Uint8PerChannelSpec", {"ch_axis": 0}, TensorSpec("uint8", per_channel=True)),
    ("Int4PerChannelSpec", {"ch_axis": 0}, TensorSpec("int4", per_channel=True)),
    (
        "Uint4PerChannelSpec",
        {"ch_axis": 0},
        TensorSpec("uint4", symmetric=False, per_channel=True),
    ),
    (
        "Int3PerChannelSpec",
        {"ch_axis": 0},
        TensorSpec("int3", symmetric=False, per_channel=True),
    ),
    (
        "Int2PerGroupSpec",
        {"ch_axis": -1, "group_size": 32},
        TensorSpec("int2", block_size=32),
    ),
    (
        "Int3PerGroupSpec",
        {"ch_axis": -1, "group_size": 64},
        TensorSpec("int3", block_size=64),
    ),
    (
        "Int4PerGroupSpec",
        {"ch_axis": 1, "group_size": 128},
        TensorSpec("int4", block_size=128),
    ),
    (
        "Uint4PerGroupSpec",
        {"ch_axis": -1, "group_size": 32},
        TensorSpec("uint4", symmetric=False, block_size=32),
    ),
    (
        "Int8PerGroupSpec",
        {"ch_axis": -1, "group_size": 32},
        TensorSpec("int8", block_size=32),
    ),
    (
        "Uint8PerGroupSpec",
        {"ch_axis": -1, "group_size": 32},
        TensorSpec("uint8", symmetric=False, block_size=32),
    ),
    ("FP8E4M3PerTensorSpec", {}, TensorSpec("fp8e4m3")),
    ("FP8E5M2PerTensorSpec", {}, TensorSpec("fp8e5m2")),
    ("FP8E4M3PerChannelSpec", {"ch_axis": 0}, TensorSpec("fp8e4m3", per_channel=True)),
    ("FP8E5M2PerChannelSpec", {"ch_axis": 0}, TensorSpec("fp8e5m2", per_channel=True)),
    (
        "FP8E4M3PerGroupSpec",
        {"ch_axis": -1, "group_size": 128, "is_dynamic": False},
        TensorSpec("fp8e4m3", block_size=128),
    ),
    (
        "OCP_MXFP8E4M3Spec",
        {"ch_axis": -1, "is_dynamic": False},
        TensorSpec("mxfp8e4m3"),
    ),
    (
        "OCP_MXFP8E5M2Spec",
        {"ch_axis": -1, "is_dynamic": False},
        TensorSpec("mxfp8e5m2"),
    ),
    (
        "OCP_MXFP6E3M2Spec",
        {"ch_axis": -1, "is_dynamic": False},
        TensorSpec("mxfp6e3m2"),
    ),
    (
        "OCP_MXFP6E2M3Spec",
        {"ch_axis": -1, "is_dynamic": False},
        TensorSpec("mxfp6e2m3"),
    ),
    (
        "OCP_MXFP4Spec",
        {"ch_axis": -1, "is_dynamic": False, "scale_calculation_mode": "floor"},
        TensorSpec("mxfp4e2m1", exponent="floor"),
    ),
    ("OCP_MXINT8Spec", {"ch_axis": -1, "is_dynamic": False}, TensorSpec("mxint8")),
    ("MX6Spec", {"ch_axis": -1, "block_size": 16}, TensorSpec("mx6")),
    ("MX9Spec", {"ch_axis": -1, "block_size": 16}, TensorSpec("mx9")),
    ("BFP16Spec", {"ch_axis": -1}, TensorSpec("bfp16")),
    ("Float16Spec", {}, TensorSpec("float16")),
    ("Bfloat16Spec", {}, TensorSpec("bfloat16")),
]
INPUTS = [
    (
        "Int8PerTensorSpec",
        {"observer_method": "MSE"},
        TensorSpec("int8", calibrator=MinMSE()),
    ),
    (
        "Int8PerTensorSpec",
        {"observer_method": "histogram"},
        TensorSpec("int8", calibrator=MinMSE()),
    ),
    (
        "Int8PerTensorSpec",
        {"observer_method": "percentile"},
        TensorSpec("int8", calibrator=Percentile()),
    ),
    ("Int8PerTensorSpec", {"is_dynamic": True}, TensorSpec("int8", dynamic=True)),
    (
        "FP8E4M3PerChannelSpec",
        {"ch_axis": 1, "is_dynamic": True},
        TensorSpec("fp8e4m3", per_channel=True, dynamic=True),
    ),
    (
        "FP8E4M3PerGroupSpec",
        {"ch_axis": -1, "group_size": 128},
        TensorSpec("fp8e4m3", block_size=128, dynamic=True),
    ),
    ("OCP_MXFP4Spec", {"ch_axis": -1}, TensorSpec("mxfp4e2m1")),
    ("MX9Spec", {"ch_axis": -1, "block_size": 16}, TensorSpec("mx9")),
]


def made(name: str, settings: dict[str, Any]) -> Any:
    return getattr(config, name)(**settings).to_quantization_spec()


@loop_over(("name", "settings", "expected"), WEIGHTS)
def test_weights(name: str, settings: dict[str, Any], expected: TensorSpec) -> None:
    assert QLayerConfig(weight=made(name, settings)).spec() == LayerSpec(expected)


@pytest.mark.parametrize(("name", "settings", "expected"), INPUTS)
def test_activations(name: str, settings: dict[str, Any], expected: TensorSpec) -> None:
    spec = QLayerConfig(input_tensors=made(name, settings), output_tensors=None).spec()
    assert spec == LayerSpec(input=expected)


def test_two_stages_are_nvfp4() -> None:
    def stages(dynamic: bool) -> list[QTensorConfig]:
        first = config.FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=dynamic)
        return config.ScaleQuantSpec(
            first, config.FP8E4M3PerTensorSpec()
        ).to_quantization_spec()

    both = QLayerConfig(weight=stages(False), input_tensors=stages(True))
    assert both.spec() == LayerSpec(TensorSpec("nvfp4"), TensorSpec("nvfp4"))
    entry = both.to_dict()
    assert [each["is_dynamic"] for each in entry["input_tensors"]] == [
        True,
        False,
    ]  # vLLM asks for this
    assert [each["is_scale_quant"] for each in entry["weight"]] == [False, True]


def test_both_generations_of_names_are_the_same_classes() -> None:
    assert (
        config.Config is QConfig
        and QuantizationConfig is QLayerConfig
        and QuantizationSpec is QTensorConfig
    )


def test_enumerations_and_their_names_are_one() -> None:
    by_name = QTensorConfig(
        "int8", "PerTensorMinMaxObserver", False, "per_tensor", symmetric=True
    )
    assert by_name == QTensorConfig(
        Dtype.int8,
        PerTensorMinMaxObserver,
        False,
        QSchemeType.per_tensor,
        symmetric=True,
    )
    by_name.scale_type = "float32"
    assert by_name.scale_type is ScaleType.float32


def test_group_size_can_be_changed() -> None:
    spec = made("Int4PerGroupSpec", {"ch_axis": -1, "group_size": 128})
    spec.set_group_size(32)
    assert spec.spec() == TensorSpec("int4", block_size=32)
    with pytest.raises(
        ConfigError, match="qscheme is per_tensor; only per_group has groups"
    ):
        made("Int8PerTensorSpec", {}).set_group_size(32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QTensorConfig("int88"), "dtype is 'int88'; did you mean 'int8'"),
        (lambda: QTensorConfig("int8", "PerTensorMinMax"), "did you mean 'PerTensorMinMaxObserver'"),  # noqa: E501
        (lambda: QTensorConfig("int8", dynamic=True), "no setting 'dynamic'; did you mean 'is_dynamic'"),  # noqa: E501
        (lambda: Int8PerTensorSpec(symetric=True), "no setting 'symetric'; did you mean 'symmetric'"),  # noqa: E501
        (lambda: QConfig(QLayerConfig(), exlude=["lm_head"]), "no setting 'exlude'; did you mean 'exclude'"),  # noqa: E501
        (lambda: setattr(QLayerConfig(), "weights", None), "no setting 'weights'; did you mean 'weight'"),  # noqa: E501
        (lambda: made("Int8PerTensorSpec", {"observer_method": "mse"}), "observer_method is 'mse'; .*MSE"),  # noqa: E501
    ],
)  # fmt: skip
def test_misspelt_names(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("field", "name", "settings", "message"),
    [
        ("weight", "Int8PerTensorSpec", {"round_method": "floor"}, "round_method is 'floor', which is not supported"),  # noqa: E501
        ("weight", "Int8PerTensorSpec", {"observer_method": "percentile"}, "range of a weight is that of its values"),  # noqa: E501
        ("weight", "Int8PerTensorSpec", {"symmetric": None}, "symmetric is None; for int8 it must be True or False"),  # noqa: E501
        ("weight", "FP8E5M2PerTensorSpec", {"symmetric": False}, "fp8e5m2 has no zero point"),
        ("weight", "Int8PerTensorSpec", {"scale_type": "float8_e8m0fnu"}, "scales of type 'float8_e8m0fnu'"),  # noqa: E501
        ("weight", "Int8PerChannelSpec", {"ch_axis": 1}, "ch_axis is 1; for per_channel it must be 0"),  # noqa: E501
        ("weight", "Int4PerGroupSpec", {"ch_axis": 0, "group_size": 32}, "ch_axis is 0; .* -1 or 1"),  # noqa: E501
        ("weight", "Uint4PerChannelSpec", {"ch_axis": 0, "zero_point_type": "float32"}, "zero points are integers"),  # noqa: E501
        ("weight", "MX6Spec", {"ch_axis": -1, "block_size": 32}, "blocks of 32; those of mx6 have 16"),  # noqa: E501
        ("weight", "AmdFP4Spec", {"ch_axis": -1, "group_size": 64}, "those with scales in E5M3 have 16 or 32"),  # noqa: E501
        ("weight", "FP8E5M3PerTensorSpec", {}, "unknown number format 'fp8_e5m3'"),
        ("weight", "FP4PerGroupSpec", {"ch_axis": -1, "group_size": 16}, "or in two stages"),
        ("input_tensors", "OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": False}, "are computed by each run"),  # noqa: E501
        ("input_tensors", "Int8PerChannelSpec", {"ch_axis": 0, "is_dynamic": True}, "must be 1 or -2"),  # noqa: E501
        ("input_tensors", "Int8PerTensorSpec", {"observer_method": "MSE", "is_dynamic": True}, "is_dynamic is set"),  # noqa: E501
        ("input_tensors", "FP8E4M3PerChannelSpec", {"ch_axis": 1}, "one scale for each token"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed(
    field: str, name: str, settings: dict[str, Any], message: str
) -> None:
    layer = QLayerConfig(**{field: made(name, settings)})
    with pytest.raises(ConfigError, match=message):
        layer.spec()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qat_spec": config.TQTSpec()}, "training is not done"),
        ({"block_size": [128, 128]}, "blocks of two axes"),
        (
            {"qscheme": "per_channel"},
            "qscheme is per_channel, but PerTensorMinMaxObserver is for per_tensor",
        ),
        ({"qscheme": "per_group", "observer_cls": None}, "there is no group_size"),
        ({"group_size": 32}, "group_size is 32, but qscheme is per_tensor"),
    ],
)
def test_what_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    spec = made("Int8PerTensorSpec", {})
    for name, value in changes.items():
        setattr(spec, name, value)
    with pytest.raises(ConfigError, match=message):
        spec.spec()


def test_two_stages_of_codes_are_not_computed() -> None:
    stages = config.ProgressiveSpec(
        Int8PerTensorSpec(), config.Int4PerChannelSpec(ch_axis=0)
    ).to_quantization_spec()
    with pytest.raises(ConfigError, match=r"stages \['int8', 'int4'\]"):
        QLayerConfig(weight=stages).spec()


def test_fp8_and_then_int4_are_two_factors_of_scales() -> None:
    spec = config.ProgressiveSpec(
        config.FP8E4M3PerTensorSpec(scale_type="float32"),
        config.Int4PerChannelSpec(ch_axis=0, scale_type="float32"),
    ).to_quantization_spec()
    read = config.FP8E4M3PerTensorSpec(
        scale_type="float32", is_dynamic=True
    ).to_quantization_spec()
    assert QLayerConfig(weight=spec, input_tensors=read).spec() == scheme("int4_fp8")


@pytest.mark.parametrize(("size", "name"), [(16, "amdfp4"), (32, "amdfp4_g32")])
def test_fp4_with_float_scales(size: int, name: str) -> None:
    weight, read = (
        config.AmdFP4Spec(
            ch_axis=-1, group_size=size, is_dynamic=dynamic
        ).to_quantization_spec()
        for dynamic in (False, True)
    )
    assert QLayerConfig(weight=weight, input_tensors=read).spec() == scheme(name)


def test_a_helper_is_no_config() -> None:
    with pytest.raises(ConfigError, match="to_quantization_spec"):
        QLayerConfig(weight=Int8PerTensorSpec()).spec()


GOLDEN = {
    "int8": {
        "weight": ("Int8PerTensorSpec", {}),
        "input_tensors": ("Int8PerTensorSpec", {}),
    },
    "int4_wo_128": {"weight": ("Int4PerGroupSpec", {"ch_axis": -1, "group_size": 128})},
    "uint4_wo_128": {
        "weight": ("Uint4PerGroupSpec", {"ch_axis": -1, "group_size": 128})
    },
    "mxfp4_weight_only": {
        "weight": ("OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": False})
    },
    "fp8": {
        "weight": ("FP8E4M3PerTensorSpec", {"scale_type": "float"}),
        "input_tensors": ("FP8E4M3PerTensorSpec", {"scale_type": "float"}),
    },
}


@pytest.mark.realdata
@pytest.mark.parametrize("name", GOLDEN)
def test_checkpoints_say_what_those_of_amd_quark_say(golden: Path, name: str) -> None:
    layer = QLayerConfig(**{field: made(*each) for field, each in GOLDEN[name].items()})
    found = json.loads((golden / name / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    assert layer.to_dict() == found["global_quant_config"]
    assert (
        layer.weight is not None
        and layer.weight.to_dict() == found["global_quant_config"]["weight"]
    )
    ours = QConfig(layer, exclude=["lm_head"]).to_dict()
    assert ours == {key: value for key, value in found.items() if key != "export"}


def test_a_rule_that_amd_quark_does_not_know() -> None:
    """Codes of weights say nothing of the rule; of inputs, each run would have to know it."""
    weight = TensorSpec("mxfp4e2m1", exponent="best")
    entry = layer_to_json(LayerSpec(weight, TensorSpec("mxfp4e2m1", exponent="ceil")))
    assert entry["weight"]["scale_calculation_mode"] == "even"
    assert entry["input_tensors"]["scale_calculation_mode"] == "ceil"
    with pytest.raises(
        ConfigError,
        match=(
            "exponent is 'rceil'; each run computes it, and AMD Quark knows even, floor"
        ),
    ):
        layer_to_json(LayerSpec(weight, TensorSpec("mxfp4e2m1", exponent="rceil")))
    with pytest.raises(
        ConfigError,
        match="input: exponent is 'best'; each run computes it, by one rule",
    ):
        LayerSpec(weight, weight)
