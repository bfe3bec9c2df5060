"""Express the constraints of AMD's integer engine on power-of-two scales.

A position is the exponent p of a scale 2**-p. The rules C1 to C10 follow amd-quark 0.13 (build
647cedc, onnx/postprocess/refinement/refine.py) for the NPU's convolution engine. The shifts in them
are the hardware's steps between a product and the next tensor: a product of positions i and w
becomes an output of position o by a shift of i + w - o bits, and the shifter has a limited range.

Constraints do not know graphs: positions are looked up by keys of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quark_onnx.common.containers import tie
from quark_onnx.common.errors import ConstraintError

Key = Hashable
Positions = dict[Key, int]

#: Range of the positions whose scales are normal float32 numbers.
LEAST = -126
GREATEST = 126

#: Rounds after which positions are stable if no constraint undoes another.
_FEW = 20
#: Rounds after which positions are stable if they move in one direction only.
_MANY = 400
#: Source of the rules.
SOURCE = "amd-quark 0.13, onnx/postprocess/refinement/refine.py"
#: Names of the rules in the source.
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
    """A rule at a node."""

    @property
    def rule(self) -> str:
        """Name of the rule, C1 to C10."""

    @property
    def node(self) -> str:
        """Name of the node."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the constrained positions."""

    def broken(self, at: Positions) -> str:
        """Return the figures of a violation; empty if the constraint holds."""

    def settle(self, at: Positions) -> bool:
        """Satisfy the constraint by the cheapest move; return whether a position moved."""

    def lower(self, at: Positions) -> bool:
        """Satisfy the constraint by coarser scales alone; return whether a position moved.

        Assumes that positions with a lower bound are at their bounds already.
        """

    def lift(self, floors: Positions) -> bool:
        """Propagate lower bounds; return whether a bound moved."""

    def rise(self, at: Positions) -> bool:
        """Satisfy the constraint by finer scales alone; return whether a position moved."""


@dataclass(frozen=True)
class Near:
    """Bounded difference of positions, at most ``most``; finer positions become coarser.

    0 ties positions to the coarsest scale, which clips nothing more than before.
    """

    rule: str
    node: str
    keys: tuple[Key, ...]
    most: int = 0

    def broken(self, at: Positions) -> str:
        """Return the figures of a violation; empty if the constraint holds."""
        positions = [at[key] for key in self.keys]
        if max(positions) - min(positions) > self.most:
            return f"positions {', '.join(map(str, positions))}"
        return ""

    def settle(self, at: Positions) -> bool:
        """Satisfy the constraint by the cheapest move."""
        # The coarsest position stays: finer scales give up precision, but clip nothing.
        limit = min(at[key] for key in self.keys) + self.most
        return _set(at, [key for key in self.keys if at[key] > limit], limit)

    lower = settle

    def lift(self, floors: Positions) -> bool:
        """Raise lower bounds."""
        # A bound that one key cannot fall below holds for the others, at a distance of ``most``.
        limit = max(floors[key] for key in self.keys) - self.most
        return _set(floors, [key for key in self.keys if floors[key] < limit], limit)

    rise = lift


