"""The settings that tools are compared at: number types, calibrator and granularity in one named
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

CALIBRATORS = ("minmax", "percentile", "entropy", "minmse", "nonoverflow")


@dataclass(frozen=True)
class Setting:
    """A preset, and where it is not left as it is, its calibrator and whether weights are scaled
    per channel; or our recipe for the model, as by ``--recipe auto``.

    >>> str(Setting("A8W8", "entropy", per_channel=True)), str(Setting("XINT8"))
    ('A8W8-entropy-channel', 'XINT8')
    >>> str(Setting("A8W8", recipe=True))
    'A8W8-recipe'
    """

    preset: str
    calibrator: str | None = None
    per_channel: bool | None = None
    recipe: bool = False

    def __str__(self) -> str:
        """The name by which results and the command line know this setting."""
        granularity = {None: None, True: "channel", False: "tensor"}[self.per_channel]
        recipe = "recipe" if self.recipe else None
        parts = (self.preset, self.calibrator, granularity, recipe)
        return "-".join(part for part in parts if part)

    def spelled(self) -> Iterator[Setting]:
        """The explicit settings of which one is this preset as it is.

        None if this is explicit already.
        """
        if self.calibrator is None and self.per_channel is None and not self.recipe:
            for calibrator, per_channel in product(CALIBRATORS, (True, False)):
                yield replace(self, calibrator=calibrator, per_channel=per_channel)


SETTINGS = (
    Setting("A8W8"),
    *(Setting("A8W8", calibrator, per_channel=True) for calibrator in CALIBRATORS),
    *(Setting("A8W8", calibrator, per_channel=False) for calibrator in CALIBRATORS),
    Setting("A16W8"),
    *(Setting("A16W8", "minmax", per_channel) for per_channel in (True, False)),
    Setting("XINT8"),
    Setting("S8S8", "percentile", per_channel=False),  # what amd-quark calls A8W8
)
#: What of ours the default, A8W8, may not be below.
RECIPES = (Setting("A8W8", recipe=True), Setting("DYNAMIC"))
