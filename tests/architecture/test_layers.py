"""Imports only ever go down the layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.cases import loop_over

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for package in ("calibrators", "quark_onnx")
    for path in (ROOT / package).rglob("*.py")
)

#: Low to high; what shares a line may not import each other.
LAYERS = """
calibrators
calibrators.onnx_runtime
calibrators.readers
common
page
kernels
functions
dtypes
config
graph
patterns
check
files
targets engines
running
plan
rules passes fusions optimizers recipes
onnxruntime_spelling
report
preprocessing
planning
measuring
scales
writing
study
trials
refine
assemble
convert
job
api
search
analysis
npu
torch.config torch.runtime
torch.formats
torch.models
torch.validate torch.checkpoints
torch.calibration
torch.algorithms
torch.page
torch.pipelines
torch.exports torch.transformers
torch.quantization torch.utils
torch.export
torch.quantize_quark
torch
onnx compat_onnxruntime
vai_q_onnx olive
quark_onnx
cli
__main__
""".strip().splitlines()
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}

#: Beside the layer of that name; inside functions, as importing the package loads no torch.
MAY_IMPORT_TORCH = {"device.py"}
#: Mirrors of AMD Quark's and onnxruntime's module paths; native code never imports them.
MIRRORS = {
    "onnx",
    "compat_onnxruntime",
    "vai_q_onnx",
    "torch.quantization",
    "torch.export",
    "torch.utils",
}
MIRRORS |= {"torch.quantize_quark"}
#: Rooms that may import a mirror: the front doors that re-export its names or take its parameters,
#: and other mirrors.
FRONT_DOORS = {"quark_onnx", "torch", "cli", "olive"}


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere, functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module)


def layer(module: str) -> str:
    """Return the longest prefix of a module's name that is a layer, without the package's own name.

    ``quark_onnx.files.io`` belongs to ``graph``, ``quark_onnx.torch.models.experts`` to
    ``torch.models`` and ``quark_onnx`` to itself.
    """
    # The front door of calibrators has the name of their layer.
    if module == "quark_onnx.calibrators":
        return "quark_onnx"
    name = module.removeprefix("quark_onnx.")
    while name not in RANK and "." in name:
        name = name.rpartition(".")[0]
    return name


def own(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    )
    found = layer(name)
    if found == "torch":
        assert name == "quark_onnx.torch", f"{name} belongs to no room of torch"
    return found


@loop_over("path", {path.relative_to(ROOT).as_posix(): path for path in FILES})
def test_imports_go_down(path: Path) -> None:
    room = own(path)
    assert room in RANK, "name the new layer above"
    for module in imports(path):
        top = module.split(".")[0]
        if not room.startswith("torch"):
            assert top not in ("transformers", "safetensors", "gguf")
            assert top != "torch" or path.name in MAY_IMPORT_TORCH
        if top in ("quark_onnx", "calibrators") and layer(module) != room:
            assert RANK[layer(module)] < RANK[room], f"{room} imports {module}"
            assert layer(module) not in MIRRORS or room in MIRRORS | FRONT_DOORS, (
                f"{room} imports the mirror {module}"
            )
        if room == "calibrators":
            assert top not in ("onnx", "onnxruntime", "onnxruntime_extensions"), (
                "numbers need numpy alone"
            )


def test_no_file_imports_what_imports_it() -> None:
    """Imports in functions count; those for type checkers alone do not.

    An import of ``a.b.c`` runs ``a`` and ``a.b`` first. The packages around the importing file are
    left out, as they run before each of their files.
    """
    names = {module_of(path): path for path in FILES}
    imported = {}
    for name, path in names.items():
        modules = set(imported_files(path, names))
        packages = {package for module in modules for package in packages_of(module)}
        imported[name] = names.keys() & (modules | packages - packages_of(name)) - {
            name
        }
    circles = set(imported)
    before = -1
    while len(circles) != before:
        before = len(circles)
        readers = set().union(*(imported[name] for name in circles))
        circles = {name for name in circles & readers if imported[name] & circles}
    assert circles == set()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def packages_of(module: str) -> set[str]:
    """Return the packages around a module: ``a`` and ``a.b`` of ``a.b.c``."""
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def imported_files(path: Path, names: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports at run time, ``from a import b`` as ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else str(node.module)


def test_nothing_imports_the_extensions() -> None:
    """As that changes the environment of child processes, and imports torch, from tests, too.

    What a bundle ships stands alone.
    """
    bundle = ROOT / "quark_onnx" / "npu" / "bundle"
    tests = {
        path
        for path in (ROOT / "tests").rglob("*.py")
        if "local_models" not in path.parts
    }  # as others write them
    found = {
        path
        for path in tests.union(FILES)
        if "onnxruntime_extensions" in path.read_text(encoding="utf-8")
        and "onnxruntime_extensions" in imports(path)
        and not path.is_relative_to(bundle)
    }
    assert not found


def test_every_layer_exists() -> None:
    assert {own(path) for path in FILES} == RANK.keys()


#: The only files that use the one mechanism of each kind, below the package.
ONE_OF_EACH = {
    # A run with a limit of time: searches and advice try configurations there.
    "time_limit": {"search/runs.py"},
    "TimeLimitError": {"common/progress.py", "search/runs.py"},
    # The errors and the verdict of two models.
    "VerdictCollector": {"trials/judge.py", "writing/finish.py", "writing/judging.py"},
    # Advice after a verdict: listed by the verdict and by a missed gate, tried by advise.
    "next_steps": {
        "analysis/advise.py",
        "report/verdict/collect.py",
        "writing/finish.py",
    },
    # The samples that are held out.
    "HoldOut": {"measuring/run_data.py"},
    # The samples of searches, and the runs of searches and advice.
    "SplitData": {"analysis/accuracy.py", "search/search.py"},
    "Runs": {"analysis/accuracy.py", "analysis/advise.py", "search/search.py"},
    # The loop, the journal, the records and the front of every search.
    "Study": {
        "analysis/accuracy.py",
        "analysis/advise.py",
        "search/search.py",
        "torch/pipelines/scheme_search.py",
        "trials/mixed_precision.py",
    },
    "StudyJournal": {"search/search.py", "torch/pipelines/scheme_search.py"},
    "Record": {
        "search/candidate.py",
        "search/search.py",
        "study/journal.py",
        "torch/pipelines/scheme_search.py",
    },
    # Intermediate results, from which runs resume, and errors of the places that have them.
    "ResumeFolder": {
        "job.py",
        "refine/resume.py",
        "torch/checkpoints/atomic_file.py",
        "torch/pipelines/resume.py",
    },
    "access_errors": {"study/journal.py"},
    # The choice among ranked nodes.
    "bisected": {"trials/mixed_precision.py"},
    # Warnings that trials repeat: in a study, in the ranking of nodes and in a command.
    "WarningsOnce": {
        "cli/dispatch.py",
        "study/study.py",
        "trials/mixed_precision.py",
    },
    "pareto_front": {"search/result.py", "torch/pipelines/scheme_search.py"},
    # One way to a page and one to a terminal: the rendering of blocks.
    "document": {"page/browser.py"},
    "CSS": {"page/document.py"},
    # One check of a given model, and the parts that it alone puts together.
    "check_model": {"files/io.py"},
    "check_stored": {"files/io.py"},
    "check_variadic": {"check/model.py"},
    "check_loops": {"check/model.py"},
    "contradicted_shapes": {"check/model.py"},
    # One line from ranges to the quantized graph.
    "Assembler": {"job.py"},
}


@loop_over("name", {name: name for name in ONE_OF_EACH})
def test_there_is_one_of_each(name: str) -> None:
    users = {
        path.relative_to(ROOT / "quark_onnx").as_posix()
        for path in FILES
        if path.name != "__init__.py" and name in imported_names(path)
    }
    assert users == ONE_OF_EACH[name]


@cache
def imported_names(path: Path) -> set[str]:
    """Return the names that a file imports from modules."""
    return {
        alias.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_one_file_writes_the_markup_of_pages() -> None:
    """Others compose blocks, and draw SVG by ``page/svg.py``."""
    markup = re.compile("<(section|h2|p|div|ul|table)[ >]")
    found = {
        path.relative_to(ROOT / "quark_onnx").as_posix()
        for path in FILES
        if path.is_relative_to(ROOT / "quark_onnx")
        and markup.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"page/browser.py"}
