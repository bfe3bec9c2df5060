"""AutoSearch with AMD Quark's names, by this package's search on held-out samples."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from onnx import ModelProto, save

from quark_onnx.common.errors import ConfigError
from quark_onnx.config import QConfig as Native
from quark_onnx.config.checks import require_known
from quark_onnx.onnx import spec as specs
from quark_onnx.onnx.algorithm import AlgoConfig
from quark_onnx.onnx.data_type import parse_data_type
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.quantization.api import choose_data
from quark_onnx.onnx.quantization.config.config import (
    Config,
    QConfig,
    QuantizationConfig,
)
from quark_onnx.onnx.run import native, run
from quark_onnx.search.result import SearchResult
from quark_onnx.search.search import search

logger = logging.getLogger(__name__)

#: A search space: lists of values by name, dictionaries of such lists inside.
SearchSpace = dict[str, Any]

#: Names of conditions in a space; a group applies if its parent is chosen.
_CONDITIONS = ("only_if",)
#: Names of a newer space that are not options.
_PARTS = (
    "activation",
    "activation_params",
    "weight",
    "weight_params",
    "cle_algo",
    "cle_params",
    "algorithms",
    "adaround_params",
    "adaquant_params",
    "specific_layer_config",
    "layer_type_config",
    "exclude",
    "use_external_data_format",
)


def generate_all_configs(search_space: SearchSpace) -> list[dict[str, Any]]:
    """Return every combination of the values in a space.

    Args:
        search_space: names and values, or nested spaces.

    >>> generate_all_configs({"a": [1, 2], "b": {"c": [3]}})
    [{'a': 1, 'b': {'c': 3}}, {'a': 2, 'b': {'c': 3}}]
    """
    return list(_combinations(search_space))


def _combinations(space: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    # Every parent is tried with every group: a condition only saves trials.
    names = [name for name in space if name not in _CONDITIONS]
    # The last name varies fastest, as in AMD's ``generate_all_configs``.
    for values in itertools.product(*(_values(space[name]) for name in names)):
        yield dict(zip(names, values, strict=True))


def _values(entry: Any) -> list[Any]:
    """Return the values of an entry of a space."""
    # A range as in optuna, of AMD's newer spaces; other dictionaries are nested spaces.
    if isinstance(entry, Mapping) and {"type", "low", "high"} <= set(entry):
        return _range(entry)
    if isinstance(entry, Mapping):
        return list(_combinations(entry))
    # A bare value is a fixed setting.
    return list(entry) if isinstance(entry, list | tuple) else [entry]


def _range(entry: Mapping[str, Any]) -> list[Any]:
    """Return both ends of a continuous range, and the values between for a step."""
    low, high, step = entry["low"], entry["high"], entry.get("step")
    if not step:
        return [low, high]
    # The small number keeps the last value where the quotient falls just short of an integer.
    count = int((high - low) / step + 1e-9)
    return [low + i * step for i in range(count + 1)]


class AutoSearchConfig:
    """Settings of the older AutoSearch; scripts pass a class with these attributes."""

    search_space: ClassVar[SearchSpace] = {
        "calibrate_method": ["MinMax", "Percentile"],
        "activation_type": ["QInt8"],
        "weight_type": ["QInt8"],
        "include_cle": [False, True],
    }
    # A function from the path of a model to a number, higher is better.
    search_evaluator: ClassVar[Callable[[str], float] | None] = None
    search_output_dir: ClassVar[str] = "./"
    search_stop_condition: ClassVar[dict[str, float]] = {}


#: Settings without a default.
_NEEDED = ("search_space", "model_input", "calib_data_reader")
#: Settings without an effect, with their harmless values, and the reason.
_UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "search_metric": ((None, "L2"), "the noise at the outputs decides"),
    # AMD's defaults are harmless: scripts carry them without a purpose.
    "search_metric_tolerance": ((None, 2e4), "the best candidate is written"),
    "search_algo": (
        (None, "grid_search", "grid", "Grid", "TPE"),
        "every combination is tried, or as many as n_trials says",
    ),
    "n_jobs": ((None, 1, 2), "candidates are tried one after another"),
    "search_devices": ((None, "", "cuda:0,1"), "candidates run on the CPU"),
    "advanced_fastft_search": (
        (None, False),
        "put the parameters of AdaRound or AdaQuant into the space",
    ),
}


def _warn(settings: Mapping[str, Any]) -> None:
    """Warn of settings without an effect unless they are harmless."""
    for name, (harmless, why) in _UNUSED.items():
        if settings.get(name) not in harmless:
            logger.warning("%s=%r has no effect here: %s", name, settings[name], why)


class AutoSearch:
    """Search over the fields of a ``QuantizationConfig``.

    Args:
        model_input: path of the float model, or a ModelProto.
        config: settings outside the space.
        auto_search_config: the space; see ``AutoSearchConfig``.
        eval_dataloader: not needed: candidates are evaluated on held-out calibration samples.
        calibration_data_reader: calibration data, with ``get_next``.
        calibration_data_path: a folder of .npy files.
    """

    def __init__(  # noqa: PLR0913
        self,
        model_input: str | Path | ModelProto,
        config: Config | QuantizationConfig,
        auto_search_config: Any = None,
        eval_dataloader: Any = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | Path | None = None,
    ) -> None:
        self.model_input = model_input
        self.config = (
            config.global_quant_config if isinstance(config, Config) else config
        )
        self.auto_search_config = auto_search_config or AutoSearchConfig()
        self.data = choose_data(
            model_input, calibration_data_reader, calibration_data_path
        )
        self.all_configs: list[QuantizationConfig] = []
        self.result: SearchResult | None = None
        _warn(_attributes(self.auto_search_config))
        if eval_dataloader is not None:
            logger.warning(
                "eval_dataloader has no effect: calibration samples are held out to judge by",
            )

    def build_all_configs(
        self,
        search_space_config: SearchSpace,
    ) -> list[QuantizationConfig]:
        """Return a configuration for each combination of the space.

        Args:
            search_space_config: the space.
        """
        return [
            _changed(self.config, combination)
            for combination in generate_all_configs(search_space_config)
        ]

    def search_model(self) -> list[dict[str, Any]]:
        """Try all configurations, and write the best model.

        Returns:
            The best candidate, with its index in ``all_configs``, the noise at its outputs in dB
            (or the negative number of the evaluator), and the path of its model. The ranking is
            in ``result``.
        """
        settings = _attributes(self.auto_search_config)
        configs = self.build_all_configs(settings["search_space"])
        limit = (settings.get("search_stop_condition") or {}).get("iteration_limit")
        self.all_configs = configs if limit is None else configs[: int(limit)]
        # All are translated before the first trial: a wrong setting is an error at once.
        drafts = [config.draft() for config in self.all_configs]
        # The data is read by the search, and again by the quantization of the best candidate.
        data = _kept(self.data)
        metric = _metric(settings.get("search_evaluator"), 1.0)
        self.result, best = _search(self.model_input, drafts, data, metric)
        folder = Path(settings.get("search_output_dir") or ".")
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / f"iter_{best}.onnx")
        # The candidates of the search are quantized without the held-out samples; the result with
        # all.
        run(drafts[best], self.model_input, data, path)
        # AMD's number is a difference, which falls with accuracy.
        score = self.result.best.score
        difference = None if score is None else -score
        return [{"config_index": best, "difference": difference, "model_path": path}]


class AutoSearchPro:
    """Search over the settings of a ``QConfig``.

    Args:
        config: ``search_space``, ``model_input``, ``calib_data_reader``, and optionally
            ``search_evaluator`` with ``direction`` and ``output_dir``.

    Raises:
        ConfigError: a name is missing.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        missing = [name for name in _NEEDED if name not in config]
        if missing:
            raise ConfigError(f"the configuration of a search has no {missing[0]}")
        self.config = config
        _warn(config)

    def run(self) -> dict[str, Any]:
        """Try the combinations of the space, ``n_trials`` at most.

        Returns:
            The values of the best combination. ``best_params.json`` in ``output_dir`` holds the
            values too, if the folder is given.
        """
        combinations = generate_all_configs(self.config["search_space"])
        drafts = [_newer(combination).draft() for combination in combinations]
        # optuna's default is to minimize what the evaluator returns.
        maximize = self.config.get("direction", "minimize") == "maximize"
        _, best = _search(
            self.config["model_input"],
            drafts,
            self.config["calib_data_reader"],
            _metric(self.config.get("search_evaluator"), 1.0 if maximize else -1.0),
            self.config.get("n_trials"),
        )
        if self.config.get("output_dir"):
            folder = Path(self.config["output_dir"])
            folder.mkdir(parents=True, exist_ok=True)
            # Combinations may hold enumerations and configurations.
            text = json.dumps(combinations[best], indent=2, default=str)
            (folder / "best_params.json").write_text(text, encoding="utf-8")
        return combinations[best]


