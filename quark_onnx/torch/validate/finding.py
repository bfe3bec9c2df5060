"""Rules of clients, findings (broken rules), and the verdict on a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quark_onnx.common.containers import grouped_by
from quark_onnx.page.blocks import Block, Facts, Judgement, Notes, Problem, Problems
from quark_onnx.page.reported import Reported
from quark_onnx.page.terminal import render_lines

#: A verdict follows from reading files; the text says so, since only the client itself can prove
#: it.
_RULES_ONLY = "(the client was not run)"

#: Consequences of a broken rule, the worst first: the client refuses the checkpoint, loads wrong
#: values, or loads correctly with a detail that deserves attention.
REFUSED, WRONG, WARNING = SEVERITIES = ("refused", "wrong", "warning")


@dataclass(frozen=True)
class Rule:
    """Requirement of a client.

    Attributes:
        severity: default consequence of a broken rule: "refused", "wrong" or "warning".
        title: the requirement.
        fix: instructions to fix a checkpoint that breaks the rule.
        source: source of the rule, with the release; by default that of its table in ``rules``.
    """

    severity: str
    title: str
    fix: str
    source: str = ""


@dataclass(frozen=True)
class Finding:
    """Broken rule at a place of a checkpoint.

    Attributes:
        rule: name of the rule in ``RULES``.
        place: file, tensor, layer or key of the configuration.
        found: actual content.
        broken: the rule.
        severity: consequence at this place.
    """

    rule: str
    place: str
    found: str
    broken: Rule
    severity: str

    @property
    def document(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "place": self.place,
            "found": self.found,
            "demanded": self.broken.title,
            "fix": self.broken.fix,
            "source": self.broken.source,
        }

    def __str__(self) -> str:
        rule = self.broken
        return (
            f"{self.severity} {self.rule} at {self.place}: {self.found} ({rule.title});"
            f" {rule.fix} [{rule.source}]"
        )


@dataclass(frozen=True, repr=False)
class Validation(Reported):
    """Result of the validation of a checkpoint for a client.

    Attributes:
        place: folder or file.
        client: name of the client, as given to ``validate``.
        release: release of the client to which the rules belong.
        layout: layout of the weights, such as "quark", "awq", "float" or "gguf".
        schemes: number of layers by scheme.
        needs: packages that must be installed in addition to the client.
        findings: findings, the worst first.
    """

    place: str
    client: str
    release: str
    layout: str
    schemes: dict[str, int]
    needs: tuple[str, ...]
    findings: tuple[Finding, ...]

    def count(self, severity: str) -> int:
        """Return the number of findings with a severity.

        Args:
            severity: "refused", "wrong" or "warning".
        """
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def loads(self) -> bool:
        """Whether the client loads the checkpoint."""
        # a client that loads wrong values loads nevertheless; only a refusal stops it
        return not self.count(REFUSED)

    @property
    def right(self) -> bool:
        """Whether the client loads the checkpoint with correct values."""
        return self.loads and not self.count(WRONG)

    @property
    def word(self) -> str:
        """The verdict by the rules: "loads", "loads but wrong" or "refused"."""
        if self.right:
            return "loads"
        return "loads but wrong" if self.loads else "refused"

    @property
    def sentence(self) -> str:
        """The verdict, and that the client itself was not asked.

        >>> Validation("llama", "vllm", "vLLM 0.33.0", "quark", {}, (), ()).sentence
        'passes all rules of vLLM 0.33.0 (the client was not run)'
        """
        if not self.findings:
            return f"passes all rules of {self.release} {_RULES_ONLY}"
        if self.right:
            return f"only warnings by the rules of {self.release} {_RULES_ONLY}"
        return f"{self.word} by the rules of {self.release} {_RULES_ONLY}"

    @property
    def document(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {
            "client": self.client,
            "release": self.release,
            "layout": self.layout,
            "schemes": self.schemes,
            "needs": list(self.needs),
            "verdict": self.word,
            **{severity: self.count(severity) for severity in SEVERITIES},
            "findings": [finding.document for finding in self.findings],
        }

    def blocks(self) -> list[Block]:
        """Return the broken rules with their places, the worst first, and the verdict as blocks."""
        by_rule = grouped_by(
            self.findings, lambda finding: (finding.rule, finding.severity)
        )
        problems = list[Problem]()
        for (name, severity), findings in by_rule.items():
            rule = findings[0].broken
            places = [(finding.place, finding.found) for finding in findings]
            problems.append(
                Problem(severity, name, rule.title, places, rule.fix, [rule.source])
            )
        counts = [
            (severity.capitalize(), str(self.count(severity)), "places")
            for severity in SEVERITIES
        ]
        facts = [("Layout", self.layout, _counted(self.schemes)), *counts]
        lines = {"model": [f"{self.place}: {self._checkpoint}"], "needs": self.needs}
        header = ("severity", "rule", "what it demands", "what to do", "known from")
        band = "risky" if self.findings else "good"
        return [
            Judgement(band if self.right else "poor", self.sentence),
            Facts(facts, lines),
            Notes("Needed packages", self.needs),
            Problems("Broken rules", header, problems),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return self.document

    def text(self, complete: bool = False) -> str:
        """Return the verdict as text.

        Args:
            complete: whether to name every place; otherwise three places stand for more.

        Returns:
            Lines: the checkpoint, the required packages, the broken rules, the worst first, and
            the verdict.
        """
        return "\n".join(render_lines(self.blocks(), complete))

    @property
    def _checkpoint(self) -> str:
        """The layout with the schemes, such as "quark checkpoint (14 × fp8, 2 × mxfp4)"."""
        text = f"{self.layout} checkpoint"
        if self.schemes:
            text += f" ({_counted(self.schemes)})"
        return text


def _counted(counts: Mapping[str, int]) -> str:
    """Return numbers of things by name as text.

    >>> _counted({"fp8": 14, "mxfp4": 2})
    '14 × fp8, 2 × mxfp4'
    """
    return ", ".join(f"{count} × {name}" for name, count in counts.items())
