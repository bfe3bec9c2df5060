"""Algorithms with AMD Quark's names, parameters and defaults.

They are translated into optimizers of this package. A warning names parameters without a
counterpart that differ from AMD's default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require, require_known, require_one_of
from quark_onnx.onnx import distances
from quark_onnx.onnx.spec import QLayerConfig
from quark_onnx.onnx.translation import listed, narrowed, pattern
from quark_onnx.optimizers import (
    CLE,
    GPTQ,
    AdaQuant,
    AdaRound,
    AutoMixedPrecision,
    BiasCorrection,
    QuaRot,
    SmoothQuant,
)
from quark_onnx.optimizers.mixed import Distance

logger = logging.getLogger(__name__)

#: Directions of metric_optimize_object: lower nodes of the wide model, or raise nodes of the narrow
#: model.
_OBJECTS = {"speed": "8bit", "quality": "16bit"}
#: An SQNR in dB that no model reaches; every model reaches its negative.
_ANYTHING = 1000.0

_LAYERS = (
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "InstanceNormalization",
    "LayerNormalization",
)


# Without eq, a configuration stays hashable, and two equal ones stay distinct entries of a list.
@dataclass(eq=False)
class AlgoConfig:
    """Base class of the algorithms, with a name and serializable parameters."""

    name: ClassVar[str] = ""
    #: Parameters without a counterpart here, and why.
    _unused: ClassVar[dict[str, str]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the parameters as plain values, for ``from_dict``."""
        return {
            "name": self.name,
            **{f.name: getattr(self, f.name) for f in fields(self)},
        }

    @staticmethod
    def from_dict(d: dict[str, Any]) -> AlgoConfig:
        """Return the algorithm from the values of ``to_dict``.

        Args:
            d: the values.

        Raises:
            ConfigError: the name or a parameter is unknown.
        """
        # A copy, as the name is removed.
        parameters = dict(d)
        name = parameters.pop("name", "")
        require_known(name, ALGO_NAME_TO_CLASS, "unknown algorithm")
        kind = ALGO_NAME_TO_CLASS[name]
        names = [field.name for field in fields(kind)]
        for parameter in parameters:
            require_known(parameter, names, f"{name} has no parameter")
        return kind(**parameters)

    def native(self) -> Any:
        """Translate the algorithm into an optimizer of this package."""
        raise NotImplementedError

    def _warn(self) -> None:
        """Warn of ineffective parameters with values other than the default."""
        # Every algorithm has defaults for all parameters.
        default = type(self)()
        for parameter, why in self._unused.items():
            if getattr(self, parameter) != getattr(default, parameter):
                logger.warning(
                    "%s: %s has no effect here: %s",
                    self.name,
                    parameter,
                    why,
                )


@dataclass(eq=False)
class SmoothQuantConfig(AlgoConfig):
    """SmoothQuant (Xiao et al. 2022)."""

    name: ClassVar[str] = "smooth_quant"
    alpha: float = 0.5

    def native(self) -> SmoothQuant:
        return SmoothQuant(alpha=self.alpha)


@dataclass(eq=False)
class CLEConfig(AlgoConfig):
    """Cross-layer equalization (Nagel et al. 2019)."""

    name: ClassVar[str] = "cle"
    _unused: ClassVar[dict[str, str]] = {
        "cle_balance_method": (
            "factors leave the least noise of weights and activations"
        ),
        "cle_steps": "factors of all pairs are chosen together",
        "cle_weight_threshold": "channels of any size are equalized",
        "cle_scale_append_bias": "factors follow from weights and activations",
        "cle_scale_use_threshold": "channels of any size are equalized",
        "cle_total_layer_diff_threshold": (
            "sweeps end where no factor changes by more than a thousandth"
        ),
    }
    cle_balance_method: str = "max"
    cle_steps: int = 1
    cle_weight_threshold: float = 0.5
    cle_scale_append_bias: bool = True
    cle_scale_use_threshold: bool = True
    cle_total_layer_diff_threshold: float = 1.9e-7
    #: Replace Clip(0, 6) by Relu first; AMD has it as the option ReplaceClip6Relu.
    replace_relu6: bool = False

    def native(self) -> CLE:
        self._warn()
        return CLE(relu6="replace" if self.replace_relu6 else "auto")


