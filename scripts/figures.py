"""Tables of README and docs/ that follow from benchmarks/results.

``scripts/tables.py`` writes them between two comments. A figure is never typed by hand: a run of
``benchmarks/`` changes the results, and the tables follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from quark_onnx.torch.config.schemes import SCHEMES

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Row = Mapping[str, Any]

TASKS = {
    "mobilenetv2": "MobileNetV2, ImageNet classes, top-1",
    "squeezenet": "SqueezeNet 1.1, ImageNet classes, top-1",
    "yolox_nano": "YOLOX-nano, COCO, mAP",
    "minilm-stsb": "MiniLM-L6, STS-B, Spearman",
    "minilm-sst2": "MiniLM-L6, SST-2, accuracy",
    "resnet20": "ResNet-20, CIFAR-10, top-1",
    "resnet44": "ResNet-44, CIFAR-10, top-1",
    "ultraface": "UltraFace, faces, F1 against the float model",
}
#: Models that packages ship, which nothing here was tuned for.
PACKAGED = {
    "ocr-lines": "lines of text, characters read right",
    "captchas": "captchas, read without an error",
    "characters": "detector of characters, Jaccard index",
    "faces": "detector of faces, Jaccard index against the float model",
    "speech": "speech or silence",
    "file-types": "types of files",
}
#: Numbers of test samples of the tasks whose metric does not name them: sentences (or pairs of
#: sentences), and images.
TESTED = {"minilm-stsb": 1379, "minilm-sst2": 1821, "ultraface": 96}
#: Rows of the short table and of the chart.
FIRST_TASKS = ("mobilenetv2", "squeezenet", "yolox_nano", "minilm-sst2", "resnet44")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines.extend(list(row) for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@cache
def stored(name: str) -> dict[str, Row]:
    """Return the rows of a result file in JSON."""
    text = (RESULTS / f"{name}.json").read_text(encoding="utf-8")
    rows: dict[str, Row] = json.loads(text)
    return rows


@cache
def markdown_tables(name: str) -> dict[str, list[list[str]]]:
    """Return the tables of a result file in Markdown, header included, by their heading."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        elif line.startswith("|") and not re.match(r"\|[\s:|-]+\|$", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.setdefault(heading, []).append(cells)
    return found


def value(name: str, key: str, places: int = 2) -> str:
    """Return the metric of a row; empty where it was not measured."""
    row = stored(name).get(key, {})
    found = row.get("value")
    return "" if found is None else f"{found:.{places}f}"


def preset_accuracy(task: str, preset: str) -> str:
    """Return the metric of a preset at its defaults."""
    explicit = {"XINT8": "XINT8-minmse-tensor"}
    return value("accuracy", f"{task}/ours/{explicit.get(preset, preset)}")


#: Presets of the table of runtime; the page of all rows is linked there.
RUNTIME_PRESETS = ("A8W8", "U8U8", "A16W8", "XINT8", "DYNAMIC")


def onnxruntime_best(task: str) -> str:
    """Return the best metric of onnxruntime's calibrators with A8W8, weights per channel."""
    keys = (
        f"{task}/onnxruntime/A8W8-{calibrator}-channel"
        for calibrator in ("minmax", "percentile", "entropy")
    )
    values = [value("accuracy", key) for key in keys]
    return max((text for text in values if text), key=float, default="")


def accuracy_short() -> str:
    """Return the table of README."""
    rows = (
        (
            TASKS[task],
            samples(task),
            value("accuracy", f"{task}/float/float"),
            preset_accuracy(task, "A8W8"),
            onnxruntime_best(task),
        )
        for task in FIRST_TASKS
    )
    columns = ("task", "samples", "float", "`A8W8`")
    return table((*columns, "onnxruntime, best of three calibrators"), rows)


def samples(task: str) -> str:
    """Return the numbers of calibration samples and of test samples of a task."""
    row = stored("accuracy")[f"{task}/ours/A8W8"]
    tested = re.search(r" of (\d+)", row["metric"])
    count = int(tested[1]) if tested else TESTED[task]
    return f"{row['samples']} / {count:,}"


