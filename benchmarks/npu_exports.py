"""Networks of torchvision and timm on Ryzen AI: forecasts of current exports, and bundles of some.

    python benchmarks/npu_exports.py --networks DIR [--export] [--bundles] [--recipes]
    [--names NAME ...] [--again] [--stale] [--report] [--out OUT]

--export writes the networks into DIR with random weights, by both exporters of torch for nine of
them; torchvision and timm are needed for that alone. Each file is legalized and forecast for each
device and format. With --bundles the networks of BUNDLES, of 14 kinds, are deployed for each as
well, with --recipes by each recipe: the forecast before must be that of the bundle, the checker
must find no error, and the bundle's compare.py must pass.

Rows are kept in OUT/npu_exports.json: a later run goes on where this one stopped, and --stale
measures again what an older version of our source made. The table is OUT/npu_exports.md. The exit
code is 1 where a bundle fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _data import digest
from _results import Row, Store, add_arguments, due, table
from _tools import Ours
from onnx import ModelProto

from quark_onnx import QConfig, npu
from quark_onnx.common.errors import QuarkError
from quark_onnx.common.registry import NPU_RECIPES, TARGETS
from quark_onnx.graph import Graph
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.passes import LEGALIZING
from quark_onnx.planning.prepare import passes_for
from quark_onnx.running.run import Reference
from quark_onnx.targets import format_of

#: Devices and formats of the columns.
TARGET_FORMATS = (
    ("phx", "XINT8"),
    ("stx", "XINT8"),
    ("stx-x1", "XINT8"),
    ("stx", "A8W8"),
    ("stx", "A16W8"),
    ("stx", "BF16"),
)
#: One network of each kind, deployed for each device and format.
BUNDLES = {
    "squeezenet1_1.script": "concatenations",
    "resnet18.script": "residuals",
    "resnet18.dynamo": "residuals, by the dynamo exporter",
    "mobilenet_v2.script": "depthwise with Clip",
    "mobilenet_v3_small.script": "HardSwish and gates",
    "mobilenet_v3_small.dynamo": "the same, by the dynamo exporter",
    "efficientnet_b0.script": "SiLU and gates",
    "shufflenet_v2_x0_5.script": "channel shuffles",
    "densenet121.script": "dense connections",
    "ghostnet_100.script": "ghost modules",
    "lraspp.script": "segmentation",
    "googlenet.script": "branches",
    "vit_tiny_patch16_224.script": "attention",
    "mobilevit_xxs.script": "convolutions and attention",
    "lcnet_050.script": "few operators",
}
TORCHVISION = [
    "mobilenet_v3_small",
    "mobilenet_v2",
    "resnet18",
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "googlenet",
    "efficientnet_b0",
    "regnet_y_400mf",
    "densenet121",
    "swin_t",
    "convnext_tiny",
]
TIMM = [
    "mobilenetv4_conv_small",
    "mobilevit_xxs",
    "efficientnet_lite0",
    "ghostnet_100",
    "hardcorenas_a",
    "rexnet_100",
    "fastvit_t8",
    "edgenext_xx_small",
    "repvgg_a0",
    "levit_128s",
    "xcit_nano_12_p16_224",
    "poolformer_s12",
    "lcnet_050",
    "tinynet_e",
    "res2net50_26w_4s",
    "hrnet_w18_small",
    "eca_resnet33ts",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "mixer_s32_224",
    "cspdarknet53",
    "dla34",
    "vovnet39a",
    "selecsls42",
    "tf_efficientnetv2_b0",
    "mobileone_s0",
    "repghostnet_050",
    "starnet_s1",
    "inception_v3",
]
#: Networks that the dynamo exporter writes as well.
DYNAMO = [
    "mobilenet_v3_small",
    "resnet18",
    "mobilenetv4_conv_small",
    "vit_tiny_patch16_224",
    "shufflenet_v2_x0_5",
    "efficientnet_b0",
    "convnext_tiny",
    "mobilevit_xxs",
    "fastvit_t8",
]
#: Sizes of images other than 96, by a part of the name.
SIZES = {
    "vit": 224,
    "swin": 224,
    "mixer": 224,
    "xcit": 224,
    "deit": 224,
    "inception": 139,
}


def modules() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the names of the networks with functions that make them."""
    import timm
    import torch
    import torchvision

    class Segmentation(torch.nn.Module):
        """The masks of a segmentation network, which returns a dictionary."""

        def __init__(self) -> None:
            super().__init__()
            make = torchvision.models.segmentation.lraspp_mobilenet_v3_large
            self.inner = make(weights=None, weights_backbone=None)

        def forward(self, x: Any) -> Any:
            return self.inner(x)["out"]

    for name in TORCHVISION:
        more = (
            {"init_weights": True, "aux_logits": False} if name == "googlenet" else {}
        )
        make = getattr(torchvision.models, name)
        yield name, lambda make=make, more=more: make(weights=None, **more)
    for name in TIMM:
        yield name, lambda name=name: timm.create_model(name, pretrained=False)
    yield "lraspp", Segmentation


