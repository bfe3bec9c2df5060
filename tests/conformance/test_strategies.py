"""Every strategy with every preset in every form: what any result has to be, and how near the float
model it comes.

A preset is tested by being registered. How near its results have to come follows from the bits of
its formats alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import (
    QConfig,
    quantize,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
)
from quark_onnx.api import Result
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.common.registry import DTYPES, PRESETS
from quark_onnx.config import FORMS, QuantizationSpec
from quark_onnx.dtypes import Block, Half, Integer
from tests.cases import loop_over
from tests.models import Feeds, interface, kinds, normal, parse, weight
from tests.settings import ONE_NETWORK, portable

STRATEGIES = ("static", "dynamic", "weights")

#: Operators that compute on codes, by what they take the place of.
ON_CODES = {"QLinearConv", "QLinearMatMul", "QGemm"}
ON_DYNAMIC_CODES = {"ConvInteger", "MatMulInteger"}
#: What stands beside nodes that quantize and dequantize: the pairs of 16-bit floats, and what keeps
#: a pair apart.
BESIDE = {"Cast", "Clip", "Min"}


# Models


@dataclass(frozen=True)
class Network:
    """A float model, data for it, and how often values are rounded on the way through it.

    Attributes:
        activations, weights: how many are rounded, at most, on the way through the layers. around:
        how many activations are rounded, at most, whose noise reaches the output as it is.
        weighted: operator types that have weights, and how many of these. layers: the tensor that
        the layers compute; what else the output consists of is not rounded on the way.
    """

    model: ModelProto
    data: tuple[Feeds, ...]
    activations: int
    weights: int
    around: int
    weighted: dict[str, int]
    layers: str

    @cached_property
    def outputs(self) -> NDArray[np.float64]:
        return outputs(self.model, self.data)

    @cached_property
    def share(self) -> float:
        """The power of what the layers compute, by that of the output."""
        model = ModelProto()
        model.CopyFrom(self.model)
        model.graph.output[0].name = self.layers
        return float(
            np.square(outputs(model, self.data)).mean() / np.square(self.outputs).mean()
        )


def outputs(model: ModelProto, data: tuple[Feeds, ...]) -> NDArray[np.float64]:
    """The one output of a model on all samples."""
    session = open_session(model)
    return np.concatenate([session.run(None, feeds)[0] for feeds in data]).astype(
        np.float64
    )


def convolutions() -> Network:
    model = parse(
        """g (float[N,32,8,8] x) => (float[N,24] y) {
            [conv] c = Conv <pads = [1,1,1,1]> (x, k, b)
            [relu] r = Relu (c)
            [pool] p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r)
            [flat] f = Flatten (p)
            [head] y = Gemm (f, w, d)
        }""",
        k=weight(32, 32, 3, 3),
        b=normal(32, scale=0.1),
        w=weight(24, 512).T.copy(),
        d=normal(24, scale=0.1),
    )
    data = tuple({"x": normal(4, 32, 8, 8, seed=seed)} for seed in range(8))
    return Network(model, data, 4, 2, 1, {"Conv": 1, "Gemm": 1}, "y")


def attention() -> Network:
    """One head between a normalization and a residual sum; the scores are of the size of one."""
    model = parse(
        """g (float[N,8,32] x) => (float[N,8,32] y) {
            [norm] n = LayerNormalization <axis = -1> (x, gamma, beta)
            [q] q = MatMul (n, wq)
            [k] k = MatMul (n, wk)
            [v] v = MatMul (n, wv)
            [turn] t = Transpose <perm = [0,2,1]> (k)
            [products] s = MatMul (q, t)
            [scale] z = Mul (s, root)
            [softmax] p = Softmax <axis = -1> (z)
            [mix] m = MatMul (p, v)
            [out] o = MatMul (m, wo)
            [bias] h = Add (o, bo)
            [residual] y = Add (h, x)
        }""",
        **{
            name: weight(32, 32, seed=seed)
            for seed, name in enumerate(("wq", "wk", "wv", "wo"))
        },
        gamma=np.ones(32, np.float32),
        beta=np.zeros(32, np.float32),
        root=np.float32(32**-0.5),
        bo=normal(32, scale=0.1),
    )
    data = tuple({"x": normal(4, 8, 32, seed=seed)} for seed in range(8))
    return Network(model, data, 10, 4, 2, {"MatMul": 4}, "h")


NETWORKS = {make.__name__: make() for make in (convolutions, attention)}


# Cases


@dataclass(frozen=True)
class Case:
    """A strategy with a preset in a form, and a network."""

    strategy: str
    preset: str
    form: str
    network: str

    @cached_property
    def config(self) -> QConfig:
        """What the strategy makes of the preset."""
        config = QConfig.of(self.preset).with_(form=self.form)
        if self.strategy == "static":
            return config
        return config.with_(
            activation=QConfig.of("DYNAMIC").activation
            if self.strategy == "dynamic"
            else None
        )

    @property
    def on(self) -> Network:
        return NETWORKS[self.network]

    @property
    def data(self) -> tuple[Feeds, ...] | None:
        """The samples, where anything is measured on them."""
        return self.on.data if self.config.measures else None

    @property
    def on_codes(self) -> set[str]:
        """Operators of which some compute on codes of its formats; empty where there are none."""
        activation, weights = self.config.activation, self.config.weight
        if not isinstance(weights.dtype, Integer) or weights.dtype.bits > 8:
            return set()
        if weights.block_size:
            return {"MatMulNBits"}
        if (
            activation is None
            or not isinstance(activation.dtype, Integer)
            or activation.dtype.bits > 8
        ):
            return set()
        return ON_DYNAMIC_CODES if activation.dynamic else ON_CODES

    @property
    def extended(self) -> bool:
        """Whether the vendor has pairs of its own for one of its formats: those of 8 to 32 bits
        that know no blocks.
        """
        specs = [
            spec
            for spec in (self.config.activation, self.config.weight)
            if spec is not None and not spec.dynamic
        ]
        return any(
            isinstance(s.dtype, Half | Integer)
            and s.dtype.bits >= 8
            and not s.block_size
            for s in specs
        )

    @property
    def changes(self) -> bool:
        """Whether the form makes a difference."""
        return {"qdq": True, "operators": bool(self.on_codes), "vendor": self.extended}[
            self.form
        ]

    @property
    def offered(self) -> bool:
        """Whether the strategy takes such weights: a dynamic scale is for those that MatMulInteger
        multiplies. One network is enough for some presets.
        """
        if self.preset in ONE_NETWORK and self.network != "convolutions":
            return False
        weights = QConfig.of(self.preset).weight
        assert weights is not None
        return self.strategy != "dynamic" or (
            weights.dtype.name in ("int8", "uint8") and not weights.block_size
        )

    @cached_property
    def result(self) -> Result:
        return quantize(self.on.model, self.data, self.config)

    @cached_property
    def outputs(self) -> NDArray[np.float64]:
        return outputs(self.result.model, self.on.data)

    def again(self, output: Path | None = None) -> ModelProto:
        """What the strategy's own function returns."""
        asked = QConfig.of(self.preset).with_(form=self.form)
        if self.strategy == "static":
            return quantize_static(self.on.model, self.data, asked, output)
        if self.strategy == "weights":
            return quantize_weights(self.on.model, asked, output)
        if (
            self.form != "operators"
        ):  # which it writes, unless it is given all the settings
            asked = self.config
        return quantize_dynamic(self.on.model, asked, output)

    def __str__(self) -> str:
        return f"{self.strategy}-{self.preset}-{self.form}-{self.network}"


