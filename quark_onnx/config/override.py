"""Override: a different decision for certain nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrators.shown import short
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.wording import counted
from quark_onnx.config.checks import (
    Requirement,
    instance_of,
    require_all,
    require_flags,
)
from quark_onnx.config.spec import (
    QuantizationSpec,
    check_granularity,
    check_names,
    settings_of,
    spec_of,
)
from quark_onnx.config.text import name_tuple


@dataclass(frozen=True)
class Override:
    """A different decision for certain nodes.

    A node matches if ``nodes``, ``op_types`` or ``between`` matches. An override without a match in
    the model is an error. Of several that match a node, the last one decides whether the node is
    kept float or quantized, all of it; a format is that of the last one that gives it.

    Attributes:
        nodes: node names, globs (``"/head/*"``) or regular expressions (``"re:^/head/.*"``).
        op_types: operator types.
        between: two sets of tensor or node names; the nodes on the paths from the first to the
            second, both included.
        keep: leave these nodes float.
        activation: quantization of the nodes' activations; None for no change.
        weight: quantization of the nodes' weights; None for no change.

    >>> Override("/head/*", keep=True)
    Override(nodes=('/head/*',), op_types=(), between=(), keep=True, activation=None, weight=None)
    """

    nodes: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    between: tuple[tuple[str, ...], ...] = ()
    keep: bool = False
    activation: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None

    # The accepted types; the stored values are tuples.
    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913  the fields
            self,
            nodes: str | Iterable[str] = (),
            op_types: str | Iterable[str] = (),
            between: Sequence[str | Iterable[str]] = (),
            keep: bool = False,
            activation: QuantizationSpec | None = None,
            weight: QuantizationSpec | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("nodes", "op_types"):
            names = name_tuple(getattr(self, name), f"{name} of an override")
            object.__setattr__(self, name, names)
        require_all(self, [_BETWEEN], " of an override")
        # A single name is a set of one: ``between=("x", "y")`` has two sets.
        ends = tuple(name_tuple(end, "between of an override") for end in self.between)
        object.__setattr__(self, "between", ends)
        if len(ends) not in (0, 2):
            raise ConfigError(
                f"between of an override has {counted(len(ends), 'set')} of names; it takes two:"
                " starts and ends",
            )
        # Before the messages below, which identify the override by its patterns.
        if not (self.nodes or self.op_types or self.between):
            raise ConfigError(
                "an override names no nodes; give nodes, op_types or between"
            )
        where = f" of the override for {self.where}"
        require_flags(self, ["keep"], where)
        quantizes = self.activation or self.weight
        if not (self.keep or quantizes):
            raise ConfigError(
                f"the override for {self.where} changes nothing; give keep, activation"
                " or weight"
            )
        if self.keep and quantizes:
            raise ConfigError(
                f"the override for {self.where} both keeps nodes float and quantizes"
                " them"
            )
        self._check_specs(where)
        check_granularity(self.activation, self.weight, where)

    def _check_specs(self, where: str) -> None:
        """Raise ConfigError for a spec of another type.

        Names of formats are accepted in dictionaries and by ``QConfig.with_``, which have a base.
        """
        for name in ("activation", "weight"):
            spec = getattr(self, name)
            if not isinstance(spec, QuantizationSpec | None):
                raise ConfigError(
                    f"{name}{where} is {short(spec)}, not a QuantizationSpec",
                )

    def __str__(self) -> str:
        if self.keep:
            return f"{self.where}: float"
        changes = {"activation": self.activation, "weight": self.weight}
        specs = [f"{name} {spec}" for name, spec in changes.items() if spec]
        return f"{self.where}: {', '.join(specs)}"

    @property
    def where(self) -> str:
        """The patterns, for messages."""
        patterns = [*self.nodes, *self.op_types]
        if self.between:
            patterns.append(" .. ".join(",".join(end) for end in self.between))
        return ", ".join(patterns)


_BETWEEN = Requirement("between", instance_of(list, tuple), "two sets of names")


def override_of(
    data: object, activation: QuantizationSpec | None, weight: QuantizationSpec | None
) -> Override:
    """Return an override from a dictionary of settings, or as it is.

    Args:
        data: an ``Override``, or its settings.
        activation: the configuration's quantization of activations, which a dictionary changes.
        weight: that of weights.
    """
    if isinstance(data, Override):
        return data
    settings = settings_of(data, "an override")
    check_names(settings, Override)
    # None means no change here, unlike in a QConfig, where None means float.
    for name, base in (("activation", activation), ("weight", weight)):
        if settings.get(name) is not None:
            settings[name] = spec_of(settings[name], base, name)
    return Override(**settings)
