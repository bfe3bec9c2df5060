"""Write the tables of README and docs/ that follow from the code and from benchmarks/results.

    python scripts/tables.py            write the tables
    python scripts/tables.py --check    only list pages that differ; the exit code is 1 if one does

A table stands between two comments that name it. A test runs the check.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import figures

from quark_onnx.common.absent import WAYS, Absent
from quark_onnx.common.aliases import ALIASES
from quark_onnx.onnx.options import ROWS
from quark_onnx.onnx.quantization.config.custom_config import DefaultConfigMapping
from quark_onnx.onnx.tools.table import TOOLS
from quark_onnx.onnxruntime_spelling import option_table
from quark_onnx.onnxruntime_spelling.request import name_of
from quark_onnx.torch.config.refusals import (
    REFUSED_ALGORITHMS,
    REFUSED_CACHES,
    REFUSED_SETTINGS,
)
from quark_onnx.torch.quantize_quark.arguments import ROWS as SCRIPT_ROWS

ROOT = Path(__file__).parents[1]
#: The names of AMD Quark, which scripts/amd_names.py writes.
AMD_NAMES = ROOT / "tests/quark_onnx/amd_quark/names.json"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def amd_options() -> str:
    """Return the extra options of AMD Quark for ONNX, and what becomes of each."""
    return table(
        ("option", "here", "how, or why"),
        ((f"`{row.name}`", row.support, row.text) for row in ROWS),
    )


def amd_presets() -> str:
    """Return the older presets of AMD Quark for ONNX."""
    rows = []
    for name, config in DefaultConfigMapping.items():
        formats = f"{name_of(config.activation_type)} / {name_of(config.weight_type)}"
        if config.use_dynamic_quant:
            formats = f"each run / {name_of(config.weight_type)}"
        if config.extra_options.get("UseMatMulNBits"):
            formats = "float / int4 in blocks"
        flags = (
            "include_fast_ft",
            "include_auto_mp",
            "enable_npu_cnn",
            "enable_npu_transformer",
        )
        rows.append(
            (
                f"`{name}`",
                formats,
                config.calibrate_method,
                ", ".join(f for f in flags if getattr(config, f)),
            )
        )
    return table(
        ("preset", "activations / weights", "calibration", "besides CLE"), rows
    )


def amd_script() -> str:
    """Return the arguments of AMD Quark's script for language models, and what becomes of each."""
    rows = (
        (f"`{row.names.replace(' ', '`, `')}`", row.support, row.text)
        for row in SCRIPT_ROWS
    )
    return table(("argument", "here", "how, or why"), rows)


def amd_tools() -> str:
    """Return the tools of AMD Quark for ONNX that exist, and what to do instead of the others."""
    return table(
        ("tool", "here"),
        (
            (f"`{tool.name}`", "yes" if tool.action else f"no: {tool.instead}")
            for tool in TOOLS.values()
        ),
    )


def amd_names() -> str:
    """Return how many public names of AMD Quark's modules this package has."""
    facts = json.loads(AMD_NAMES.read_text("utf-8"))["names"]
    absent = {name for names in WAYS.values() for name in names.split()}
    rows = []
    for module, names in facts.items():
        # A name may exist in one module alone, as Int8 does for ONNX models.
        homes = ALIASES.get(module.replace("quark", "quark_onnx", 1), {})
        present = {
            name
            for home, exported in homes.items()
            if home != Absent.__module__
            for name in exported.split()
        }
        without = absent.intersection(names) - present
        rows.append((f"`{module}`", str(len(names) - len(without)), str(len(without))))
    return table(("module", "names here", "without a counterpart"), rows)


def llm_refusals() -> str:
    """Return what other tools offer for language models and this package refuses."""
    named = {f"`--algorithm {name}`": text for name, text in REFUSED_ALGORITHMS.items()}
    for (algorithm, setting), refusal in REFUSED_SETTINGS.items():
        named[f"`--algorithm {algorithm}:{setting}=...`"] = refusal
    for name, refusal in REFUSED_CACHES.items():
        named[f"`--kv-cache {name}`"] = refusal
    return table(
        ("asked for", "from", "why not", "instead"),
        (
            (name, text.source, text.reason, text.instead)
            for name, text in named.items()
        ),
    )


def onnxruntime_options() -> str:
    """Return the extra options of onnxruntime.quantization, and what becomes of each."""
    return option_table().rstrip("\n")


TABLES: dict[str, Callable[[], str]] = {
    "amd-names": amd_names,
    "amd-options": amd_options,
    "amd-presets": amd_presets,
    "amd-script": amd_script,
    "amd-tools": amd_tools,
    "llm-refusals": llm_refusals,
    "onnxruntime-options": onnxruntime_options,
    **figures.TABLES,
}


def updated(text: str) -> str:
    """Return a page with its tables made anew."""

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(
        r"(<!-- table: ([\w-]+) -->).*?(<!-- end -->)", replaced, text, flags=re.DOTALL
    )


def pages() -> list[Path]:
    """Return README and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Write all pages that have changed, or only name them."""
    check = sys.argv[1:] == ["--check"]
    differ = []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = updated(before)
        if after != before:
            differ.append(path)
            print(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(after, encoding="utf-8", newline="\n")
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