def accuracy() -> str:
    """Return accuracy of presets compared with onnxruntime, NNCF and amd-quark.

    NNCF has a column as soon as it has been measured.
    """
    columns: dict[str, Callable[[str], str]] = {
        "samples": samples,
        "float": lambda task: value("accuracy", f"{task}/float/float"),
        "onnxruntime, minmax / percentile": onnxruntime_pair,
        "NNCF": lambda task: value("accuracy", f"{task}/nncf/A8W8"),
        "`A8W8`": lambda task: preset_accuracy(task, "A8W8"),
        "`XINT8`": lambda task: preset_accuracy(task, "XINT8"),
        "amd-quark, XINT8": lambda task: value("accuracy", f"{task}/amd-quark/XINT8"),
    }
    measured = {
        head: cell
        for head, cell in columns.items()
        if any(cell(task) for task in TASKS)
    }
    rows = [
        (title, *(cell(task) for cell in measured.values()))
        for task, title in TASKS.items()
    ]
    return table(("task", *measured), rows)


def packaged() -> str:
    """Return accuracy on models that packages ship, all tools at their defaults."""
    keys = (
        "float/float",
        "onnxruntime/A8W8-minmax-tensor",
        "nncf/A8W8",
        "ours/A8W8",
        "ours/XINT8-minmse-tensor",
        "amd-quark/XINT8",
    )
    head = ("task", "float", "onnxruntime", "NNCF", "`A8W8`", "`XINT8`")
    rows = [
        (title, *(value("accuracy", f"{task}/{key}") for key in keys))
        for task, title in PACKAGED.items()
    ]
    return table((*head, "amd-quark, XINT8"), rows)


def onnxruntime_pair(task: str) -> str:
    """Return the metric of two calibrators of onnxruntime."""
    minmax = value("accuracy", f"{task}/onnxruntime/A8W8-minmax-channel")
    percentile = value("accuracy", f"{task}/onnxruntime/A8W8-percentile-channel")
    return f"{minmax} / {percentile}" if minmax or percentile else ""


def optimizers() -> str:
    """Return the metric without optimizers and with the best measured combination."""
    rows = []
    found = stored("optimizers")
    for task in ("mobilenetv2", "squeezenet", "resnet20", "resnet44", "yolox_nano"):
        cells = [
            TASKS[task].partition(",")[0],
            value("accuracy", f"{task}/float/float"),
        ]
        for preset in ("A8W8", "XINT8", "A8W4"):
            prefix = f"{task}/ours/{preset}/"
            best_key = max(
                (
                    key
                    for key in found
                    if key.startswith(prefix) and "value" in found[key]
                ),
                key=lambda key: found[key]["value"],
            )
            plain = value("optimizers", f"{prefix}plain")
            cells.append(f"{plain} / {value('optimizers', best_key)}")
        rows.append(cells)
    head = (
        "task",
        "float",
        "`A8W8` plain / best",
        "`XINT8` plain / best",
        "A8W4 plain / best",
    )
    return table(head, rows)


def training() -> str:
    """Return accuracy, time and memory of AdaRound and AdaQuant compared with amd-quark."""
    found = stored("optimizers")
    rows = []
    for task, title in (("mobilenetv2", "MobileNetV2"), ("resnet20", "ResNet-20")):
        for recipe, name in (("adaround", "AdaRound"), ("adaquant", "AdaQuant")):
            ours = found[f"{task}/ours/XINT8/{recipe}"]
            theirs = found[f"{task}/amd-quark/XINT8/{recipe}"]
            rows.append(
                (
                    f"{title}, {name}",
                    _outcome(ours),
                    _outcome(theirs),
                    f"{theirs['seconds'] / ours['seconds']:.1f}x",
                )
            )
    return table(("", "ours", "amd-quark", "speed-up"), rows)


def _outcome(row: Row) -> str:
    """Return accuracy, time and memory of one run."""
    gigabytes = row["peak_mb"] / 1000
    return f"{row['value']:.2f}, {row['seconds']:.1f} s, {gigabytes:.2f} GB"


