"""Every extra option of AMD Quark is obeyed, refused with what to do instead, or warned about.

None is ignored.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibrators import LayerwisePercentile, MinMSE
from calibrators.readers.open import RandomData
from quark_onnx import QConfig as Native
from quark_onnx.common.errors import ConfigError, QuarkError
from quark_onnx.onnx import (
    CachedDataReader,
    CalibMethod,
    CLEConfig,
    Int8Spec,
    Int16,
    Int16Spec,
    ModelQuantizer,
    PathDataReader,
    QConfig,
    QLayerConfig,
    QuantizationConfig,
    RandomDataReader,
    UInt8Spec,
    XInt8Spec,
)
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.options import ROWS, TABLE
from quark_onnx.onnx.quantization.config.algorithm import AdaQuantConfig
from quark_onnx.onnx.run import native
from tests.models import loop, parse
from tests.quark_onnx.amd_quark.networks import (
    Reader,
    classifier,
    detector,
    transformer,
)

#: The options that AMD Quark 0.13 documents or reads.
DOCUMENTED = """
PreprocessYAML ShapeShifterYaml SkipPreprocess OptimizeModel SimplifyModel SimplifyModelOptions ConvertFP16ToFP32
ConvertNCHWToNHWC ConvertOpsetVersion ConvertBNToConv ConvertReduceMeanToGlobalAvgPool SplitLargeKernelPool
ConvertSplitToSlice FuseInstanceNorm FuseL2Norm FuseGelu FuseLayerNorm ConvertClipToRelu FoldBatchNorm FoldRelu
ReplaceClip6Relu RemoveInputInit CopySharedInit CopyBiasInit FixShapes FillAllValueInfo InputNodes OutputNodes
OpTypesToQuantize ExtraOpTypesToQuantize NodesToQuantize QuantizeAllOpTypes WeightsOnly MatMulConstBOnly EnableSubgraph
ForceQuantizeNoInputCheck DedicatedQDQPair OpTypesToExcludeOutputQuantization QDQOpTypePerChannelSupportToAxis
UseQDQContribOps UseQDQVitisCustomOps NodesToExcludeOutputQuantization AddQDQPairToWeight EnableDualQuantNodePairs
DedicateDQNode RemoveQDQConvClip RemoveQDQConvRelu RemoveQDQConvLeakyRelu RemoveQDQConvPRelu RemoveQDQConvGelu
RemoveQDQMulAdd RemoveQDQInstanceNorm RemoveFusedQDQ RemoveQDQBetweenOps ActivationSymmetric WeightSymmetric
CalibTensorRangeSymmetric CalibMovingAverage CalibMovingAverageConstant Percentile LWPMetric PercentileCandidates
LWPUseHistogram NumBins NumQuantizedBins Scenario MinMSEModePof2Scale WeightCalibrateMethod MinMSEModeFloatScale
CalibDataSize CalibWorkerNum CalibOptimizeMem CalibOptimizeDisk CalibPassthroughOpTypes UseRandomData
RandomDataReaderInputShape RandomDataReaderInputDataRange SaveTensorHistFig SaveAndRestore TensorsRangeFile
QuantizationPreference TensorQuantOverrides MixedPrecisionTensor SpecificTensorPrecision NodesWithMixedPrecision
QuantizeBias Int32Bias Int16Bias AdjustBiasScale AdjustWeightScaleForInt32Bias Int16Scale UsePowerOf2Scale
QuantizeFP16 UseFP32Scale ActivationScaled WeightScaled UseUnsignedReLU AlignConcat AlignPool AlignPad AlignSlice
AlignTranspose AlignReshape AlignEltwiseQuantType SimulateDPU ConvertLeakyReluToDPUVersion
ConvertSigmoidToHardSigmoid ConvertHardSigmoidToDPUVersion ConvertAvgPoolToDPUVersion ConvertReduceMeanToDPUVersion
ConvertClipToDPUVersion ConvertSoftmaxToDPUVersion ConvertInstanceNormToDPUVersion NPULimitationCheck MaxLoopNum
AdjustShiftCut AdjustShiftBias AdjustShiftRead AdjustShiftWrite AdjustHardSigmoid AdjustShiftSwish EnableNPUCnn
BF16WithClip BF16QDQToCast EnableVaimlBF16 BFPAttributes MXAttributes RefineBlockAxis UseMatMulNBits
MatMulNBitsParams UseGPTQ GPTQParams BiasCorrection SmoothAlpha CLEBalanceMethod CLESteps CLEWeightThreshold
CLEScaleAppendBias CLEScaleUseThreshold CLETotalLayerDiffThreshold FastFinetune AutoMixprecision RMatrixDim
UseRandomHad RConfigPath ExecutionProviders TmpDir UserCustomOpLibPath CryptoMode EncryptionAlgorithm DebugMode
PrintSummary IgnoreWarnings EvalMetrics EvalDataReader
"""  # noqa: E501


def draft_of(*, spec: Any = None, **options: Any) -> Draft:
    chosen = spec or Int8Spec()
    return QConfig(
        QLayerConfig(chosen, weight=Int8Spec()), extra_options=options
    ).draft()


def config_of(model: onnx.ModelProto, **options: Any) -> Native:
    return native(draft_of(**options), model)


def test_every_documented_option_has_a_row() -> None:
    assert sorted(set(DOCUMENTED.split()) - set(TABLE)) == []
    assert len(TABLE) == len(ROWS)
    assert all(row.text for row in ROWS)
    assert all((row.apply is not None) == (row.support == "obeyed") for row in ROWS)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.support == "refused"], ids=lambda row: row.name
)
def test_a_refused_option_says_what_to_do(row: Any) -> None:
    for value in row.harmless:
        draft_of(**{row.name: value})
    with pytest.raises(
        ConfigError, match=f"extra option {row.name}='asked' is not supported: "
    ):
        draft_of(**{row.name: "asked"})


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.support == "not needed"],
    ids=lambda row: row.name,
)
def test_an_option_without_effect_says_so(
    row: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = draft_of()
    with caplog.at_level(logging.WARNING):
        for value in row.harmless:
            assert draft_of(**{row.name: value}) == before
        assert not caplog.records
        assert draft_of(**{row.name: "asked"}) == before
    assert f"extra option {row.name}='asked' has no effect here: " in caplog.text


def test_an_unknown_option_is_named_with_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        draft_of(ActivationSymetric=True)
    assert "'ActivationSymetric' is unknown" in caplog.text
    assert "ActivationSymmetric" in caplog.text


def test_formats_and_ranges() -> None:
    model = classifier()
    assert not config_of(model, ActivationSymmetric=False).activation.symmetric  # type: ignore[union-attr]
    assert not config_of(model, WeightSymmetric=False).weight.symmetric  # type: ignore[union-attr]
    assert not config_of(model, QuantizeBias=False).bias
    assert config_of(
        model, OpTypesToExcludeOutputQuantization=["Gemm"]
    ).float_results == ("Gemm",)
    assert config_of(model, WeightsOnly=True).activation is None
    assert config_of(model, Percentile=99.5).activation.calibrator.percentile == 99.5  # type: ignore[union-attr]
    chosen = config_of(model, WeightCalibrateMethod="MinMSE").weight
    assert chosen is not None
    assert isinstance(chosen.calibrator, MinMSE)
    layerwise = Int8Spec(calibration_method=CalibMethod.LayerwisePercentile)
    chosen = config_of(
        model, spec=layerwise, PercentileCandidates=[99.9, 99.0, 100.0]
    ).activation
    assert chosen is not None
    assert chosen.calibrator == LayerwisePercentile(99.0, 100.0, 3)


def test_the_part_that_is_quantized(caplog: pytest.LogCaptureFixture) -> None:
    model = detector()
    kept = native(draft_of(InputNodes=["conv2"], OutputNodes=["flat"]), model).overrides
    assert sorted(kept[0].nodes) == ["conv1", "decode1", "decode2", "relu1"]
    with pytest.raises(ConfigError, match="no node of the model is called 'conv3'"):
        config_of(model, InputNodes=["conv3"])
    with caplog.at_level(logging.WARNING):
        assert config_of(
            model, OpTypesToQuantize=["Conv", "NonMaxSuppression"]
        ).op_types == ("Conv",)
        assert config_of(model, NodesToQuantize=["conv1", "conv9"]).nodes == ("conv1",)
    assert "NonMaxSuppression" in caplog.text
    assert (
        "nodes_to_quantize: no node of the model is called 'conv9'; did you mean"
        " 'conv2'?" in caplog.text
    )
    with pytest.raises(ConfigError, match="nothing would be quantized"):
        config_of(model, OpTypesToQuantize=["NonMaxSuppression"])
    kept = config_of(transformer(), MatMulConstBOnly=True).overrides
    assert sorted(kept[0].nodes) == ["back", "score"]


def test_operators_of_other_domains_are_known_by_their_bare_names() -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[N,4] x) => (float[N,4] y) {
            h = com.microsoft.FastGelu (x)
            y = Relu (h)
        }"""  # noqa: E501
    )
    assert config_of(model, OpTypesToQuantize=["FastGelu"]).op_types == (
        "com.microsoft::FastGelu",
    )