@dataclass(eq=False)
class BiasCorrectionConfig(AlgoConfig):
    """Bias correction (Nagel et al. 2019)."""

    name: ClassVar[str] = "bias_correction"

    def native(self) -> BiasCorrection:
        return BiasCorrection()


@dataclass(eq=False)
class GPTQConfig(AlgoConfig):
    """GPTQ (Frantar et al. 2022), in the format of the weights' specification."""

    name: ClassVar[str] = "gptq"
    _unused: ClassVar[dict[str, str]] = {
        "bits": "the weight's specification says it",
        "block_size": (
            "columns are processed in blocks that suit the processor; the result is the"
            " same"
        ),
        "group_size": "the weight's specification says it",
        "per_channel": "the weight's specification says it",
        "mse": "the weight's calibration method says it",
        "weight_symmetric": "the weight's specification says it",
    }
    bits: int = 8
    block_size: int = 128
    group_size: int = -1
    perc_damp: float = 0.01
    act_order: bool = False
    per_channel: bool = False
    mse: bool = False
    weight_symmetric: bool = True

    def native(self) -> GPTQ:
        self._warn()
        # Both have the meaning of the paper; format and groups are those of the weights.
        return GPTQ(damping=self.perc_damp, act_order=self.act_order)


@dataclass(eq=False)
class _FastFinetune(AlgoConfig):
    """Common parameters of AdaRound and AdaQuant."""

    _unused: ClassVar[dict[str, str]] = {
        "infer_device": "onnxruntime runs on the CPU",
        "fixed_seed": "the seed is fixed, and the result is the same in each run",
        "data_size": "all calibration samples count; give fewer with CalibDataSize",
        "batch_size": "the rows of a step are drawn from all samples",
        "num_batches": "the rows of a step are drawn from all samples",
        "learning_rate": (
            "rates are relative to the step of a weight's grid; set one with"
            " AdaRound(rate=) of this package"
        ),
        "early_stop": "a layer keeps the better of its old and new weights",
        "output_index": "each layer is tuned by its own output",
        "lr_adjust": "the rate falls by itself",
        "target_op_type": "all layers with weights are tuned",
        "selective_update": "a layer keeps the better of its old and new weights",
        "update_bias": "AdaQuant moves biases, AdaRound does not",
        "output_qdq": (
            "the activation function behind a layer counts, its rounding does not"
        ),
        "drop_ratio": "inputs are those of the quantized model",
        "mem_opt_level": "layers are tuned one after another",
        "cache_dir": "temporary files lie in the system's temporary folder",
        "log_period": "there is a progress bar",
        "ref_model_path": "the float model is the reference",
        "dynamic_batch": "samples of any batch size are taken",
        "parallel": "the parts of a layer are tuned side by side",
        "reg_param": "AdaRound(push=) of this package sets it",
        "beta_range": "AdaRound(push=) of this package sets it",
        "warm_start": "AdaRound(warm=) of this package sets it",
        "select_max_mem_layer": "layers are tuned one after another",
        "num_workers": "samples are read once",
        "pin_memory": "samples are read once",
        "use_gds": "samples are read once",
    }
    _optimizer: ClassVar[type[Any]]
    optim_device: str = "cpu"
    infer_device: str = "cpu"
    fixed_seed: int = 1705472343
    data_size: int = 1000000000
    batch_size: int = 1
    num_batches: int = 1
    num_iterations: int = 1000
    learning_rate: float = 0.1
    early_stop: bool = False
    output_index: int = 0
    lr_adjust: Any = None
    target_op_type: Sequence[str] = _LAYERS
    selective_update: bool = False
    update_bias: bool = False
    output_qdq: bool = False
    drop_ratio: float = 1.0
    mem_opt_level: int = 1
    cache_dir: str | None = None
    log_period: float = 100
    ref_model_path: str | None = None
    dynamic_batch: bool = False
    parallel: bool = False
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20, 2)
    warm_start: float = 0.2
    select_max_mem_layer: bool = False
    num_workers: int = 1
    pin_memory: bool = False
    use_gds: bool = False

    @property
    def _device(self) -> str:
        # "cuda:0" and "hip:1,2": torch calls AMD's devices "cuda" as well, and one device is used.
        if self.optim_device.startswith(("cuda", "hip")):
            return "cuda"
        return self.optim_device

    def native(self) -> Any:
        self._warn()
        return self._optimizer(iterations=self.num_iterations, device=self._device)