def export(folder: Path) -> None:
    """Write the networks that the folder lacks."""
    import torch

    for name, make in modules():
        kinds = ("script", "dynamo") if name in DYNAMO else ("script",)
        size = next((size for part, size in SIZES.items() if part in name), 96)
        for kind in kinds:
            path = folder / f"{name}.{kind}.onnx"
            if path.exists():
                continue
            torch.manual_seed(0)
            arguments: dict[str, Any] = {"dynamo": False, "opset_version": 17}
            if kind == "dynamo":
                arguments = {"dynamo": True, "external_data": False}
            image = torch.randn(1, 3, size, size)
            torch.onnx.export(make().eval(), (image,), path, **arguments)


def forecasts(path: Path) -> dict[str, Any]:
    """Return the share, the subgraphs and the operators off the NPU, by device and format."""
    found, legal = dict[str, Any](), dict[Any, ModelProto]()
    for target, kind in TARGET_FORMATS:
        # Legalization depends on the device and the format by these passes alone.
        passes = passes_for(TARGETS[target], kind, LEGALIZING)
        if passes not in legal:
            legal[passes] = npu.legalize(path, target, kind=kind).model
        forecast = npu.preflight(legal[passes], target, kind=kind)
        off = {name for group in forecast.groups for name in group.kinds.split(", ")}
        found[f"{target} {kind}"] = {
            "share": round(forecast.share, 4),
            "subgraphs": forecast.subgraphs,
            "off": sorted(off),
        }
    return found


def bundle(path: Path, target: str, config: QConfig) -> str:
    """Return "good" for a bundle that keeps its promises, else what is wrong.

    Args:
        path: the float model.
        target: name of the device.
        config: the configuration, without a search of scales.
    """
    kind = format_of(config)
    model = npu.legalize(path, target, kind=kind).model
    sample = random_sample(Graph.of(model), Reference(model))
    data = None if kind == "BF16" else [sample]
    before = npu.deploy_forecast(path, target, config=config, data=data)
    with TemporaryDirectory() as folder:
        try:
            made = npu.deploy(
                path, data, Path(folder) / "bundle", target, config, min_sqnr=None
            )
        except QuarkError as error:
            return f"refused: {error}" if before.problem else f"fails: {error}"
        if before.best.to_dict() != made.forecast.to_dict():
            return f"forecast {before.best.sentence}, bundle {made.forecast.sentence}"
        if made.check.errors:
            return made.check.sentence
        words = [sys.executable, "-B", "compare.py", "--device", "cpu", "--runs", "0"]
        done = subprocess.run(words, cwd=made.folder, capture_output=True, text=True)
        return "good" if done.returncode == 0 else f"compare.py: {done.stderr[-200:]}"


def bundles(path: Path, *, recipes: bool) -> dict[str, str]:
    """Return the results of the bundles of a network, by device and format or recipe."""
    results = dict[str, str]()
    if not recipes:
        for target, kind in TARGET_FORMATS:
            config = QConfig.of(kind).with_(search=0)
            results[f"{target} {kind}"] = bundle(path, target, config)
        return results
    for target in ("phx", "stx"):
        for name in NPU_RECIPES:
            config = NPU_RECIPES[name].config_for(target).with_(search=0)
            results[f"{target}, recipe {name}"] = bundle(path, target, config)
    return results