EVERY = [
    case
    for case in starmap(Case, product(STRATEGIES, PRESETS, FORMS, NETWORKS))
    if case.offered
]
PLAIN = {
    (case.strategy, case.preset, case.network): case
    for case in EVERY
    if case.form == "qdq"
}


def canonical(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


# How near


#: Bits of the fraction, in formats whose every value has an exponent of its own; the names of the
#: small ones say it.
FRACTION = {"float16": 10, "bfloat16": 7}
#: Bits of the magnitude, and values to a block, in formats whose blocks share an exponent.
SHARED = {
    "bfp16": (7, 8),
    "mx9": (7, 16),
    "mx6": (4, 16),
    "mx4": (2, 16),
    "mxint8": (7, 32),
}
#: How many values share the scale of a tensor or of a channel.
TENSOR, CHANNEL = 2**16, 2**9
#: dB for what is not as the theory has it: no tensor is quite Gaussian, and the greatest values of
#: some are clipped.
SLACK = 4.0


def noise(spec: QuantizationSpec) -> float:
    """The power of what is lost of Gaussian values of power one: that of a step is its square by
    12.
    """
    name = spec.dtype.name
    small = re.search(r"fp\de\dm(\d)", name)
    if (
        small or name in FRACTION
    ):  # a step is 2^-m of the power of two below a value, whose mean square is 3 / (2 ln 2)
        fraction = int(small[1]) if small else FRACTION[name]
        return float(4.0**-fraction / 12 * np.log(4) / 3)
    if isinstance(spec.dtype, Block):
        bits, block = SHARED[name]
        halved = name in (
            "mx9",
            "mx6",
            "mx4",
        )  # of most pairs in a block, neither value is large
        step = greatest(block) * 2.0 ** (1 - bits - halved)
    else:
        together = spec.block_size or (CHANNEL if spec.per_channel else TENSOR)
        bits = spec.dtype.bits - spec.reduce_range
        codes = 2 ** (bits - 1) - 1 if spec.symmetric else (2**bits - 1) / 2
        step = greatest(together) / codes * (1 + spec.pow2)
    return min(
        1.0, float(step**2 / 12)
    )  # as zero is a code, no value loses more than itself


def greatest(count: int) -> float:
    """About the greatest magnitude of so many Gaussian values."""
    return float(np.sqrt(2 * np.log(count)))


def least(on: Network, config: QConfig) -> float:
    """The signal-to-noise ratio in dB that the bits of a configuration allow: the noise of all
    roundings adds up.
    """
    weights, activation = config.weight, config.activation
    inside, outside = on.weights * noise(weights), 0.0
    if activation is not None:
        inside += on.activations * noise(activation)
        outside += on.around * noise(activation)
    elif isinstance(weights.dtype, Integer) and weights.dtype.bits <= 8:
        # onnxruntime rounds what such weights multiply to 8 bits of its own accord
        inside += on.weights * noise(QuantizationSpec("uint8", symmetric=False))
    return float(-10 * np.log10(on.share * inside + outside) - SLACK)


def sqnr(expected: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    return float(
        10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (QuantizationSpec("int8"), 6.02 * 8 + 10.79 - 20 * np.log10(2 * 4.71)),
        (
            QuantizationSpec("uint4", symmetric=False, block_size=32),
            6.02 * 4 + 10.2 - 20 * np.log10(2 * 2.63),
        ),
        (QuantizationSpec("bfloat16"), 6.02 * 7 + 14.1),
        (QuantizationSpec("bfp16"), 6.02 * 6 + 10.79 - 20 * np.log10(2.04)),
    ],
    ids=["int8", "uint4", "bfloat16", "bfp16"],
)
def test_a_bit_is_worth_six_decibels(spec: QuantizationSpec, expected: float) -> None:
    assert -10 * np.log10(noise(spec)) == pytest.approx(expected, abs=0.1)


# What any result has to be


def it_is_a_valid_model_with_the_interface_of_the_float_model(
    case: Case, folder: Path
) -> None:
    model = case.on.model
    before = canonical(model)
    result = case.result.model
    assert canonical(model) == before, "the caller's model is never changed"
    onnx.checker.check_model(result, full_check=True)
    assert interface(result) == interface(model)


def it_runs_and_comes_as_near_as_its_bits_allow(case: Case, folder: Path) -> None:
    assert case.outputs.shape == case.on.outputs.shape
    config = portable(case.config) if case.form == "operators" else case.config
    same = config == case.config
    found = (
        case.outputs
        if same
        else outputs(quantize(case.on.model, case.data, config).model, case.on.data)
    )
    assert least(case.on, config) < sqnr(case.on.outputs, found) < np.inf


def the_next_run_and_its_file_have_the_same_bytes(case: Case, folder: Path) -> None:
    again = case.again(folder / "out.onnx")
    assert canonical(again) == canonical(case.result.model)
    assert (folder / "out.onnx").read_bytes() == again.SerializeToString()
    assert [path.name for path in folder.iterdir()] == ["out.onnx"]


def the_report_says_what_was_quantized(case: Case, folder: Path) -> None:
    report, model = case.result.report, case.on.model
    assert {kind: total for kind, (_, total) in report.operators.items()} == Counter(
        kinds(model)
    )
    for kind, number in case.on.weighted.items():
        done, _ = report.operators[kind]
        assert done == number if case.config.activation is None else done >= number
    assert report.quantized == sum(done for done, _ in report.operators.values())
    assert report.config == str(case.config)
    assert (report.bytes_before, report.bytes_after) == (
        model.ByteSize(),
        case.result.model.ByteSize(),
    )
    assert report.samples == len(case.data or ())
    text = str(report)
    assert f"quantized {report.quantized} of {len(model.graph.node)} nodes" in text
    assert ("one random sample" in text) is (case.data is None)
    [output] = report.outputs
    assert output.name == "y" and output.sqnr is not None and np.isfinite(output.sqnr)


def it_is_written_in_the_form_that_was_asked_for(case: Case, folder: Path) -> None:
    before, after = Counter(kinds(case.on.model)), Counter(kinds(case.result.model))
    added = {kind for kind in after if kind not in before}
    if case.form == "operators":
        assert added & case.on_codes
        return
    for kind in case.on.weighted:
        assert after[kind] == before[kind]
    assert added and all("quantize" in kind.lower() for kind in added - BESIDE)
    assert any(kind.startswith("Extended") for kind in added) is (case.form == "vendor")


CHECKS = {
    check.__name__: check
    for check in (
        it_is_a_valid_model_with_the_interface_of_the_float_model,
        it_runs_and_comes_as_near_as_its_bits_allow,
        the_next_run_and_its_file_have_the_same_bytes,
        the_report_says_what_was_quantized,
        it_is_written_in_the_form_that_was_asked_for,
    )
}


@loop_over("check", CHECKS)
@pytest.mark.parametrize("case", [case for case in EVERY if case.changes], ids=str)
def test_any_result(
    case: Case, check: Callable[[Case, Path], None], tmp_path: Path
) -> None:
    """Of every case whose form makes a difference."""
    check(case, tmp_path)


#: Formats whose exponents AMD's operator chooses by another rule than the function that takes its
#: place.
BY_VENDOR = frozenset(preset for preset in PRESETS if preset.startswith("MXFP"))
SAME = [
    case
    for case in EVERY
    if not case.changes
    and case.network == "convolutions"
    and not (case.form == "vendor" and case.preset in BY_VENDOR)
]


@pytest.mark.parametrize("same", SAME, ids=str)
def test_a_form_that_its_formats_do_not_have_is_that_of_pairs(same: Case) -> None:
    assert canonical(same.again()) == canonical(
        PLAIN[same.strategy, same.preset, same.network].result.model
    )


@pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))
@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPES[name].scaled])
@pytest.mark.parametrize("preset", ["A8W8", "DYNAMIC"])
def test_weights_of_any_format_go_with_activations_of_8_bits(
    preset: str, name: str, network: Network
) -> None:
    config = QConfig.of(preset).with_(
        weight=QuantizationSpec(name, per_channel=True), form="qdq"
    )
    result = quantize(network.model, network.data if config.measures else None, config)
    found = outputs(result.model, network.data)
    assert least(network, config) < sqnr(network.outputs, found) < np.inf