def test_the_target(caplog: pytest.LogCaptureFixture) -> None:
    model = classifier()
    on_engine = QConfig(QLayerConfig(XInt8Spec(), weight=XInt8Spec()))
    assert native(on_engine.draft(), model).target == "npu"
    off = QConfig(QLayerConfig(XInt8Spec(), weight=XInt8Spec()), EnableNPUCnn=False)
    assert native(off.draft(), model).target == ""
    assert native(on_engine.draft(), model).fix_sizes is False


def test_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit, and random data with shapes and ranges.

    Without any, the message says what to set.
    """
    model = classifier()
    onnx.save(model, tmp_path / "float.onnx")
    config = QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()))
    with pytest.raises(
        ConfigError, match=r"there is no calibration data.*UseRandomData"
    ):
        ModelQuantizer(config).quantize_model(model)
    with pytest.raises(QuarkError, match="nowhere does not exist"):
        ModelQuantizer(config).quantize_model(
            model, calibration_data_path=tmp_path / "nowhere"
        )
    reader = Reader(model)
    limited = QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()), CalibDataSize=4)
    ModelQuantizer(limited).quantize_model(model, calibration_data_reader=reader)
    assert reader.next <= 4
    draft = draft_of(UseRandomData=True, RandomDataReaderInputShape={"x": [3, 4, 8, 8]})
    assert draft.random and draft.random_shapes == {"x": [3, 4, 8, 8]}
    drawn = RandomDataReader(model, {"x": [3, 4, 8, 8]}, {"x": [-2.0, 5.0]}).get_next()
    assert drawn is not None
    assert drawn["x"].shape == (3, 4, 8, 8)
    assert drawn["x"].min() >= -2 and drawn["x"].max() < 5 and drawn["x"].max() > 4


@pytest.mark.parametrize(
    "wanted", [{}, {"UseRandomData": False}, {"UseRandomData": None}]
)
@pytest.mark.parametrize(
    "details",
    [
        {"RandomDataReaderInputShape": {"x": [3, 4, 8, 8]}},
        {"RandomDataReaderInputDataRange": {"x": [-2.0, 5.0]}},
    ],
)
def test_random_data_is_drawn_only_if_it_is_asked_for(
    wanted: dict[str, Any], details: dict[str, Any]
) -> None:
    """As ``get_data_reader`` of AMD Quark 0.13, which reads UseRandomData alone."""
    layer = QLayerConfig(Int8Spec(), weight=Int8Spec())
    for options in (wanted | details, details | wanted):
        with pytest.raises(ConfigError, match=r"there is no calibration data"):
            ModelQuantizer(QConfig(layer, extra_options=options)).quantize_model(
                classifier()
            )


@pytest.mark.parametrize(
    ("options", "quantized"),
    [
        ({}, True),
        ({"EnableSubgraph": None}, True),
        ({"EnableSubgraph": True}, True),
        ({"EnableSubgraph": False}, False),
    ],
)
def test_bodies(
    options: dict[str, Any], quantized: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = loop()
    result = ModelQuantizer(
        QConfig(
            QLayerConfig(Int8Spec(), weight=Int8Spec()),
            extra_options=options,
        )
    ).quantize_model(model, calibration_data_reader=Reader(model))
    assert result is not None
    [node] = [node for node in result.graph.node if node.op_type == "Loop"]
    [body] = [attribute.g for attribute in node.attribute]
    assert ("DequantizeLinear" in {node.op_type for node in body.node}) is quantized
    assert "has no effect" not in caplog.text


def test_files(tmp_path: Path) -> None:
    """One folder of arrays, or one for each input; as many of each."""
    model = parse("g (float[1,2] a, float[1,2] b) => (float[1,2] y) { y = Add (a, b) }")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            np.save(
                tmp_path / name / f"{i}.npy", np.full((1, 2), i + len(name), np.float32)
            )
    reader = PathDataReader(model, tmp_path)
    assert len(reader) == 3
    samples = list(iter(reader.get_next, None))
    assert [sample["a"][0, 0] for sample in samples] == [1, 2, 3]
    (tmp_path / "b" / "2.npy").unlink()
    with pytest.raises(QuarkError, match="different numbers of files"):
        PathDataReader(model, tmp_path)
    with pytest.raises(QuarkError, match=r"there is no .npy file for the input 'x'"):
        PathDataReader(classifier(), tmp_path / "nowhere")


def test_random_data_checks_what_it_is_given() -> None:
    with pytest.raises(QuarkError, match="no input 'z'"):
        RandomDataReader(classifier(), {"z": [1]}).get_next()
    with pytest.raises(QuarkError, match="the model says"):
        RandomDataReader(classifier(), {"x": [1, 2, 8, 8]}).get_next()
    wrong: list[Any] = [(3.0, 1.0), (1.0,), (), 5, (0.0, np.nan), (0.0, 1.0, 2.0)]
    for ends in wrong:
        with pytest.raises(Exception, match=r"must be \(least, greatest\)"):
            RandomData(ranges={"x": ends})


def test_fast_finetune_names_its_algorithm_and_its_settings() -> None:
    config = QuantizationConfig(include_fast_ft=True, include_cle=False)
    config.extra_options["FastFinetune"] = {
        "OptimAlgorithm": "adaquant",
        "NumIterations": 7,
        "LRAdjust": None,
    }
    [algorithm] = config.draft().algorithms
    assert isinstance(algorithm, AdaQuantConfig)
    assert algorithm.num_iterations == 7
    config.extra_options["FastFinetune"] = {"NumIteration": 7}
    with pytest.raises(
        ConfigError, match=r"FastFinetune has no 'NumIteration'.*NumIterations"
    ):
        config.draft()


def test_matmul_nbits() -> None:
    parameters = {"Algorithm": "HQQ", "GroupSize": 32, "Bits": 4, "AccuracyLevel": 4}
    config = config_of(transformer(), UseMatMulNBits=True, MatMulNBitsParams=parameters)
    assert config.weight is not None
    assert (
        config.weight.dtype.name,
        config.weight.block_size,
        config.weight.solver,
    ) == ("uint4", 32, "hqq")
    assert (
        config.accuracy_level == 4
        and config.activation is None
        and config.form == "operators"
    )


def test_asymmetric_weights_use_every_code() -> None:
    symmetric, asymmetric = (
        draft_of(WeightSymmetric=wanted).weight for wanted in (True, False)
    )
    assert symmetric is not None and asymmetric is not None
    assert (symmetric.symmetric, symmetric.narrow) == (True, True)
    assert (asymmetric.symmetric, asymmetric.narrow) == (False, False)


@pytest.mark.parametrize(
    ("choice", "parameters"),
    [
        ("UseMatMulNBits", {"MatMulNBitsParams": {"GroupSize": 32}}),
        ("UseGPTQ", {"GPTQParams": {"PercDamp": 0.5}}),
    ],
)
def test_parameters_may_come_before_their_choice(
    choice: str, parameters: dict[str, Any]
) -> None:
    model = transformer()
    usual = config_of(model, **{choice: True}, **parameters)
    assert config_of(model, **parameters, **{choice: True}) == usual
    assert config_of(model, **{choice: True}) != usual


def test_conversions_come_first(tmp_path: Path) -> None:
    model = classifier()
    config = QConfig(
        QLayerConfig(Int8Spec(), weight=Int8Spec()),
        extra_options={"FixShapes": "x:[2,4,8,8];y:[2,10]", "ConvertOpsetVersion": 19},
    )
    result = ModelQuantizer(config).quantize_model(model, None, Reader(model))
    assert result is not None
    assert [
        dim.dim_value for dim in result.graph.input[0].type.tensor_type.shape.dim
    ] == [2, 4, 8, 8]
    assert result.opset_import[0].version == 19


def test_a_config_survives_its_dictionary() -> None:
    model = classifier()
    config = QConfig(
        QLayerConfig(XInt8Spec(), weight=Int8Spec()),
        specific_layer_config={QLayerConfig(Int8Spec(), weight=Int8Spec()): ["conv2"]},
        layer_type_config={None: ["Relu"]},
        exclude=["^fc.*"],
        algo_config=[AdaQuantConfig(num_iterations=9)],
        extra_options={"Percentile": 99.9},
    )
    again = QConfig.from_dict(config.to_dict())
    assert native(again.draft(), model) == native(config.draft(), model)
    assert again.to_dict() == config.to_dict()


def test_a_number_format_of_a_layer_survives_its_dictionary() -> None:
    model = classifier()
    config = QConfig(
        QLayerConfig(XInt8Spec(), weight=Int8Spec()),
        layer_type_config={Int16: ["Conv"]},
    )
    again = QConfig.from_dict(config.to_dict())
    assert native(again.draft(), model) == native(config.draft(), model)


def test_a_configuration_of_the_layers_between_two_nodes() -> None:
    """By names, regular expressions and pairs of start and end nodes, as in ``exclude``."""
    narrow, wide = Int8Spec(), Int16Spec()
    config = QConfig(
        QLayerConfig(narrow, weight=narrow),
        specific_layer_config={
            QLayerConfig(wide, weight=narrow): [(["conv2"], ["pool"]), "^fc.*"],
        },
    )
    found = native(config.draft(), classifier()).overrides
    assert [(each.nodes, each.between) for each in found] == [
        (("re:^fc.*",), ()),
        ((), (("conv2",), ("pool",))),
    ]
    model = ModelQuantizer(config).quantize_model(
        classifier(), None, Reader(classifier())
    )
    assert model is not None
    constants = {each.name: each.data_type for each in model.graph.initializer}
    types = {
        node.input[0]: onnx.TensorProto.DataType.Name(constants[node.input[2]])
        for node in model.graph.node
        if node.op_type == "QuantizeLinear"
    }
    assert types["x"] == "INT8" and types["s"] == "INT16"


def test_a_pair_that_is_none() -> None:
    config = QConfig(
        QLayerConfig(Int8Spec(), weight=Int8Spec()),
        specific_layer_config={QLayerConfig(Int8Spec()): [("conv1", "a", "b")]},
    )
    with pytest.raises(ConfigError, match="it must be a name or a pair"):
        config.draft()


def test_a_reader_that_keeps_samples() -> None:
    """Its arguments are those of AMD Quark, in their order."""
    images = {
        "x": np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4),
        "n": np.arange(2),
    }

    class One:
        def __init__(self) -> None:
            self.left = [images, images, images]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    reader = CachedDataReader(One(), 2, True, True)
    assert len(reader) == 2
    sample = reader.get_next()
    assert sample is not None and sample["x"].dtype == np.float16
    assert sample["x"].shape == (1, 3, 4, 2) and sample["n"].dtype == np.int64
    assert reader.get_next() is not None and reader.get_next() is None
    reader.reset_iter()
    assert reader.get_next() is not None


def test_pairs_that_a_script_asks_for() -> None:
    """A float weight with a pair, a pair for each reader, and onnxruntime's own domain."""
    options = {
        "AddQDQPairToWeight": True,
        "DedicatedQDQPair": True,
        "UseQDQContribOps": True,
    }
    spec = QLayerConfig(Int8Spec(), weight=Int8Spec())
    plain, asked = (
        ModelQuantizer(QConfig(spec, extra_options=each)).quantize_model(
            transformer(), None, Reader(transformer())
        )
        for each in ({}, options)
    )
    assert plain is not None and asked is not None
    pairs = {"QuantizeLinear", "DequantizeLinear"}
    for model, domain in ((plain, ""), (asked, "com.microsoft")):
        nodes = [node for node in model.graph.node if node.op_type in pairs]
        assert {node.domain for node in nodes} == {domain}
    stored = [
        {each.data_type for each in model.graph.initializer if each.dims == [64, 128]}
        for model in (plain, asked)
    ]
    assert stored == [{onnx.TensorProto.INT8}, {onnx.TensorProto.FLOAT}]
    # the normalized tensor has three readers
    counts = [
        sum(
            node.op_type == "QuantizeLinear" and node.input[0] == "n"
            for node in model.graph.node
        )
        for model in (plain, asked)
    ]
    assert counts[0] <= 1 < counts[1]


