"""deploy: write the folder that an application ships for a Ryzen AI processor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, helper

from calibrators.onnx_runtime.session import open_session
from calibrators.readers import encoded
from calibrators.readers.images import ImageSpec, image_model
from calibrators.readers.open import CalibrationData, Reader
from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import (
    AccuracyError,
    ConfigError,
    ModelError,
    data_errors,
    system_reason,
)
from quark_onnx.config import QConfig
from quark_onnx.files.half_precision import upcast_to_float32
from quark_onnx.files.io import load, staged
from quark_onnx.files.overwrites import refuse_overwritten_arguments
from quark_onnx.graph import Graph
from quark_onnx.graph.shapes import is_tensor
from quark_onnx.job import Job, Result, run
from quark_onnx.measuring.open_data import first_sample, reader_for
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.npu.bundle.npu_session import arrays_of
from quark_onnx.npu.cut import Parts
from quark_onnx.npu.doubts import has_attention
from quark_onnx.npu.legalize import legalize
from quark_onnx.npu.next_format import format_steps
from quark_onnx.npu.options import (
    CONFIG_FILE,
    LEAST_DRIVER,
    OVERLAY_FILE,
    OVERLAY_MAGIC,
    check_options,
    compiled_for,
    compiler_config,
    devices_for,
    split_options,
)
from quark_onnx.npu.page import forecast_blocks, write_page
from quark_onnx.npu.placement import NPU
from quark_onnx.npu.preflight import Preflight, preflight
from quark_onnx.npu.readme import readme
from quark_onnx.npu.tail import try_tail
from quark_onnx.page.blocks import Block, Facts, Notes
from quark_onnx.page.reported import Reported
from quark_onnx.report import Report
from quark_onnx.report.verdict import NextStep
from quark_onnx.report.verdict.verdict import BANDS
from quark_onnx.running.run import Reference, Sample
from quark_onnx.targets import (
    Check,
    Target,
    check,
    format_of,
    refusal,
    require_rules,
)
from quark_onnx.targets.target import npu_of

#: Number of shipped samples, with their outputs on the CPU.
_SHIPPED = 4
_MODEL, _READER, _TAIL = "model.onnx", "preprocess.onnx", "postprocess.onnx"
_MARK, _SUMS = "bundle.json", "SHA256SUMS"
#: Files that arise from using the folder.
_MADE = ("cache", "compiled", "__pycache__")
_FILES = (
    "npu_session.py",
    "npu_engine.py",
    "compare.py",
    "precompile.py",
    "npu_session.hpp",
    "npu_example.cpp",
    "CMakeLists.txt",
)


@dataclass(frozen=True, repr=False)
class Bundle(Reported):
    """Result of a deployment.

    Attributes:
        folder: path of the folder.
        kind: number format of the model: "XINT8", "A8W8", "A16W8", or "BF16". A BF16 model is
            stored in float32 and converted by the compiler.
        report: accuracy of the quantized model; for BF16, of the float model with tensors rounded
            to bfloat16, or None without data.
        check: broken rules of the target; warnings alone.
        forecast: the nodes that will run on the processor.
        notes: rewrites of the legalization.
        images: conversion of image files to inputs of the model; None if the data are arrays.
        tail: the model that runs after this one on the CPU; None if the model is complete.
        next_steps: another number format to try, with its forecast; empty where the forecast and
            the accuracy are good.
        legal: the legalized float model, which was quantized; None if unknown.
    """

    folder: Path
    kind: str
    report: Report | None
    check: Check
    forecast: Preflight
    notes: tuple[str, ...]
    images: ImageSpec | None = None
    tail: ModelProto | None = None
    next_steps: tuple[NextStep, ...] = ()
    legal: ModelProto | None = field(default=None, compare=False, repr=False)

    @property
    def band(self) -> str:
        """Return the worse band of accuracy and forecast: "good", "risky" or "poor".

        Without a verdict on the accuracy, or with an unclear one, the band is that of the forecast.
        """
        bands = [self.forecast.band]
        verdict = None if self.report is None else self.report.verdict
        if verdict is not None and verdict.band in BANDS:
            bands.append(verdict.band)
        return max(bands, key=BANDS.index)

    def blocks(self) -> list[Block]:
        """Return the accuracy, the forecast and the legalization as blocks.

        The forecast has the last word in a terminal, with the format to try next.
        """
        target = self.forecast.target.name
        lines = {
            "bundle": [f"{self.kind} model for {target} in {self.folder}"],
            "legalized": self.notes,
            "rules": [self.check.sentence],
        }
        quality = [] if self.report is None else self.report.blocks()
        steps = [step.action for step in self.next_steps]
        return [
            Facts((), lines),
            *quality[:1],
            *forecast_blocks(self.forecast, steps),
            self.check.problems,
            *quality[1:],
            Notes("Legalization", self.notes),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the bundle as plain values, without the nodes of the forecast."""
        forecast = self.forecast.to_dict()
        del forecast["nodes"]
        verdict = None if self.report is None else self.report.verdict
        return {
            "output": self.folder,
            "kind": self.kind,
            "notes": list(self.notes),
            "worst_sqnr": None if self.report is None else self.report.worst_sqnr,
            "verdict": None if verdict is None else asdict(verdict),
            "band": self.band,
            "next_steps": [asdict(step) for step in self.next_steps],
            "warnings": [str(finding) for finding in self.check.findings],
            **forecast,
        }


