"""Price of 16 bits: the estimate that automatic mixed precision decides by, and onnxruntime's
runtime.

    QUARK_ONNX_DATA=DIR python benchmarks/raises.py [--tasks mobilenetv2 ...] [--repeats 24]
        [--seconds 5] [--clock cpu] [--again] [--report]

`auto_mixed_precision` weighs a raised node by an estimate, so that equal input gives an equal
model. Here all nodes of one class of a model in A8W8 are raised at once, because a single one costs
less than a busy machine hides, and the raised model and the plain one run in turn, in default
sessions with one thread. A row has the sum of the estimates and the difference of the medians.
Under the table stands the rank correlation (Spearman) of both over all rows: the mark is 0.8 or
more. Rows go to OUT/raises.json; the exit code is 1 where the mark is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from _data import Feeds, digest, load
from _ranks import spearman
from _results import (
    Row,
    Store,
    add_store_arguments,
    add_turn_arguments,
    due,
    table,
)
from _tools import Ours
from runtime import run_in_turn

from quark_onnx import QConfig, quantize
from quark_onnx.check.static_shapes import fixed
from quark_onnx.graph import Graph, Node
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.patterns.runtime import absorbing_layer, raised_runtime

TASKS = ("resnet20", "squeezenet", "mobilenetv2", "yolox_nano", "minilm-sst2")
LEAST = 0.8  # of the rank correlation
SAMPLES = 4
CONFIG = QConfig.of("A8W8").with_(calibrator="minmax", equalize=False)
HEADER = ("raised", "nodes", "estimated ms", "measured ms", "8 bits ms")


def class_of(graph: Graph, node: Node) -> str:
    """Return the class whose nodes are raised together."""
    if absorbing_layer(graph, node) is not None:
        return "absorbed activation"
    if node.kind not in LAYERS or not graph.is_constant(node.input(1)):
        return str(node.kind)
    if node.kind in ("Conv", "ConvTranspose"):
        grouped = node.attribute("group", 1) > 1
        return "depthwise convolution" if grouped else "convolution"
    return "matrix product"


def rows_of(
    task: Path, samples: list[Feeds], repeats: int, seconds: float, clock: str
) -> Iterator[tuple[str, Row]]:
    """Measure every class of a model."""
    settings = AutoMixedPrecision()
    with TemporaryDirectory() as folder:
        files = {
            "plain": Path(folder) / "plain.onnx",
            "raised": Path(folder) / "raised.onnx",
        }
        graph, classes = classes_of(task, samples, files["plain"])
        for name, nodes in classes.items():
            override = settings.override(tuple(each.name for each in nodes), CONFIG)
            raised = CONFIG.with_(overrides=(*CONFIG.overrides, override))
            quantize(task, samples, raised, files["raised"])
            taken = run_in_turn(files, samples[0], repeats, seconds, clock)
            before, after = (median(taken[each]) for each in ("plain", "raised"))
            yield (
                name,
                {
                    "nodes": len(nodes),
                    "estimated": estimate(graph, nodes),
                    "measured": round(after - before, 4),
                    "plain": round(before, 4),
                    "turns": len(taken["plain"]),
                },
            )


def classes_of(
    task: Path, samples: list[Feeds], output: Path
) -> tuple[Graph, dict[str, list[Node]]]:
    """Write the plain model; return its graph and its quantized nodes by class."""
    plan = quantize(task, samples, CONFIG, output).plan
    assert plan is not None
    graph = _sized(plan.graph, samples[0])
    quantized = {node.name for node in plan.graph.nodes if plan.touches(node)}
    classes: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.name in quantized:
            classes.setdefault(class_of(graph, node), []).append(node)
    return graph, classes


def estimate(graph: Graph, nodes: list[Node]) -> float:
    """Return the estimated price of raising nodes, in milliseconds."""
    return round(sum(raised_runtime(graph, each) for each in nodes) / 1e6, 4)


def _sized(graph: Graph, sample: Feeds) -> Graph:
    """Return the graph with the sizes of a sample."""
    return fixed(graph, {each.name: sample[each.name].shape for each in graph.inputs})[
        0
    ]


def correlation(rows: list[Row]) -> float:
    """Return the rank correlation of estimated and measured prices."""
    return spearman(
        [row["estimated"] for row in rows], [row["measured"] for row in rows]
    )


def report(rows: dict[str, Row], tasks: list[str]) -> Iterator[str]:
    """A table for each model, and the rank correlation over all."""
    for task in tasks:
        cells = [
            [key.partition("/")[2], *(row[name] for name in _COLUMNS)]
            for key, row in rows.items()
            if key.startswith(f"{task}/")
        ]
        yield f"## {task}\n\n{table(HEADER, cells)}"
    known = [row for key, row in rows.items() if key.partition("/")[0] in tasks]
    if len(known) > 1:
        yield (
            f"Rank correlation of estimated and measured prices over {len(known)} rows:"
            f" {correlation(known):.2f}"
        )


_COLUMNS = ("nodes", "estimated", "measured", "plain")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_store_arguments(parser, TASKS)
    add_turn_arguments(parser, repeats=24)
    arguments = parser.parse_args()
    store = Store(arguments.out / "raises.json")
    for name in [] if arguments.report else arguments.tasks:
        task = load(name)
        tag = {"model": digest(task.path), "source": Ours().source}
        known = [row for key, row in store.rows().items() if key.startswith(f"{name}/")]
        if known and not any(due(row, tag, again=arguments.again) for row in known):
            continue
        samples = list(task.calibration(SAMPLES))
        turns = (arguments.repeats, arguments.seconds, arguments.clock)
        for kind, row in rows_of(task.path, samples, *turns):
            store.put(f"{name}/{kind}", row | tag | {"clock": arguments.clock})
            print(name, kind, row, file=sys.stderr, flush=True)
    rows = store.rows()
    text = "\n\n".join(report(rows, arguments.tasks))
    print(text)
    if tuple(arguments.tasks) == TASKS:
        intro = (
            "All nodes of a class raised to 16-bit activations at once, in A8W8:"
            " milliseconds that a run of one sample takes longer, on one thread."
        )
        (arguments.out / "raises.md").write_text(
            f"# Price of 16 bits\n\n{intro}\n\n{text}\n"
        )
    known = [row for key, row in rows.items() if key.partition("/")[0] in TASKS]
    return 0 if len(known) > 1 and correlation(known) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
