"""AlgoConfig: settings of algorithms with AMD Quark's API names, and JSON files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_known
from quark_onnx.torch.algorithms.gptq.gptq import GPTAQ, GPTQ, Qronos
from quark_onnx.torch.algorithms.learned_rounding.autoround import SignedRounding
from quark_onnx.torch.algorithms.rescaling.awq import AWQ
from quark_onnx.torch.algorithms.rescaling.smoothquant import (
    AutoSmoothQuant,
    SmoothQuant,
)
from quark_onnx.torch.algorithms.rotation.settings import Rotation
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.config.refusals import REFUSED_ALGORITHMS, REFUSED_SETTINGS
from quark_onnx.torch.quantization.config.fields import Fields

logger = logging.getLogger(__name__)

__all__ = [
    "AWQConfig",
    "AlgoConfig",
    "AutoRoundConfig",
    "AutoSmoothQuantConfig",
    "GPTAQConfig",
    "GPTQConfig",
    "OnlineRotationConfig",
    "PreQuantOptConfig",
    "QronosConfig",
    "RotationConfig",
    "SmoothQuantConfig",
    "load_pre_optimization_config_from_file",
    "load_quant_algo_config_from_file",
]


class AlgoConfig(Fields):
    """Settings of an algorithm; frozen base class."""

    name: str

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Any:
        """Return the settings of the algorithm that an entry names.

        Args:
            entry: the values of ``to_dict``; without a ``name``, those of this class.

        Raises:
            ConfigError: the algorithm or a field is unknown.
        """
        # The base class has no settings of its own.
        if cls is not AlgoConfig and "name" not in entry:
            return super().from_dict(entry)
        return algorithm_named(str(entry.get("name")))._of(entry)

    @classmethod
    def _of(cls, entry: Mapping[str, Any]) -> Any:
        """Return settings of this class; a class with nested settings overrides this."""
        # JSON has lists alone; the default of a sequence is an empty tuple.
        settings = {name: () if value == [] else value for name, value in entry.items()}
        return super().from_dict(settings)

    def algorithm(self) -> Any:
        """Return the algorithm with these settings.

        Layers and their order are found by the structure of the model, and not by the names in the
        settings.

        Raises:
            ConfigError: the settings are not supported.
        """
        raise ConfigError(
            f"nothing does what {type(self).__name__} describes; known:"
            f" {', '.join(ALGORITHMS)}",
        )


@dataclass(frozen=True)
class SmoothQuantConfig(AlgoConfig):
    """Settings of SmoothQuant, which moves the range of activations into weights."""

    name: str = "smooth"
    alpha: float = 1
    scale_clamp_min: float = 1e-3
    # AMD's files name layers by these fields; here the structure of the model says where they are.
    scaling_layers: Sequence[Mapping[str, Any]] = ()
    model_decoder_layers: str = ""

    def algorithm(self) -> SmoothQuant:
        """See ``AlgoConfig.algorithm``."""
        return SmoothQuant(self.alpha, self.scale_clamp_min)


@dataclass(frozen=True)
class AutoSmoothQuantConfig(AlgoConfig):
    """Settings of SmoothQuant with a strength that is searched per layer."""

    name: str = "autosmoothquant"
    scaling_layers: Sequence[Mapping[str, Any]] | None = None
    model_decoder_layers: str | None = None
    compute_scale_loss: str = "MSE"

    def algorithm(self) -> AutoSmoothQuant:
        """See ``AlgoConfig.algorithm``."""
        if self.compute_scale_loss != "MSE":
            raise ConfigError(
                "AutoSmoothQuantConfig: compute_scale_loss is"
                f" {self.compute_scale_loss!r}; scales are chosen by MSE",
            )
        return AutoSmoothQuant()


@dataclass(frozen=True)
class AWQConfig(AlgoConfig):
    """Settings of AWQ, which scales salient channels up before rounding."""

    name: str = "awq"
    scaling_layers: Sequence[Mapping[str, Any]] = ()
    model_decoder_layers: str = ""

    def algorithm(self) -> AWQ:
        """See ``AlgoConfig.algorithm``."""
        return AWQ()


def _check_groups(config: GPTQConfig | GPTAQConfig | QronosConfig) -> None:
    """Raise ConfigError if groups are to follow the order of activations."""
    if not config.static_groups and config.desc_act:
        raise ConfigError(
            f"{type(config).__name__}: desc_act without static_groups needs an"
            " index of groups, which the checkpoint has no place for; leave"
            " static_groups at True",
        )


@dataclass(frozen=True)
class GPTQConfig(AlgoConfig):
    """Settings of GPTQ, which compensates the error of a column in later columns.

    Attributes:
        true_sequential: without effect; layers of a block are always quantized in order of
            execution.
    """

    name: str = "gptq"
    block_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: Sequence[str] = ()
    model_decoder_layers: str = ""
    true_sequential: bool = True

    def algorithm(self) -> GPTQ:
        """See ``AlgoConfig.algorithm``."""
        _check_groups(self)
        if not self.true_sequential:
            logger.warning(
                "GPTQConfig: true_sequential is False; layers are quantized in the"
                " order they run in",
            )
        # The block size changes the order of sums alone: columns are compensated in the same order.
        return GPTQ(self.damp_percent, self.desc_act)


@dataclass(frozen=True)
class GPTAQConfig(AlgoConfig):
    """Settings of GPTAQ, a GPTQ that corrects the error of preceding layers."""

    name: str = "gptaq"
    block_size: int = 128
    damp_percent: float = 0.01
    # The weight of the correction for preceding layers.
    alpha: float = 0.25
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: Sequence[str] = ()
    model_decoder_layers: str = ""

    def algorithm(self) -> GPTAQ:
        """See ``AlgoConfig.algorithm``."""
        _check_groups(self)
        return GPTAQ(self.damp_percent, self.desc_act, alpha=self.alpha)


@dataclass(frozen=True)
class QronosConfig(AlgoConfig):
    """Settings of Qronos, a GPTQ that corrects the error of preceding layers."""

    inside_layer_modules: Sequence[str] = ()
    model_decoder_layers: str = ""
    name: str = "qronos"
    block_size: int = 128
    desc_act: bool = True
    static_groups: bool = True
    # Damping of the Hessian, relative to its greatest eigenvalue.
    alpha: float = 1e-3
    beta: float = 1e4

    def algorithm(self) -> Qronos:
        """See ``AlgoConfig.algorithm``."""
        _check_groups(self)
        if self.beta != QronosConfig.beta:
            raise ConfigError(
                f"QronosConfig: beta is {self.beta!r}, and nothing here depends on"
                " it; leave it out",
            )
        # GPTQ's damping is relative to the mean of the diagonal, Qronos' to an eigenvalue.
        return Qronos(self.alpha, self.desc_act, relative_to="eigenvalue")


@dataclass(frozen=True)
class AutoRoundConfig(AlgoConfig):
    """Settings of AutoRound, which trains rounding and ranges block by block."""

    name: str = "autoround"
    iters: int = 200
    # 1 / iters, as in AutoRound: a share of the distance of two codes.
    lr: float = 0.005
    enable_minmax_tuning: bool = True
    minmax_lr: float = 0.005
    batch_size: int = 8
    inside_layer_modules: Sequence[str] = ()
    model_decoder_layers: str = ""

    def algorithm(self) -> SignedRounding:
        """See ``AlgoConfig.algorithm``."""
        return SignedRounding(
            self.iters,
            self.lr,
            self.minmax_lr,
            self.batch_size,
            tune_ranges=self.enable_minmax_tuning,
            # Signed gradient descent, as in the paper of AutoRound.
            optimizer="sign",
        )


@dataclass(frozen=True)
class OnlineRotationConfig(Fields):
    """Settings of rotations at run time."""

    shared_parallel: bool
    online_rotation_layers: Sequence[str] | None = None
    use_input_prescale: bool = False


@dataclass(frozen=True)
class RotationConfig(AlgoConfig):
    """Settings of rotations (QuaRot, SpinQuant), which spread outliers over channels.

    Attributes:
        random_r1: without effect; signs are always random, at no cost.
        random_r2: without effect; signs are always random, at no cost.
    """

    scaling_layers: Mapping[str, Any] | None = None
    name: str = "rotation"
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: int | None = None
    random_r1: bool = False
    random_r2: bool = False
    backbone: str = "model"
    model_decoder_layers: str = "model.layers"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    self_attn: str = "self_attn"
    mlp: str = "mlp"
    online_r1_rotation: bool | None = None
    online_config: OnlineRotationConfig | None = None
    trainable: bool = False
    train_smooth: Any = None
    smooth_positions: Any = None

    @classmethod
    def _of(cls, entry: Mapping[str, Any]) -> Any:
        settings = dict(entry)
        # Older files switch all rotations at run time on together.
        if _ONLINE in settings:
            # A rotation of keys (R3) has no effect here.
            settings.setdefault("r4", bool(settings.pop(_ONLINE)))
        if isinstance(online := settings.get("online_config"), Mapping):
            settings["online_config"] = OnlineRotationConfig.from_dict(online)
        return super()._of(settings)

    def algorithm(self) -> Rotation:
        """See ``AlgoConfig.algorithm``."""
        # R1 in the weights does the same, and costs nothing at run time.
        if self.online_r1_rotation or self.online_config is not None:
            refusal = REFUSED_SETTINGS["rotation", "online_r1"]
            raise ConfigError(
                f"RotationConfig: {refusal.reason}; leave online settings out",
            )
        for name in ("train_smooth", "smooth_positions"):
            if getattr(self, name):
                raise ConfigError(
                    f"RotationConfig: {name} is {getattr(self, name)!r}, but no"
                    " scales are learned beside rotations; leave it out, or add"
                    " AutoSmoothQuantConfig()",
                )
        return Rotation(
            self.r1,
            self.r2,
            self.r3,
            self.r4,
            self.rotation_size,
            self.trainable,
        )


#: The name of the base class before release 0.13, for what runs before quantization.
PreQuantOptConfig = AlgoConfig
#: Settings classes by the algorithm names of files and templates.
ALGORITHMS: dict[str, type[AlgoConfig]] = {
    "smooth": SmoothQuantConfig,
    "smoothquant": SmoothQuantConfig,
    "autosmoothquant": AutoSmoothQuantConfig,
    "awq": AWQConfig,
    "gptq": GPTQConfig,
    "gptaq": GPTAQConfig,
    "qronos": QronosConfig,
    "autoround": AutoRoundConfig,
    "rotation": RotationConfig,
    # The name of the paper, in AMD's earlier files.
    "quarot": RotationConfig,
}


#: Names of online rotations in older JSON files.
_ONLINE = "online-had"


def algorithm_named(name: str) -> type[AlgoConfig]:
    """Return the settings class of an algorithm.

    Raises:
        ConfigError: there is none.

    >>> algorithm_named("awq")().name
    'awq'
    """
    # Known elsewhere, with a reason: better than "unknown".
    if name in REFUSED_ALGORITHMS:
        refusal = REFUSED_ALGORITHMS[name]
        raise ConfigError(f"the algorithm {name!r} is not offered: {refusal}")
    require_known(name, ALGORITHMS, "unknown algorithm")
    return ALGORITHMS[name]


def load_quant_algo_config_from_file(file_path: Path | str) -> AlgoConfig:
    """Load the settings of an algorithm from a JSON file.

    The file has the ``name`` and fields of the algorithm.

    Raises:
        ConfigError: the algorithm or a field is unknown.
        ModelError: the file does not exist, or is no JSON object.
    """
    entries = read_json(Path(file_path))
    if not isinstance(entries.get("name"), str):
        raise ConfigError(
            f'{file_path} must hold an object with the name of an algorithm: {{"name":'
            ' "awq", ...}',
        )
    try:
        algorithm: AlgoConfig = AlgoConfig.from_dict(entries)
    except ConfigError as error:
        raise ConfigError(f"{file_path}: {error}") from error
    return algorithm


def load_pre_optimization_config_from_file(file_path: Path | str) -> AlgoConfig:
    """Load the settings of SmoothQuant or of rotations from a JSON file.

    Raises:
        ConfigError: a field is unknown, or the file is of another algorithm.
        ModelError: the file does not exist, or is no JSON object.
    """
    config = load_quant_algo_config_from_file(file_path)
    if not isinstance(config, SmoothQuantConfig | RotationConfig):
        raise ConfigError(
            f"{file_path} is of {config.name!r}, which runs during quantization: load it"
            " with load_quant_algo_config_from_file"
        )
    return config