def deploy(  # noqa: PLR0913
    model: str | Path | ModelProto | Parts,
    data: CalibrationData | None,
    folder: str | Path,
    target: str = "stx",
    config: QConfig | str | Path | dict[str, Any] = "XINT8",
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    min_sqnr: float | None = 10.0,
    progress: bool | None = False,
    ep_options: Mapping[str, str] | None = None,
    xclbin: str | Path | None = None,
) -> Bundle:
    """Legalize, quantize and check a model, and write the deployment folder.

    The folder holds the model, provider options for each device that supports the format, and
    loaders for Python and C++, which report a fallback to the CPU. It also holds samples with
    outputs that were computed on the CPU, a script that compares, reports, and checksums.

    Args:
        model: the whole model, or the parts that ``cut`` returns. The second part, which may have
            operators of onnxruntime-extensions, is shipped too and runs after the first on the
            CPU.
        data: calibration data, as for ``quantize_static``; None for BF16, of which a random sample
            is shipped then, and no accuracy is measured. If an ``ImageSpec`` reads images, the
            preprocessing is shipped as an ONNX model with operators of onnxruntime-extensions.
        folder: path of a folder that does not exist, is empty, or holds an earlier bundle. An
            earlier bundle is replaced in one step at the end.
        target: name of the target.
        config: configuration of the quantization; its target is set to ``target``.
        shapes: sizes of dynamic dimensions, by the name of an input.
        min_sqnr: minimum signal-to-noise ratio of every output in dB, unless the config has one;
            None for no minimum.
        progress: True to show a progress bar on stderr; None shows it on a terminal only.
        ep_options: further options of the execution provider for the target, such as
            ``{"opt_level": "2"}``. ``{"target": "X1"}`` on stx is the target "stx-x1". Options of
            the BF16 compiler, such as ``preferred_data_storage``, go to its configuration.
        xclbin: overlay of Phoenix and Hawk Point to ship with the bundle, which releases after
            1.7.1 do not install; None for the one of the installation.

    Returns:
        The folder, the model's format, and the reports.

    Raises:
        ConfigError: the device does not support the number format, or the folder cannot be
            written.
        ConstraintError: the result breaks rules of the target.
        AccuracyError: an output has a lower signal-to-noise ratio than the minimum.
        QuarkError: the model or the data is wrong. No file is written then.
    """
    extra = dict(ep_options or {})
    settings = QConfig.of(config)
    kind = format_of(settings)
    check_options(extra, npu_of(target), kind)
    # Another compiler takes other formats and operators, whatever the device.
    target = compiled_for(target, extra)
    row = npu_of(target)
    overlay = _overlay(xclbin, row)
    settings = settings.with_(target=target)
    refuse_overwritten_arguments(
        {"model": model, "data": data, "config": config}, {"folder": folder}
    )
    path = _bundle_folder(Path(folder))
    if why := refusal(row, settings):
        raise ConfigError(why)
    front, tail = _parts_of(model)
    _check_inputs(front)
    # Before calibration: data must have the fixed shapes, and scales belong to the final operators.
    legal = legalize(front, target, shapes=shapes, kind=kind)
    # Samples are shipped in the model's own types, in which an application feeds it.
    wide, narrowing = upcast_to_float32(legal.model)
    # A model of 16 bits is quantized in float32.
    measured = data is not None
    if data is None and not settings.measures:
        # Nothing is measured: the shipped sample may be a random one.
        sample = random_sample(Graph.of(wide), Reference(wide))
        data = None if sample is None else [sample]
    reader = reader_for(Graph.of(wide), data, settings)
    samples = _shipped(reader, narrowing.inputs)
    if tail is not None:  # before the time that quantizing takes
        try_tail(tail, legal.model, samples[0])
    result, report = legal.model, None
    if kind != "BF16" or measured:
        # A gate of the configuration takes precedence over the default of this function.
        gate = settings.min_sqnr if settings.min_sqnr is not None else min_sqnr
        # Bfloat16 tensors show the error alone; the device's compiler makes its own.
        rounded = settings.with_(target="") if kind == "BF16" else settings
        try:
            quantized = _quantized(
                legal.model, front, reader, rounded.with_(min_sqnr=gate), progress
            )
        except AccuracyError as error:
            # Changes of the configuration are tried on this model, not on the caller's.
            error.model = legal.model
            raise
        report = quantized.report
        if kind != "BF16":
            result = quantized.model
    checked, forecast = check(result, target), preflight(result, target, kind=kind)
    # Checked on the result: quantization may add nodes that break rules of the graph.
    require_rules(checked, "nothing was written")
    # Readers of images are partials of a function with the argument ``images``.
    images = data.keywords.get("images") if isinstance(data, partial) else None
    steps = format_steps(legal.model, forecast, report.verdict if report else None)
    bundle = Bundle(
        path,
        kind,
        report,
        checked,
        forecast,
        legal.notes,
        images,
        tail,
        steps,
        legal.model,
    )
    _put(bundle, result, samples, extra, overlay)
    return bundle


