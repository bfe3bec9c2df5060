"""Tables of a run: the formats, and the outcomes of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby

from quark_onnx.common.containers import grouped, grouped_by
from quark_onnx.common.wording import first_of
from quark_onnx.page.blocks import Strong, TitledTable
from quark_onnx.torch.algorithms.base import Outcome
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.page.frame import block_of

#: Maximum number of layer names per format.
_NAMED = 8
_Rows = list[tuple[str, ...]]


def formats_table(quantized: Mapping[str, LayerSpec]) -> TitledTable:
    """Return the formats with their layers."""
    named = grouped((_words(spec), name) for name, spec in quantized.items())
    rows = _Rows()
    # Formats with equal counts stay in the order of the model.
    for words, names in sorted(named.items(), key=lambda item: -len(item[1])):
        # Each block repeats the names of its layers.
        local_names = list(dict.fromkeys(_local(name) for name in names))
        rows.append((words, str(len(names)), first_of(local_names, _NAMED)))
    return TitledTable("Formats", ("format", "layers", "called"), rows)


def layers_table(
    quantized: Mapping[str, LayerSpec], outcomes: Iterable[Outcome]
) -> TitledTable:
    """Return the outcomes of each layer; blocks with equal rows share an entry."""
    outcomes_by_layer = grouped_by(outcomes, lambda outcome: outcome.layer)
    formats = Counter(map(_words, quantized.values()))
    # The most frequent format is named once, so that cells show exceptions alone.
    usual = max(formats, key=formats.__getitem__, default="")
    rows = _Rows()
    # Outcomes without a layer belong to the whole model.
    if "" in outcomes_by_layer:
        rows += _rows("the whole model", "", outcomes_by_layer[""])
    entries = list[tuple[str, _Rows]]()
    for block, names in groupby(quantized, block_of):
        entry = _Rows()
        # A layer outside of blocks is a block of its own, and has its row below.
        if block in outcomes_by_layer and block not in quantized:
            entry += _rows("the whole block", "", outcomes_by_layer[block])
        for name in names:
            words = _words(quantized[name])
            other_format = words if words != usual else ""
            entry += _rows(_local(name), other_format, outcomes_by_layer.get(name))
        entries.append((block, entry))
    # Blocks have equal rows if no algorithm has measured their errors.
    for entry, alike in groupby(entries, lambda entry: entry[1]):
        blocks = [block for block, _ in alike]
        title = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
        rows += [(title,), *entry]
    header = ("layer", "other format", "algorithm", "before", "after", "note")
    note = f"Layers without another format have the usual one: {usual}."
    return TitledTable("Layers", header, rows, note).without_empty_columns()


def _rows(label: str, words: str, outcomes: Iterable[Outcome] | None) -> _Rows:
    """Return a row for each outcome; repeated cells are empty.

    Args:
        label: the name of a layer within its block, or a different label.
        words: the format, if it is not the usual one.
        outcomes: the outcomes; None for a layer without any, which has one row.
    """
    rows = [
        (label, words, outcome.algorithm, *_errors(outcome), outcome.note)
        for outcome in outcomes or ()
    ]
    if not rows:
        return [(label, words, "", "", "", "")]
    return [rows[0], *(("", "", *row[2:]) for row in rows[1:])]


def _errors(outcome: Outcome) -> tuple[str, str]:
    """Return the errors before and after an algorithm."""
    # Errors of 0 before and after mean that none was measured.
    if not (outcome.before or outcome.after):
        return "–", "–"
    after = _number(outcome.after)
    better = outcome.after < outcome.before
    return _number(outcome.before), Strong(after) if better else after


def _local(name: str) -> str:
    """Return the name of a layer within its block.

    >>> _local("model.layers.3.mlp.up_proj"), _local("lm_head")
    ('mlp.up_proj', 'lm_head')
    """
    return name.removeprefix(f"{block_of(name)}.")


def _number(error: float) -> str:
    """Return an error in three digits, with trailing zeros and a true minus."""
    return f"{error:#.3g}".replace("-", "−")


def _words(layer: LayerSpec) -> str:
    """Describe the specs of a layer; all but the weight's have a prefix."""
    parts = [("", layer.weight), ("input ", layer.input), ("output ", layer.output)]
    parts.append(("probabilities ", layer.probabilities))
    return "; ".join(f"{name}{spec}" for name, spec in parts if spec is not None)