@dataclass(eq=False)
class AdaRoundConfig(_FastFinetune):
    """AdaRound (Nagel et al. 2020)."""

    name: ClassVar[str] = "adaround"
    _optimizer: ClassVar[type[Any]] = AdaRound


@dataclass(eq=False)
class AdaQuantConfig(_FastFinetune):
    """AdaQuant (Hubara et al. 2020)."""

    name: ClassVar[str] = "adaquant"
    _optimizer: ClassVar[type[Any]] = AdaQuant
    num_iterations: int = 3000
    learning_rate: float = 1e-5


@dataclass(eq=False)
class QuarotConfig(AlgoConfig):
    """QuaRot (Ashkboos et al. 2024)."""

    name: ClassVar[str] = "quarot"
    _unused: ClassVar[dict[str, str]] = {
        "r_matrix_dim": "the size of the rotation is that of the residual stream",
        "use_random_had": "the Hadamard matrix has random signs, by a fixed seed",
        "r_config_path": (
            "norms and layers around the residual stream are found in the graph"
        ),
    }
    r_matrix_dim: int = 4096
    use_random_had: bool = False
    r_config_path: str | None = None

    def native(self) -> QuaRot:
        self._warn()
        return QuaRot()


@dataclass(eq=False)
class AutoMixprecisionConfig(AlgoConfig):
    """Mixed precision: nodes are lowered to a narrow format if accuracy permits."""

    name: ClassVar[str] = "auto_mixprecision"
    _unused: ClassVar[dict[str, str]] = {
        "subgraph_json": "nodes are changed one by one",
        "sensitivity_cache_file": "errors are measured anew",
        "worker_num": "candidates are measured one after another",
        "dual_quant_nodes": "a tensor between two formats gets the pairs that it needs",
        "no_input_qdq_shared": (
            "a tensor between two formats gets the pairs that it needs"
        ),
        "shared_param_mode": (
            "a tensor between two formats gets the pairs that it needs"
        ),
    }
    target_layer_config: Any = None
    target_op_type: Sequence[str] = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    subgraph_json: str | None = None
    include_layers: Sequence[str] | None = None
    exclude_layers: Sequence[str] | None = None
    data_size: int = 0
    metric_output_index: int = 0
    metric_distance_fn: Callable[..., float] | None = None
    metric_evaluate_fn: Callable[[Any], float] | None = None
    metric_default: str = "l2"
    metric_threshold: float | None = 0
    metric_optimize_object: str = "speed"
    sensitivity_cache_file: str | None = None
    worker_num: int = 1
    dual_quant_nodes: bool = False
    no_input_qdq_shared: bool = False
    shared_param_mode: str = "propagate"

    def native(self) -> AutoMixedPrecision | None:
        """Translate the algorithm into an optimizer.

        Returns:
            The optimizer; None if metric_threshold is None, which requests an analysis alone.

        Raises:
            ConfigError: a parameter is wrong, or two metrics are given.
        """
        self._warn()
        require_one_of(
            "metric_optimize_object of auto_mixprecision",
            self.metric_optimize_object,
            _OBJECTS,
        )
        if self.metric_threshold is None:
            logger.warning(
                "%s: metric_threshold is None, so that no node is changed; see"
                " `quark-onnx search` for what each node does to the outputs",
                self.name,
            )
            return None
        # "speed" lowers nodes from the wide format; "quality" raises nodes from the narrow one.
        to = _OBJECTS[self.metric_optimize_object]
        weight = self.narrow.native_weight()
        settings: dict[str, Any] = {
            "to": to,
            # 0 is AMD's default, and stands for this package's.
            "samples": self.data_size or AutoMixedPrecision().samples,
            "activation": self.narrow.native_activation(),
            "weight": None if weight is None else narrowed(weight),
            "nodes": tuple(pattern(name) for name in self.include_layers or ()),
            # None is every operator type.
            "op_types": tuple(self.target_op_type or ()),
            "exclude": tuple(pattern(name) for name in self.exclude_layers or ()),
        }
        if settings["nodes"]:
            settings["op_types"] = ()  # named nodes count for every operator type
        # AMD's default: 0 is no bound, but asks for all candidates.
        if self.metric_threshold == 0:
            logger.warning(
                "%s: metric_threshold is 0, so that all candidates are changed,"
                " whatever it costs; set a threshold to bound the loss",
                self.name,
            )
            # In dB: a bound that always holds lowers all nodes; one that never holds raises all
            # nodes.
            bound = -_ANYTHING if to == "8bit" else _ANYTHING
            return AutoMixedPrecision(bound, **settings)
        threshold, distance = self._goal(self.metric_threshold)
        return AutoMixedPrecision(threshold, distance=distance, **settings)

    def _goal(self, threshold: float) -> tuple[float, Distance]:
        """Return the greatest permitted distance, and its measure."""
        distance = distances.distance(self.metric_default)
        # A function takes the place of metric_default, which always has a value.
        if self.metric_distance_fn is not None and self.metric_evaluate_fn is not None:
            raise ConfigError(
                "auto_mixprecision has metric_distance_fn and metric_evaluate_fn;"
                " choose one of them",
            )
        if self.metric_distance_fn is not None:
            distance = self.metric_distance_fn
        elif self.metric_evaluate_fn is not None:
            distance = distances.loss_of(self.metric_evaluate_fn)
        elif self.metric_default in distances.RATIOS:
            # Distances fall with accuracy, so that a minimum of 20 dB is a maximum of -20.
            threshold = -abs(threshold)
        return threshold, distances.of_output(self.metric_output_index, distance)

    @property
    def narrow(self) -> QLayerConfig:
        """Return the configuration of the lowered nodes.

        Raises:
            ConfigError: there is no configuration, or more than one.
        """
        given = self.target_layer_config
        # AMD also takes a dictionary, whose keys are configurations, for several formats.
        choices = list(given) if isinstance(given, dict | list | tuple) else [given]
        if len(choices) != 1 or not isinstance(choices[0], QLayerConfig):
            raise ConfigError(
                f"target_layer_config of auto_mixprecision is {given!r}; it must be one"
                " QLayerConfig, for the nodes that are lowered. For named nodes take"
                " specific_layer_config",
            )
        return choices[0]