def speed() -> str:
    """Return time and peak memory of quantization."""
    found = stored("speed")
    names = {
        "ours minmax": "minmax",
        "ours percentile": "percentile",
        "ours entropy": "entropy",
        "ours minmse": "minmse",
        "ours A8W8": "`A8W8`",
        "ours XINT8": "`XINT8`",
        "onnxruntime minmax": "onnxruntime, minmax",
        "onnxruntime percentile": "onnxruntime, percentile",
        "onnxruntime entropy": "onnxruntime, entropy",
        "amd-quark XINT8": "amd-quark, XINT8",
    }
    rows = []
    for key, title in names.items():
        cells = [title]
        for model in ("resnet50", "squeezenet"):
            row = found[f"{model}/{key}"]
            cells.append(f"{row['ratio']:.2f}")
            cells.append(f"{row['whole']['peak_mb']:.0f}")
        rows.append(cells)
    head = (
        "method",
        "ResNet-50: CPU / float inference",
        "peak MB",
        "SqueezeNet: CPU / float inference",
        "peak MB",
    )
    return table(head, rows)


def speed_of_small_models() -> str:
    """Return CPU seconds of a call on models of 0.6 to 20 MB."""
    found = stored("speed")
    methods = ("ours A8W8", "ours without verdict A8W8", "onnxruntime minmax")
    rows = []
    for model in ("file-types", "resnet20", "ultraface", "speech", "yolox_nano"):
        seconds = [found[f"{model}/{key}"]["whole"]["cpu_seconds"] for key in methods]
        ours, bare, theirs = seconds
        ratios = (f"{ours / theirs:.1f}", f"{bare / theirs:.1f}")
        rows.append([model, *(f"{each:.1f}" for each in seconds), *ratios])
    head = (
        "model",
        "`A8W8`",
        "without verdict",
        "onnxruntime, minmax",
        "ratio",
        "without verdict",
    )
    return table(head, rows)


def runtime() -> str:
    """Return the runtime of written models compared with the float model and onnxruntime's."""
    rows = []
    for key, row in stored("runtime").items():
        model, preset = key.split("/")
        if preset not in RUNTIME_PRESETS:
            continue
        onnxruntime = row.get("ours/onnxruntime")
        rows.append(
            (
                f"{model}, `{preset}`",
                f"{row['float']:.2f}",
                f"{row['ours']:.2f}",
                f"{row['ours/float']:.2f}",
                "" if onnxruntime is None else f"{onnxruntime:.2f}",
                f"{row['ours bytes'] / 1000:.0f}",
            )
        )
    head = (
        "model, preset",
        "float, ms",
        "ours, ms",
        "ours / float",
        "ours / ort",
        "kB",
    )
    return table(head, rows)


def engines() -> str:
    """Return SQNR, relative time and integer layers of files in onnxruntime and OpenVINO."""
    rows = []
    for key, row in stored("engines").items():
        if "onnxruntime" not in row:  # our time in OpenVINO relative to NNCF's
            continue
        cells = [key.replace("/", ", ")]
        for engine in ("onnxruntime", "openvino"):
            found = row[engine]
            if "failed" in found:
                cells += ["fails", "", ""]
                continue
            ratio = found.get("ratio")
            cells.append(f"{found['sqnr']:.1f}")
            cells.append("" if ratio is None else f"{ratio:.2f}")
            cells.append(f"{found['integer_layers']} of {found['layers']}")
        rows.append(cells)
    columns = ("{}: dB", "time / float", "on integers")
    head = [
        column.format(name)
        for name in ("onnxruntime", "OpenVINO")
        for column in columns
    ]
    return table(("model, file", *head), rows)


def consumers() -> str:
    """Return SQNR in programs that load ONNX files, beside that in onnxruntime."""
    rows = []
    for name, row in stored("consumers").items():
        if "error" in row:
            rows.append((name, "", "fails", "", ""))
            continue
        rows.append(
            (
                name,
                row["version"],
                row["note"],
                f"{row['consumer dB']:.1f}",
                f"{row['own dB']:.1f}",
            )
        )
    return table(("program", "version", "what ran", "dB there", "dB here"), rows)


def scaling_images() -> str:
    """Return time and memory of quantization as calibration data grow.

    The last column is extrapolated: time is proportional to the images, and held-out samples and
    those of the verdict take at most 192 MiB.
    """
    found = stored("scaling")
    keys = [key.split("/") for key in found if key.startswith("images/")]
    sizes = sorted({int(size) for _, size, _ in keys})
    rows = []
    for method in dict.fromkeys(method for *_, method in keys):
        cells = [method]
        for size in sizes:
            row = found[f"images/{size}/{method}"]
            cells.append(f"{row['cpu_seconds']:.1f} s, {row['peak_mb']:.0f} MB")
        minutes = row["cpu_seconds"] / sizes[-1] * 1e6 / 60
        kept = 0 if method == "float model" else 192 * 2**20 / 1e6
        most = found[f"images/{sizes[0]}/{method}"]["peak_mb"] + kept
        rows.append([*cells, f"{minutes:.0f} min, at most {most:.0f} MB"])
    head = [f"{size:,} images" for size in sizes]
    return table(["", *head, "1,000,000 (extrapolated)"], rows)


