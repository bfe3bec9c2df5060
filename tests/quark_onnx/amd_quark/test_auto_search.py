"""AMD's searches, by this package's search: the best configuration is the one that a native run
finds best.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import onnx
import pytest

from quark_onnx import compare
from quark_onnx.common.errors import ConfigError
from quark_onnx.onnx import (
    AutoSearch,
    AutoSearchPro,
    ModelQuantizer,
    PowerOfTwoMethod,
    QuantizationConfig,
    get_auto_search_config,
)
from quark_onnx.onnx.quantization.config import Config
from tests.models import normal
from tests.quark_onnx.amd_quark.networks import Reader, classifier

pytest.importorskip("optuna")

HELD_OUT = [{"x": normal(2, 4, 8, 8, seed=seed)} for seed in range(50, 54)]


def settings(**changes: Any) -> Any:
    """A class of settings, as AMD's examples write it."""

    class AutoSearchConfig:
        search_space = {  # noqa: RUF012
            "calibrate_method": [PowerOfTwoMethod.MinMSE, "MinMax"],
            "activation_type": ["QInt8"],
            "weight_type": ["QInt8"],
            "include_cle": [False],
            "extra_options": {"ActivationSymmetric": [True], "WeightSymmetric": [True]},
        }
        search_metric = "L2"
        search_algo = "grid_search"
        search_evaluator = None
        search_stop_condition = {"find_n_candidates": 1, "time_limit": 1e6}  # noqa: RUF012

    for name, value in changes.items():
        setattr(AutoSearchConfig, name, value)
    return AutoSearchConfig()


def test_the_older_search_writes_the_best_model(tmp_path: Path) -> None:
    model = classifier()
    search = AutoSearch(
        model_input=model,
        config=Config(QuantizationConfig()),
        auto_search_config=settings(search_output_dir=str(tmp_path)),
        calibration_data_reader=Reader(model, 8),
    )
    [found] = search.search_model()
    ratios = []
    for config in search.all_configs:
        quantized = ModelQuantizer(Config(config)).quantize_model(
            model, None, Reader(model, 8)
        )
        assert quantized is not None
        ratios.append(compare(model, quantized, HELD_OUT).sqnr)
    assert len(ratios) == 2 and found["config_index"] == ratios.index(max(ratios))
    written = onnx.load(found["model_path"])
    assert Path(found["model_path"]).parent == tmp_path
    assert compare(model, written, HELD_OUT).sqnr == pytest.approx(max(ratios), abs=0.5)
    assert search.result is not None and found["difference"] < 0


def test_an_evaluator_and_a_limit(tmp_path: Path) -> None:
    """The evaluator takes the path of a model and returns a number, the higher the better."""
    model, sizes = classifier(), list[int]()

    def evaluator(path: str) -> float:
        sizes.append(len(onnx.load(path).graph.node))
        return float(len(sizes))

    asked = settings(
        search_evaluator=staticmethod(evaluator),
        search_output_dir=str(tmp_path),
        search_stop_condition={"iteration_limit": 1},
    )
    search = AutoSearch(
        model, Config(QuantizationConfig()), asked, None, Reader(model, 8)
    )
    [found] = search.search_model()
    assert len(search.all_configs) == 1 and found["config_index"] == 0 and sizes


def test_what_has_no_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        AutoSearch(
            classifier(), Config(QuantizationConfig()), settings(search_metric="psnr")
        )
    assert "search_metric='psnr' has no effect here" in caplog.text
    assert "search_algo" not in caplog.text


def test_the_newer_search_returns_and_writes_the_best_values(tmp_path: Path) -> None:
    model = classifier()
    space = get_auto_search_config("A8W8_SEARCH")["search_space"]
    space = {
        **space,
        "activation_params": {"calibration_method": ["MinMax", "Percentile"]},
    }
    config = {
        "search_space": {**space, "cle_algo": [False]},
        "model_input": model,
        "calib_data_reader": Reader(model, 8),
        "output_dir": str(tmp_path / "out"),
        "n_trials": 5,
    }
    best = AutoSearchPro(config).run()
    assert best["activation_params"]["calibration_method"] in ("MinMax", "Percentile")
    text = (tmp_path / "out" / "best_params.json").read_text(encoding="utf-8")
    assert json.loads(text) == best


def test_layers_of_the_newer_space_have_their_own_configuration() -> None:
    model, kinds = classifier(), set[str]()

    def evaluator(path: str) -> float:
        for node in onnx.load(path).graph.node:
            if node.op_type == "Conv":
                kinds.update(name.rpartition("_")[2] for name in node.input[:1])
        return 1.0

    config = {
        "search_space": {"layer_type_config": [{None: ["Conv"]}]},
        "model_input": model,
        "calib_data_reader": Reader(model, 8),
        "search_evaluator": evaluator,
    }
    AutoSearchPro(config).run()
    assert kinds and "DequantizeLinear" not in kinds


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"algorithms": ["adaraund"]}, "unknown algorithm.*adaround"),
        ({"cle_algo": [True], "cle_params": {"steps": 1}}, "cle has no parameter"),
        ({"activation_params": {"calibration_method": ["MinMx"]}}, "CalibMethod.MinMx"),
    ],
)
def test_an_unknown_name_in_a_newer_space(space: Any, message: str) -> None:
    config = {
        "search_space": space,
        "model_input": classifier(),
        "calib_data_reader": [],
    }
    with pytest.raises(ConfigError, match=message):
        AutoSearchPro(config).run()


def test_a_search_that_lacks_something() -> None:
    with pytest.raises(ConfigError, match="has no model_input"):
        AutoSearchPro({"search_space": {}})
    with pytest.raises(
        ConfigError, match=r"unknown search .XINT4_SEARCH.*XINT8_SEARCH"
    ):
        get_auto_search_config("XINT4_SEARCH")
