"""What scripts extend in onnxruntime's quantizer is obeyed, or refused with the way here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime.quantization as theirs
import pytest
from onnxruntime.quantization import registry

import quark_onnx
import quark_onnx.compat_onnxruntime as ours
from quark_onnx.compat_onnxruntime.onnx_quantizer import ONNXQuantizer
from tests.compat_onnxruntime import networks

TABLES = (
    "CommonOpsRegistry",
    "IntegerOpsRegistry",
    "QLinearOpsRegistry",
    "QDQRegistry",
)


class Operator:
    """An operator's quantizer, as a script would write one."""


@pytest.mark.parametrize("package", [ours, quark_onnx])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("change", [{"Gelu": Operator}, {"Gather": Operator}])
def test_a_changed_registry_is_refused(
    tmp_path: Path, monkeypatch: Any, package: Any, table: str, change: dict[str, type]
) -> None:
    for op_type, operator in change.items():
        monkeypatch.setitem(getattr(registry, table), op_type, operator)
    source = networks.save(networks.layers(), tmp_path)
    with pytest.raises(ValueError, match=rf"{table}\[.*was changed.*quark_onnx\.rules"):
        package.quantize_dynamic(source, tmp_path / "q.onnx")
    monkeypatch.undo()
    package.quantize_dynamic(source, tmp_path / "q.onnx")


def test_a_removed_operator_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delitem(registry.QDQRegistry, "Conv")
    with pytest.raises(ValueError, match=r"QDQRegistry\['Conv'\] was changed"):
        ours.quantize_dynamic(networks.layers(), tmp_path / "q.onnx")


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        (ours.QDQQuantizer, "quantize_weight_tensor"),
        (ours.QDQQuantizer, "should_quantize_node"),
        (ONNXQuantizer, "quantize_activation"),
    ],
)
def test_an_overridden_hook_is_refused(base: type, hook: str) -> None:
    with pytest.raises(ValueError, match=rf"Mine overrides {hook}.*quark_onnx\.rules"):
        type("Mine", (base,), {hook: lambda self: None})
    quantizer = base(networks.layers())
    with pytest.raises(ValueError, match=f"{hook} of a .* is set"):
        setattr(quantizer, hook, None)
    with pytest.raises(AttributeError, match=f"has no {hook}"):
        getattr(quantizer, hook)
    with pytest.raises(ValueError, match=r"quantization_params of a .* is set"):
        quantizer.quantization_params = {}


def test_a_subclass_with_names_of_its_own() -> None:
    class Mine(ours.QDQQuantizer):
        def __init__(self, model: Any, label: str) -> None:
            super().__init__(model, tensors_range=None)
            self.label = label

        def twice(self) -> str:
            return 2 * self.label

    assert Mine(networks.layers(), "a").twice() == "aa"


@pytest.mark.parametrize("quantizer", [ours.QDQQuantizer, ONNXQuantizer])
def test_static_scales_without_ranges_are_refused(quantizer: type) -> None:
    """The same call is an error in onnxruntime, and no request of dynamic scales."""
    with pytest.raises(ValueError, match=r"tensors_range of a .*Quantizer is None"):
        quantizer(networks.layers()).quantize_model()


def test_the_mode_of_integer_operators_needs_no_ranges() -> None:
    mode = ours.QuantizationMode.IntegerOps
    quantizer = ONNXQuantizer(networks.layers(), mode=mode)
    kinds = {node.op_type for node in quantizer.quantize_model().graph.node}
    assert "DynamicQuantizeLinear" in kinds


def test_attributes_are_read_when_the_model_is_quantized() -> None:
    model = networks.layers()
    ranges = {
        name: theirs.TensorData(lowest=np.float32(-4), highest=np.float32(4))
        for name in ("x", "g", "r", "h", "y")
    }
    quantizer = ours.QDQQuantizer(model, tensors_range=ranges)
    quantizer.nodes_to_exclude = ["first", "second", "third"]
    quantizer.quantize_model()
    kinds = {node.op_type for node in quantizer.model.model.graph.node}
    assert "QuantizeLinear" not in kinds


def test_operators_are_onnxruntimes() -> None:
    from onnxruntime.quantization.operators import conv

    from quark_onnx.compat_onnxruntime.operators.conv import QDQConv

    assert QDQConv is conv.QDQConv