def _attributes(settings: Any) -> dict[str, Any]:
    """Return the attributes of an object, including its class's attributes."""
    # vars() of an instance misses what its class defines, as scripts do.
    names = (name for name in dir(settings) if not name.startswith("_"))
    return {name: getattr(settings, name) for name in names}


def _kept(data: Any) -> Any:
    """Return calibration data that can be read twice."""
    if not hasattr(data, "get_next"):
        return data
    # A reader of onnxruntime need not have ``rewind``.
    return list(iter(data.get_next, None))


def get_auto_search_config(config_name: str) -> dict[str, Any]:
    """Return the search space with a name.

    Args:
        config_name: name of the space.

    Raises:
        ConfigError: the name is unknown; the message suggests the closest name.
    """
    require_known(config_name, _SPACES, "unknown search")
    return {"search_space": _SPACES[config_name]}


def _space(spec: str, weight: str, methods: list[str], **more: Any) -> SearchSpace:
    return {
        "activation": [spec],
        "activation_params": {"calibration_method": methods},
        "weight": [weight],
        "cle_algo": [True, False],
        **more,
    }


_FLOAT_METHODS = ["MinMax", "Percentile", "LayerwisePercentile"]
_SPACES: dict[str, SearchSpace] = {
    "XINT8_SEARCH": _space("XInt8Spec", "XInt8Spec", ["MinMSE", "MinMax"]),
    "A8W8_SEARCH": _space("Int8Spec", "Int8Spec", _FLOAT_METHODS),
    "A16W8_SEARCH": _space("Int16Spec", "Int8Spec", _FLOAT_METHODS),
    "ADVANCED_SEARCH": _space(
        "Int8Spec",
        "Int8Spec",
        _FLOAT_METHODS,
        algorithms=[[], ["adaround"], ["adaquant"]],
    ),
}


