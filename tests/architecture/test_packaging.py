"""The two distributions agree, and what is published is complete: metadata, links, files of a
project that others may join.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import quark_onnx
from calibrators.onnx_runtime.installed import OLDEST

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")

ROOT = Path(__file__).parents[2]
#: Extras that are not for users of ``quark-onnx``.
INNER = {"cpu", "gpu", "directml", "dev", "docs"}


def project(folder: str = ".") -> dict[str, Any]:
    text = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


CORE, PLAIN = project(), project("packaging/quark-onnx")


def test_the_core_depends_on_no_onnxruntime() -> None:
    """Two builds of onnxruntime overwrite each other's files."""
    assert [name for name in CORE["dependencies"] if "onnxruntime" in name] == []
    builds = [
        CORE["optional-dependencies"][name] for name in ("cpu", "gpu", "directml")
    ]
    assert [re.split("[>=]", build)[0] for [build] in builds] == [
        "onnxruntime",
        "onnxruntime-gpu",
        "onnxruntime-directml",
    ]
    oldest = ".".join(map(str, OLDEST))
    assert {build.partition(">=")[2] for [build] in builds} == {oldest}
    for extra in CORE["optional-dependencies"].keys() - INNER - {"oga"}:
        for name in CORE["optional-dependencies"][extra]:
            assert re.match(r"onnxruntime(?!-extensions)", name) is None


def test_the_plain_name_adds_onnxruntime_and_nothing_else() -> None:
    version = CORE["version"]
    assert PLAIN["dependencies"] == [f"quark-onnx-core[cpu]=={version}"]
    extras = CORE["optional-dependencies"].keys() - INNER
    assert PLAIN["optional-dependencies"] == {
        extra: [f"quark-onnx-core[{extra}]=={version}"] for extra in extras
    }
    for key in ("version", "description", "license", "requires-python", "urls"):
        assert PLAIN[key] == CORE[key]


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert CORE["version"] == quark_onnx.__version__ == citation["version"]


def test_every_version_of_python_is_tested() -> None:
    listed = [
        entry.rpartition(" ")[2]
        for entry in CORE["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", entry)
    ]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == listed
    assert CORE["requires-python"] == f">={listed[0]}"


def test_the_readme_has_no_relative_link_on_pypi() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    hook = tomllib.loads(text)["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in hook["substitutions"]:
        readme = re.sub(rule["pattern"], rule["replacement"], readme)
    targets = re.findall(r"\]\(([^)\s]+)|(?:src|srcset|href)=\"([^\"]+)", readme)
    assert len(targets) > 10
    relative = [a or b for a, b in targets if not (a or b).startswith(("https:", "#"))]
    assert relative == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)", readme)
    assert all("/blob/" not in target for target in pictures)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name
)
def test_scripts_that_workflows_call_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    for script in re.findall(r"scripts/[a-z]+", text):
        assert (ROOT / script).is_file()


def test_hooks_call_scripts_that_exist() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    [local] = hooks["repos"]
    for hook in local["hooks"]:
        assert (ROOT / hook["entry"].split()[0]).is_file()
