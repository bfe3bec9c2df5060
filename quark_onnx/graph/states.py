"""Recurrent state through the interface: outputs of one step that are inputs of the next one.

Names and declared shapes decide, as nothing in an ONNX file says it. A key-value cache that grows
by a step (past: N, present: N + 1) is no state of this kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from onnx import TensorProto

from quark_onnx.graph.graph import Graph
from quark_onnx.graph.traversal import reach

#: Words that name a state, and words that say which of both sides of a step a tensor is on.
_STATE = frozenset(
    {
        "state",
        "states",
        "hidden",
        "cell",
        "cache",
        "cached",
        "mem",
        "memory",
        "carry",
        "context",
        "ctx",
    }
    | {"rnn", "lstm", "gru", "recurrent", "h", "c", "hx", "cx", "past", "present"},
)
_BEFORE = frozenset(
    {"in", "input", "past", "prev", "previous", "old", "last", "init", "initial", "i"},
)
_AFTER = frozenset(
    {"out", "output", "present", "next", "new", "n", "o", "cur", "current", "updated"},
)
#: A name and its side in one short word: h0 and hn, r1i and r1o.
_SHORT = re.compile(r"([a-z]\d*)(n|i|o|in|out|0)")


@dataclass(frozen=True)
class State:
    """A recurrent state.

    Attributes:
        input: name of the graph input that holds the state before a step.
        output: name of the graph output that holds it after the step.
    """

    input: str
    output: str


@dataclass(frozen=True)
class _Words:
    """The words of a name.

    Attributes:
        stem: what it is, without the words for a side.
        before, after: it has a word for that side of a step.
        state: one of its words names a state.
        pure: no word of its stem says anything else, as in ``encoder_hidden_states``.
    """

    stem: tuple[str, ...]
    before: bool
    after: bool
    state: bool
    pure: bool

    @classmethod
    def of(cls, name: str) -> _Words:
        stem, sides, state = list[str](), set[str](), False
        parted = (
            re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().replace("key_values", "")
        )
        for word in re.split(r"[^a-z0-9]+", parted):
            state |= word in _STATE
            if word in _BEFORE | _AFTER:
                sides.add(word)
                continue
            short = _SHORT.fullmatch(word)
            if short is not None:
                word = short[1]
                state |= word in _STATE
                sides.add("in" if short[2] == "0" else short[2])
            if word:
                stem.append(word.removesuffix("s") if word in _STATE else word)
        pure = state and all(word in _STATE or word.isdigit() for word in stem)
        return cls(
            tuple(stem),
            bool(sides & _BEFORE),
            bool(sides & _AFTER),
            state,
            pure,
        )


def states(graph: Graph) -> list[State]:
    """Return the recurrent states of a graph, in the order of its inputs.

    An output is the next value of an input if it has its type and, as far as it is declared, its
    shape, depends on it, and has its name but for words such as ``past`` and ``present``, ``in``
    and ``out``, ``0`` and ``n``. Inputs that are named as states alone and have no such output go
    with the last outputs that are left, in their order.

    A model whose only inputs are states has no steps, and so no states.
    """
    inputs = [value.name for value in graph.inputs if not graph.is_constant(value.name)]
    outputs = [value.name for value in graph.outputs]
    words = {name: _Words.of(name) for name in (*inputs, *outputs)}
    found = dict[str, str]()
    for name in inputs:
        free = (output for output in outputs if output not in found.values())
        match = (
            o
            for o in free
            if _named_alike(words[name], words[o]) and _follows(graph, name, o)
        )
        if (output := next(match, None)) is not None:
            found[name] = output
    rest = [
        name
        for name in inputs
        if name not in found and words[name].pure and not words[name].after
    ]
    left = [
        name
        for name in outputs
        if name not in found.values() and not words[name].before
    ]
    left = left[-len(rest) :] if rest else []
    if len(rest) == len(left) and all(
        _follows(graph, *pair) for pair in zip(rest, left, strict=True)
    ):
        found |= dict(zip(rest, left, strict=True))
    signals = set(inputs) - set(found)
    return (
        [State(name, found[name]) for name in inputs if name in found]
        if signals
        else []
    )


def _named_alike(before: _Words, after: _Words) -> bool:
    """Return whether two names differ in the side of a step alone, and say that they are a state."""  # noqa: E501
    if (before.after and not before.before) or (after.before and not after.after):
        return False  # as last_hidden_state, which is no input of a next step
    # numbers alone say nothing: "input.1" and "output.1" are what exporters call any tensor
    named = any(not word.isdigit() for word in before.stem)
    paired = named and before.before and after.after
    return before.stem == after.stem and (before.state or after.state or paired)


def _follows(graph: Graph, before: str, after: str) -> bool:
    """Return whether an output may be the next value of an input: float, of its shape, and computed
    from it.
    """
    if {graph.elem_type(before), graph.elem_type(after)} != {int(TensorProto.FLOAT)}:
        return False
    old, new = graph.shape(before), graph.shape(after)
    if not old or (
        new is not None and not (len(old) == len(new) and all(map(_alike, old, new)))
    ):
        return False
    producer = graph.producer(after)
    upstream = reach([producer] if producer is not None else [], graph.leaders)
    return any(reader in upstream for reader in graph.consumers(before))


def _alike(old: object, new: object) -> bool:
    """Return whether two dimensions may be equal; exporters write 0 for unknown ones.

    Two different names are two sizes: a cache of ``past`` rows grows to ``total`` rows.
    """
    unknown = not old or not new or isinstance(old, str) != isinstance(new, str)
    return unknown or old == new