def _search(
    model: Any,
    drafts: list[Draft],
    data: Any,
    metric: Callable[[ModelProto], float] | None,
    trials: int | None = None,
) -> tuple[SearchResult, int]:
    """Rank the drafts; return the result, and the index of the best draft."""
    configs: list[Native] = [native(draft, model) for draft in drafts]
    # Empty lists: the search tries the given configurations, without variations of its own.
    space = {"presets": configs, "calibrators": [], "optimizers": []}
    result = search(model, data, space=space, metric=metric, trials=trials)
    return result, configs.index(result.best.config)


def _metric(
    evaluator: Callable[[str], float] | None,
    sign: float,
) -> Callable[[ModelProto], float] | None:
    """Convert a script's evaluator of model paths to a metric; higher is better.

    None is returned unchanged.
    """
    if evaluator is None:
        return None

    def metric(candidate: ModelProto) -> float:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "candidate.onnx"
            # The evaluators of scripts open files.
            save(candidate, path)
            return sign * float(evaluator(str(path)))

    return metric


def _changed(
    config: QuantizationConfig,
    changes: Mapping[str, Any],
) -> QuantizationConfig:
    """Return a copy with changed fields; ``extra_options`` are merged."""
    fields = {**vars(config), **changes}
    # A combination names the options that it changes, not all of them.
    fields["extra_options"] = {
        **config.extra_options,
        **(changes.get("extra_options") or {}),
    }
    try:
        return QuantizationConfig(**fields)
    except TypeError as error:
        raise ConfigError(
            f"the search space names no field of QuantizationConfig: {error}",
        ) from error


def _newer(values: Mapping[str, Any]) -> QConfig:
    """Return the configuration for a combination of a newer space."""
    # Names that are no part of a QConfig are extra options.
    options = {name: value for name, value in values.items() if name not in _PARTS}
    activation = _tensor(
        values.get("activation", "Int8Spec"), values.get("activation_params") or {}
    )
    weight = _tensor(
        values.get("weight", "Int8Spec"), values.get("weight_params") or {}
    )
    layer = specs.QLayerConfig(input_tensors=activation, weight=weight)
    names = ["cle"] if values.get("cle_algo") else []
    # An entry of the space is a name, or a list of names.
    chosen = values.get("algorithms") or []
    names += [chosen] if isinstance(chosen, str) else chosen
    algorithms = []
    for name in names:
        parameters = values.get(f"{name}_params") or {}
        algorithms.append(AlgoConfig.from_dict({"name": name, **parameters}))
    return QConfig(
        layer,
        values.get("specific_layer_config"),
        values.get("layer_type_config"),
        values.get("exclude"),
        algorithms,
        bool(values.get("use_external_data_format")),
        extra_options=options,
    )


#: Enumerations of the parameters of a specification.
_MEMBERS = {
    "calibration_method": "CalibMethod",
    "scale_type": "ScaleType",
    "quant_granularity": "QuantGranularity",
}


def _tensor(name: str, parameters: Mapping[str, Any]) -> specs.QTensorConfig:
    """Return a specification from names of a class, enumeration members and types."""
    kind = getattr(specs, name, None)
    if kind is None:
        raise ConfigError(
            f"the search space names {name!r}, which is no specification, such as Int8Spec",
        )
    # Values of a space are names, as it may come from JSON; members themselves are accepted, too.
    arguments = dict(parameters)
    for parameter, value in parameters.items():
        if not isinstance(value, str):
            continue
        if parameter == "data_type":
            arguments[parameter] = parse_data_type(value)
        elif parameter in _MEMBERS:
            arguments[parameter] = specs.parse_enum(f"{_MEMBERS[parameter]}.{value}")
    result: specs.QTensorConfig = kind(**arguments)
    return result
