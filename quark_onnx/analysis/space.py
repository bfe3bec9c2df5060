"""Space: the configurations that a search may try, and how one is made from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import split
from typing import TYPE_CHECKING, Any

from quark_onnx.config import QConfig
from quark_onnx.config.spec import check_names
from quark_onnx.config.text import format_call
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.registry import PRESETS

#: Equalization through all that it can pass.
_CLE = "cle:relu6=bound,silu=scale"


@dataclass(frozen=True)
class Trial:
    """A configuration with a name, and the place of the preset that it comes from."""

    name: str
    origin: int
    config: QConfig

    @property
    def kinds(self) -> frozenset[str]:
        """The names of its optimizers, which are what a run takes its time for."""
        return frozenset(optimizer.name for optimizer in self.config.optimizers)


#: A variation of a trial; the trial itself where there is nothing to vary.
Change = Callable[[Trial], Trial]


@dataclass(frozen=True)
class Space:
    """What a search tries: all presets as they are, then variations of the best of them.

    Attributes:
        presets: presets' names, YAML files, dictionaries or QConfigs.
        calibrators: calibrators of activations, with settings as in
            ``"percentile:percentile=99.9"``.
        per_channel: whether weights have a scale for each channel: any of True and False; nothing
            leaves it as it is.
        optimizers: what is put behind a preset's own optimizers, each a text such as
            ``"cle+bias_correction"``, an optimizer, or a tuple of optimizers.
        refine: of so many presets, the best ones, variations are tried.

    >>> Space(presets="A8W8", optimizers=["cle", "cle+adaquant:iterations=100"]).optimizers[1]
    'cle+adaquant:iterations=100'
    """

    presets: tuple[Any, ...] = ("A8W8", "S8S8", "XINT8", "A16W8")
    calibrators: tuple[Any, ...] = (
        "mean_minmax",
        "percentile",
        "minmse",
        "entropy",
        "minmax",
    )
    per_channel: tuple[bool, ...] = ()
    optimizers: tuple[Any, ...] = (
        _CLE,
        "bias_correction",
        f"{_CLE}+bias_correction",
        "adaquant",
        f"{_CLE}+adaquant",
    )
    refine: int = 2

    if TYPE_CHECKING:  # what may be written; what is stored are tuples

        def __init__(
            self,
            presets: Any = ...,
            calibrators: Any = ...,
            per_channel: bool | Sequence[bool] = ...,
            optimizers: Any = ...,
            refine: int = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("presets", "calibrators", "per_channel", "optimizers"):
            value = getattr(self, name)
            single = isinstance(value, str | bool | Path | Mapping) or not hasattr(
                value,
                "__iter__",
            )
            object.__setattr__(self, name, (value,) if single else tuple(value))
        if not self.presets:
            raise ConfigError(
                "presets: there is none, so there is nothing to"
                f" search{nearest('', PRESETS)}",
            )
        if type(self.refine) is not int or self.refine < 0:
            raise ConfigError(
                f"refine is {self.refine!r}; it must be a number of presets, 0 or more",
            )
        for choice in self.per_channel:
            if not isinstance(choice, bool):
                raise ConfigError(f"per_channel: {choice!r} is neither True nor False")
        self.trials()
        for change in self._calibrated():
            change(Trial("", 0, QConfig()))
        for change in self._optimized():
            change(Trial("", 0, QConfig()))

    @classmethod
    def of(cls, space: object) -> Space:
        """A Space from what a user may write: None for the default, a dictionary of its attributes,
        or a Space.
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

    def trials(self) -> list[Trial]:
        """The presets as they are."""
        with_error = _naming("presets")
        return [
            Trial(_preset_name(preset, place), place, with_error(QConfig.of, preset))
            for place, preset in enumerate(self.presets)
        ]

    def stages(self) -> Iterator[list[Change]]:
        """What is varied in turn, each on top of the best that was found before.

        The cheap first.
        """
        yield list(self._calibrated())
        yield [_per_channel(choice) for choice in self.per_channel]
        yield list(self._optimized())

    @property
    def most(self) -> int:
        """At most so many configurations are tried."""
        return len(self.presets) + self.refine * sum(map(len, self.stages()))

    def _calibrated(self) -> Iterator[Change]:
        for calibrator in self.calibrators:
            yield _calibrated_by(calibrator)

    def _optimized(self) -> Iterator[Change]:
        for choice in self.optimizers:
            yield _optimized_by(choice)


def _calibrated_by(calibrator: Any) -> Change:
    def change(trial: Trial) -> Trial:
        activation = trial.config.activation
        if activation is None or not activation.measured:
            return trial
        config = _naming("calibrators")(trial.config.with_, calibrator=calibrator)
        assert config.activation is not None
        return Trial(
            f"{trial.name} {format_call(config.activation.calibrator)}",
            trial.origin,
            config,
        )

    return change


def _per_channel(choice: bool) -> Change:
    def change(trial: Trial) -> Trial:
        weight = trial.config.weight
        if (
            weight is None
            or weight.per_channel is choice
            or weight.block_size
            or not weight.dtype.scaled
        ):
            return trial
        name = f"{trial.name} {'per_channel' if choice else 'per_tensor'}"
        return Trial(name, trial.origin, trial.config.with_(per_channel=choice))

    return change


def _optimized_by(choice: Any) -> Change:
    def change(trial: Trial) -> Trial:
        texts = split(r"\+(?=[A-Za-z])", choice) if isinstance(choice, str) else choice
        given = texts if isinstance(texts, list | tuple) else (texts,)
        optimizers = _naming("optimizers")(
            trial.config.with_,
            optimizers=tuple(given),
        ).optimizers
        config = trial.config.with_(optimizers=(*trial.config.optimizers, *optimizers))
        return Trial(
            f"{trial.name} {'+'.join(map(format_call, optimizers))}".rstrip(),
            trial.origin,
            config,
        )

    return change


def _preset_name(preset: object, place: int) -> str:
    if isinstance(preset, str | Path):
        return str(preset).upper() if str(preset).upper() in PRESETS else str(preset)
    for name in PRESETS:
        if PRESETS[name] == preset:
            return name
    return f"config{place + 1}"


def _naming(setting: str) -> Callable[..., QConfig]:
    """Calls a function; an error says which setting of the space is wrong."""

    def call(make: Callable[..., QConfig], *arguments: Any, **keywords: Any) -> QConfig:
        try:
            return make(*arguments, **keywords)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error

    return call
