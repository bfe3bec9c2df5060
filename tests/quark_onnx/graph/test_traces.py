"""What torch's exporter wrote down goes, wherever it stands; what the user wrote stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto

from quark_onnx import quantize
from tests.models import conv_relu, samples

TRACED = {
    "pkg.torch.onnx.stack_trace": "File 'model.py', line 12, in forward" * 40,
    "pkg.torch.onnx.class_hierarchy": "['torch.nn.modules.conv.Conv2d']",
    "pkg.onnxscript.rewriter.rule_name": "FuseBatchNorm",
    "namespace": "model/features",
}
OWN = {"owner": "us", "pkg.ours.id": "7", "license": "MIT"}


def add(owner: Any, entries: dict[str, str]) -> None:
    for key, value in entries.items():
        owner.metadata_props.add(key=key, value=value)


def traced() -> ModelProto:
    """A model as torch's exporter writes it, with the user's own entries beside."""
    model = conv_relu()
    model.ir_version = 10
    value = model.graph.value_info.add()
    value.CopyFrom(
        onnx.helper.make_tensor_value_info(model.graph.node[0].output[0], 1, None)
    )
    for owner in (
        model.graph,
        *model.graph.node,
        *model.graph.initializer,
        *model.graph.input,
        value,
    ):
        add(owner, TRACED)
        add(owner, OWN)
    add(model, OWN)
    model.graph.node[-1].metadata_props.add(key="pkg.torch.onnx.fx_node", value="relu")
    return model


def keys(owner: Any) -> set[str]:
    return {entry.key for entry in owner.metadata_props}


@pytest.mark.parametrize("preset", ["A8W8", "INT4"])
def test_traces_are_dropped(tmp_path: Path, preset: str) -> None:
    model = traced()
    before = model.SerializeToString()
    output = tmp_path / "q.onnx"
    result = quantize(
        model, samples(model, 2) if preset == "A8W8" else None, preset, output
    )
    assert model.SerializeToString() == before
    written = onnx.load(output)
    text = output.read_bytes()
    assert (
        b"pkg.torch" not in text
        and b"pkg.onnxscript" not in text
        and b"namespace" not in text
    )
    assert keys(written) >= set(OWN) and keys(written.graph) == set(OWN)
    [conv] = [node for node in written.graph.node if node.op_type == "Conv"]
    assert keys(conv) == set(OWN)
    assert any(
        "stack traces and names of torch's exporter were dropped" in note
        for note in result.report.notes
    )


def test_the_user_may_have_a_namespace() -> None:
    """The key has no prefix, so that it is torch's only beside others of its own."""
    model = conv_relu()
    model.graph.node[0].metadata_props.add(key="namespace", value="mine")
    result = quantize(model, samples(model, 2), "A8W8")
    [conv] = [node for node in result.model.graph.node if node.op_type == "Conv"]
    assert keys(conv) == {"namespace"}
    assert not any("exporter" in note for note in result.report.notes)
