"""Blocks: the parts of a result, from top to bottom of its page.

``html_of`` in ``browser`` renders a block for a page, ``text_of`` in ``terminal`` for a terminal,
where ``short`` is the title of a block. Blocks without a short title are for the page alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from quark_onnx.common.containers import grouped


@dataclass(frozen=True)
class Action:
    """A proposed action.

    Attributes:
        text: description of the action.
        code: a command or options to copy; empty for none.
        effect: the expected effect; empty if unknown.
    """

    text: str
    code: str = ""
    effect: str = ""

    def lines(self) -> list[str]:
        """Return the action as text; a command is a line of its own, to be pasted."""
        effect = f" ({self.effect})" if self.effect else ""
        if self.code.startswith("quark-onnx "):
            return [self.text + effect, self.code]
        text = f"{self.code}: {self.text}" if self.code else self.text
        return [text + effect]


@dataclass(frozen=True)
class Heading:
    """The title of a page, with the names of the models."""

    title: str
    names: str = ""


@dataclass(frozen=True)
class Judgement:
    """The band of a verdict, its sentence, and what to do next.

    Attributes:
        band: "good", "risky", "poor", "unclear" or "unknown".
        sentence: the verdict.
        actions: changes to try, the most promising first.
        measured_on: the samples in words; empty where the sentence names them.
        details: sentences that explain the verdict.
    """

    band: str
    sentence: str
    actions: tuple[Action, ...] = ()
    measured_on: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """A few figures.

    Attributes:
        rows: label, figure and explanation of each.
        lines: the lines of a terminal by their title, which may say more than the figures.
    """

    rows: Sequence[tuple[str, str, str]]
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Strong(str):
    """A cell of a table in bold."""

    __slots__ = ()


class Multiline(str):
    """A cell of a table with line breaks; in other cells a line break is part of a name."""

    __slots__ = ()


@dataclass(frozen=True)
class Names:
    """A cell of a table that unfolds to names.

    Attributes:
        text: the text of the cell.
        names: the names; a single one is shown at once.
    """

    text: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class TitledTable:
    """A table with a title.

    Attributes:
        title: title of the section.
        header: titles of the columns.
        rows: the cells of each row. A row of a single cell is the title of the rows below it; a
            row without a first cell continues the row above.
        note: a sentence before the rows.
        short: title in a terminal.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Names]]
    note: str = ""
    short: str = ""

    def without_empty_columns(self) -> TitledTable:
        """Return the table without the columns that have no text in any row."""
        # A row of a single cell is a title, and fills no column.
        rows = [row for row in self.rows if len(row) == len(self.header)]
        filled = [any(cells) for cells in zip(*rows, strict=True)]
        if len(rows) < len(self.rows) and sum(filled) < 2:
            # Rows of one column would be titles, too.
            filled[:2] = [True] * len(filled[:2])
        if all(filled):
            return self
        kept = [
            row if len(row) == 1 else list(compress(row, filled)) for row in self.rows
        ]
        return replace(self, header=list(compress(self.header, filled)), rows=kept)


@dataclass(frozen=True)
class Problem:
    """A broken rule or another shortcoming, with its places.

    Attributes:
        kind: severity or device, of at most nine letters.
        label: short name of the rule, or the kinds of the places.
        text: the rule, or the reason.
        places: name of each place, and what was found there; the latter may be empty.
        remedy: what to do; empty if nothing is known to help.
        sources: where the rule is known from.
    """

    kind: str
    label: str
    text: str
    places: Sequence[tuple[str, str]] = ()
    remedy: str = ""
    sources: Sequence[str] = ()


@dataclass(frozen=True)
class Problems:
    """Problems in order, the worst first.

    Attributes:
        title: title of the section.
        header: titles of the columns of a page: kind, label with places, text, remedy, sources.
        problems: the problems.
        nothing: a sentence for a page without problems; empty for no section.
    """

    title: str
    header: tuple[str, str, str, str, str]
    problems: Sequence[Problem]
    nothing: str = ""


