"""The settings that tools are compared at: number types, calibrator and granularity in one named value."""

from __future__ import annotations

from dataclasses import dataclass, replace

CALIBRATORS = ("minmax", "percentile", "entropy", "minmse", "nonoverflow")


@dataclass(frozen=True)
class Setting:
    """A preset, its calibrator (None: the tool's default) and whether weights are scaled per channel.

    >>> str(Setting("A8W8", "entropy", per_channel=True)), str(Setting("XINT8"))
    ('A8W8-entropy-channel', 'XINT8')
    """

    preset: str
    calibrator: str | None = None
    per_channel: bool = False

    def __str__(self) -> str:
        """The name by which results and the command line know this setting."""
        granularity = "channel" if self.per_channel else "tensor" if self.calibrator else None
        return "-".join(part for part in (self.preset, self.calibrator, granularity) if part)

    def with_calibrator(self, name: str) -> Setting:
        """This setting with its calibrator named."""
        return replace(self, calibrator=name)


SETTINGS = (
    *(Setting("A8W8", calibrator, per_channel=True) for calibrator in (None, *CALIBRATORS)),
    *(Setting("A8W8", calibrator) for calibrator in (None, *CALIBRATORS)),
    Setting("A16W8"),
    Setting("A16W8", per_channel=True),
    Setting("XINT8"),
    Setting("S8S8", "percentile"),  # what amd-quark calls A8W8
)
