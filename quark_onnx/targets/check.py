"""check: the rules of a Ryzen AI processor or an engine that a model of any tool breaks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from quark_onnx.check.inlined import inlined
from quark_onnx.common.containers import grouped_by
from quark_onnx.common.errors import ConstraintError
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted
from quark_onnx.files.io import load
from quark_onnx.graph import Graph, gather_constants
from quark_onnx.page.blocks import Block, Judgement, Problem, Problems
from quark_onnx.page.reported import Reported
from quark_onnx.targets.engine_rules import engine_findings, engine_structure
from quark_onnx.targets.finding import RULES, Finding
from quark_onnx.targets.pairs import Pairs
from quark_onnx.targets.scales import alignment_findings, scale_findings
from quark_onnx.targets.structure import convolution_findings, structure_findings
from quark_onnx.targets.target import Target

#: Maximum number of broken rules in an error message, which names the first place of each.
_SHOWN = 10


@dataclass(frozen=True, repr=False)
class Check(Reported):
    """Result of checking a model against a target.

    Attributes:
        target: the target of the check.
        kind: the model's number format: "float", "XINT8" (power-of-two scales) or "integer"
            (other scales).
        findings: broken rules, errors first.
    """

    target: Target
    kind: str
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        """Return the number of findings that are errors."""
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def sentence(self) -> str:
        """Return the numbers of errors and warnings in words."""
        warnings = len(self.findings) - self.errors
        return (
            f"{self.kind} model for {self.target.name}: "
            f"{counted(self.errors, 'error')}, {counted(warnings, 'warning')}"
        )

    @property
    def problems(self) -> Problems:
        """Return each broken rule with the nodes that break it."""
        by_rule = grouped_by(self.findings, lambda finding: finding.rule)
        problems = list[Problem]()
        for name, findings in by_rule.items():
            rule = RULES[name]
            places = [(finding.node, finding.figures) for finding in findings]
            severity = findings[0].severity
            problems.append(
                Problem(severity, name, rule.title, places, rule.fix, [rule.source])
            )
        header = ("severity", "rule", "what it asks for", "what to do", "known from")
        return Problems("Broken rules", header, problems)

    def blocks(self) -> list[Block]:
        """Return the broken rules and their number as blocks."""
        band = "risky" if self.findings else "good"
        return [
            Judgement("poor" if self.errors else band, self.sentence),
            self.problems,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            "target": self.target.name,
            "kind": self.kind,
            "errors": self.errors,
            "findings": [
                {
                    **asdict(finding),
                    "severity": finding.severity,
                    **asdict(RULES[finding.rule]),
                }
                for finding in self.findings
            ],
        }


def check(
    model: str | Path | ModelProto, target: str = "npu", *, kind: str = ""
) -> Check:
    """Check a model against the rules of a target.

    Args:
        model: a path or a model, float or with Q/DQ pairs of any tool.
        target: name of a processor, such as phx, stx or, for any of them, npu, or of an engine
            (cpu, openvino, tensorrt, qnn, web).
        kind: number format whose rules apply, "XINT8" or "integer"; empty to infer the format from
            the scales. A target that supports XINT8 alone applies the XINT8 rules to every
            quantized model.

    Returns:
        The target, the number format and the broken rules.

    Raises:
        ConfigError: the target is unknown.
        ModelError: the model cannot be read.

    >>> from onnx import parser
    >>> text = '<ir_version: 9, opset_import: ["": 17]> g (float[N,3,8,8] x) => (float[N,3,8,8] y) { y = Relu (x) }'
    >>> print(check(parser.parse_model(text), "phx").findings[0].figures)
    input 'x' has the shape ['N', 3, 8, 8]
    """  # noqa: E501
    return check_loaded(load(model), target, kind=kind)


def check_loaded(model: ModelProto, target: str, *, kind: str = "") -> Check:
    """Check a model of this process, whose large weights may be held apart or lie in files.

    Arguments and result are those of ``check``.
    """
    row = TARGETS[target]
    if not row.is_npu:  # engines inline functions themselves
        model = inlined(model)
    graph = Graph.of(model)
    # Some tools write scales and weights as Constant nodes, which onnxruntime stores when it loads.
    gather_constants(graph, keep_inputs=True)
    pairs = Pairs(graph)
    kind = kind or kind_of(pairs, row)
    if row.takes is not None:
        findings = [*engine_findings(graph, pairs, row, row.takes)]
    else:
        findings = _npu_findings(model, graph, pairs, row, kind)
    # "error" precedes "warning" in the alphabet; within each, the order of the rules stays.
    findings.sort(key=lambda finding: finding.severity)
    return Check(row, kind, tuple(findings))


def _npu_findings(
    model: ModelProto, graph: Graph, pairs: Pairs, row: Target, kind: str
) -> list[Finding]:
    """Return the rules of a Ryzen AI processor that a model breaks."""
    findings = [*structure_findings(model, graph, row)]
    if kind == "XINT8":
        findings += [*scale_findings(pairs), *convolution_findings(graph, row)]
    elif kind == "integer":
        findings += alignment_findings(pairs)
    return findings


def check_structure(model: ModelProto, target: str, kind: str) -> Check:
    """Check a float model against the rules that no quantization changes.

    Args:
        model: the float model, after the rewrites for the target.
        target: name of the target.
        kind: number format that the model will get.
    """
    row, graph = TARGETS[target], Graph.of(model)
    if row.takes is not None:
        return Check(row, kind, tuple(engine_structure(graph, row, row.takes)))
    findings = [*structure_findings(model, graph, row)]
    if kind == "XINT8":
        findings += [*convolution_findings(graph, row)]
    return Check(row, kind, tuple(findings))


def require_rules(found: Check, consequence: str) -> None:
    """Raise ConstraintError if a checked model breaks rules of its target.

    Args:
        found: the result of the check; warnings are no errors.
        consequence: what did not happen because of the errors.
    """
    if not found.errors:
        return
    errors = [finding for finding in found.findings if finding.severity == "error"]
    by_rule = grouped_by(errors, lambda finding: finding.rule)
    lines = [
        f"{first} ({len(others)} more of {rule})" if others else str(first)
        for rule, (first, *others) in by_rule.items()
    ]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {counted(len(lines) - _SHOWN, 'further rule')}"]
    raise ConstraintError(
        f"the {found.kind} model breaks {counted(found.errors, 'rule')} of"
        f" {found.target.name} ({found.target.summary}); {consequence}:",
        lines,
    )


def kind_of(pairs: Pairs, target: Target) -> str:
    """Return a model's format: "float", "XINT8" (power-of-two scales) or "integer"."""
    if not pairs.quantizing and not pairs.dequantizing:
        return "float"
    # Float scales are then broken rules, rather than another format.
    if _takes_xint8_alone(target):
        return "XINT8"
    positions = [pairs.grid(node).position for node in pairs.quantizing]
    # By majority: single float scales may be powers of two by chance, and single scales of an XINT8
    # model may be wrong, which is a finding.
    powers_of_two = len(positions) - positions.count(None)
    return "XINT8" if 2 * powers_of_two > len(positions) else "integer"


def _takes_xint8_alone(target: Target) -> bool:
    if not target.integer_engine or not target.architecture:
        return False
    # The generic target "npu" names no architecture, and infers the format from the model.
    return target.presets == ("XINT8",)
