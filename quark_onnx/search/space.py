"""Space: the configurations of a search, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from re import split
from typing import TYPE_CHECKING, Any, TypeVar

from onnx import ModelProto

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.common.registry import PRESETS, TARGETS
from quark_onnx.config import QConfig, to_dict
from quark_onnx.config.qconfig import parse_optimizer
from quark_onnx.config.spec import check_names, is_measured, parse_calibrator
from quark_onnx.config.text import format_call
from quark_onnx.recipes import Recipe, choose
from quark_onnx.search.keys import config_key
from quark_onnx.targets import unfit

#: Name of the recipe for a model, which is known with the model.
RECIPE = "recipe"
#: Label of the choice that keeps the preset's setting.
PLAIN = ""
#: Assumed runtime by optimizer relative to a plain candidate, before any candidate was timed
#: (measured on ResNet-20, MobileNetV2 and YOLOX-nano), and the value for other optimizers.
_RELATIVE_COST = {
    "bias_correction": 2.5,
    "cle": 3.0,
    "smoothquant": 3.0,
    "gptq": 6.0,
    "auto_mixed_precision": 8.0,
}
_OTHER_COST = 10.0
#: Presets without a target: formats that onnxruntime supports on a CPU.
_PRESETS = ("A8W8", "S8S8", "A16W8")

T = TypeVar("T")


@dataclass(frozen=True)
class ConfigCombination:
    """A choice on each axis, and the configuration of the choices.

    Attributes:
        name: the preset, and changes to the preset.
        config: the configuration.
        choices: label of the choice on each axis of the space.
    """

    name: str
    config: QConfig
    choices: Mapping[str, str]

    @cached_property
    def key(self) -> str:
        """The key of the configuration."""
        return config_key(self.config)

    @property
    def document(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return to_dict(self.config)

    @property
    def kinds(self) -> frozenset[str]:
        """Return the names of the optimizers, which dominate the runtime."""
        return frozenset([optimizer.name for optimizer in self.config.optimizers])

    @property
    def relative_cost(self) -> float:
        """Estimate the runtime relative to a run without optimizers."""
        return relative_cost(self.config)


def relative_cost(config: QConfig) -> float:
    """Estimate the runtime of a configuration relative to a run without optimizers."""
    kinds = {optimizer.name for optimizer in config.optimizers}
    costs = [_RELATIVE_COST.get(kind, _OTHER_COST) for kind in sorted(kinds)]
    # Each cost includes the plain run, which happens once.
    return 1.0 + sum(cost - 1.0 for cost in costs)


#: Labels of scales per channel, and per tensor.
_GRANULARITIES = {True: "per_channel", False: "per_tensor"}


@dataclass(frozen=True)
class Space:
    """Search space: every preset with every calibrator, granularity and optimizer.

    Attributes:
        presets: names of presets, YAML files, dictionaries or QConfigs. Other choices start from
            the first. None for the presets of the target that quantization writes, or, without a
            target, for A8W8, S8S8 and A16W8. A target must take all of them.
        calibrators: calibrators of activations, with settings as in
            ``"percentile:percentile=99.9"``.
        per_channel: choices for per-channel weights: True, False or both; empty to keep the
            presets' granularity.
        optimizers: optimizers to add after a preset's own optimizers, each a text such as
            ``"cle+bias_correction"``, an optimizer, or a tuple of optimizers; ``"recipe"`` stands
            for the optimizers and operator types of the recipe for the model.
        target: target of the result, as in ``QConfig.target``; empty for any runtime.

    >>> Space(presets="A8W8", optimizers=["cle", "cle+adaquant:iterations=100"]).optimizers[1]
    'cle+adaquant:iterations=100'
    """

    presets: tuple[Any, ...] | None = None
    calibrators: tuple[Any, ...] = (
        "mean_minmax",
        "percentile",
        "minmse",
        "entropy",
        "minmax",
    )
    per_channel: tuple[bool, ...] = ()
    optimizers: tuple[Any, ...] = (
        RECIPE,
        "bias_correction",
        "cle+bias_correction",
        "cle",
        "smoothquant",
        "adaquant",
        "cle+adaquant",
    )
    target: str = ""

    if TYPE_CHECKING:  # types of arguments; the fields store tuples

        def __init__(
            self,
            presets: Any = ...,
            calibrators: Any = ...,
            per_channel: bool | Sequence[bool] = ...,
            optimizers: Any = ...,
            target: str = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.target and not isinstance(self.target, str):
            raise ConfigError(
                f"target of a space is {self.target!r}; it must be the name of a"
                f" target{nearest('', TARGETS)}",
            )
        # The dataclass is frozen, so that fields are set through object.
        if self.presets is None:
            object.__setattr__(self, "presets", _default_presets(self.target))
        for name in ("presets", "calibrators", "per_channel", "optimizers"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if not self.presets:
            raise ConfigError(
                "presets: there is none, so there is nothing to"
                f" search{nearest('', PRESETS)}",
            )
        for choice in self.per_channel:
            if not isinstance(choice, bool):
                raise ConfigError(f"per_channel: {choice!r} is neither True nor False")
        _ = self.axes  # raise errors early

    @classmethod
    def of(cls, space: object) -> Space:
        """Return a Space from user input.

        Args:
            space: None for the default, a dictionary of attributes, or a Space.
        """
        if space is None:
            return cls()
        if isinstance(space, Mapping):
            check_names(space, cls)
            return cls(**space)
        if isinstance(space, cls):
            return space
        raise ConfigError(
            f"space is a {type(space).__name__}; it must be a Space, or a dictionary of"
            " its settings",
        )

    @cached_property
    def axes(self) -> dict[str, dict[str, Any]]:
        """Return the choices of each axis by their labels, plain choices first.

        Returns:
            For each of the axes preset, calibrator, granularity and optimizers the values by label:
            a QConfig, a calibrator or None, a bool or None, and a chain of optimizers.

        Raises:
            ConfigError: a choice is no preset, calibrator or optimizer.
        """
        presets = {
            _preset_name(preset, index): self._config(preset)
            for index, preset in enumerate(self.presets or ())
        }
        calibrators = map(
            partial(_naming, "calibrators", _calibrator), self.calibrators
        )
        chains = map(partial(_naming, "optimizers", _optimizers), self.optimizers)
        return {
            "preset": presets,
            "calibrator": _by_label(None, format_call, calibrators),
            "granularity": _by_label(
                None, _GRANULARITIES.__getitem__, self.per_channel
            ),
            "optimizers": _by_label(_Chain(), lambda chain: chain.label, chains),
        }

    def _config(self, preset: Any) -> QConfig:
        """Return the configuration of a preset, for the target of the space if it has one."""
        config = _naming("presets", QConfig.of, preset)
        if not self.target:
            return config
        # Before the search: each candidate with such a preset would fail.
        if why := unfit(TARGETS[self.target], config):
            raise ConfigError(f"presets: {why}")
        return config.with_(target=self.target)

    def for_model(self, model: str | Path | ModelProto) -> Space:
        """Return the space with the recipe of a model in the place of ``"recipe"``.

        Raises:
            ModelError: the model cannot be read.
        """
        if RECIPE not in self.optimizers:
            return self
        recipe = choose(model, self.target).recipe
        chains = [
            recipe if optimizer == RECIPE else optimizer
            for optimizer in self.optimizers
        ]
        return replace(self, optimizers=tuple(chains))

    def combination(self, choices: Mapping[str, str]) -> ConfigCombination:
        """Return the combination of a choice on each axis.

        Choices that do not apply to the preset are left out of the name.

        Args:
            choices: a label of ``axes`` for each axis.
        """
        picked = {axis: self.axes[axis][label] for axis, label in choices.items()}
        config: QConfig = picked["preset"]
        name = [choices["preset"]]
        if picked["calibrator"] and is_measured(config.activation):
            config = config.with_(calibrator=picked["calibrator"])
            name.append(choices["calibrator"])
        per_channel = picked["granularity"]
        if per_channel is not None and _has_other_granularity(config, per_channel):
            config = config.with_(per_channel=per_channel)
            name.append(choices["granularity"])
        chain: _Chain = picked["optimizers"]
        if chain.optimizers:
            # The preset's own optimizers come first.
            optimizers = (*config.optimizers, *chain.optimizers)
            op_types = chain.op_types or config.op_types
            config = config.with_(optimizers=optimizers, op_types=op_types)
            name.append(choices["optimizers"])
        return ConfigCombination(" ".join(name), config, choices)

    def order(
        self, early: str = ""
    ) -> tuple[list[ConfigCombination], list[ConfigCombination]]:
        """Return combinations with different configurations, in the order of cost and promise.

        Args:
            early: a promising optimizer for the model; a candidate with it comes second.

        Returns:
            Variations of the first preset along a single axis, which show the value of each
            choice, and all other combinations; cheap ones first.
        """
        labels = {axis: list(choices) for axis, choices in self.axes.items()}
        probes, others = list[ConfigCombination](), list[ConfigCombination]()
        seen = set[str]()  # a choice may equal a preset's own setting
        # A few hundred combinations: a configuration is a value without a model.
        for chosen in product(*labels.values()):
            choices = dict(zip(labels, chosen, strict=True))
            combination = self.combination(choices)
            if combination.key in seen:
                continue
            seen.add(combination.key)
            # The first label of an axis is the plain choice, or the first preset.
            changes = sum(label != labels[axis][0] for axis, label in choices.items())
            (probes if changes <= 1 else others).append(combination)
        # Stable sorts: of equal cost, the order of the axes stays.
        probes.sort(key=lambda candidate: candidate.relative_cost)
        others.sort(key=lambda candidate: candidate.relative_cost)
        promising = [candidate for candidate in probes if early in candidate.kinds]
        # bias correction is fast, and complements any optimizer before it
        with_bias = [
            candidate for candidate in promising if "bias_correction" in candidate.kinds
        ]
        of_recipe = [
            candidate
            for candidate in probes
            if candidate.choices["optimizers"].startswith(RECIPE)
        ]
        for probe in (*(with_bias or promising)[:1], *of_recipe):
            probes.remove(probe)
            probes.insert(1, probe)
        return probes, others


def _default_presets(target: str) -> tuple[str, ...]:
    """Return the presets to try for a target; empty for any runtime."""
    if not target:
        return _PRESETS
    # Formats that a compiler makes of the float model, such as BF16, are no candidates.
    row = TARGETS[target]
    return tuple(preset for preset in row.presets if not unfit(row, QConfig.of(preset)))


def _by_label(
    plain: Any, label_of: Callable[[Any], str], choices: Iterable[Any]
) -> dict[str, Any]:
    """Return the choices of an axis by their labels, after the plain one, the preset's own."""
    labelled: dict[str, Any] = {PLAIN: plain}
    for choice in choices:
        # Labels are keys: equal choices, written in two ways, fall together.
        labelled[label_of(choice)] = choice
    return labelled