@dataclass(frozen=True)
class Shift:
    """Bounds on a shift: the positions of factors minus the position of another tensor.

    Attributes:
        rule: name of the rule.
        node: name of the node.
        plus: keys that are added, possibly repeated.
        minus: keys that are subtracted.
        least: lower bound; None for none.
        most: upper bound; None for none.
        mover: key that moves, among ``plus`` or ``minus``.
        smallest: only the least position of ``plus`` counts.
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
        """Keys of the constrained positions."""
        return (*self.plus, *self.minus)

    def broken(self, at: Positions) -> str:
        """Return the figures of a violation; empty if the constraint holds."""
        if self._excess(at):
            return f"a shift of {self._value(at)}, not {self._ends}"
        return ""

    def settle(self, at: Positions) -> bool:
        """Satisfy the constraint by the cheapest move."""
        excess = self._excess(at)
        # A higher shift needs a higher subtracted position, or a lower added one.
        if self.mover not in self.minus:
            excess = -excess
        return _set(at, [self.mover], at[self.mover] + excess)

    def lower(self, at: Positions) -> bool:
        """Satisfy the constraint by coarser scales alone."""
        excess = self._excess(at)
        # Nothing else depends on a free mover: the cheapest move undoes no other constraint.
        if self.free or not excess:
            return self.settle(at)
        # Too small a shift: coarser scales alone lower the subtracted positions.
        if excess < 0:
            return self._follow(at, excess)
        # Of several factors the finest one moves; for a sum the coarsest, the only one that counts.
        choose = min if self.smallest else max
        return self._give(at, choose(self.plus, key=at.__getitem__), excess)

    def lift(self, floors: Positions) -> bool:
        """Propagate lower bounds."""
        # A free mover follows the others, and bounds none of them.
        if self.free:
            return False
        raised = self._lift_plus(floors)
        if self.most is not None and self.minus:
            base = floors[self.minus[0]]
            total = self._sum([floors[key] for key in self.plus])
            raised |= _set(floors, self.minus, max(base, total - self.most))
        return raised

    def _lift_plus(self, floors: Positions) -> bool:
        """Propagate the lower bound of the subtracted tensor to the added ones."""
        # With several factors either may move: no bound follows for a single one.
        if self.least is None or not (self.smallest or len(self.plus) == 1):
            return False
        # C9 bounds single positions, with nothing subtracted.
        base = floors[self.minus[0]] if self.minus else 0
        bound = base + self.least
        short = [key for key in self.plus if floors[key] < bound]
        return _set(floors, short, bound)

    def rise(self, at: Positions) -> bool:
        """Satisfy the constraint by finer scales alone."""
        excess = self._excess(at)
        if self.free or not excess:
            return self.settle(at)
        # Too great a shift: only a finer subtracted scale reduces the shift.
        if excess > 0:
            return self._follow(at, excess)
        # The coarsest factor becomes finer: for a sum the coarsest is the one that counts.
        return self._give(at, min(self.plus, key=at.__getitem__), excess)

    def _follow(self, at: Positions, excess: int) -> bool:
        """Move the subtracted positions, if there are any, by the excess."""
        if not self.minus:
            return False
        return _set(at, self.minus, at[self.minus[0]] + excess)

    def _give(self, at: Positions, key: Key, excess: int) -> bool:
        """Move a possibly repeated factor until no excess is left."""
        # A factor that occurs twice, as in x * x, moves the sum by two positions at a time.
        times = 1 if self.smallest else self.plus.count(key)
        # Rounded up: half an excess must move by a whole position.
        distance = -(-abs(excess) // times)
        if excess > 0:
            distance = -distance
        return _set(at, [key], at[key] + distance)

    @property
    def _ends(self) -> str:
        """The bounds as text; one of them may be missing."""
        if self.least is None:
            return f"at most {self.most}"
        if self.most is None:
            return f"at least {self.least}"
        return f"{self.least} to {self.most}"

    def _value(self, at: Positions) -> int:
        """Return the shift in bits."""
        added = self._sum([at[key] for key in self.plus])
        return added - sum(at[key] for key in self.minus)

    def _sum(self, plus: Sequence[int]) -> int:
        """Return the position of a sum, which is the coarsest, or that of a product."""
        return min(plus) if self.smallest else sum(plus)

    def _excess(self, at: Positions) -> int:
        """Return the distance above the upper bound, or, negative, below the lower bound."""
        value = self._value(at)
        # Only one bound can be broken, as ``least`` is not above ``most``.
        if self.most is not None and value > self.most:
            return value - self.most
        if self.least is not None and value < self.least:
            return value - self.least
        return 0


def _set(at: Positions, keys: Sequence[Key], position: int) -> bool:
    """Set keys to a position; return whether a position moved."""
    moved = any(at[key] != position for key in keys)
    at.update(dict.fromkeys(keys, position))
    return moved


@dataclass
class Constraints:
    """The constraints of a model, in the order of application.

    Attributes:
        found: the constraints.
    """

    found: list[Constraint] = field(default_factory=list)

    @property
    def keys(self) -> list[Key]:
        """Keys of the constrained positions, without repetition."""
        # A dictionary as an ordered set: the results do not depend on hashes.
        keys: dict[Key, None] = {}
        for constraint in self.found:
            keys.update(dict.fromkeys(constraint.keys))
        return list(keys)

    def tied(self) -> dict[Key, tuple[Key, ...]]:
        """Return the group of equal positions of each tied key, including the key."""
        groups: dict[Key, tuple[Key, ...]] = {}
        # Groups that share a key merge: a pool between two Concats ties the inputs of both.
        for constraint in self.found:
            if not isinstance(constraint, Near) or constraint.most:
                continue
            tie(groups, constraint.keys)
        return groups

    def broken(self, at: Positions) -> list[tuple[Constraint, str]]:
        """Return the violated constraints, with figures."""
        return [
            (constraint, figures)
            for constraint in self.found
            if (figures := constraint.broken(at))
        ]

    def settle(self, at: Positions) -> Positions:
        """Return nearby positions that satisfy the constraints.

        Each constraint makes the cheapest move, round by round. If constraints undo each other's
        moves, all positions are raised to lower bounds, and from then on scales only become
        coarser, which terminates. If that fails, as with products, of whose factors either may
        move, scales only become finer instead, although more is clipped then.

        Args:
            at: position of each key; unchanged.

        Raises:
            ConstraintError: no positions satisfy all constraints within the range of float32.
        """
        for strategy in (self._nearest, self._coarser, self._finer):
            settled = strategy(at)
            # Positions may have stopped for lack of rounds: only a final check is proof.
            broken = [constraint for constraint, _ in self.broken(settled)]
            if not broken and all(
                LEAST <= settled[key] <= GREATEST for key in self.keys
            ):
                return settled
        raise ConstraintError(
            "no power-of-two scales meet these rules together:"
            f" {_listed(broken or self.found)}",
        )

    def _repeat(self, move: Callable[[Constraint], bool], rounds: int) -> None:
        """Move by every constraint in turn until nothing moves, at most so many rounds."""
        for _ in range(rounds):
            # Every constraint moves: a list, as any() alone would stop at the first one.
            moved = [move(constraint) for constraint in self.found]
            if not any(moved):
                return

    def _nearest(self, at: Positions) -> Positions:
        """Return positions after the cheapest moves, which constraints may undo for each other."""
        settled = dict(at)
        self._repeat(lambda constraint: constraint.settle(settled), _FEW)
        return settled

    def _coarser(self, at: Positions) -> Positions:
        """Return positions after moves to coarser scales, from lower bounds on.

        Lower bounds only rise, and positions then only fall, so that both end.
        """
        # First the bounds alone, to a fixpoint: positions that start at their bounds never need to
        # rise.
        floors: Positions = dict.fromkeys(self.keys, LEAST)
        self._repeat(lambda constraint: constraint.lift(floors), _MANY)
        settled = {
            key: max(position, floors.get(key, position))
            for key, position in at.items()
        }
        self._repeat(lambda constraint: constraint.lower(settled), _MANY)
        return settled

    def _finer(self, at: Positions) -> Positions:
        """Return positions after moves to finer scales, which clip more."""
        settled = dict(at)
        # Start from the coarsest position of each tied group.
        self._repeat(lambda constraint: constraint.lower(settled), 1)
        self._repeat(lambda constraint: constraint.rise(settled), _MANY)
        return settled


def _listed(constraints: Sequence[Constraint]) -> str:
    """Return constraints as text: six at most, without repetition, and the number of the others."""
    names: dict[str, None] = {}
    for constraint in constraints:
        # Several constraints of one rule at a node, such as the three of C9, are one line.
        text = NAMES[constraint.rule]
        names[f"{constraint.rule} at {constraint.node!r} ({text})"] = None
    listed = "; ".join(list(names)[:6])
    if len(names) > 6:
        listed += f"; and {len(names) - 6} more"
    return listed
