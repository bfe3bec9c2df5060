"""Scripts written for AMD Quark for ONNX run when the name of the package is replaced, as
accurately as native calls.

Each script is a function of the path of a model, the path of the result and a data reader. It
imports as the scripts do; its docstring says which public kind of script it is. The native
configuration beside it asks for the same, and the result must be within 0.5 dB of that one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from calibrators import LayerwisePercentile, MinMax, MinMSE, NonOverflow, Percentile
from calibrators.readers.open import RandomData
from quark_onnx import (
    CLE,
    GPTQ,
    AdaQuant,
    AdaRound,
    BiasCorrection,
    Override,
    QuantizationSpec,
    QuaRot,
    SmoothQuant,
)
from quark_onnx import QConfig as Native
from quark_onnx.analysis import compare
from quark_onnx.api import quantize
from tests.models import normal
from tests.quark_onnx.amd_quark.networks import (
    Reader,
    classifier,
    detector,
    transformer,
)

Script = Callable[[str, str, Any], None]

POW2 = QuantizationSpec("int8", pow2=True, calibrator=MinMSE())
XINT8 = Native.of("XINT8").with_(target="npu", fix_sizes=False)
INT8 = QuantizationSpec("int8", calibrator=Percentile())
WEIGHT = QuantizationSpec("int8", narrow=True)
A8W8 = Native(INT8, WEIGHT)
A16W8 = Native(INT8.with_(dtype="int16"), WEIGHT)


def getting_started(model: str, output: str, reader: Any) -> None:
    """The first page: a preset, a ModelQuantizer, a data reader."""
    from quark_onnx.onnx import ModelQuantizer
    from quark_onnx.onnx.quantization.config import Config, get_default_config

    quant_config = get_default_config("XINT8")
    config = Config(global_quant_config=quant_config)
    ModelQuantizer(config).quantize_model(model, output, reader)


def getting_started_today(model: str, output: str, reader: Any) -> None:
    """The same with the newer configuration."""
    from quark_onnx.onnx import ModelQuantizer, QConfig, QLayerConfig, XInt8Spec

    config = QConfig(QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()))
    ModelQuantizer(config).quantize_model(model, output, reader)


def hello_world(model: str, output: str, reader: Any) -> None:
    """Random data, as there is no other."""
    from quark_onnx.onnx import ModelQuantizer, QConfig, QLayerConfig, XInt8Spec

    config = QConfig(
        QLayerConfig(activation=XInt8Spec(), weight=XInt8Spec()),
        extra_options={"UseRandomData": True},
    )
    ModelQuantizer(config).quantize_model(
        model_input=model, model_output=output, calibration_data_reader=None
    )


def a8w8(model: str, output: str, reader: Any) -> None:
    """Float scales on both sides."""
    from quark_onnx.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig

    config = QConfig(
        global_config=QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def a8w8_per_channel(model: str, output: str, reader: Any) -> None:
    """A scale for each channel of a weight, and extremes as ranges."""
    from quark_onnx.onnx import (
        CalibMethod,
        Int8Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
        QuantGranularity,
    )

    activation, weight = Int8Spec(), Int8Spec()
    activation.set_calibration_method(CalibMethod.MinMax)
    weight.set_quant_granularity(QuantGranularity.Channel)
    ModelQuantizer(QConfig(QLayerConfig(activation, weight=weight))).quantize_model(
        model, output, reader
    )


def a16w8(model: str, output: str, reader: Any) -> None:
    """16-bit activations."""
    from quark_onnx.onnx import (
        Int8Spec,
        Int16Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
    )

    config = QConfig(QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec()))
    ModelQuantizer(config).quantize_model(model, output, reader)


def non_overflow(model: str, output: str, reader: Any) -> None:
    """Power-of-two scales that hold the extremes."""
    from quark_onnx.onnx import (
        CalibMethod,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
        XInt8Spec,
    )

    spec = XInt8Spec(calibration_method=CalibMethod.MinMax)
    ModelQuantizer(QConfig(QLayerConfig(spec, weight=spec))).quantize_model(
        model, output, reader
    )


def yolo_with_a_subgraph_excluded(model: str, output: str, reader: Any) -> None:
    """The decoding of a detector stays float by its first and last nodes."""
    from quark_onnx.onnx import ModelQuantizer, QConfig, QLayerConfig, XInt8Spec

    config = QConfig(
        global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
        exclude=[(["flat"], ["decode2"])],
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def yolo_with_names_excluded(model: str, output: str, reader: Any) -> None:
    """The same by a regular expression and a name, and one that the model does not have."""
    from quark_onnx.onnx import ModelQuantizer, QConfig, QLayerConfig, XInt8Spec

    config = QConfig(
        global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
        exclude=["^decode.*", "flat", "/model.22/dfl/Reshape"],
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def cle_and_adaround(model: str, output: str, reader: Any) -> None:
    """Equalization, then fine-tuning."""
    from quark_onnx.onnx import (
        AdaRoundConfig,
        CLEConfig,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
        XInt8Spec,
    )

    config = QConfig(
        QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
        algo_config=[
            CLEConfig(cle_steps=2),
            AdaRoundConfig(num_iterations=50, learning_rate=0.1),
        ],
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def fast_finetune(model: str, output: str, reader: Any) -> None:
    """Fine-tuning by the options of the older configuration."""
    from quark_onnx.onnx import ModelQuantizer
    from quark_onnx.onnx.quantization.config import Config, get_default_config

    quant_config = get_default_config("XINT8_ADAQUANT")
    quant_config.include_cle = False
    quant_config.extra_options["FastFinetune"]["NumIterations"] = 60
    ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(
        model, output, reader
    )


def algorithms_apart(model: str, output: str, reader: Any) -> None:
    """Algorithms as an argument of quantize_model, as in release 0.9."""
    from quark_onnx.onnx import CLEConfig, ModelQuantizer, QuantizationConfig, QuantType
    from quark_onnx.onnx.quantization.config import Config

    config = QuantizationConfig(
        activation_type=QuantType.QInt8, include_cle=False, per_channel=True
    )
    ModelQuantizer(Config(config)).quantize_model(
        model, output, reader, algorithms=[CLEConfig()]
    )


def layerwise_percentile(model: str, output: str, reader: Any) -> None:
    """A percentile for each tensor."""
    from quark_onnx.onnx import (
        CalibMethod,
        Int8Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
    )

    activation = Int8Spec(calibration_method=CalibMethod.LayerwisePercentile)
    config = QConfig(
        QLayerConfig(activation, weight=Int8Spec()),
        extra_options={"LWPMetric": "mae", "PercentileCandidates": [99.0, 99.9, 100.0]},
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def bfp16(model: str, output: str, reader: Any) -> None:
    """Block floating point."""
    from quark_onnx.onnx import BFP16Spec, ModelQuantizer, QConfig, QLayerConfig

    config = QConfig(QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec()))
    ModelQuantizer(config).quantize_model(model, output, reader)


def microscaling(model: str, output: str, reader: Any) -> None:
    """A microscaling format by the older configuration."""
    from quark_onnx.onnx import (
        ExtendedQuantFormat,
        ExtendedQuantType,
        ModelQuantizer,
        QuantizationConfig,
    )
    from quark_onnx.onnx.quantization.config.config import Config

    config = QuantizationConfig(
        quant_format=ExtendedQuantFormat.QDQ,
        activation_type=ExtendedQuantType.QMX,
        weight_type=ExtendedQuantType.QMX,
        include_cle=False,
        extra_options={
            "MXAttributes": {
                "element_dtype": "fp8_e4m3",
                "axis": 1,
                "block_size": 32,
                "rounding_mode": 2,
            }
        },
    )
    ModelQuantizer(Config(global_quant_config=config)).quantize_model(
        model, output, reader
    )


def bf16(model: str, output: str, reader: Any) -> None:
    """bfloat16, which needs no data."""
    from quark_onnx.onnx import BF16_QCONFIG, ModelQuantizer

    ModelQuantizer(BF16_QCONFIG).quantize_model(model, output, reader)


def smooth_quant(model: str, output: str, reader: Any) -> None:
    """SmoothQuant on a transformer."""
    from quark_onnx.onnx import (
        Int8Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
        SmoothQuantConfig,
    )

    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
        algo_config=[SmoothQuantConfig(alpha=0.6)],
        extra_options={
            "OpTypesToQuantize": ["MatMul", "Gemm"],
            "MatMulConstBOnly": True,
        },
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def quarot(model: str, output: str, reader: Any) -> None:
    """Rotation of the residual stream."""
    from quark_onnx.onnx import (
        Int8Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
        QuarotConfig,
    )

    config = QConfig(
        QLayerConfig(Int8Spec(), weight=Int8Spec()),
        algo_config=[QuarotConfig(r_matrix_dim=64)],
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def gptq(model: str, output: str, reader: Any) -> None:
    """GPTQ."""
    from quark_onnx.onnx import (
        GPTQConfig,
        Int8Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
    )

    config = QConfig(
        QLayerConfig(Int8Spec(), weight=Int8Spec()),
        algo_config=[GPTQConfig(act_order=True)],
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def bias_correction(model: str, output: str, reader: Any) -> None:
    """Bias correction."""
    from quark_onnx.onnx import (
        BiasCorrectionConfig,
        Int8Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
    )

    config = QConfig(
        QLayerConfig(Int8Spec(), weight=Int8Spec()),
        algo_config=[BiasCorrectionConfig()],
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def matmul_nbits(model: str, output: str, reader: Any) -> None:
    """Weight-only MatMul of 4 bits, as for language models."""
    from quark_onnx.onnx import ModelQuantizer
    from quark_onnx.onnx.quantization.config import Config, get_default_config

    config = get_default_config("MATMUL_NBITS")
    config.extra_options["MatMulNBitsParams"]["GroupSize"] = 32
    ModelQuantizer(Config(global_quant_config=config)).quantize_model(
        model, output, None
    )


def dynamic(model: str, output: str, reader: Any) -> None:
    """Dynamic quantization, as for OPT."""
    from quark_onnx.onnx import ModelQuantizer
    from quark_onnx.onnx.quantization.config import Config, get_default_config

    ModelQuantizer(Config(get_default_config("UINT8_DYNAMIC_QUANT"))).quantize_model(
        model, output, None
    )


def mixed_by_layer(model: str, output: str, reader: Any) -> None:
    """16 bits for a named layer and for an operator type, one type float."""
    from quark_onnx.onnx import (
        Int8Spec,
        Int16Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
    )

    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())
    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
        specific_layer_config={wide: ["conv2"]},
        layer_type_config={None: ["GlobalAveragePool"]},
    )
    ModelQuantizer(config).quantize_model(model, output, reader)


def quantize_static_call(model: str, output: str, reader: Any) -> None:
    """The function, with onnxruntime's names and AMD's methods."""
    from onnxruntime.quantization import QuantFormat, QuantType

    from quark_onnx.onnx import PowerOfTwoMethod, quantize_static

    quantize_static(
        model,
        output,
        reader,
        quant_format=QuantFormat.QDQ,
        calibrate_method=PowerOfTwoMethod.MinMSE,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        enable_npu_cnn=True,
        include_cle=False,
        extra_options={"ActivationSymmetric": True},
    )


def vai_q(model: str, output: str, reader: Any) -> None:
    """The module of release 0.8 and before."""
    import quark_onnx.vai_q_onnx as vai_q_onnx

    vai_q_onnx.quantize_static(
        model,
        output,
        reader,
        quant_format=vai_q_onnx.QuantFormat.QDQ,
        calibrate_method=vai_q_onnx.PowerOfTwoMethod.MinMSE,
        activation_type=vai_q_onnx.QuantType.QUInt8,
        weight_type=vai_q_onnx.QuantType.QInt8,
        enable_ipu_cnn=True,
        include_cle=False,
        extra_options={"ActivationSymmetric": True},
    )


def data_path(model: str, output: str, reader: Any) -> None:
    """Calibration data as files."""
    from quark_onnx.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig

    folder = Path(output).parent / "calibration"
    folder.mkdir()
    for index, sample in enumerate(reader.samples):
        np.save(folder / f"{index:02}.npy", sample["x"])
    config = QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()))
    ModelQuantizer(config).quantize_model(
        model, output, calibration_data_path=str(folder)
    )


CASES: list[tuple[Script, Callable[[], ModelProto], Native, str]] = [
    (getting_started, classifier, XINT8.with_(optimizers=(CLE(),)), "data"),
    (getting_started_today, classifier, XINT8, "data"),
    (hello_world, classifier, XINT8, "random"),
    (a8w8, classifier, A8W8, "data"),
    (
        a8w8_per_channel,
        classifier,
        A8W8.with_(calibrator=MinMax(), per_channel=True),
        "data",
    ),
    (a16w8, classifier, A16W8, "data"),
    (
        non_overflow,
        classifier,
        XINT8.with_(
            activation=POW2.with_(calibrator=NonOverflow()),
            weight=POW2.with_(calibrator=NonOverflow()),
        ),
        "data",
    ),
    (
        yolo_with_a_subgraph_excluded,
        detector,
        XINT8.with_(exclude=("flat", "decode1", "decode2")),
        "data",
    ),
    (
        yolo_with_names_excluded,
        detector,
        XINT8.with_(exclude=("flat", "decode1", "decode2")),
        "data",
    ),
    (
        cle_and_adaround,
        classifier,
        XINT8.with_(optimizers=(CLE(), AdaRound(iterations=50))),
        "data",
    ),
    (
        fast_finetune,
        classifier,
        XINT8.with_(optimizers=(AdaQuant(iterations=60),)),
        "data",
    ),
    (
        algorithms_apart,
        classifier,
        Native(
            QuantizationSpec("int8", symmetric=False),
            WEIGHT.with_(per_channel=True),
            optimizers=(CLE(),),
        ),
        "data",
    ),
    (
        layerwise_percentile,
        classifier,
        A8W8.with_(calibrator=LayerwisePercentile(99.0, 100.0, 3)),
        "data",
    ),
    (bfp16, classifier, Native.of("BFP16"), "none"),
    (microscaling, classifier, Native.of("MXFP8E4M3"), "none"),
    (bf16, classifier, Native.of("BF16"), "none"),
    (
        smooth_quant,
        transformer,
        A8W8.with_(
            op_types=("MatMul",),
            overrides=(Override(("score", "back"), keep=True),),
            optimizers=(SmoothQuant(alpha=0.6),),
        ),
        "data",
    ),
    (quarot, transformer, A8W8.with_(optimizers=(QuaRot(),)), "data"),
    (gptq, classifier, A8W8.with_(optimizers=(GPTQ(),)), "data"),
    (bias_correction, classifier, A8W8.with_(optimizers=(BiasCorrection(),)), "data"),
    (
        matmul_nbits,
        transformer,
        Native(
            None,
            QuantizationSpec("int4", block_size=32),
            form="operators",
            op_types=("MatMul",),
            accuracy_level=1,
        ),
        "none",
    ),
    (
        dynamic,
        classifier,
        Native.of("DYNAMIC").with_(weight=QuantizationSpec("uint8")),
        "none",
    ),
    (
        mixed_by_layer,
        classifier,
        A8W8.with_(
            overrides=(
                Override("conv2", activation=A16W8.activation, weight=WEIGHT),
                Override(op_types="GlobalAveragePool", keep=True),
            )
        ),
        "data",
    ),
    (quantize_static_call, classifier, XINT8, "data"),
    (vai_q, classifier, XINT8, "data"),
    (data_path, classifier, A8W8, "data"),
]


def test_there_are_twenty_four() -> None:
    assert len({script for script, *_ in CASES}) >= 24


@pytest.mark.filterwarnings("ignore:random data")
@pytest.mark.parametrize(
    ("script", "make", "config", "kind"),
    CASES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_script_is_as_accurate_as_the_native_call(
    script: Script,
    make: Callable[[], ModelProto],
    config: Native,
    kind: str,
    tmp_path: Path,
) -> None:
    model = make()
    onnx.save(model, tmp_path / "float.onnx")
    script(
        str(tmp_path / "float.onnx"), str(tmp_path / "quantized.onnx"), Reader(model)
    )
    written = onnx.load(tmp_path / "quantized.onnx")
    data = {"data": Reader(model), "random": RandomData(1), "none": None}[kind]
    native = quantize(model, data, config).model
    shape = [
        dim.dim_value or 2 for dim in model.graph.input[0].type.tensor_type.shape.dim
    ]
    held_out = [{"x": normal(*shape, seed=seed)} for seed in range(50, 58)]
    ours, theirs = (
        compare(model, written, held_out).sqnr,
        compare(model, native, held_out).sqnr,
    )
    assert abs(ours - theirs) < 0.5
    assert ours > 15 or kind == "random"  # whose ranges mean nothing
    assert [node.op_type for node in written.graph.node] == [
        node.op_type for node in native.graph.node
    ]
