"""Rule, Finding and Verdict: what a client demands, what was found instead, and what follows from
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: What a client does with a checkpoint that breaks a rule: it does not load it, it loads something
#: else than what was written, or it loads it and something deserves a look. Worst first.
REFUSED, WRONG, WARNING = SEVERITIES = ("refused", "wrong", "warning")


@dataclass(frozen=True)
class Rule:
    """Something that a client demands.

    Attributes:
        severity: what follows where it is broken, unless the finding says otherwise: "refused",
            "wrong" or "warning".
        title: what is demanded.
        mend: what to do about a checkpoint that breaks it.
        source: where the rule was read, with the release.
    """

    severity: str
    title: str
    mend: str
    source: str


@dataclass(frozen=True)
class Finding:
    """A rule that is broken.

    Attributes:
        rule: its name in ``RULES``.
        place: the file, tensor, layer or key of the configuration.
        found: what is there.
        broken: the rule itself.
        severity: what follows here.
    """

    rule: str
    place: str
    found: str
    broken: Rule
    severity: str

    @property
    def document(self) -> dict[str, Any]:
        """The finding for a program."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "place": self.place,
            "found": self.found,
            "demanded": self.broken.title,
            "mend": self.broken.mend,
            "source": self.broken.source,
        }

    def __str__(self) -> str:
        rule = self.broken
        return (
            f"{self.severity} {self.rule} at {self.place}: {self.found} ({rule.title});"
            f" {rule.mend} [{rule.source}]"
        )


@dataclass(frozen=True)
class Verdict:
    """What a client makes of a checkpoint.

    Attributes:
        place: the folder or file.
        client: the name that ``validate`` was called with.
        release: of the client, whose rules these are.
        layout: how the weights are stored, such as "quark", "awq", "float" or "gguf".
        schemes: how many layers are quantized how.
        needs: what must be installed beside the client.
        findings: the gravest first.
    """

    place: str
    client: str
    release: str
    layout: str
    schemes: dict[str, int]
    needs: tuple[str, ...]
    findings: tuple[Finding, ...]

    def count(self, severity: str) -> int:
        """How many findings are "refused", "wrong" or "warning"."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def loads(self) -> bool:
        """Whether the client loads the checkpoint at all."""
        return not self.count(REFUSED)

    @property
    def right(self) -> bool:
        """Whether the client loads it, and it is what was written."""
        return self.loads and not self.count(WRONG)

    @property
    def word(self) -> str:
        """ "loads", "loads but wrong" or "refused"."""
        return "loads" if self.right else "loads but wrong" if self.loads else "refused"

    @property
    def document(self) -> dict[str, Any]:
        """The verdict for a program."""
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

    def text(self, complete: bool = False) -> str:
        """The verdict for a person.

        A rule that is broken in many places is shown three times, unless complete.
        """
        schemes = ", ".join(f"{count} × {name}" for name, count in self.schemes.items())
        what = (
            f"{self.layout} checkpoint ({schemes})"
            if schemes
            else f"{self.layout} checkpoint"
        )
        lines = [f"{self.place}: {what} for {self.release}: {self.word}"]
        lines += [f"needs {what}" for what in self.needs]
        seen = dict[str, int]()
        for finding in self.findings:
            seen[finding.rule] = seen.get(finding.rule, 0) + 1
            if complete or seen[finding.rule] <= 3:
                lines.append(str(finding))
        more = [f"{count - 3} × {rule}" for rule, count in seen.items() if count > 3]
        return "\n".join(
            lines if complete or not more else [*lines, f"and {', '.join(more)}"],
        )

    def __str__(self) -> str:
        return self.text()