@dataclass(frozen=True)
class Reasons:
    """Names grouped by reason; the line of a reason unfolds to its names.

    Attributes:
        title: title of the section.
        reasons: the reason of each name.
        one, many: the noun for one name and for several.
        short: title in a terminal.
        kinds: the kind of each name, if numbers of kinds say more than names do.
    """

    title: str
    reasons: Mapping[str, str]
    one: str
    many: str
    short: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> list[tuple[str, list[str]]]:
        """Return each reason with its names, the reason of most names first."""
        groups = grouped((reason, name) for name, reason in self.reasons.items())
        # Stable: reasons of equally many names stay in the order of first appearance.
        return sorted(groups.items(), key=lambda group: -len(group[1]))


@dataclass(frozen=True)
class Notes:
    """Sentences with a title."""

    title: str
    lines: Sequence[str]
    short: str = ""


@dataclass(frozen=True)
class Warnings(Notes):
    """Signs of wrong data or settings; a terminal shows them next to the verdict."""

    title: str = "Warnings"
    lines: Sequence[str] = ()
    short: str = "warning"


@dataclass(frozen=True)
class Text:
    """A text of several lines, as it is."""

    title: str
    text: str
    short: str = ""


@dataclass(frozen=True)
class Picture:
    """Images or drawings side by side.

    Attributes:
        caption: what is to be seen.
        parts: the title of each part with a PNG file, or with a drawing as SVG.
    """

    caption: str
    parts: Sequence[tuple[str, bytes | str]]


@dataclass(frozen=True)
class Gallery:
    """Pictures with a title."""

    title: str
    note: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Drawing:
    """Drawings with a title and a legend.

    Attributes:
        title: title of the section.
        note: what is drawn.
        draw: function that draws: it returns SVGs, of which those of the CSS classes "wide" and
            "narrow" are shown in windows of that width alone. A terminal does not call it.
        key: the legend: CSS class of each mark, and its meaning.
        remarks: CSS class and text of sentences below the drawings.
        side_by_side: whether the drawings are small, and share a row.
    """

    title: str
    note: str
    draw: Callable[[], Iterable[str]]
    key: Sequence[tuple[str, str]] = ()
    remarks: Sequence[tuple[str, str]] = ()
    side_by_side: bool = False


@dataclass(frozen=True)
class Share:
    """A share of noise, 0 to 1, with its cause and a remedy."""

    share: float
    text: str
    remedy: str
    code: str = ""


@dataclass(frozen=True)
class Figure:
    """A small drawing with a caption: its subject, a description, and a complaint."""

    plot: str
    subject: str
    text: str
    complaint: str = ""


@dataclass(frozen=True)
class RankingEntry:
    """An entry of a ranking.

    Attributes:
        name: name of the entry.
        origin: what it is, in words.
        figures: title and value of each figure; the unit stands after a space.
        shares: parts of what the entry is ranked by, the largest first.
        drawings: drawings of the entry.
    """

    name: str
    origin: str
    figures: Sequence[tuple[str, str]]
    shares: Sequence[Share] = ()
    drawings: Sequence[Figure] = ()


@dataclass(frozen=True)
class Ranking:
    """Entries in order, the most important first.

    Attributes:
        title: title of the section.
        note: what the order means.
        entries: the entries.
        nothing: a sentence for a ranking without entries.
        noun: the noun for an entry, such as "tensor".
        short: title in a terminal.
    """

    title: str
    note: str
    entries: Sequence[RankingEntry]
    nothing: str
    noun: str = ""
    short: str = ""


@dataclass(frozen=True)
class Terms:
    """Terms with their explanations."""

    title: str
    rows: Sequence[tuple[str, str]]


Block = (
    Heading
    | Judgement
    | Facts
    | TitledTable
    | Problems
    | Reasons
    | Notes
    | Text
    | Gallery
    | Drawing
    | Ranking
    | Terms
)
