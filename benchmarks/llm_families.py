"""Every family of language models of the installed transformers: quantized file to file, read
again, and run.

    python benchmarks/llm_families.py [--families NAME ...] [--workers 2] [--limit 120] [--again]
    [--out DIR]

A tiny random model of each family is written by transformers, quantized by each recipe at its
defaults, loaded, and run. It works where the result predicts nearly what the float model predicts;
it is refused where the package says why it cannot be quantized. Every other outcome fails. What
cannot be built tiny, or cannot run on random tokens, is listed apart.

Families take turns in child processes, with a limit of seconds for each. Rows are kept in
DIR/llm_families.json: a later run goes on where this one stopped. The table is DIR/llm_families.md.
The exit code is 1 where something fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _results import Row, Store, add_arguments, table

#: By what the table calls them: the scheme and the algorithms.
RECIPES = {
    "fp8": ("fp8", ()),
    "uint4_wo_32 + gptq": ("uint4_wo_32", ("gptq",)),
    "mxfp4": ("mxfp4", ()),
}
#: The greatest relative error of logits: random models of two layers exaggerate every rounding.
LARGEST_ERROR = {"fp8": 0.5, "uint4_wo_32 + gptq": 1.0, "mxfp4": 1.5}
#: Noise on the embedded tokens, about as large as the rounding of FP8. Where the float model makes
#: more of it than the above, as where it changes the choice of experts, a recipe may have that
#: error and a half.
NOISE, AMPLIFIED = 0.02, 1.5
RESULTS = Path(__file__).with_name("results")
#: Characters of a message in the table.
_LENGTH = 200


def outcomes(family: str, folder: Path) -> Row:
    """Build the tiny model of a family, and quantize it by each recipe.

    Args:
        folder: where the models are written.

    Returns:
        By recipe "works", "refused: ..." or "fails: ..."; "absent" alone where there is no such
        model.
    """
    import torch
    from _tiny_models import families, samples, tiny_model

    name, kind = families()[family]
    row: Row = {"class": name, "kind": kind}
    try:
        model = tiny_model(family)
        batches = samples(model)
        source = folder / "source"
        model.save_pretrained(source)
    except Exception as error:  # whatever transformers raises
        return row | {"absent": _line(error)}
    torch.manual_seed(0)
    expected = _logits(model, batches[0])
    if not torch.isfinite(expected).all():
        return row | {"absent": "the random model computes no finite logits"}
    row["parameters"] = sum(each.numel() for each in model.parameters())
    noise = row["error of noise"] = _error_of_noise(model, batches[0], expected)
    for recipe in RECIPES:
        limit = max(LARGEST_ERROR[recipe], AMPLIFIED * noise)
        row |= _outcome(
            recipe, source, folder / recipe.replace(" ", "_"), batches, expected, limit
        )
    return {name: _placeless(value, folder) for name, value in row.items()}


def _placeless(value: Any, folder: Path) -> Any:
    """A message without the name of the temporary folder."""
    return value.replace(f"{folder}/", "") if isinstance(value, str) else value


def _error_of_noise(model: Any, batch: Mapping[str, Any], expected: Any) -> float:
    """The relative error of the logits where the embedded tokens are disturbed by noise.

    0 without an embedding.
    """
    import torch

    from quark_onnx.torch.models.structure import embedding_of

    embedding = embedding_of(model)
    if embedding is None:
        return 0.0

    def disturb(module: Any, args: Any, embedded: Any) -> Any:
        return embedded * (1 + NOISE * torch.randn_like(embedded))

    hook = embedding.register_forward_hook(disturb)
    computed = _logits(model, batch)
    hook.remove()
    return float((computed - expected).norm() / expected.norm())


def _outcome(
    recipe: str,
    source: Path,
    output: Path,
    batches: list[Any],
    expected: Any,
    limit: float,
) -> Row:
    """Quantize a model by one recipe.

    Args:
        limit: the greatest relative error of the logits.
    """
    from quark_onnx.common.errors import QuarkError
    from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
    from quark_onnx.torch.checkpoints.load import load_checkpoint
    from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
    from quark_onnx.torch.pipelines.ptq import config_for

    scheme, algorithms = RECIPES[recipe]
    try:
        checkpoint = FloatCheckpoint(source)
        config = config_for(scheme, exclude=checkpoint.usually_float()).with_(
            algorithms=algorithms
        )
        data = batches if config.needs_data else None
        report = quantize_checkpoint(checkpoint, data, config, output, progress=False)
    except QuarkError as error:
        return {recipe: f"refused: {_line(error)}"}
    except Exception as error:
        return {recipe: f"fails: quantizing: {_line(error)}"}
    found: Row = {
        f"{recipe}: layers": len(report.quantized),
        f"{recipe}: notes": len(report.notes),
    }
    if not report.quantized:
        return found | {recipe: "fails: no layer is quantized"}
    try:
        computed = _logits(load_checkpoint(output), batches[0])
    except Exception as error:
        return found | {recipe: f"fails: loading: {_line(error)}"}
    relative = float((computed - expected).norm() / expected.norm())
    found[f"{recipe}: error"] = relative
    if not 0 < relative < limit:
        return found | {
            recipe: f"fails: a relative error of {relative:.3g} in the logits"
        }
    return found | {recipe: "works"}


def _logits(model: Any, batch: Mapping[str, Any]) -> Any:
    import torch
    from _tiny_models import logits_of

    torch.manual_seed(0)  # some families draw random numbers when they run
    with torch.no_grad():
        return logits_of(model(**batch)).float()


def _line(error: BaseException) -> str:
    """An error in one line; errors of the package without their class."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    own = type(error).__module__.startswith("quark_onnx")
    return text if own else f"{type(error).__name__}: {text}"