@pytest.mark.parametrize(
    "case",
    [case for case in EVERY if case.form == QConfig.of(case.preset).form],
    ids=str,
)
def test_with_all_nodes_excluded_it_is_the_float_model(case: Case) -> None:
    result = quantize(case.on.model, case.data, case.config.with_(exclude="*"))
    assert plain(result.model) == plain(case.on.model)
    assert result.report.quantized == 0
    assert "nothing in this model could be quantized" in str(result.report)


def plain(model: ModelProto) -> bytes:
    """The bytes of a model without the shapes that can be inferred."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    return canonical(copy)


@pytest.mark.parametrize("preset", PRESETS)
def test_static_needs_data_only_for_what_is_measured(preset: str) -> None:
    network = NETWORKS["convolutions"]

    def run(data: Any) -> bytes:
        return canonical(quantize_static(network.model, data, preset))

    if QConfig.of(preset).measures:
        with pytest.raises(DataError, match="no calibration data was given"):
            run(None)
    else:
        assert run(None) == run(network.data)


@pytest.mark.parametrize("preset", PRESETS)
def test_dynamic_writes_operators_or_says_for_which_weights_there_are_none(
    preset: str,
) -> None:
    model = NETWORKS["convolutions"].model
    case = Case("dynamic", preset, "operators", "convolutions")
    if case.offered:
        assert canonical(quantize_dynamic(model, preset)) == canonical(
            case.result.model
        )
    else:
        with pytest.raises(
            ConfigError,
            match=re.escape(f"weight is {QConfig.of(preset).weight}; ")
            + ".*quantize_weights$",
        ):
            quantize_dynamic(model, preset)