def _overlay(xclbin: str | Path | None, target: Target) -> Path | None:
    """Return the path of the overlay to ship; None for none.

    Raises:
        ConfigError: the target takes no overlay, or the file does not exist or is none.
    """
    if xclbin is None:
        return None
    if not target.xclbin:
        raise ConfigError(
            f"{target.name} takes no overlay (xclbin), as only Phoenix and Hawk Point do; leave"
            " it out"
        )
    path = Path(xclbin)
    if not path.is_file():
        raise ConfigError(
            f"xclbin {path} is no file; release 1.7.1 installs {OVERLAY_FILE}"
        )
    with path.open("rb") as file:
        if file.read(len(OVERLAY_MAGIC)) != OVERLAY_MAGIC:
            raise ConfigError(
                f"xclbin {path} is no overlay; release 1.7.1 installs {OVERLAY_FILE}"
            )
    return path


def _check_inputs(model: ModelProto) -> None:
    """Raise ConfigError for an input that is no tensor, which no .npz file could hold."""
    for value in model.graph.input:
        if not is_tensor(value):
            raise ConfigError(
                f"input {value.name!r} is no tensor; the samples of a bundle are arrays:"
                " cut the model behind it",
            )


def _parts_of(
    model: str | Path | ModelProto | Parts,
) -> tuple[ModelProto, ModelProto | None]:
    """Return the model for the processor, and the model after it (None without one)."""
    if isinstance(model, Parts):
        return load(model.first), load(model.second)
    return load(model), None


def _quantized(
    legal: ModelProto,
    front: ModelProto,
    reader: Reader,
    config: QConfig,
    progress: bool | None,
) -> Result:
    """Quantize a legalized model; the check of the preprocessing sees the float model.

    The statistics of the first BatchNormalization show the scaling of the training data, and
    legalization folds them into weights.
    """
    folded = any(node.op_type == "BatchNormalization" for node in front.graph.node)
    job = Job.open(legal, config, None, external=False)
    try:
        job = replace(job, trained=front if folded else None)
        return run(job, reader, None, progress)
    finally:
        job.close()


def _shipped(reader: Reader, kinds: Mapping[str, int]) -> list[Sample]:
    """Return the first samples, which are shipped.

    Args:
        reader: source of the calibration samples.
        kinds: types of the model's 16-bit inputs, as ``TensorProto.DataType``, by name.
    """
    with data_errors():
        samples: list[Sample]
        if reader.restartable:
            samples = list(islice(reader, _SHIPPED))
        else:
            # The calibration needs the samples: the first one is read without consuming it.
            samples = [first_sample(reader)]
    return [_in_types(sample, kinds) for sample in samples]


def _in_types(sample: Sample, kinds: Mapping[str, int]) -> Sample:
    """Return a sample with some arrays converted.

    Args:
        kinds: types of the arrays to convert, as ``TensorProto.DataType``, by name.
    """
    converted = dict(sample)
    for name, value in sample.items():
        if name in kinds:
            dtype = helper.tensor_dtype_to_np_dtype(kinds[name])
            converted[name] = np.asarray(value).astype(dtype)
    return converted


