"""Distributions made for a test: what an installer leaves of a package with entry points."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent


def install(folder: Path, name: str, modules: dict[str, str], **groups: str) -> None:
    """Write modules, and the metadata of a distribution that names them.

    Args:
        folder: is to be on ``sys.path``.
        name: of the distribution.
        modules: the code of each module.
        groups: the entry points of each group of quark_onnx, by its last name.
    """
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(dedent(code), encoding="utf-8")
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8"
    )
    sections = [f"[quark_onnx.{group}]\n{text}\n" for group, text in groups.items()]
    (metadata / "entry_points.txt").write_text("".join(sections), encoding="utf-8")
