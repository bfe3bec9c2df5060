"""Hooks of mkdocs: reference parts, and links to files outside of docs/.

Pages of docs/ are read on the site and in a checkout. So they link to files of the project by
relative paths, and the site has a copy of each Markdown file that is linked to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import notebooks  # noqa: E402
import reference  # noqa: E402

#: Pages of the site that are files of the project outside of docs/.
COPIES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples/plugin.md": "examples/plugin/README.md",
    "results/index.md": "benchmarks/README.md",
    **{
        f"results/{path.name}": f"benchmarks/results/{path.name}"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    },
}
#: Pages that are made from the scripts of tutorials.
TUTORIALS = {f"tutorials/{name}.md": name for name in notebooks.NAMES}
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the copies and the tutorials."""
    for page, source in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, name in TUTORIALS.items():
        files.append(File.generated(config, page, content=notebooks.page(name)))
    return files


#: Weight of a page in the site's search, by the start of its path; 1 elsewhere. Answers come first,
#: and the generated reference after what explains.
_WEIGHTS = {
    "faq.md": 4,
    "howto/": 2,
    "goals/": 2,
    "reference/": 0.25,
    "tutorials/": 0.5,
    "from_": 0.5,
    "changelog.md": 0.25,
    "contributing.md": 0.25,
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the reference parts, and turn links to copied files into links to their pages."""
    path = page.file.src_uri
    # Tables of measurements have many words and answer no question.
    if path.startswith("results/"):
        page.meta["search"] = {"exclude": True}
    weights = [weight for start, weight in _WEIGHTS.items() if path.startswith(start)]
    if weights:
        page.meta["search"] = {"boost": weights[0]}
    source = COPIES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {path: copy for copy, path in COPIES.items()}
    pages |= {
        f"examples/tutorials/{name}.ipynb": page for page, name in TUTORIALS.items()
    }
    depth = page.file.src_uri.count("/")

    def relinked(match: re.Match[str]) -> str:
        target = (ROOT / source).parent / match[1]
        try:
            path = target.resolve().relative_to(ROOT).as_posix()
        except ValueError:
            return match[0]
        if path.startswith("docs/") and source.startswith("docs/"):
            return match[0]
        uri = pages.get(path) or path.removeprefix("docs/")
        if not match[1] or (uri == path and not path.startswith("docs/")):
            return match[0]
        return f"]({'../' * depth}{uri}{match[2] or ''})"

    return _LINK.sub(relinked, reference.filled(markdown))
