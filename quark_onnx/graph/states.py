"""Find recurrent state in the interface: outputs of a step that are inputs of the next.

Names and declared shapes decide, as an ONNX file does not tell. A key-value cache that grows by a
step (past: N, present: N + 1) is not a state of this kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import TensorProto

from quark_onnx.graph.graph import Graph, Shape
from quark_onnx.graph.traversal import reach

#: Words that name a state.
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
        "rnn",
        "lstm",
        "gru",
        "recurrent",
        "h",
        "c",
        "hx",
        "cx",
        "past",
        "present",
    },
)
#: Words for the sides of a step.
_BEFORE = frozenset(
    {
        "in",
        "input",
        "past",
        "prev",
        "previous",
        "old",
        "last",
        "init",
        "initial",
        "i",
    },
)
_AFTER = frozenset(
    {"out", "output", "present", "next", "new", "n", "o", "cur", "current", "updated"},
)
#: Sides of short words that are no words for a side elsewhere: input_0 is merely the first input.
_SIDES = {"0": "in"}
#: A name and its side in a short word: h0 and hn, r1i and r1o.
_SHORT = re.compile(r"([a-z]\d*)(n|i|o|in|out|0)")


@dataclass(frozen=True)
class State:
    """A recurrent state.

    Attributes:
        input: graph input of the state before a step.
        output: graph output of the state after the step.
    """

    input: str
    output: str


@dataclass(frozen=True)
class _Words:
    """The words of a name.

    Attributes:
        stem: words without those for a side.
        before: a word means the side before a step.
        after: a word means the side after a step.
        state: a word names a state.
        pure: all words of the stem name a state, unlike in ``encoder_hidden_states``.
    """

    stem: tuple[str, ...]
    before: bool
    after: bool
    state: bool
    pure: bool

    @property
    def is_after_only(self) -> bool:
        """Whether the name can only be that of an output."""
        return self.after and not self.before

    @property
    def is_before_only(self) -> bool:
        """Whether the name can only be that of an input."""
        return self.before and not self.after

    @classmethod
    def of(cls, name: str) -> _Words:
        """Return the words of a name of an input or output, in lower case and apart from sides."""
        stem = list[str]()
        sides = set[str]()
        state = False
        # Words end at underscores, dots and the humps of camel case.
        parted = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
        for word in re.findall(r"[a-z0-9]+", parted.replace("key_values", "")):
            state |= word in _STATE
            if word in _BEFORE | _AFTER:
                sides.add(word)
                continue
            short = _SHORT.fullmatch(word)
            if short is not None:
                word = short[1]
                state |= word in _STATE
                sides.add(_SIDES.get(short[2], short[2]))
            # Plural and singular mean the same state.
            stem.append(word.removesuffix("s") if word in _STATE else word)
        return cls(
            tuple(stem),
            before=not sides.isdisjoint(_BEFORE),
            after=not sides.isdisjoint(_AFTER),
            state=state,
            # Digits count several states.
            pure=state and all(word in _STATE or word.isdigit() for word in stem),
        )


def states(graph: Graph) -> list[State]:
    """Return the recurrent states of a graph, in the order of its inputs.

    An output is the next value of an input if it has the same type and, as far as declared, the
    same shape, depends on the input, and has the same name apart from words such as ``past`` and
    ``present``, ``in`` and ``out``, ``0`` and ``n``. Inputs whose names mean a state alone, without
    such an output, are paired with the last remaining outputs, in order.

    A model whose only inputs are states has no steps, and so no states.
    """
    names = [value.name for value in graph.inputs]
    inputs = {name: _Words.of(name) for name in names if not graph.is_constant(name)}
    outputs = {value.name: _Words.of(value.name) for value in graph.outputs}
    paired = _pairs_by_name(graph, inputs, outputs)
    paired |= _pairs_in_order(graph, inputs, outputs, paired)
    if len(paired) == len(inputs):
        return []
    return [State(name, paired[name]) for name in inputs if name in paired]


def _pairs_by_name(
    graph: Graph,
    inputs: Mapping[str, _Words],
    outputs: Mapping[str, _Words],
) -> dict[str, str]:
    """Return the inputs that have an output of the same name, apart from its side.

    Args:
        inputs: words by the name of an input, without constants.

    Returns:
        The output by input; each output at most once.
    """
    paired = dict[str, str]()
    # An output is the next value of one input at most.
    free = dict(outputs)
    for name, words in inputs.items():
        for output, output_words in free.items():
            if _named_alike(words, output_words) and _follows(graph, name, output):
                paired[name] = output
                del free[output]
                break
    return paired


def _pairs_in_order(
    graph: Graph,
    inputs: Mapping[str, _Words],
    outputs: Mapping[str, _Words],
    paired: Mapping[str, str],
) -> dict[str, str]:
    """Pair the inputs that are certainly states with the last outputs.

    Args:
        inputs: words by the name of an input, without constants.
        outputs: words by the name of an output.
        paired: the pairs that names have decided.

    Returns:
        The output by input; none if there are too few outputs, or if one pair does not fit.
    """
    before = [
        name
        for name, words in inputs.items()
        if words.pure and not words.after and name not in paired
    ]
    results = [
        name
        for name, words in outputs.items()
        if not words.before and name not in paired.values()
    ]
    # Results proper come before the states among the outputs, as exporters list them.
    after = results[-len(before) :]
    if len(after) < len(before):
        return {}
    pairs = dict(zip(before, after, strict=False))
    # All or nothing: one pair that does not fit means that the order is a different one.
    if not all(_follows(graph, name, output) for name, output in pairs.items()):
        return {}
    return pairs


def _named_alike(before: _Words, after: _Words) -> bool:
    """Return whether the names of an input and an output differ in the side of a step alone.

    The names must also name a state, or the sides of a step.
    """
    if before.stem != after.stem:
        return False
    # Such as last_hidden_state, which is not an input of the next step.
    if before.is_after_only or after.is_before_only:
        return False
    if before.state or after.state:
        return True
    # Numbers alone mean nothing: exporters call any tensor "input.1" and "output.1".
    named = any(not word.isdigit() for word in before.stem)
    return named and before.before and after.after


def _follows(graph: Graph, before: str, after: str) -> bool:
    """Return whether an output may be the next value of an input.

    Both must be float and of the same shape, and the output must depend on the input.
    """
    if {graph.elem_type(before), graph.elem_type(after)} != {int(TensorProto.FLOAT)}:
        return False
    if not _shaped_alike(graph.shape(before), graph.shape(after)):
        return False
    # An output that does not depend on the input starts anew in each step.
    producer = graph.producer(after)
    if producer is None:
        return False
    upstream = reach([producer], graph.leaders)
    return any(reader in upstream for reader in graph.consumers(before))


def _shaped_alike(old: Shape | None, new: Shape | None) -> bool:
    """Return whether the shapes of an input and an output may be equal.

    An input that is a scalar or of unknown rank (None) is no state.
    """
    if not old:
        return False
    if new is None:
        return True
    return len(old) == len(new) and all(map(_alike, old, new))


def _alike(old: object, new: object) -> bool:
    """Return whether two dimensions may be equal: sizes, names, or None if open."""
    # Exporters write 0 for an unknown size. Two different names are two sizes: a cache of ``past``
    # rows grows to ``total`` rows.
    unknown = not old or not new or isinstance(old, str) != isinstance(new, str)
    return unknown or old == new
