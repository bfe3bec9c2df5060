"""check: what stands between a model, of any tool, and a Ryzen AI processor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from calibrators.shown import printable
from quark_onnx.graph import Graph
from quark_onnx.graph.io import load
from quark_onnx.npu.finding import Finding
from quark_onnx.npu.pairs import Pairs
from quark_onnx.npu.scales import scale_findings
from quark_onnx.npu.structure import convolution_findings, structure_findings
from quark_onnx.registry import TARGETS
from quark_onnx.targets import Target


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        target: what the model was held against.
        kind: how the model's numbers look: "float", "XINT8" (power-of-two scales) or "integer"
            (other scales).
        findings: errors first.
    """

    target: Target
    kind: str
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        """How many findings are no mere warnings."""
        return sum(finding.severity == "error" for finding in self.findings)

    def __str__(self) -> str:
        warnings = len(self.findings) - self.errors
        head = (
            f"{self.kind} model for {self.target.name}: {self.errors} errors,"
            f" {warnings} warnings"
        )
        return "\n".join(
            [head, *(printable(str(finding)) for finding in self.findings)],
        )


def check(
    model: str | Path | ModelProto,
    target: str = "npu",
    *,
    kind: str = "",
) -> Check:
    """Hold a model against a target.

    Args:
        model: a path or a model, with Q/DQ pairs of any tool, or float.
        target: its name: npu, phx, hpt, stx or krk.
        kind: hold it against the rules for "XINT8" or "integer"; empty to see from its scales which
            it is. A target that knows nothing but XINT8 holds every quantized model against these
            rules.

    Raises:
        ConfigError: there is no such target.
        ModelError: the model cannot be read.

    >>> from onnx import parser
    >>> text = '<ir_version: 9, opset_import: ["": 17]> g (float[N,3,8,8] x) => (float[N,3,8,8] y) { y = Relu (x) }'
    >>> print(check(parser.parse_model(text), "phx").findings[0].figures)
    input 'x' has the shape ['N', 3, 8, 8]
    """  # noqa: E501
    found, row = load(model), TARGETS[target]
    graph = Graph.of(found)
    pairs = Pairs(graph)
    kind = kind or kind_of(pairs, row)
    findings = [*structure_findings(found, graph, row)]
    if kind == "XINT8":
        findings += [*scale_findings(pairs)]
        findings += [*convolution_findings(graph)] if row.compiler != "X2" else []
    findings.sort(key=lambda finding: finding.severity)
    return Check(row, kind, tuple(findings))


def kind_of(pairs: Pairs, target: Target) -> str:
    """How the numbers of a model look: "float", "XINT8" (power-of-two scales) or "integer"."""
    if not pairs.quantizing and not pairs.dequantizing:
        return "float"
    known = sum(pairs.grid(node).position is not None for node in pairs.quantizing)
    only = (
        target.integer_engine and target.presets == ("XINT8",) and target.architecture
    )
    return "XINT8" if only or 2 * known > len(pairs.quantizing) else "integer"