@dataclass(frozen=True)
class _Chain:
    """Optimizers to add, with the operators that a recipe quantizes.

    Attributes:
        optimizers: the optimizers, in order.
        op_types: operator types to quantize; empty to keep those of the preset.
        recipe: name of the recipe; empty for optimizers without one.
    """

    optimizers: tuple[Any, ...] = ()
    op_types: tuple[str, ...] = ()
    recipe: str = ""

    @property
    def label(self) -> str:
        """Return the label in tables: the recipe, or the optimizers."""
        return self.recipe or "+".join(
            format_call(optimizer) for optimizer in self.optimizers
        )


def _calibrator(choice: Any) -> Any:
    """Return a calibrator from an object or a text."""
    if isinstance(choice, str):
        return parse_calibrator(choice)
    # QConfig checks its calibrator; the error then has the words of a configuration's error.
    activation = QConfig().with_(calibrator=choice).activation
    assert activation is not None
    return activation.calibrator


def _optimizers(choice: Any) -> _Chain:
    """Return a chain of optimizers from a text, an object, or a tuple.

    Args:
        choice: a text such as "cle+bias_correction", an optimizer, a list or tuple of optimizers,
            or a recipe; "recipe" stands for that of a model that is not known yet.

    Raises:
        ConfigError: a part is no optimizer.
    """
    if isinstance(choice, Recipe):
        optimizers = choice.config.optimizers
        return _Chain(optimizers, choice.op_types, f"{RECIPE} {choice.name}")
    if choice == RECIPE:
        return _Chain(recipe=RECIPE)
    if isinstance(choice, str):
        # A plus before a digit is part of a number, such as 1e+3.
        return _Chain(tuple(map(parse_optimizer, split(r"\+(?=[A-Za-z])", choice))))
    chain = tuple(choice) if isinstance(choice, list | tuple) else (choice,)
    return _Chain(QConfig().with_(optimizers=chain).optimizers)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a setting's values; a text, a dictionary or a path is a single value."""
    if isinstance(value, str | bool | Path | Mapping) or not hasattr(value, "__iter__"):
        return (value,)
    return tuple(value)


def _has_other_granularity(config: QConfig, per_channel: bool) -> bool:
    """Return whether weights have a scale per tensor or channel, and not as given."""
    weight = config.weight
    # Blocks have a granularity of their own, and formats without scales have none.
    if weight is None or weight.block_size or not weight.dtype.scaled:
        return False
    return weight.per_channel is not per_channel


def _preset_name(preset: object, index: int) -> str:
    """Return the name of a preset, a file or a configuration in a table.

    Args:
        preset: a name, a path, a dictionary or a QConfig.
        index: index of the preset in the space, for configurations without a name.
    """
    if isinstance(preset, str | Path):
        if str(preset).upper() in PRESETS:
            return str(preset).upper()
        return str(preset)
    # A configuration that equals a preset has the name of the preset.
    for name in PRESETS:
        if PRESETS[name] == preset:
            return name
    return f"config{index + 1}"


def _naming(setting: str, make: Callable[[Any], T], value: Any) -> T:
    """Call a function that parses or checks a value; an error begins with the setting."""
    try:
        return make(value)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