LAYER = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: QConfig(UInt8Spec()), "global_config of a QConfig is"),  # type: ignore[arg-type]
        (
            lambda: QConfig(LAYER, algo_config=["cle"]),  # type: ignore[list-item]
            r"algorithm is 'cle'; it must be a configuration such as CLEConfig\(\)",
        ),
        (
            lambda: QConfig(LAYER, algo_config=[CLEConfig]),  # type: ignore[list-item]
            r"algorithm is .*; it must be a configuration such as CLEConfig\(\)",
        ),
        (
            lambda: QConfig(LAYER, algo_config=CLEConfig()),  # type: ignore[arg-type]
            "algorithms is .*; it must be a list",
        ),
        (lambda: QConfig(LAYER, exclude=5), "exclude is 5; it must be a list"),  # type: ignore[arg-type]
        (
            lambda: QConfig(LAYER, extra_options=["x"]),
            r"extra_options is \['x'\]; it must be a dictionary",
        ),
        (
            lambda: QConfig(QLayerConfig(UInt8Spec, weight=Int8Spec())),  # type: ignore[arg-type]
            "input_tensors of a QLayerConfig is .*; it must be a QTensorConfig",
        ),
    ],
)
def test_arguments_of_another_type(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build().draft()


def test_a_single_name_is_a_list_of_one() -> None:
    excluding = QConfig(LAYER, {LAYER: "fc"}, exclude="fc").draft()  # type: ignore[arg-type,dict-item]
    assert excluding.exclude == ["fc"] and excluding.overrides[0].nodes == ("fc",)
    older = QuantizationConfig(
        nodes_to_exclude="fc",  # type: ignore[arg-type]
        op_types_to_quantize="Conv",  # type: ignore[arg-type]
    ).draft()
    assert older.exclude == ["fc"] and older.op_types == ("Conv",)
