"""Settings with AMD Quark's names go through JSON, and observers compute scales."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.torch import LLMTemplate
from quark_onnx.torch.quantization import QConfig, QLayerConfig, RotationConfig
from quark_onnx.torch.quantization import observer as observers
from quark_onnx.torch.quantization.config import specs
from quark_onnx.torch.quantization.config.algorithms import (
    ALGORITHMS,
    AlgoConfig,
    OnlineRotationConfig,
)
from tests.cases import loop_over

#: Values of fields without a default.
REQUIRED = {"ch_axis": -1, "group_size": 32, "block_size": 32, "shared_parallel": True}


def through_json(settings: Any) -> Any:
    """Return settings after a round trip through JSON."""
    return type(settings).from_dict(json.loads(json.dumps(settings.to_dict())))


@loop_over("name", specs.__all__)
def test_spec_helpers(name: str) -> None:
    helper = getattr(specs, name)
    needed = [f.name for f in fields(helper) if f.default is MISSING]
    if not set(needed) <= set(REQUIRED):
        with pytest.raises(ConfigError, match=f"{name}: {needed[0]} is missing"):
            helper.from_dict({})
        return
    settings = helper(**{field: REQUIRED[field] for field in needed})
    assert through_json(settings) == settings
    with pytest.raises(ConfigError, match="has no setting 'wrong'"):
        helper.from_dict({**settings.to_dict(), "wrong": 1})


@pytest.mark.parametrize(
    "kind", sorted(set(ALGORITHMS.values()), key=lambda k: k.__name__)
)
def test_algorithms(kind: type[AlgoConfig]) -> None:
    settings = kind()
    assert through_json(settings) == settings
    assert AlgoConfig.from_dict(settings.to_dict()) == settings


def test_nested_settings() -> None:
    online = OnlineRotationConfig(True, ["*down_proj"])
    settings = RotationConfig(r4=True, online_config=online)
    assert through_json(settings) == settings


@pytest.mark.parametrize("scheme", ["fp8", "int4_wo_128", "mxfp4", "int8", "nvfp4"])
def test_models(scheme: str) -> None:
    config = LLMTemplate.get("llama").get_config(
        scheme,
        kv_cache_scheme="fp8",
        algorithm="awq",
        exclude_layers=["lm_head", "*q*"],
    )
    config.min_kv_scale = 0.5
    found = through_json(config)
    assert found.torch_config() == config.torch_config()
    assert found.algo_config == config.algo_config
    assert found.to_dict() == config.to_dict()


def test_observers_stay() -> None:
    spec = specs.Int8PerTensorSpec(observer_method="percentile").to_quantization_spec()
    config = QConfig(QLayerConfig(input_tensors=spec))
    assert through_json(config).torch_config() == config.torch_config()


def test_entries_without_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="there is no global_quant_config"):
        QConfig.from_dict({"exclude": []})
    with pytest.raises(ConfigError, match="unknown algorithm"):
        AlgoConfig.from_dict({"name": "gptqq"})


def scales_of(low: Any, high: Any, bits: int) -> Any:
    """Return asymmetric scales in float64."""
    return (np.maximum(high, 0) - np.minimum(low, 0)) / (2**bits - 1)


def test_observers_compute_scales() -> None:
    """Scales and zero points are those of the formulas, over all batches."""
    batches = [
        torch.randn(8, 64, generator=torch.Generator().manual_seed(k)) for k in (0, 1)
    ]
    values = torch.stack(batches).double().numpy()
    tensor = observers.PerTensorMinMaxObserver(
        specs.Int8PerTensorSpec().to_quantization_spec()
    )
    channel = observers.PerChannelMinMaxObserver(
        specs.Uint8PerChannelSpec(ch_axis=0, symmetric=False).to_quantization_spec()
    )
    group = observers.PerGroupMinMaxObserver(
        specs.Uint4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
    )
    for batch in batches:
        assert tensor(batch) is batch
        channel(batch)
        group(batch)
    scale, zero = tensor.calculate_qparams()
    assert float(scale) == pytest.approx(np.abs(values).max() / 127.5, rel=1e-6)
    assert int(zero) == 0
    expected = scales_of(values.min((0, 2)), values.max((0, 2)), 8)
    scale, zero = channel.calculate_qparams()
    assert np.allclose(scale.numpy(), expected, rtol=1e-6)
    codes = np.clip(np.rint(-values.min((0, 2)) / expected), 0, 255)
    assert np.array_equal(zero.numpy(), codes)
    groups = values.reshape(2, 8, 2, 32)
    expected = scales_of(groups.min((0, 3)), groups.max((0, 3)), 4)
    assert group.calculate_qparams()[0].shape == (8, 2)
    assert np.allclose(group.calculate_qparams()[0].numpy(), expected, rtol=1e-6)


def test_observers_refuse() -> None:
    spec = specs.Int8PerTensorSpec().to_quantization_spec()
    observer = observers.PerTensorMinMaxObserver(spec)
    with pytest.raises(DataError, match="has observed no tensor"):
        observer.calculate_qparams()
    with pytest.raises(DataError, match="infinite or no number"):
        observer(torch.tensor([float("nan")]))
    observer(torch.ones(3))
    observer.reset_state()
    with pytest.raises(DataError, match="has observed no tensor"):
        observer.calculate_qparams()
    channel = observers.PerChannelMinMaxObserver(
        specs.Int8PerChannelSpec(ch_axis=0).to_quantization_spec()
    )
    channel(torch.ones(3, 2))
    with pytest.raises(DataError, match="call reset_state first"):
        channel(torch.ones(4, 2))
