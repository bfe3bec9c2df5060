"""Describe the target devices."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import TARGETS


@dataclass(frozen=True)
class Takes:
    """Types and operators of quantized models that an engine takes, by ONNX's names.

    An empty tuple is no bound. ``engine_rules.py`` checks files, ``formats.py`` configurations.

    Attributes:
        activations: types of the codes of activations.
        weights: types of the codes of weights.
        zero_points: zero points of activations may differ from 0.
        biases: types of stored biases; ``float`` alone keeps them float.
        channels: operators whose weights may have a scale per channel.
        one_scale: type of the codes of the weights of other operators; empty for any.
        floats: operators whose weights stay float.
        codes: operators of ONNX and onnxruntime on codes, scales computed at runtime, blocks, and
            weights without activations in codes.
        vendor_pairs: Q/DQ pairs of onnxruntime's own domain, where ``codes`` is false.
        refused: operators that the engine does not load.
        static: shapes must be static.
        paired: an operator runs on integers only where its result is quantized, too.
        fuses: an activation function runs with the layer before it, on float sums.
        products: products of two activations run on integers.
        padded_means: an AveragePool that counts its padding pads codes with their zero point.
        small_products: chains of small products without a bias keep their scales.
        moves: operators that only move values move codes without a pair after them, and a Concat
            whose inputs have one scale.
        barriers: Min operators that keep onnxruntime from fusions with wrong results stay.
        cpu_forms: forms that onnxruntime's CPU runs faster are written (``writing.cpu_forms``).
        timed: onnxruntime's latency on this machine's CPU is that of the target.
    """

    activations: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    zero_points: bool = True
    biases: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    one_scale: str = ""
    floats: tuple[str, ...] = ()
    codes: bool = False
    vendor_pairs: bool = False
    refused: tuple[str, ...] = ()
    static: bool = False
    paired: bool = False
    fuses: bool = False
    products: bool = True
    padded_means: bool = True
    small_products: bool = True
    moves: bool = False
    barriers: bool = False
    cpu_forms: bool = False
    timed: bool = False


@dataclass(frozen=True)
class Target:
    """A device, a family of devices, or an engine.

    Attributes:
        name: name as in ``--target``.
        summary: description in words.
        architecture: the engine, "XDNA1" or "XDNA2"; empty for any.
        compiler: value of the provider option ``target``, "X1" or "X2"; empty if omitted.
        presets: presets that run on the device, the recommended one first.
        integer_engine: power-of-two scales have to satisfy the constraints C1 to C10.
        opset: greatest recommended opset; 0 for none.
        xclbin: the provider needs the path of an overlay.
        source: source of the row, with its date.
        takes: what an engine takes; None for a Ryzen AI processor, which has rules of its own.
    """

    name: str
    summary: str
    architecture: str
    compiler: str
    presets: tuple[str, ...]
    integer_engine: bool
    opset: int
    xclbin: bool
    source: str
    takes: Takes | None = None

    @property
    def is_npu(self) -> bool:
        """Whether the target is a Ryzen AI processor."""
        return self.takes is None

    @property
    def keeps_barriers(self) -> bool:
        """Whether onnxruntime's kernels run what the target leaves, and need barriers."""
        return self.takes is None or self.takes.barriers

    @property
    def is_static(self) -> bool:
        """Whether shapes must be static, so that a symbolic batch becomes 1."""
        return self.takes is None or self.takes.static


_DOCS = (
    "Ryzen AI documentation 1.8 (2026-07-23): relnotes.rst, modelrun.rst,"
    " model_quantization.rst"
)
_XDNA2 = ("XINT8", "A8W8", "A16W8", "BF16")
# Only XDNA1 (phx, hpt) takes an overlay; a session on XDNA2 must not set one since release 1.6.
_ROWS = (
    Target("npu", "any Ryzen AI processor", "", "", ("XINT8",), True, 17, False, _DOCS),
    Target("phx", "Phoenix (XDNA1)", "XDNA1", "X1", ("XINT8",), True, 17, True, _DOCS),
    Target(
        "hpt", "Hawk Point (XDNA1)", "XDNA1", "X1", ("XINT8",), True, 17, True, _DOCS
    ),
    Target(
        "stx",
        "Strix and Strix Halo (XDNA2)",
        "XDNA2",
        "X2",
        _XDNA2,
        True,
        17,
        False,
        _DOCS,
    ),
    Target("krk", "Krackan (XDNA2)", "XDNA2", "X2", _XDNA2, True, 17, False, _DOCS),
    Target(
        "stx-x1",
        "Strix and Strix Halo (XDNA2) with the older compiler X1",
        "XDNA2",
        "X1",
        ("XINT8",),
        True,
        17,
        False,
        _DOCS,
    ),
    Target(
        "krk-x1",
        "Krackan (XDNA2) with the older compiler X1",
        "XDNA2",
        "X1",
        ("XINT8",),
        True,
        17,
        False,
        _DOCS,
    ),
)
#: Operators on codes, which engines of Q/DQ pairs do not load.
_ON_CODES = (
    "ConvInteger",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "QLinearConv",
    "QLinearMatMul",
)
_MEASURED = "measured here with OpenVINO 2026.4 on x86-64, docs/howto/engines.md"
_TENSORRT = (
    "by documentation, not run here: TensorRT, Working with Quantized Types (2026-11);"
    " onnx-tensorrt, docs/operators.md"
)
_QNN = (
    "by documentation, not run here: onnxruntime, QNN-ExecutionProvider.md 019bde6;"
    " quantization/execution_providers/qnn/quant_config.py 1.32"
)
_WEB = (
    "by source, kernels not timed here: onnxruntime, core/mlas/lib/qgemm.h 3c93a0a; files run"
    " with onnxruntime-web 1.30"
)