def measured(path: Path, row: Row, arguments: argparse.Namespace) -> Row:
    """Return a row with what it lacks.

    Args:
        path: the float model.
        row: what is known.
        arguments: whether bundles are asked for.
    """
    if "forecasts" not in row:
        row["forecasts"] = forecasts(path)
    if path.name.removesuffix(".onnx") not in BUNDLES:
        return row
    for asked, recipes in ((arguments.bundles, False), (arguments.recipes, True)):
        known = row.get("bundles", {})
        if asked and not any(("recipe" in key) == recipes for key in known):
            row["bundles"] = {**known, **bundles(path, recipes=recipes)}
    return row


def report(rows: dict[str, Row], source: str) -> str:
    """Return the tables; rows by older source have a star."""
    columns = [" ".join(pair) for pair in TARGET_FORMATS]
    lines, off, checks = (
        list[list[object]](),
        list[list[object]](),
        list[list[object]](),
    )
    for name, row in rows.items():
        star = "" if row["source"] == source else "*"
        if "error" in row:
            lines.append([f"{name}{star}", row["error"], *[""] * (len(columns) - 1)])
            continue
        cells = [row["forecasts"][column] for column in columns]
        shown = [f"{100 * cell['share']:.1f} %, {cell['subgraphs']}" for cell in cells]
        lines.append([f"{name}{star}", *shown])
        for column, cell in zip(columns, cells, strict=True):
            if cell["subgraphs"] != 1:
                off.append([name, column, ", ".join(cell["off"])])
        for column, result in row.get("bundles", {}).items():
            first_line = str(result).splitlines()[0]
            checks.append([f"{name}{star}", BUNDLES[name], column, first_line])
    known = [row for row in rows.values() if "forecasts" in row]
    whole = [
        f"{sum(row['forecasts'][column]['subgraphs'] == 1 for row in known)} in {column}"
        for column in columns
    ]
    results = [row[-1] for row in checks]
    good = sum(str(result).startswith(("good", "refused")) for result in results)
    return "\n\n".join(
        [
            "# Exports of torchvision and timm on Ryzen AI",
            "`python benchmarks/npu_exports.py`; share of the operations on the NPU, and subgraphs."
            " A star: by an older version of the source.",
            f"In one subgraph, of {len(known)} exports: {', '.join(whole)}.",
            table(["export", *columns], lines),
            f"## Bundles: {good} of {len(results)} keep their promises",
            table(["export", "kind", "device and format", "result"], checks),
            "## Operators off the NPU, where there is more than one subgraph",
            table(["export", "device and format", "operators"], off),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--export", action="store_true", help="write the networks first"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="these files alone")
    parser.add_argument(
        "--bundles", action="store_true", help="deploy those of BUNDLES"
    )
    parser.add_argument("--recipes", action="store_true", help="deploy by each recipe")
    add_arguments(parser, "again", "stale", "report", "out")
    arguments = parser.parse_args()
    if arguments.export:
        arguments.networks.mkdir(exist_ok=True)
        export(arguments.networks)
    store, source = Store(arguments.out / "npu_exports.json"), Ours().source_of_npu
    paths = sorted(
        arguments.networks.glob("*.onnx"), key=lambda path: path.stat().st_size
    )
    if not paths and not arguments.report:
        parser.error(f"{arguments.networks} has no networks; --export writes them")
    for path in () if arguments.report else paths:
        name = path.name.removesuffix(".onnx")
        if arguments.names and name not in arguments.names:
            continue
        tag = {"model": digest(path), "source": source}
        row = store.rows().get(name)
        if due(row, tag, again=arguments.again, stale=arguments.stale):
            row = None
        start = time.perf_counter()
        try:
            row = measured(path, dict(row or tag), arguments)
        except QuarkError as error:
            row = {**tag, "error": str(error)[:200]}
        store.put(name, row)
        seconds = time.perf_counter() - start
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    text = report(store.rows(), source)
    (arguments.out / "npu_exports.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    every = [
        result
        for row in store.rows().values()
        for result in row.get("bundles", {}).values()
    ]
    return int(any(not result.startswith(("good", "refused")) for result in every))


if __name__ == "__main__":
    sys.exit(main())