def architectures() -> str:
    """Return SQNR and runtime on architectures with random weights, beside onnxruntime's."""
    rows = []
    for key, row in stored("architectures").items():
        model, opset = key.split("/")
        rows.append(
            (
                f"{model}, opset {opset}",
                f"{row['ours dB']:.1f}",
                f"{row['onnxruntime dB']:.1f}",
                f"{row['XINT8 dB']:.1f}",
                f"{row['ours/float']:.2f}",
                f"{row['ours/onnxruntime']:.2f}",
            )
        )
    head = (
        "model",
        "`A8W8`, dB",
        "ort, dB",
        "`XINT8`, dB",
        "ours / float",
        "ours / ort",
    )
    return table(head, rows)


def large() -> str:
    """Return time and memory of weight-only quantization."""
    rows = []
    for key, row in stored("large").items():
        own = row["private_mb"] * 2**20
        rows.append(
            (
                key,
                f"{row['cpu_seconds']:.1f}",
                f"{row['result'] / 1e6:.0f}",
                f"{own / 1e6:.0f}",
                f"{own / row['result']:.1f}",
                f"{own / max(row['bytes'], row['result']):.2f}",
            )
        )
    head = (
        "model",
        "CPU seconds",
        "result MB",
        "peak MB above imports",
        "times the result",
        "times the larger of model and result",
    )
    return table(head, rows)


def llm_rtn() -> str:
    """Return perplexities with round-to-nearest, ours and amd-quark's."""
    names = {
        "fp8": "`fp8`",
        "int8": "`int8`",
        "uint4_wo_32": "`uint4_wo_32`",
        "uint4_wo_128": "`uint4_wo_128`",
        "mxfp4_weight_only": "`mxfp4_weight_only`",
        "mxfp4": "`mxfp4`",
        "nvfp4": "`nvfp4`",
    }
    tables = markdown_tables("llm")
    rows = []
    for scheme, title in {"float": "float", **names}.items():
        cells = [title]
        for model in ("stories260K", "mixtext"):
            lines = {line[0]: line for line in tables[model]}
            theirs = lines[scheme][4].partition(":")[0]
            cells += [lines[scheme][1], theirs]
        rows.append(cells)
    head = ("scheme", "stories260K", "amd-quark", "mixtext", "amd-quark")
    return table(head, rows)


def _best_perplexity(prefix: str, tools: tuple[str, ...]) -> str:
    """Return the lowest perplexity of some tools; empty where none was measured."""
    found = stored("llm_algorithms")
    values = []
    for key, row in found.items():
        if key.startswith(prefix) and key.endswith(tools) and "value" in row:
            values.append(row["value"])
    return f"{min(values):.3f}" if values else "refused"


def llm_algorithms() -> str:
    """Return the best perplexity with algorithms, ours and the best of three other tools."""
    schemes = (
        "uint4_wo_per_channel",
        "uint4_wo_32",
        "uint3_wo_32",
        "uint2_wo_32",
        "uint2_wo_128",
        "int8",
        "mxfp4",
        "fp8+kv",
    )
    others = ("/amd-quark", "/llm-compressor", "/gptqmodel")
    rows = []
    for scheme in schemes:
        cells = [f"`{scheme}`"]
        for model in ("stories260K", "mixtext"):
            prefix = f"{model}/{scheme}/"
            cells.append(_best_perplexity(prefix, ("/ours",)))
            cells.append(_best_perplexity(prefix, others))
        rows.append(cells)
    head = ("scheme", "stories260K", "best other tool", "mixtext", "best other tool")
    return table(head, rows)


def llm_peers() -> str:
    """Return time and memory of GPTQ and AWQ compared with other tools."""
    rows = []
    for key, row in stored("llm_peers").items():
        if "seconds" in row:
            model, algorithm, tool = key.split("/")
            rows.append(
                (
                    f"{algorithm.upper()}, {model} channels",
                    tool,
                    f"{row['seconds']:.1f}",
                    f"{row['cpu_seconds']:.1f}" if "cpu_seconds" in row else "-",
                    f"{row['peak_mb']:.0f}",
                )
            )
    head = ("algorithm, blocks", "tool", "seconds", "CPU seconds", "peak MB")
    return table(head, rows)