def _bundle_folder(folder: Path) -> Path:
    """Resolve the output folder, and check write access.

    Missing parent folders are not created.

    Raises:
        ConfigError: the path is a file, or the folder holds files of another origin.
    """
    try:
        # Resolved once: a change of the working directory does not move the output.
        path = folder.resolve()
        if path.exists() and not path.is_dir():
            raise ConfigError(f"output {folder} is a file; name a folder")
        if path.is_dir() and any(path.iterdir()) and (unknown := _unknown(path)):
            raise ConfigError(
                f"output {folder} holds {unknown}, which is of no earlier bundle; name a"
                " new folder",
            )
        # The test below creates missing parents, which are removed again.
        missing = [parent for parent in path.parents if not parent.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with ScratchFolder(path.parent, path.name):
                pass
        finally:
            for parent in missing:
                # The folder is missing, or has files of another origin.
                with contextlib.suppress(OSError):
                    parent.rmdir()
    except ConfigError:  # a ValueError, too
        raise
    # A ValueError is a path that no folder can have.
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"output {folder} cannot be written: {system_reason(error)}",
        ) from error
    return path


def _unknown(folder: Path) -> str:
    """Return the first file that is not part of a bundle; empty without such a file.

    Files that arise from using a bundle count as part of the bundle.
    """
    try:
        # Only a folder that the checksums describe is replaced: files of the user are never
        # deleted.
        mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
        sums = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return f"{min(path.name for path in folder.iterdir())!r}"
    # Lines are those of sha256sum: the digest, two spaces, and the name.
    known = {line.partition("  ")[2] for line in sums} | {_SUMS}
    if not isinstance(mark, dict) or mark.get("schema") != 1 or _MARK not in known:
        return f"{_MARK!r}"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_part = name.as_posix() in known or name.parts[0] in _MADE
        if not is_part and not path.is_dir():
            return f"{name.as_posix()!r}"
    return ""


class _Options(NamedTuple):
    """What a bundle tells the engine.

    Attributes:
        devices: options of the execution provider by device.
        compiler: configuration of the BF16 compiler.
    """

    devices: dict[str, dict[str, str]]
    compiler: dict[str, Any]


def _put(
    bundle: Bundle,
    model: ModelProto,
    samples: Sequence[Sample],
    extra: Mapping[str, str],
    overlay: Path | None,
) -> None:
    """Write a scratch folder next to the destination, then move the folder."""
    target = bundle.folder
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ScratchFolder(target.parent, target.name) as folder:
            inside = folder / target.name
            inside.mkdir()
            if overlay is not None:
                shutil.copyfile(overlay, inside / OVERLAY_FILE)
            provider, compiler = split_options(extra)
            devices = devices_for(
                bundle.forecast.target,
                bundle.kind,
                provider,
                overlay=overlay is not None,
            )
            transformer = bundle.kind == "BF16" and has_attention(Graph.of(model))
            options = _Options(
                devices, compiler_config(compiler, transformer=transformer)
            )
            _write(inside, bundle, model, samples, options)
            _replace(inside, target, folder)
    # Both name a file inside the temporary folder.
    except (OSError, ModelError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise ModelError(
            f"{target} cannot be written: {system_reason(cause)}",
        ) from error


def _write(
    folder: Path,
    bundle: Bundle,
    model: ModelProto,
    samples: Sequence[Sample],
    options: _Options,
) -> None:
    """Write all files of a bundle, the checksums last.

    Args:
        folder: an empty folder.
        model: the model for the processor.
        samples: samples to ship with their outputs on the CPU.
        options: options of the provider and of the compiler.
    """
    target, kind = bundle.forecast.target, bundle.kind
    # One file: the loaders and the checksums need no weights beside the model.
    with staged(model, folder / _MODEL, external=False):
        pass
    # The provider keeps compiled models by this key, in a folder that bundles share: another model,
    # or the same one under other options, must not find the cache of this one.
    digest = hashlib.sha256((folder / _MODEL).read_bytes())
    digest.update(json.dumps(options._asdict(), sort_keys=True).encode())
    settings: dict[str, Any] = {
        "model": _MODEL,
        "format": kind,
        "cache_key": digest.hexdigest()[:16],
        "least_driver": LEAST_DRIVER,
        "devices": options.devices,
    }
    if bundle.images is not None:
        with staged(image_model(bundle.images), folder / _READER, external=False):
            pass
        _text(folder / "encoded.py", Path(encoded.__file__).read_text(encoding="utf-8"))
        settings["preprocess"] = _READER
    if bundle.tail is not None:
        with staged(bundle.tail, folder / _TAIL, external=False):
            pass
        settings["postprocess"] = _TAIL
    _json(folder / "provider_options.json", settings)
    _text(folder / "provider_options.hpp", _header(settings))
    if kind == "BF16":
        _json(folder / CONFIG_FILE, options.compiler)
    for name in _FILES:
        source = Path(__file__).parent / "bundle" / name
        _text(folder / name, source.read_text(encoding="utf-8"))
    _record(folder, samples)
    forecast = {
        "counts": bundle.forecast.counts,
        "subgraphs": bundle.forecast.subgraphs,
        "share": bundle.forecast.share,
        "least_share": bundle.forecast.least_share,
        # By first outputs, as the engine's report names nodes.
        "off": [
            placed.output
            for placed in bundle.forecast.placements
            if placed.device != NPU
        ],
        "doubts": list(map(str, bundle.forecast.doubts)),
    }
    report = None if bundle.report is None else bundle.report.to_dict()
    findings = list(map(str, bundle.check.findings))
    _json(
        folder / "report.json",
        {"accuracy": report, "forecast": forecast, "warnings": findings},
    )
    write_page(bundle.forecast, folder / "forecast.html", _MODEL)
    _text(
        folder / "README.md",
        readme(
            bundle.forecast,
            kind,
            report=bundle.report,
            band=bundle.band,
            others=settings,
        ),
    )
    _json(
        folder / _MARK,
        {
            "schema": 1,
            "format": kind,
            "target": target.name,
            "release": bundle.forecast.release,
        },
    )
    # Last, so that the sums cover every other file.
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    )
    sums = ""
    for name in names:
        file_digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        sums += f"{file_digest}  {name}\n"
    _text(folder / _SUMS, sums)


