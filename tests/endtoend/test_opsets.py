"""Every opset from 7 on, by operators whose signatures have changed, in formats that ask for a
newer one or do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.config import QuantizationSpec
from quark_onnx.job import Result
from quark_onnx.planning.opsets import newest_with_pairs
from tests.cases import loop_over
from tests.models import Feeds, interface, normal, parse, weight


def runs(opset: int) -> bool:
    """Whether the installed onnxruntime knows the opset."""
    try:
        open_session(
            parse(
                "g (float[2] x) => (float[2] y) { y = Relu (x) }",
                opset=opset,
                ir_version=8,
            )
        )
    except Exception:  # onnxruntime raises several unrelated types
        return False
    return True


OPSETS = [
    opset for opset in range(7, onnx.defs.onnx_opset_version() + 1) if runs(opset)
]

#: The least opset in which a preset can be written, and what a single rounding to its coarsest
#: format leaves of Gaussian values, in dB: six a bit, and as much as the greatest of them allow.
NEEDS = {
    "A8W8": (13, 41),  # 8 bits would do with 10, a scale for each channel needs 13
    "XINT8": (11, 35),
    "A16W8": (21, 41),
    "INT4": (21, 21),
    "DYNAMIC": (13, 41),
    "FP16": (11, 74),
    "BF16": (13, 56),
    "BFP16": (17, 42),
    "MXFP8E4M3": (17, 32),
}
#: Those that are tested with every opset.
PRESETS = [preset for preset in NEEDS if preset != "FP16"]
BLOCKS = ("BFP16", "MXFP8E4M3")
#: Some fifteen roundings add up to fifteen times the noise of one, 12 dB; the rest is for what is
#: not Gaussian.
SLACK = 16
#: The IR version that brought a type of tensors.
NARROW = {
    **dict.fromkeys((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2), 9),
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4), 10),
}


# Models


CONSTANTS: Feeds = {
    "k": weight(6, 4, 3, 3),
    "b": normal(6, scale=0.1),
    "gamma": np.float32([1, 0.5, 2, 1, 1.5, 1]),
    "beta": normal(6, scale=0.1),
    "mean": normal(6, seed=1, scale=0.1),
    "variance": np.float32([1, 0.5, 2, 1, 1.5, 1]),
    "low": np.asarray(np.float32(-1.5)),
    "high": np.asarray(np.float32(1.5)),
    "ratio": np.asarray(np.float32(0.25)),
    "pads": np.int64([0, 0, 1, 1, 0, 0, 1, 1]),
    "scales": np.float32([1, 1, 2, 2]),
    "roi": np.float32([]),
    "zero": np.int64([0]),
    "one": np.int64([1]),
    "three": np.int64([3]),
    "five": np.int64([5]),
    "sizes": np.int64([2, 4]),
    "gw": 2 * weight(1, 15, 4),
    "gr": 2 * weight(1, 15, 5),
    "gb": normal(1, 30, scale=0.1),
    "w": weight(3, 5).T.copy(),
    "d": normal(3, scale=0.1),
    "m": weight(8, 8),
    "n": weight(3, 8).T.copy(),
    "p": weight(3, 6).T.copy(),
}


def model_of(opset: int, text: str) -> ModelProto:
    """The model with the least IR version of its opset.

    Of the constants it has those that the text names.
    """
    ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    named = {
        name: CONSTANTS[name]
        for name in dict.fromkeys(re.findall(r"\w+", text))
        if name in CONSTANTS
    }
    model = parse(text, opset=opset, ir_version=ir_version, **named)
    if ir_version < 4:  # in which every initializer has to be an input, too
        constants = model.graph.initializer
        model.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims)
            for t in constants
        )
    return model


def network(opset: int) -> ModelProto:
    """Every operator whose signature has changed, in the notation of the opset."""

    def spelled(**since: str) -> str:
        """The text of the last opset that is not newer."""
        return since[
            max(
                (name for name in since if int(name[1:]) <= opset),
                key=lambda name: int(name[1:]),
            )
        ]

    doubled = (
        'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode'
        ' = "floor"'
    )
    return model_of(
        opset,
        f"""g (float[N,4,8,8] x) => (float[N,3] y, float[N,8,8] z) {{
            [conv] c = Conv <pads = [1,1,1,1]> (x, k, b)
            [norm] h = BatchNormalization (c, gamma, beta, mean, variance)
            [clip] r = {
            spelled(_7="Clip <min = -1.5, max = 1.5> (h)", _11="Clip (h, low, high)")
        }
            [drop] e = {
            spelled(_7="Dropout <ratio = 0.25> (r)", _12="Dropout (r, ratio)")
        }
            [pad] f = {
            spelled(_7="Pad <pads = [0,0,1,1,0,0,1,1]> (e)", _11="Pad (e, pads)")
        }
            [pool] g = MaxPool <kernel_shape = [4,4], strides = [2,2]> (f)
            [double] u = {
            spelled(
                _7='Upsample <mode = "nearest", scales = [1.0,1.0,2.0,2.0]> (g)',
                _9='Upsample <mode = "nearest"> (g, scales)',
                _10='Resize <mode = "nearest"> (g, scales)',
                _11=f"Resize <{doubled}> (g, roi, scales)",
                _13=f"Resize <{doubled}> (g, , scales)",
            )
        }
            [split] i, j = {
            spelled(
                _7="Split <axis = 1, split = [2,4]> (u)",
                _13="Split <axis = 1> (u, sizes)",
            )
        }
            [softmax] s = Softmax (i)
            [sum] z = {
            spelled(
                _7="ReduceSum <axes = [1], keepdims = 0> (s)",
                _13="ReduceSum <keepdims = 0> (s, one)",
            )
        }
            [mean] a = {
            spelled(
                _7="ReduceMean <axes = [3], keepdims = 0> (j)",
                _18="ReduceMean <keepdims = 0> (j, three)",
            )
        }
            [turn] t = Transpose <perm = [2,0,1]> (a)
            [gru] all, last = GRU <hidden_size = 5> (t, gw, gr, gb)
            [shape] sizes_of_x = Shape (x)
            [slice] batch = {
            spelled(
                _7="Slice <axes = [0], starts = [0], ends = [1]> (sizes_of_x)",
                _10="Slice (sizes_of_x, zero, one, zero)",
            )
        }
            [thin] scalar = {
            spelled(_7="Squeeze <axes = [0]> (batch)", _13="Squeeze (batch, zero)")
        }
            [narrow] small = Cast <to = 6> (scalar)
            [wide] large = Cast <to = 7> (small)
            [thick] vector = {
            spelled(_7="Unsqueeze <axes = [0]> (large)", _13="Unsqueeze (large, zero)")
        }
            [join] rows = Concat <axis = 0> (vector, five)
            [flat] q = Reshape (last, rows)
            [head] y = Gemm (q, w, d)
        }}""",
    )


def hardmax(opset: int) -> ModelProto:
    """Without an axis it means something else from opset 13 on, and onnx's converter does not see
    to that.
    """
    return model_of(
        opset,
        """g (float[N,6,8] x) => (float[N,6,8] y, float[N,6,3] z) {
            [first] h = MatMul (x, m)
            [relu] r = Relu (h)
            [hard] y = Hardmax (x)
            [second] z = MatMul (r, n)
        }""",
    )


def upsample(opset: int) -> ModelProto:
    """Linear, which means something else from opset 11 on, and onnx's converter does not see to
    that.
    """
    double = {
        7: '<mode = "linear", scales = [1.0,1.0,2.0,2.0]> (r)',
        9: '<mode = "linear"> (r, scales)',
    }
    return model_of(
        opset,
        f"""g (float[N,4,8,8] x) => (float[N,3] z) {{
            [conv] c = Conv <pads = [1,1,1,1]> (x, k, b)
            [relu] r = Relu (c)
            [double] u = {"Resize" if opset == 10 else "Upsample"} {double[7 if opset < 9 else 9]}
            [mean] a = GlobalAveragePool (u)
            [flat] f = Flatten (a)
            [head] z = Gemm (f, p, d)
        }}""",
    )


SHAPES = {network: (4, 8, 8), hardmax: (6, 8), upsample: (4, 8, 8)}


# Runs


@dataclass(frozen=True)
class Float:
    """A model, samples for it, and its outputs on all samples."""

    model: ModelProto
    data: list[Feeds]
    outputs: list[NDArray[np.float64]]


@cache
def float_model(make: Any, opset: int) -> Float:
    model = make(opset)
    onnx.checker.check_model(model, full_check=True)
    data = [{"x": normal(2, *SHAPES[make], seed=seed)} for seed in range(4)]
    return Float(model, data, outputs(model, data))


def outputs(model: ModelProto, data: list[Feeds]) -> list[NDArray[np.float64]]:
    session = open_session(model)
    found = [session.run(None, feeds) for feeds in data]
    return [
        np.concatenate(values).astype(np.float64) for values in zip(*found, strict=True)
    ]


def run(floats: Float, config: QConfig) -> Result:
    return quantize(floats.model, floats.data if config.measures else None, config)


@dataclass(frozen=True)
class Case:
    opset: int
    preset: str

    @property
    def floats(self) -> Float:
        return float_model(network, self.opset)

    @property
    def config(self) -> QConfig:
        config = QConfig.of(self.preset)
        if (
            self.preset in BLOCKS
        ):  # their nodes are functions of a hundred operators, which take long to load
            config = config.with_(op_types=("Conv", "GRU", "Gemm"))
        return config

    @cached_property
    def result(self) -> Result:
        return run(self.floats, self.config)

    def __str__(self) -> str:
        return f"{self.opset}-{self.preset}"


def opset_of(model: ModelProto) -> int:
    [version] = [entry.version for entry in model.opset_import if entry.domain == ""]
    return version


def check(model: ModelProto, floats: Float, preset: str) -> None:
    """It is valid, has the interface of the float model, comes near it, and declares what it
    consists of.
    """
    onnx.checker.check_model(model, full_check=True)
    assert interface(model) == interface(floats.model)
    _, rounding = NEEDS[preset]
    for expected, found in zip(
        floats.outputs, outputs(model, floats.data), strict=True
    ):
        assert found.shape == expected.shape
        noise = np.square(found - expected).sum()
        assert (
            10 * np.log10(np.square(expected).sum() / max(noise, 1e-30))
            > rounding - SLACK
        )
    assert model.ir_version == least_ir_version(model, floats.model)


def least_ir_version(model: ModelProto, floats: ModelProto) -> int:
    """What a model's opsets, functions and types need, or what the float model had.

    Before 4 constants were inputs.
    """
    needed = helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    types = (NARROW.get(tensor.data_type, 0) for tensor in model.graph.initializer)
    return max(floats.ir_version, needed, 4, 8 if model.functions else 0, *types)


# Tests


def test_every_opset_from_7_on_is_tested() -> None:
    assert list(range(7, 22)) == OPSETS[:15]
    assert list(range(7, OPSETS[-1] + 1)) == OPSETS


def it_is_quantized(case: Case) -> None:
    before = case.floats.model.SerializeToString(deterministic=True)
    result = case.result
    assert case.floats.model.SerializeToString(deterministic=True) == before
    assert result.report.operators["Conv"] == result.report.operators["Gemm"] == (1, 1)
    check(result.model, case.floats, case.preset)


def its_opset_is_the_least_that_its_formats_need(case: Case) -> None:
    needed, _ = NEEDS[case.preset]
    newest = newest_with_pairs()
    assert opset_of(case.result.model) == min(max(case.opset, needed), newest)
    raised, lowered = (
        f"opset {how} from {case.opset} to" for how in ("raised", "lowered")
    )
    # Runtimes of years read opsets up to 17: only a higher one is noted.
    is_noted = f"{raised} {needed}" in case.result.report.notes
    assert is_noted is (case.opset < needed and needed > 17)
    assert any(
        note.startswith(f"{lowered} {newest}: ") for note in case.result.report.notes
    ) is (case.opset > newest)


def max_opset_is_respected(case: Case) -> None:
    if case.opset < 11:
        with pytest.raises(
            ConfigError,
            match=rf"^max_opset is {case.opset}; it must be an opset, 11 or higher$",
        ):
            case.config.with_(max_opset=case.opset)
        return
    config = case.config.with_(max_opset=case.opset)
    needed, _ = NEEDS[case.preset]
    names = {"BF16": "bfloat16", "BFP16": "bfp16", "MXFP8E4M3": "mxfp8e4m3"}
    if case.opset >= needed:
        assert run(case.floats, config).model == case.result.model
    elif case.preset in names:
        message = (
            f"^{names[case.preset]} needs opset {needed}, but max_opset is"
            f" {case.opset}; raise it, or choose"
        )
        with pytest.raises(ConfigError, match=message):
            run(case.floats, config)
    else:
        model = run(case.floats, config).model
        assert opset_of(model) == case.opset
        assert "com.microsoft" in [entry.domain for entry in model.opset_import]
        check(model, case.floats, case.preset)


CHECKS = (
    it_is_quantized,
    its_opset_is_the_least_that_its_formats_need,
    max_opset_is_respected,
)


@loop_over("check", {check.__name__: check for check in CHECKS})
@pytest.mark.parametrize(
    "case", [Case(*pair) for pair in product(OPSETS, PRESETS)], ids=str
)
def test_every_opset(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize(
    "opset", [opset for opset in (11, 13, 17, 20) if opset in OPSETS]
)
def test_codes_of_4_bits_at_an_old_opset_have_the_ir_version_that_knows_them(
    opset: int, dtype: str
) -> None:
    floats = float_model(network, opset)
    weights = QuantizationSpec(dtype, per_channel=True, symmetric=dtype == "int4")
    model = run(floats, QConfig(None, weights, max_opset=opset)).model
    assert opset_of(model) == opset
    assert TensorProto.DataType.Value(dtype.upper()) in {
        tensor.data_type for tensor in model.graph.initializer
    }
    assert model.ir_version == least_ir_version(model, floats.model)


# Models that onnx converts to something else

#: Formats that the com.microsoft domain has at any opset, and what others lack in an old one.
ANYWHERE = ["A8W8", "XINT8", "A16W8", "INT4"]
BEYOND = {"BF16": ("bfloat16", 13), "BFP16": ("bfp16", 17)}


def refusal(name: str, needed: int, opset: int) -> str:
    return (
        f"^{name} needs opset {needed}, and the model's opset {opset} cannot be raised"
        f" to {needed}; export the model"
    )


@pytest.mark.parametrize("preset", [*ANYWHERE, "DYNAMIC"])
@pytest.mark.parametrize("opset", range(7, 13))
def test_a_model_that_can_be_raised_to_12_at_most_is_quantized(
    opset: int, preset: str
) -> None:
    floats = float_model(hardmax, opset)
    result = run(floats, QConfig.of(preset))
    assert opset_of(result.model) <= 12
    assert result.report.operators["MatMul"] == (2, 2)
    check(result.model, floats, preset)


@pytest.mark.parametrize("preset", ANYWHERE)
@pytest.mark.parametrize("opset", range(7, 11))
def test_a_model_that_can_be_raised_to_10_at_most_is_quantized(
    opset: int, preset: str
) -> None:
    floats = float_model(upsample, opset)
    result = run(floats, QConfig.of(preset))
    assert opset_of(result.model) <= 10
    assert result.report.operators["Conv"] == result.report.operators["Gemm"] == (1, 1)
    check(result.model, floats, preset)


@pytest.mark.parametrize("preset", BEYOND)
@pytest.mark.parametrize(
    ("make", "opset"),
    [*product([hardmax], range(7, 13)), *product([upsample], range(7, 11))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_format_that_it_cannot_be_raised_to_is_refused(
    make: Any, opset: int, preset: str
) -> None:
    name, needed = BEYOND[preset]
    with pytest.raises(ModelError, match=refusal(name, needed, opset)):
        run(float_model(make, opset), QConfig.of(preset))


@pytest.mark.parametrize(
    ("preset", "name"), [("DYNAMIC", "uint8"), ("FP16", "float16")]
)
@pytest.mark.parametrize("opset", range(7, 11))
def test_operators_of_opset_11_are_not_written_into_an_older_model(
    opset: int, preset: str, name: str
) -> None:
    """DynamicQuantizeLinear, and the inputs of the Clip that lets a float saturate."""
    floats = float_model(upsample, opset)
    try:
        result = run(floats, QConfig.of(preset))
    except ModelError as error:
        assert re.match(
            refusal(name, 11, opset).replace("to 11", r"to \d+"), str(error)
        )
    else:
        assert opset_of(result.model) <= 10
        check(result.model, floats, preset)