def llm_large() -> str:
    """Return time, memory and disk of quantizing large language models, and their estimates."""
    rows = []
    for key, row in stored("llm_large").items():
        if key.startswith("plan "):
            continue
        seconds = row["cpu_seconds" if row["clock"] == "cpu" else "seconds"]
        estimated = row["estimated_memory"], row["estimated_size"]
        rows.append(
            (
                f"`{key}`",
                f"{row['source'] / 1e9:.1f}",
                f"{row['block'] / 1e6:.0f}",
                f"{seconds:.0f}",
                f"{row['floor']:.0f}",
                f"{row['private'] / 1e6:.0f}",
                f"{row['peak'] / 1e6:.0f}",
                f"{estimated[0] / 1e6:.0f}" if estimated[0] else "-",
                f"{row['size'] / 1e9:.2f}",
                f"{estimated[1] / 1e9:.2f}" if estimated[1] else "-",
            )
        )
    head = (
        "run",
        "model GB",
        "block MB",
        "seconds",
        "floor",
        "own MB",
        "with mapped files",
        "estimated",
        "result GB",
        "estimated",
    )
    return table(head, rows)


def llm_plans() -> str:
    """Return estimates for language models of 1 billion to 1 trillion parameters."""
    rows = []
    for key, row in stored("llm_large").items():
        if key.startswith("plan "):
            rows.append(
                (
                    f"`{key.removeprefix('plan ')}`",
                    f"{row['source'] / 1e9:.0f}",
                    f"{row['block'] / 1e9:.1f}",
                    f"{row['estimated_memory'] / 1e9:.1f}",
                    f"{row['estimated_size'] / 1e9:.0f}",
                )
            )
    head = ("plan", "model GB", "block GB", "memory GB", "result GB")
    return table(head, rows)


def llm_clients() -> str:
    """Return the layouts that each client loads, by scheme."""
    rows = dict(stored("llm_clients"))
    clients = list(rows.pop("versions"))
    lines = []
    for scheme in SCHEMES:
        cells = [f"`{scheme}`"]
        for client in clients:
            cells.append(_loading(rows[scheme].get(client, {})))
        lines.append(cells)
    return table(("scheme", *clients), lines)


def _loading(cells: Row) -> str:
    """Return the layouts of a client's cells that load, with marks."""
    found = []
    for layout, result in cells.items():
        if result["cell"] == "loads":
            marks = "*" * ("activations" in result) + "+" * ("option" in result)
            found.append(layout + marks.replace("*", r"\*"))
    words = {result["cell"] for result in cells.values()}
    if "not run" in words:
        return "not run"
    return ", ".join(found) or "-"


def llm_client_versions() -> str:
    """Return the releases of the clients, or the reason why one was not run."""
    versions = stored("llm_clients")["versions"]
    return table(("client", "releases"), versions.items())


def npu() -> str:
    """Return what the rules of a processor cost, and what optimizers recover."""
    columns = {
        "float": ("float", ""),
        "XINT8": ("ours", "XINT8"),
        "within the rules": ("ours", "XINT8, rules settled"),
        "CLE, AdaQuant, bias": ("ours", "XINT8, rules settled, cle+adaquant+bias"),
        "CLE, AdaRound, bias": ("ours", "XINT8, rules settled, cle+adaround+bias"),
        "amd-quark, CLE": ("amd-quark", "XINT8, cle"),
        "amd-quark, CLE, AdaQuant": ("amd-quark", "XINT8, cle+adaquant"),
    }
    lines = {
        tuple(row[:3]): row[3] for row in markdown_tables("npu")["XINT8 for an NPU"]
    }
    rows = []
    for model in ("resnet20", "resnet44", "squeezenet", "mobilenetv2"):
        cells = [TASKS[model].partition(",")[0]]
        cells += [lines[model, tool, how] for tool, how in columns.values()]
        rows.append(cells)
    return table(("", *columns), rows)