#: The classes by the names that ``to_dict`` writes.
ALGO_NAME_TO_CLASS: dict[str, type[AlgoConfig]] = {
    cls.name: cls
    for cls in (
        SmoothQuantConfig,
        CLEConfig,
        BiasCorrectionConfig,
        GPTQConfig,
        AutoMixprecisionConfig,
        AdaRoundConfig,
        AdaQuantConfig,
        QuarotConfig,
    )
}


def from_dict(d: dict[str, Any]) -> AlgoConfig:
    """Return the algorithm from the values of ``AlgoConfig.to_dict``."""
    return AlgoConfig.from_dict(d)


def _algo_flag(algorithms: Sequence[AlgoConfig], algo_config: type[AlgoConfig]) -> bool:
    """Return whether an algorithm of a class is among the given ones, as in AMD Quark."""
    return any(isinstance(algorithm, algo_config) for algorithm in algorithms)


def without_rivals(algorithms: Sequence[AlgoConfig]) -> list[AlgoConfig]:
    """Copy the algorithms, but only the first of AdaRound and AdaQuant.

    Options change the copies.
    """
    kept: list[AlgoConfig] = []
    finetuned = False
    for algorithm in listed(algorithms, "algorithms"):
        require(
            isinstance(algorithm, AlgoConfig),
            "algorithm",
            algorithm,
            "a configuration such as CLEConfig()",
        )
        # Both replace the rounding of the same weights. AMD Quark drops the second with a warning,
        # too.
        if algorithm.name in ("adaround", "adaquant"):
            if finetuned:
                logger.warning(
                    "only one of AdaRound and AdaQuant runs; %s is left out",
                    algorithm.name,
                )
                continue
            finetuned = True
        # The fields of the dataclass are its arguments.
        kept.append(type(algorithm)(**vars(algorithm)))
    return kept