def _child(family: str, result: Path) -> None:
    """Write the row of a family; in a process of its own."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        found = outcomes(family, Path(folder))
    result.write_text(json.dumps(found), encoding="utf-8")


def measured(family: str, limit: float) -> Row:
    """The row of a family, made in a child process that is ended after so many seconds."""
    method = (
        "forkserver"
        if "forkserver" in multiprocessing.get_all_start_methods()
        else "spawn"
    )
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(
            ["torch", "transformers", "quark_onnx.torch.pipelines.ptq"]
        )
    with TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        process = context.Process(target=_child, args=(family, result))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return {"fails": f"it takes more than {limit:.0f} seconds"}
        if process.exitcode:
            return {"fails": f"the process ended with code {process.exitcode}"}
        return json.loads(result.read_text(encoding="utf-8"))


def report(rows: Mapping[str, Row]) -> str:
    """The tables of a whole run, in Markdown."""
    import transformers

    built = {family: row for family, row in rows.items() if "absent" not in row}
    absent = {family: row for family, row in rows.items() if "absent" in row}
    head = ["family", "class", *RECIPES]
    lines = [
        [family, row.get("class", ""), *_cells(row)] for family, row in built.items()
    ]
    counts = [f"- {recipe}: {_counted(recipe, built)}" for recipe in RECIPES]
    others = table(
        ["family", "class", "why"],
        [
            [family, row["class"], _short(row["absent"])]
            for family, row in absent.items()
        ],
    )
    parts = [
        f"# Families of transformers {transformers.__version__}",
        (
            "Made by `python benchmarks/llm_families.py`. A tiny random model of each"
            " family is written by transformers, quantized file to file at the defaults"
            " of each recipe, loaded, and run."
        ),
        "\n".join(counts),
        table(head, lines),
        "## No tiny model, or none that runs on random tokens",
        others,
    ]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> Iterator[str]:
    for recipe in RECIPES:
        yield _short(row.get(recipe) or f"fails: {row.get('fails', 'no outcome')}")


def _short(text: str) -> str:
    text = text.replace("|", "\\|")
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


def _counted(recipe: str, built: Mapping[str, Row]) -> str:
    counts = Counter(
        str(row.get(recipe, "fails")).partition(":")[0] for row in built.values()
    )
    return ", ".join(f"{count} {word}" for word, count in counts.most_common())


def failures(rows: Mapping[str, Row]) -> Iterator[str]:
    """What neither works nor is refused."""
    for family, row in rows.items():
        if "fails" in row:
            yield f"{family}: {row['fails']}"
        yield from (
            f"{family}, {each}: {row[each]}"
            for each in RECIPES
            if str(row.get(each)).startswith("fails")
        )


def main() -> int:
    from _tiny_models import families

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families", nargs="+", metavar="NAME", help="these alone (default: all)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="child processes at once (default: 2)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=120,
        metavar="SECONDS",
        help="of a family (default: 120)",
    )
    add_arguments(parser, "again", "out")
    arguments = parser.parse_args()
    store = Store(arguments.out / "llm_families.json")
    known = {} if arguments.again else store.rows()
    chosen = arguments.families or list(families())
    todo = [
        family
        for family in chosen
        if family not in known or "fails" in json.dumps(known[family])
    ]
    with ThreadPoolExecutor(arguments.workers) as pool:
        for family, row in zip(
            todo,
            pool.map(lambda each: measured(each, arguments.limit), todo),
            strict=True,
        ):
            store.put(family, row)
            print(
                family,
                *(
                    row.get(each, row.get("absent", row.get("fails")))
                    for each in RECIPES
                ),
                sep=" | ",
                flush=True,
            )
    rows = {family: row for family, row in store.rows().items() if family in families()}
    (arguments.out / "llm_families.md").write_text(report(rows), encoding="utf-8")
    missed = list(failures({family: rows[family] for family in chosen}))
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
