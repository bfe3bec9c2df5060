"""What AMD's integer engine asks of power-of-two scales, as values: a position is the exponent p of
a scale 2**-p.

Rules C1 to C10 as amd-quark 0.13 (build 647cedc, onnx/postprocess/refinement/refine.py) states them
for the NPU's convolution engine. The shifts behind them are what its hardware does between a
product and the next tensor: a product of positions i and w becomes an output of position o by a
shift of i + w - o bits, of which there are only so many.

Constraints do not know graphs: positions are looked up by keys of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quark_onnx.errors import ConstraintError

Key = Hashable
Positions = dict[Key, int]

#: Positions of scales that are normal float32 numbers.
LEAST, GREATEST = -126, 126

#: Rounds in which all comes to rest where constraints do not undo each other, and where they only
#: go one way.
_FEW, _MANY = 20, 400
#: Where the rules come from.
SOURCE = "amd-quark 0.13, onnx/postprocess/refinement/refine.py"
#: What each rule is called there.
NAMES = {
    "C1": "concat: all inputs and the output have one position",
    "C2": "pool: input and output have one position",
    "C3": "pad: input and output have one position",
    "C4": "slice: input and output have one position",
    "C5": "shift_read: positions of the inputs of Add and Sub differ by at most 7",
    "C6": "shift_write: Add shifts its result by -7 to 25 bits, Mul by 0 to 32",
    "C7": "shift_cut: Conv and Gemm shift their result by 0 to 16 bits",
    "C8": (
        "shift_bias: the bias is shifted by at most 15 bits, and is no finer than 16"
        " bits below the output"
    ),
    "C9": (
        "hard sigmoid: input position 0 to 15, output position 7 to 14 above that of"
        " the input"
    ),
    "C10": "swish: the product is shifted by 0 to 15 bits",
}


class Constraint(Protocol):
    """One rule at one node."""

    @property
    def rule(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def keys(self) -> tuple[Key, ...]:
        """Whose positions it is about."""

    def broken(self, at: Positions) -> str:
        """By which figures it is broken; empty if it holds."""

    def settle(self, at: Positions) -> bool:
        """Move the position that costs least, so that it holds; whether anything moved."""

    def lower(self, at: Positions) -> bool:
        """The same by making scales coarser alone.

        Those that have a least position are there already.
        """

    def lift(self, floors: Positions) -> bool:
        """Raise least positions to what follows from those of others.

        Whether anything was raised.
        """

    def rise(self, at: Positions) -> bool:
        """The same as ``lower`` by making scales finer alone."""


@dataclass(frozen=True)
class Equal:
    """All positions are equal.

    The coarsest is taken, under which nothing is clipped that was not.
    """

    rule: str
    node: str
    keys: tuple[Key, ...]

    def broken(self, at: Positions) -> str:
        found = [at[key] for key in self.keys]
        return f"positions {', '.join(map(str, found))}" if len(set(found)) > 1 else ""

    def settle(self, at: Positions) -> bool:
        return _set(at, self.keys, min(at[key] for key in self.keys))

    lower = settle

    def lift(self, floors: Positions) -> bool:
        return _set(floors, self.keys, max(floors[key] for key in self.keys))

    rise = lift


@dataclass(frozen=True)
class Near:
    """Positions differ by no more than ``most``; those that are too fine become coarser."""

    rule: str
    node: str
    keys: tuple[Key, ...]
    most: int

    def broken(self, at: Positions) -> str:
        found = [at[key] for key in self.keys]
        return (
            f"positions {', '.join(map(str, found))}"
            if max(found) - min(found) > self.most
            else ""
        )

    def settle(self, at: Positions) -> bool:
        limit = min(at[key] for key in self.keys) + self.most
        return _set(at, [key for key in self.keys if at[key] > limit], limit)

    lower = settle

    def lift(self, floors: Positions) -> bool:
        limit = max(floors[key] for key in self.keys) - self.most
        return _set(floors, [key for key in self.keys if floors[key] < limit], limit)

    rise = lift


@dataclass(frozen=True)
class Shift:
    """The positions of some factors, less that of another, lie between two ends.

    One of them moves where they do not.

    Attributes:
        plus, minus: keys that are added and taken off; one may stand there several times.
        least, most: the ends; None for none.
        mover: the key that moves, among ``plus`` or ``minus``.
        smallest: of ``plus`` only the least position counts.
        free: nothing else depends on the mover, so that it may always move.
    """

    rule: str
    node: str
    plus: tuple[Key, ...]
    minus: tuple[Key, ...]
    least: int | None
    most: int | None
    mover: Key
    smallest: bool = False
    free: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        return (*self.plus, *self.minus)

    def broken(self, at: Positions) -> str:
        return (
            f"a shift of {self._value(at)}, not {self._ends}"
            if self._excess(at)
            else ""
        )

    def settle(self, at: Positions) -> bool:
        excess = self._excess(at)
        return _set(
            at,
            [self.mover],
            at[self.mover] + (excess if self.mover in self.minus else -excess),
        )

    def lower(self, at: Positions) -> bool:
        excess = self._excess(at)
        if self.free or not excess:
            return self.settle(at)
        if excess < 0:
            return bool(self.minus) and _set(at, self.minus, at[self.minus[0]] + excess)
        # of several factors the finest gives way, but for a sum the coarsest, which alone counts
        key = (min if self.smallest else max)(self.plus, key=at.__getitem__)
        return self._give(at, key, excess)

    def lift(self, floors: Positions) -> bool:
        if self.free:
            return False
        raised, plus = False, [floors[key] for key in self.plus]
        base = floors[self.minus[0]] if self.minus else 0
        if self.least is not None and (
            self.smallest or len(plus) == 1
        ):  # else it may be either of them
            short = [key for key in self.plus if floors[key] < base + self.least]
            raised |= _set(floors, short, base + self.least)
        if self.most is not None and self.minus:
            raised |= _set(
                floors,
                self.minus,
                max(base, (min if self.smallest else sum)(plus) - self.most),
            )
        return raised

    def rise(self, at: Positions) -> bool:
        excess = self._excess(at)
        if self.free or not excess:
            return self.settle(at)
        if excess > 0:
            return bool(self.minus) and _set(at, self.minus, at[self.minus[0]] + excess)
        return self._give(at, min(self.plus, key=at.__getitem__), excess)

    def _give(self, at: Positions, key: Key, excess: int) -> bool:
        """Move a factor, which may stand there several times, until nothing is left of an excess."""  # noqa: E501
        times = 1 if self.smallest else self.plus.count(key)
        part = -(-abs(excess) // times)
        return _set(at, [key], at[key] - (part if excess > 0 else -part))

    @property
    def _ends(self) -> str:
        if self.least is None:
            return f"at most {self.most}"
        return (
            f"at least {self.least}"
            if self.most is None
            else f"{self.least} to {self.most}"
        )

    def _value(self, at: Positions) -> int:
        """The number of bits."""
        plus = [at[key] for key in self.plus]
        return (min(plus) if self.smallest else sum(plus)) - sum(
            at[key] for key in self.minus
        )

    def _excess(self, at: Positions) -> int:
        """How far the value is above the upper end, or, negative, below the lower one."""
        value = self._value(at)
        if self.most is not None and value > self.most:
            return value - self.most
        return (
            value - self.least if self.least is not None and value < self.least else 0
        )


def _set(at: Positions, keys: Sequence[Key], position: int) -> bool:
    """Put keys at a position; whether that moved one."""
    moved = any(at[key] != position for key in keys)
    at.update(dict.fromkeys(keys, position))
    return moved


@dataclass
class Constraints:
    """All constraints of a model, in the order in which they are settled."""

    found: list[Constraint] = field(default_factory=list)

    @property
    def keys(self) -> list[Key]:
        """Whose positions they are about."""
        return list(dict.fromkeys(key for each in self.found for key in each.keys))

    def tied(self) -> dict[Key, tuple[Key, ...]]:
        """For each key that has to equal others: all of them, itself among them."""
        group: dict[Key, tuple[Key, ...]] = {}
        for each in self.found:
            if isinstance(each, Equal):
                joined = tuple(
                    dict.fromkeys(
                        other for key in each.keys for other in group.get(key, (key,))
                    ),
                )
                group.update(dict.fromkeys(joined, joined))
        return group

    def broken(self, at: Positions) -> list[tuple[Constraint, str]]:
        """Those that do not hold, with figures."""
        return [(each, figures) for each in self.found if (figures := each.broken(at))]

    def settle(self, at: Positions) -> Positions:
        """Positions near to these under which all hold.

        Each constraint moves what costs least, round by round. Where one undoes what another did,
        all that has a least position is brought there, and from then on scales only become coarser,
        which comes to an end. Where that does not suffice, as with products, of whose factors
        either may give way, they only become finer instead, although more is clipped then.

        Raises:
            ConstraintError: there are none, or a scale would leave the float32 numbers.
        """
        for way in (self._nearest, self._coarser, self._finer):
            settled = way(at)
            broken = [each for each, _ in self.broken(settled)]
            if not broken and all(
                LEAST <= settled[key] <= GREATEST for key in self.keys
            ):
                return settled
        raise ConstraintError(
            "no power-of-two scales meet these rules together:"
            f" {_listed(broken or self.found)}",
        )

    def _nearest(self, at: Positions) -> Positions:
        settled = dict(at)
        _repeat(lambda: [each for each in self.found if each.settle(settled)], _FEW)
        return settled

    def _coarser(self, at: Positions) -> Positions:
        floors: Positions = dict.fromkeys(self.keys, LEAST)
        _repeat(lambda: [each for each in self.found if each.lift(floors)], _MANY)
        settled = {
            key: max(position, floors.get(key, position))
            for key, position in at.items()
        }
        _repeat(lambda: [each for each in self.found if each.lower(settled)], _MANY)
        return settled

    def _finer(self, at: Positions) -> Positions:
        settled = dict(at)
        _repeat(
            lambda: [each for each in self.found if each.lower(settled)],
            1,
        )  # from the coarsest of what is tied
        _repeat(lambda: [each for each in self.found if each.rise(settled)], _MANY)
        return settled


def _repeat(turn: Callable[[], Sequence[Constraint]], rounds: int) -> None:
    """Take turns until one comes to rest, but no more than so many."""
    for _ in range(rounds):
        if not turn():
            return


def _listed(constraints: Sequence[Constraint]) -> str:
    names = list(
        dict.fromkeys(
            f"{each.rule} at {each.node!r} ({NAMES[each.rule]})" for each in constraints
        ),
    )
    return "; ".join(names[:6]) + (
        f"; and {len(names) - 6} more" if len(names) > 6 else ""
    )