def _record(folder: Path, samples: Sequence[Sample]) -> None:
    """Write samples and the outputs that the model computes on the CPU."""
    # The written file, not the model in memory: what ships is what is recorded.
    session = open_session(folder / _MODEL, what="the quantized model")
    for name in ("samples", "outputs"):
        (folder / name).mkdir()
    # compare.py reads the outputs by the same names.
    for index, sample in enumerate(samples):
        inputs = dict[str, Any]()
        for name, value in sample.items():
            inputs |= arrays_of(name, value)
        _arrays(folder / "samples" / f"{index:04}.npz", inputs)
        outputs = dict[str, Any]()
        for number, value in enumerate(session.run(None, dict(sample))):
            outputs |= arrays_of(f"output_{number}", value)
        _arrays(folder / "outputs" / f"{index:04}.npz", outputs)


def _arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an .npz file.

    ``numpy.savez`` does not support an array named "file".
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(
                    file, np.asanyarray(array), allow_pickle=False
                )


def _header(settings: Mapping[str, Any]) -> str:
    """Return the provider options as a C++ header.

    A type of static members, which the loader takes as a template argument: a program with several
    bundles gives each a name of its own.
    """
    rows = ""
    for name, row in settings["devices"].items():
        rows += f"\n      {{{json.dumps(name)}, {{{_cpp_pairs(row)}}}}},"
    texts = ""
    for name in ("model", "cache_key", "preprocess", "postprocess", "least_driver"):
        text = json.dumps(settings.get(name, ""))
        texts += f"  static inline const std::string {name} = {text};\n"
    return (
        "// Made with the model; see provider_options.json, and npu_session.hpp for several"
        " bundles.\n#pragma once\n\n#include <string>\n#include <unordered_map>\n\n"
        "#ifndef NPU_BUNDLE\n#define NPU_BUNDLE options\n#endif\n\nnamespace npu {\n\n"
        f"struct NPU_BUNDLE {{\n{texts}  static inline const"
        " std::unordered_map<std::string, std::unordered_map<std::string, std::string>>"
        f" devices = {{{rows}\n  }};\n}};\n\n}}  // namespace npu\n\n#undef NPU_BUNDLE\n"
    )


def _cpp_pairs(options: Mapping[str, str]) -> str:
    """Return options as the initializers of a C++ map.

    A string of JSON is valid in C++: both escape quotes and backslashes alike.
    """
    return ", ".join(
        f"{{{json.dumps(name)}, {json.dumps(value)}}}"
        for name, value in options.items()
    )


def _replace(made: Path, target: Path, aside: Path) -> None:
    """Move a folder to its destination, after moving an existing folder aside."""
    before = aside / "before"
    # A folder cannot replace a folder that holds files; the rename aside can be undone.
    if target.exists():
        target.replace(before)
    try:
        made.replace(target)
    except OSError:
        if before.exists():
            before.replace(target)
        raise


def _json(path: Path, document: Any) -> None:
    _text(path, json.dumps(document, indent=2) + "\n")


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