def _engine(
    name: str, summary: str, presets: tuple[str, ...], source: str, takes: Takes
) -> Target:
    return Target(name, summary, "", "", presets, False, 0, False, source, takes)


_ENGINES = (
    _engine(
        "cpu",
        "onnxruntime on the CPU",
        ("A8W8", "U8U8", "S8S8", "DYNAMIC", "A16W8", "INT4", "W8"),
        "measured here with onnxruntime 1.32 on x86-64, docs/benchmarks.md",
        Takes(codes=True, barriers=True, cpu_forms=True, timed=True),
    ),
    _engine(
        "openvino",
        "OpenVINO on the CPU",
        ("A8W8",),
        _MEASURED,
        Takes(
            activations=("uint8",),
            weights=("int8",),
            biases=("int32", "float"),
            floats=("LSTM", "GRU"),
            fuses=True,
            products=False,
            padded_means=False,
            small_products=False,
            moves=True,
        ),
    ),
    _engine(
        "tensorrt",
        "TensorRT on NVIDIA GPUs",
        ("S8S8",),
        _TENSORRT,
        Takes(
            activations=("int8",),
            weights=("int8",),
            zero_points=False,
            biases=("float",),
            refused=_ON_CODES,
        ),
    ),
    _engine(
        "qnn",
        "onnxruntime's QNN provider on Qualcomm's NPU",
        ("A8W8",),
        _QNN,
        Takes(
            activations=("uint8",),
            weights=("int8", "uint8"),
            biases=("int32", "float"),
            channels=("Conv", "ConvTranspose"),
            one_scale="uint8",
            vendor_pairs=True,  # the provider is part of onnxruntime
            refused=(*_ON_CODES, "If", "Loop", "Scan"),
            static=True,
            paired=True,
        ),
    ),
    _engine(
        "web",
        "onnxruntime-web on the CPU (WebAssembly)",
        ("A8W8", "U8U8", "DYNAMIC", "INT4", "W8"),
        _WEB,
        Takes(activations=("uint8",), codes=True, barriers=True),
    ),
)
for _row in (*_ROWS, *_ENGINES):
    TARGETS.add(_row.name, _row)


def is_timed(name: str) -> bool:
    """Return whether onnxruntime's latency on this CPU is that of a target.

    Args:
        name: name of the target; empty for none, which is onnxruntime.
    """
    takes = TARGETS[name].takes if name else None
    return not name or (takes is not None and takes.timed)


def npu_names() -> list[str]:
    """Return the names of the targets that are Ryzen AI processors."""
    return [name for name in TARGETS if TARGETS[name].is_npu]


def npu_of(name: str) -> Target:
    """Return the Ryzen AI processor of a name.

    Raises:
        ConfigError: the name is unknown, or that of an engine.
    """
    row: Target = TARGETS[name]
    if not row.is_npu:
        raise ConfigError(
            f"target {name} is {row.summary}, no Ryzen AI processor; take one of"
            f" {', '.join(npu_names())}, or quantize --target {name} and check --target {name}"
        )
    return row


#: Names that users of the vendor's tools may mistake for a target, with advice.
_ELSEWHERE = {
    "x1": (
        "that is the compiler of phx and hpt, whose provider options name it, and the older one"
        " of stx and krk: take stx-x1 or krk-x1"
    ),
    "x2": "that is the compiler of stx and krk, whose provider options name it",
    "bfp16": (
        "the provider makes BFP16 itself of a float model: take --target stx and"
        " --preset BF16 of 'npu deploy'; 'quantize --preset BFP16' without a target"
        " measures what it costs"
    ),
    "llm": (
        "language models run through OnnxRuntime GenAI, whose model builder reads the"
        " checkpoint of 'quark-onnx llm ptq MODEL -o OUT --scheme uint4_wo_128 --layout"
        " oga'"
    ),
}
# A declined name gets its advice in place of a guess at the nearest target.
for _name, _instead in _ELSEWHERE.items():
    TARGETS.decline(_name, _instead)
