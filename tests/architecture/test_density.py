"""The code is no denser than that of the projects it learns from.

Measured over all files of the packages, so that single functions may differ. onnx's ir-py,
onnxscript's rewriter, llm-compressor, compressed-tensors, torchao and httpx have 5.7 to 7.3 tokens
per line of code, 9 to 14 branch points per 100 lines of functions, 3 to 9 conditional expressions
and 2 to 10 comprehensions per 1,000 lines, and 46 to 77 comments per 1,000 lines.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("calibrators", "quark_onnx")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Tokens that are no code.
BLANK = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)


def counts_of(text: str) -> Counter[str]:
    """Count what the measures are made of, in the text of a file."""
    counts = Counter({"lines": text.count("\n")})
    lines_of_code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        counts["comments"] += token.type == tokenize.COMMENT
        # Docstrings are the strings in three quotes.
        if token.type not in BLANK and '"""' not in token.string:
            counts["tokens"] += 1
            lines_of_code.add(token.start[0])
    counts["lines of code"] = len(lines_of_code)
    for node in ast.walk(ast.parse(text)):
        counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
        counts["conditional expressions"] += isinstance(node, ast.IfExp)
        if isinstance(node, FUNCTIONS):
            counts += counts_of_function(node)
    return counts


def counts_of_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Counter[str]:
    """Count lines and branch points; those of a function inside count twice, as its lines do."""
    last = function.end_lineno or function.lineno
    counts = Counter({"lines of functions": last - function.lineno + 1})
    for node in ast.walk(function):
        counts["branches"] += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            counts["branches"] += len(node.values) - 1
    return counts


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """The counts of all files of the packages."""
    total = Counter[str]()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            total += counts_of(path.read_text(encoding="utf-8"))
    return total


@pytest.mark.parametrize(
    ("what", "share", "of", "least", "most"),
    [
        ("tokens", 1, "lines of code", 5.0, 7.5),
        ("branches", 100, "lines of functions", 5.0, 16.0),
        ("conditional expressions", 1000, "lines", 1.0, 10.0),
        ("comprehensions", 1000, "lines", 1.0, 14.0),
        ("comments", 1000, "lines", 40.0, 80.0),
    ],
)
def test_density(
    counts: Counter[str], what: str, share: int, of: str, least: float, most: float
) -> None:
    """Each measure is at its mark; far below, it would not have been measured."""
    found = share * counts[what] / counts[of]
    assert least < found <= most, f"{found:.2f} {what} per {share} {of}"


def test_the_counts_of_a_text() -> None:
    text = '''"""Doc."""
def f(x):
    """Doc."""
    # why
    if x and x > 1 or not x:
        return [y for y in x]
    return 1 if x else 2
'''
    assert counts_of(text) == {
        "lines": 7,
        "comments": 1,
        # def f(x): | if x and x > 1 or not x: | return [y for y in x] | return 1 if x else 2
        "tokens": 6 + 10 + 8 + 6,
        "lines of code": 4,
        "comprehensions": 1,
        "conditional expressions": 1,
        "lines of functions": 6,
        # if, and, or, the comprehension, the conditional expression
        "branches": 5,
    }