def npu_exports() -> str:
    """Return how many exports are forecast in one subgraph, by device and format."""
    rows = [row["forecasts"] for row in stored("npu_exports").values()]
    counts = {
        column: sum(row[column]["subgraphs"] == 1 for row in rows) for column in rows[0]
    }
    head = (f"of {len(rows)} exports", *(f"`{name}`" for name in counts))
    return table(head, [("in one subgraph", *map(str, counts.values()))])


def npu_bundles() -> str:
    """Return how many bundles have the forecast before, by format and by recipe."""
    rows = []
    for what, by_recipe in (("in six formats", False), ("by recipe", True)):
        results = [
            result
            for row in stored("npu_exports").values()
            for key, result in row.get("bundles", {}).items()
            if ("recipe" in key) == by_recipe
        ]
        counts = [
            sum(result.startswith(word) for result in results)
            for word in ("good", "refused")
        ]
        rows.append((what, *map(str, (len(results), *counts))))
    return table(("", "bundles", "as forecast", "refused as forecast"), rows)


def yolox_cle() -> str:
    """Return mAP of YOLOX-nano with and without equalization."""
    names = {
        "plain": "none",
        "cle": "`cle:silu=scale,relu6=bound`",
        "cle+gptq+bias": "the same, `gptq:asymmetric=true bias_correction`",
        "cle+adaround": "the same, `adaround:iterations=200`",
    }
    rows = []
    for key, title in names.items():
        cells = [title]
        for preset in ("A8W8", "XINT8"):
            cells.append(value("optimizers", f"yolox_nano/ours/{preset}/{key}"))
        rows.append(cells)
    return table(("optimizers", "`A8W8`", "`XINT8`"), rows)


def simulate() -> str:
    """Return how many codes of the simulated engine equal those of onnxruntime."""
    rows = []
    for model, row in stored("simulate").items():
        even = row["ties even, averages exact"]["whole"]
        alone = row["ties up, averages exact"]["alone"]
        whole = row["ties up, averages exact"]["whole"]
        rows.append(
            (
                TASKS[model].partition(",")[0],
                f"{even['elements']:,}",
                f"{even['equal']:.1f}",
                f"{alone['equal']:.1f}",
                f"{whole['equal']:.1f}",
                f"{whole['near']:.1f}",
                f"{whole['greatest']}",
            )
        )
    head = (
        "model",
        "codes",
        "ties to even: equal, %",
        "ties up, tensor by tensor: equal, %",
        "end to end: equal, %",
        "within 1, %",
        "largest difference",
    )
    return table(head, rows)


def note(name: str) -> str:
    """Return a table that was measured once, for one page; notes.json says how."""
    row = stored("notes")[name]
    return table(row["head"], row["rows"])


def home_figures() -> str:
    """Return what INT8 costs and gains on MobileNetV2, in three figures."""
    row = stored("runtime")["mobilenetv2/A8W8"]
    reference = stored("accuracy")["mobilenetv2/float/float"]["value"]
    lost = reference - stored("accuracy")["mobilenetv2/ours/A8W8"]["value"]
    head = (
        f"{row['ours/float']:.2f} × the time",
        f"{row['ours bytes'] / row['float bytes']:.2f} × the size",
        f"{lost:.1f} points of top-1",
    )
    cells = (
        "of the float MobileNetV2 in onnxruntime, one thread",
        f"{row['float bytes'] / 1e6:.1f} MB become {row['ours bytes'] / 1e6:.1f} MB",
        f"less than the {reference:.1f} % of the float model",
    )
    return table(head, [cells])


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "accuracy-short": accuracy_short,
    "packaged": packaged,
    "consumers": consumers,
    "engines": engines,
    "home-figures": home_figures,
    "large": large,
    "llm-algorithms": llm_algorithms,
    "llm-client-versions": llm_client_versions,
    "llm-clients": llm_clients,
    "llm-large": llm_large,
    "llm-peers": llm_peers,
    "llm-plans": llm_plans,
    "llm-rtn": llm_rtn,
    "npu-bundles": npu_bundles,
    "npu-exports": npu_exports,
    "npu-optimizers": npu,
    "optimizers": optimizers,
    "architectures": architectures,
    "runtime": runtime,
    "scaling-images": scaling_images,
    "simulate": simulate,
    "speed": speed,
    "speed-small": speed_of_small_models,
    "training": training,
    "yolox-cle": yolox_cle,
}
TABLES |= {f"notes-{name}": partial(note, name) for name in stored("notes")}
