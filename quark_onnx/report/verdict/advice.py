"""Advice after a bad verdict: changes to try, with expected effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from onnx import ModelProto, NodeProto, TensorProto

from quark_onnx.config import QConfig
from quark_onnx.graph import Node, scopes_of
from quark_onnx.patterns.depthwise import has_depthwise_kernel
from quark_onnx.report.verdict.change import is_possible
from quark_onnx.report.verdict.verdict import NextStep

#: Minimum share of depthwise convolutions for which equalization is proposed.
_DEPTHWISE = 0.15
#: Kinds of nodes for advice: a depthwise convolution, a product of two activations.
_DEPTHWISE_CONV, _PRODUCT = "depthwise convolution", "product of activations"
#: Maximum number of proposed steps.
MOST = 3


@dataclass(frozen=True)
class AdvisedSettings:
    """Settings of a run, for advice.

    Attributes:
        activation: bits of the activations; None for float.
        weight: bits of the weights; None for float.
        per_channel: whether weight scales are per-channel.
        optimizers: names of the optimizers that ran.
        target: name of the processor; None for any.
        samples: number of calibration samples.
        goal: minimum SQNR of every output, in dB.
        calibrator: calibrator of the activations; empty if unknown.
        usual_calibrator: calibrator of the preset for these activations; empty if unknown.
        powers_of_two: whether scales are powers of two, as the integer engines of some processors
            require, which have one scale per tensor.
        config: the configuration; None if unknown, for models of other tools.
        reached: SQNR of the worst output of the result in dB; None if unknown.
    """

    activation: int | None
    weight: int | None
    per_channel: bool
    optimizers: frozenset[str] = frozenset()
    target: str | None = None
    samples: int = 0
    goal: float = 20.0
    calibrator: str = ""
    usual_calibrator: str = ""
    powers_of_two: bool = False
    config: QConfig | None = field(default=None, compare=False)
    reached: float | None = None

    @property
    def is_portable(self) -> bool:
        """Return whether another number format may be proposed: no processor requires this one."""
        return self.target is None and not self.powers_of_two

    @property
    def is_portable_8bit(self) -> bool:
        """Return whether activations have 8 bits, for any processor."""
        return self.activation == 8 and self.is_portable


@dataclass(frozen=True)
class _Structure:
    depthwise: float
    transformer: bool
    weighted: int

    @classmethod
    def of(cls, model: ModelProto) -> _Structure:
        """Return the properties of a graph and of its bodies for advice."""
        kinds = Counter[str]()
        for graph, constants in scopes_of(model):
            for node in graph.node:
                kinds[node.op_type] += 1
                kinds[_kind(node, constants)] += 1
        return cls(
            kinds[_DEPTHWISE_CONV] / max(1, kinds["Conv"]),
            kinds[_PRODUCT] > 0 or kinds["Attention"] > 0,
            kinds["Conv"] + kinds["Gemm"] + kinds["MatMul"],
        )


def _kind(node: NodeProto, constants: Mapping[str, TensorProto]) -> str:
    """Return what a node is for advice; empty for other nodes.

    Args:
        node: a node of any kind.
        constants: constants that it can read, by name.
    """
    if node.op_type == "Conv" and node.input[1] in constants:
        kernel = constants[node.input[1]].dims
        return _DEPTHWISE_CONV if has_depthwise_kernel(Node(node), kernel) else ""
    # Two computed operands are attention: queries by keys, or scores by values.
    if node.op_type == "MatMul" and constants.keys().isdisjoint(node.input):
        return _PRODUCT
    return ""


def next_steps(
    model: ModelProto, settings: AdvisedSettings, task: str, most: int | None = MOST
) -> tuple[NextStep, ...]:
    """Return changes to try, the most promising first.

    Args:
        model: the float model.
        settings: settings of the run with a risky or poor verdict.
        task: name of a task in ``TASKS``.
        most: maximum number of steps, as further ones would only tire; None for all.
    """
    structure = _Structure.of(model)
    steps: list[NextStep] = []
    for rule in _RULES:
        for step in rule(settings, structure, task):
            # Data changes no configuration.
            known = settings.config if step.options else None
            if known is None or is_possible(known, step.options):
                steps.append(step)
    return tuple(steps[:most])


def _call(changes: str) -> str:
    """Return a call with changes of the configuration of the run."""
    return f"quantize(model, data, QConfig.of(config).with_({changes}))"


def _optimizer_call(optimizers: str) -> str:
    return _call(f"optimizers=[*QConfig.of(config).optimizers, {optimizers}]")


def _changed_call(options: str) -> str:
    """Return a call for a change that keeps the other settings of the run."""
    return f"quantize(model, data, changed(config, {options!r}))"


def _more_samples(
    settings: AdvisedSettings, _: _Structure, task: str
) -> Iterator[NextStep]:
    """Propose more data where ranges come from a few samples."""
    # 0 samples: random or no data, whose verdict is unknown; float activations have no ranges.
    if 0 < settings.samples < 16 and settings.activation is not None:
        yield NextStep(
            "",
            f"{settings.samples} samples were used; ranges of few samples clip values of"
            " other data",
            "100 or more calibration samples",
        )


def _usual_calibrator(
    settings: AdvisedSettings, _: _Structure, task: str
) -> Iterator[NextStep]:
    """Propose the calibrator of the preset where another was chosen."""
    usual, chosen = settings.usual_calibrator, settings.calibrator
    if usual and chosen and usual != chosen:
        yield NextStep(
            f"--calibrator {usual}",
            f"the ranges are those of {chosen!r}; {usual!r} is what the preset has",
            _call(f"calibrator={usual!r}"),
            expected="it loses less on most models",
        )


def _per_channel(
    settings: AdvisedSettings, _: _Structure, task: str
) -> Iterator[NextStep]:
    """Propose per-channel scales unless a processor requires per-tensor scales."""
    # Engines with power-of-two scales take one scale per tensor.
    if settings.weight == 8 and not settings.per_channel and settings.is_portable:
        yield NextStep(
            "--per-channel",
            "one scale per output channel of a weight",
            _call("per_channel=True"),
            expected="usually 1 to 5 dB, same speed",
        )


#: Recipes by task: name, an optimizer that identifies the recipe in a run, effect, and gain.
_RECIPES = {
    "classifier": (
        "classifier",
        "bias_correction",
        "corrects the mean of what 8-bit weights compute",
        "tenths of a dB to several dB, same speed",
    ),
    "detector": (
        "detector",
        "cle",
        "equalizes channels across SiLU and Relu6 and corrects biases",
        "YOLOX-nano 32.7 -> 33.1 mAP, 1.13 times the runtime",
    ),
    "image": (
        "superres",
        "cle",
        "equalizes channels and corrects biases, so that no mean shifts",
        "same speed",
    ),
}


def _recipe(
    settings: AdvisedSettings,
    structure: _Structure,
    task: str,
) -> Iterator[NextStep]:
    """Propose the recipe for the architecture or the task."""
    if not settings.is_portable_8bit:
        return
    if structure.transformer and "smoothquant" not in settings.optimizers:
        yield NextStep(
            "--recipe transformer",
            "moves outliers of activations into the weights and leaves all but the"
            " products float",
            _changed_call("--recipe transformer"),
            expected="usually 1 to 5 dB",
        )
    # The recipes by task are for convolutional networks.
    if structure.transformer or task not in _RECIPES:
        return
    name, optimizer, effect, expected = _RECIPES[task]
    if optimizer not in settings.optimizers:
        options = f"--recipe {name}"
        yield NextStep(options, effect, _changed_call(options), expected=expected)


def _equalize(
    settings: AdvisedSettings,
    structure: _Structure,
    task: str,
) -> Iterator[NextStep]:
    """Propose cross-layer equalization for depthwise networks, unless a recipe includes it."""
    if settings.activation is None or "cle" in settings.optimizers:
        return
    # The recipe "detector", which _recipe proposes, contains equalization.
    has_recipe = task == "detector" and settings.is_portable
    if structure.depthwise >= _DEPTHWISE and not has_recipe:
        # the search for power-of-two scales corrects biases itself
        others = [] if settings.powers_of_two else ["bias_correction"]
        optimizers = ["cle", *others]
        yield NextStep(
            f"--optimize {' '.join(optimizers)}",
            "equalizes the channels of depthwise convolutions",
            _optimizer_call(", ".join(map(repr, optimizers))),
            expected="usually 1 to 6 dB, same speed",
        )


def _corrected(
    settings: AdvisedSettings, _: _Structure, task: str
) -> Iterator[NextStep]:
    """Propose bias correction, where no recipe of the task contains it."""
    # The search for power-of-two scales corrects biases itself.
    if settings.activation is None or settings.weight is None or settings.powers_of_two:
        return
    if "bias_correction" not in settings.optimizers and task not in _RECIPES:
        yield NextStep(
            "--optimize bias_correction",
            "corrects the mean of what rounded weights compute",
            _optimizer_call("'bias_correction'"),
            expected="tenths of a dB to several dB, same speed",
        )


def _wide(settings: AdvisedSettings, _: _Structure, task: str) -> Iterator[NextStep]:
    """Propose 16-bit activations where no processor requires 8."""
    if settings.is_portable_8bit:
        effect = "16-bit activations: what is left is the error of the weights"
        if settings.weight != 8:
            effect = "16-bit activations and 8-bit weights"
        yield NextStep(
            "--preset A16W8",
            effect,
            _changed_call("--preset A16W8"),
            expected="often 10 dB or more, slower than 8 bits on most processors",
        )


def _learned(settings: AdvisedSettings, _: _Structure, task: str) -> Iterator[NextStep]:
    """Propose learned rounding, or more bits for weights if activations are float."""
    few_bits = settings.weight is not None and settings.weight <= 4
    activations = settings.activation is not None
    # One learned rounding excludes another: each chooses the codes of the same weights.
    learned = {"adaround", "adaquant", "gptq"} & settings.optimizers
    if (few_bits or not settings.is_portable) and activations and not learned:
        yield NextStep(
            "--optimize adaround",
            "learns the rounding of the weights layer by layer",
            _optimizer_call("'adaround'"),
            expected="minutes of calibration, same speed",
        )
    if few_bits and not activations:
        yield NextStep(
            "--preset W8",
            "8-bit weights, twice the size",
            _changed_call("--preset W8"),
            expected="nearly no error",
        )


def _mixed(
    settings: AdvisedSettings, structure: _Structure, task: str
) -> Iterator[NextStep]:
    """Propose more bits for the most harmful layers."""
    spent = "auto_mixed_precision" in settings.optimizers
    # The search ends at once where every output reaches the goal.
    if settings.reached is not None and settings.reached >= settings.goal:
        spent = True
    # Mixed precision ranks layers with weights; without one there is nothing to choose.
    if settings.activation == 8 and structure.weighted and not spent:
        goal = f"{settings.goal:g}"
        # With a target, nodes get 16 bits: the processor may not run float nodes. The engine for
        # power-of-two scales has 8 bits alone.
        if settings.target is None:
            kind, options = "stay float", f"--auto-exclude {goal}"
            optimizer = f"AutoMixedPrecision(target={goal}, to='float')"
        elif settings.powers_of_two:
            kind, options = (
                "stay float, on the CPU,",
                f"--optimize auto_mixed_precision:target={goal},to=float",
            )
            optimizer = f"AutoMixedPrecision(target={goal}, to='float')"
        else:
            kind, options = (
                "get 16 bits",
                f"--optimize auto_mixed_precision:target={goal}",
            )
            optimizer = f"AutoMixedPrecision(target={goal})"
        yield NextStep(
            options,
            f"as few nodes as possible {kind} so that every output reaches {goal} dB",
            _optimizer_call(optimizer),
            expected="slower than 8 bits throughout",
        )


#: In the order of promise and cost: data and settings first, wider formats last.
_RULES: tuple[Callable[[AdvisedSettings, _Structure, str], Iterator[NextStep]], ...] = (
    _more_samples,
    _usual_calibrator,
    _per_channel,
    _equalize,
    _recipe,
    _learned,
    _corrected,
    _wide,
    _mixed,
)
