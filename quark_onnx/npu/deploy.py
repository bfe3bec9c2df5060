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
from quark_onnx.analysis.compare import Comparison, compare
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import (
    AccuracyError,
    ConfigError,
    ModelError,
    data_errors,
    system_reason,
)
from quark_onnx.common.progress import Show, showing
from quark_onnx.common.wording import counted
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
from quark_onnx.npu.cut import Parts, cut
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
from quark_onnx.npu.page import FORECAST_NOTE, forecast_blocks, write_page
from quark_onnx.npu.placement import NPU
from quark_onnx.npu.preflight import Preflight, preflight
from quark_onnx.npu.readme import readme
from quark_onnx.npu.tail import run_tail, try_tail
from quark_onnx.page.blocks import Block, Facts, Judgement, Notes
from quark_onnx.page.reported import Reported
from quark_onnx.plan.existing import is_quantizing
from quark_onnx.report import Report, decibels
from quark_onnx.report.verdict import NextStep, Verdict, boxes
from quark_onnx.report.verdict.task import find_task
from quark_onnx.report.verdict.verdict import BANDS, Band
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
_MEASURE = NextStep(
    "--float-model FLOAT.onnx",
    "measures the accuracy",
    "deploy(model, data, folder, float_model=float_model)",
)
#: Module of a detector's bundle that reads boxes, and is also the one of the verdict.
_BOXES = "boxes.py"
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
            to bfloat16; for a model that was quantized before, the comparison with its float
            model. None if nothing was measured.
        check: broken rules of the target; warnings alone.
        forecast: the nodes that will run on the processor.
        notes: rewrites of the legalization.
        images: conversion of image files to inputs of the model; None if the data are arrays.
        tail: the model that runs after this one on the CPU; None if the model is complete.
        next_steps: another number format to try, with its forecast; empty where the forecast and
            the accuracy are good.
        cut_at: tensors at which the model was cut; empty if it is complete.
        legal: the legalized float model, which was quantized; None if unknown.
    """

    folder: Path
    kind: str
    report: Report | Comparison | None
    check: Check
    forecast: Preflight
    notes: tuple[str, ...]
    images: ImageSpec | None = None
    tail: ModelProto | None = None
    next_steps: tuple[NextStep, ...] = ()
    cut_at: tuple[str, ...] = ()
    legal: ModelProto | None = field(default=None, compare=False, repr=False)

    @property
    def accuracy(self) -> Verdict | None:
        """Return the verdict on the accuracy; None if nothing was measured."""
        return None if self.report is None else self.report.verdict

    @property
    def worst_sqnr(self) -> float | None:
        """Return the SQNR of the worst output in dB; None if nothing was measured."""
        if isinstance(self.report, Comparison):
            return self.report.sqnr
        return None if self.report is None else self.report.worst_sqnr

    @property
    def band(self) -> Band:
        """Return the worse band of accuracy and forecast: "good", "risky" or "poor".

        With a good forecast and an accuracy that nothing tells, the band is "unclear".
        """
        accuracy: Band = "unclear" if self.accuracy is None else self.accuracy.band
        if accuracy not in BANDS:
            return "unclear" if self.forecast.band == "good" else self.forecast.band
        return max(accuracy, self.forecast.band, key=BANDS.index)

    @property
    def sentence(self) -> str:
        """Return the verdict on accuracy and forecast in one sentence, without the band."""
        sentence = "the accuracy was not measured"
        if self.accuracy is not None:
            sentence = self.accuracy.sentence
            if self.cut_at:
                sentence = f"at {counted(len(self.cut_at), 'cut tensor')}: {sentence}"
        return (
            f"{sentence}; forecast for {self.forecast.device}: {self.forecast.sentence}"
        )

    @property
    def cut_line(self) -> str:
        """Return where the model was cut, in words; empty if it is complete."""
        if not self.cut_at or self.tail is None:
            return ""
        behind = counted(len(self.tail.graph.node), "node")
        return f"at {', '.join(self.cut_at)}; {behind} behind run on the CPU ({_TAIL})"

    @property
    def judgement(self) -> Judgement:
        """Return the verdict with all steps to take."""
        accuracy = self.accuracy
        steps = (*(() if accuracy is None else accuracy.next_steps), *self.next_steps)
        measured_on = "" if accuracy is None else accuracy.measured_on
        actions = tuple(step.action for step in steps)
        return Judgement(
            self.band, self.sentence, actions, measured_on, (FORECAST_NOTE,)
        )

    def blocks(self) -> list[Block]:
        """Return the verdict, the accuracy, the forecast and the legalization as blocks."""
        target = self.forecast.target.name
        lines = {
            "bundle": [f"{self.kind} model for {target} in {self.folder}"],
            "cut": [self.cut_line] if self.cut_at else [],
            "legalized": self.notes,
            "rules": [self.check.sentence],
        }
        # The first block of either is a verdict of its own.
        quality = [] if self.report is None else self.report.blocks()[1:]
        return [
            Facts((), lines),
            self.judgement,
            *forecast_blocks(self.forecast)[1:],
            self.check.problems,
            *quality,
            Notes("Legalization", self.notes),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the bundle as plain values, without the nodes of the forecast."""
        forecast = self.forecast.to_dict()
        del forecast["nodes"]
        verdict = None
        if self.accuracy is not None:
            verdict = asdict(self.accuracy)
            verdict |= {"band": self.band, "sentence": self.sentence}
        return {
            "output": self.folder,
            "kind": self.kind,
            "notes": list(self.notes),
            "cut_at": list(self.cut_at),
            "worst_sqnr": self.worst_sqnr,
            "verdict": verdict,
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
    progress: Show = False,
    ep_options: Mapping[str, str] | None = None,
    xclbin: str | Path | None = None,
    float_model: str | Path | ModelProto | None = None,
) -> Bundle:
    """Legalize, quantize and check a model, and write the deployment folder.

    A model that is quantized already, by any tool, keeps its codes: it is legalized and checked.

    The folder holds the model, provider options for each device that supports the format, and
    loaders for Python and C++, which report a fallback to the CPU. It also holds samples with
    outputs that were computed on the CPU, a script that compares, reports, and checksums.

    Args:
        model: the whole model, or the parts that ``cut`` returns. The second part, which may have
            operators of onnxruntime-extensions, is shipped too and runs after the first on the
            CPU.
        data: calibration data, as for ``quantize_static``. None for BF16 and for a quantized
            model, of which a random sample is shipped then, and no accuracy is measured. If an
            ``ImageSpec`` reads images, the preprocessing is shipped as an ONNX model with
            operators of onnxruntime-extensions.
        folder: path of a folder that does not exist, is empty, or holds an earlier bundle. An
            earlier bundle is replaced in one step at the end.
        target: name of the target.
        config: configuration of the quantization; its target is set to ``target``. A quantized
            model needs none.
        shapes: sizes of dynamic dimensions, by the name of an input.
        min_sqnr: minimum signal-to-noise ratio of every output in dB, unless the config has one;
            None for no minimum.
        progress: as for ``quantize_static``.
        ep_options: further options of the execution provider for the target, such as
            ``{"opt_level": "2"}``. ``{"target": "X1"}`` on stx is the target "stx-x1". Options of
            the BF16 compiler, such as ``preferred_data_storage``, go to its configuration.
        xclbin: overlay of Phoenix and Hawk Point to ship with the bundle, which releases after
            1.7.1 do not install; None for the one of the installation.
        float_model: the float model of a quantized one, to measure the accuracy on the data; None
            to measure none. A float model needs none.

    Returns:
        The folder, the model's format, and the reports.

    Raises:
        ConfigError: the device does not support the number format, or the folder cannot be
            written.
        ConstraintError: the result breaks rules of the target.
        AccuracyError: an output has a lower signal-to-noise ratio than the minimum.
        QuarkError: the model or the data is wrong. No file is written then.
    """
    with showing(progress) as show:
        extra = dict(ep_options or {})
        refuse_overwritten_arguments(
            {"model": model, "data": data, "config": config}, {"folder": folder}
        )
        path = _bundle_folder(Path(folder))
        given = Given.of(model, target, QConfig.of(config), extra, min_sqnr)
        overlay = _overlay(xclbin, given.target)
        reference = _reference(float_model, model, data, given)
        _check_inputs(given.front)
        target, kind = given.target.name, given.kind
        # Before calibration: data must have the fixed shapes, and scales belong to the final
        # operators.
        legal = legalize(given.front, target, shapes=shapes, kind=kind)
        reader, samples = _read(legal.model, data, given)
        if given.tail is not None:  # before the time that quantizing takes
            try_tail(given.tail, legal.model, samples[0])
        result = legal.model
        report: Report | Comparison | None = None
        if not given.coded:
            # Nothing is measured of a BF16 model without data.
            if kind != "BF16" or data is not None:
                quantized = _quantized(legal.model, given, reader, show)
                report = quantized.report
                if kind != "BF16":
                    result = quantized.model
        elif reference is not None and data is not None:
            reference = legalize(reference, target, shapes=shapes, kind=kind).model
            report = _compared(reference, legal.model, data, given, show)
        checked, forecast = check(result, target), preflight(result, target, kind=kind)
        # Checked on the result: quantization may add nodes that break rules of the graph.
        require_rules(checked, "nothing was written")
        # Readers of images are partials of a function with the argument ``images``.
        images = data.keywords.get("images") if isinstance(data, partial) else None
        bundle = Bundle(
            path,
            kind,
            report,
            checked,
            forecast,
            legal.notes,
            images,
            given.tail,
            cut_at=given.cut_at,
        )
        if not given.coded:
            steps = format_steps(legal.model, forecast, bundle.accuracy)
            bundle = replace(bundle, next_steps=steps, legal=legal.model)
        elif report is None:
            bundle = replace(bundle, next_steps=(_MEASURE,))
        _put(bundle, result, samples, extra, overlay)
        return bundle


@dataclass(frozen=True)
class Given:
    """Model to deploy, the device, and the settings, as ``deploy`` and its forecast take them.

    Attributes:
        front: the model for the processor.
        tail: the model after it, which runs on the CPU; None without one.
        cut_at: tensors at which a model was cut into the two; empty if it was not.
        coded: whether the model is quantized already.
        kind: number format of the written model.
        target: the device, with its compiler.
        config: the settings, with the gate.
    """

    front: ModelProto
    tail: ModelProto | None
    cut_at: tuple[str, ...]
    coded: bool
    kind: str
    target: Target
    config: QConfig

    @property
    def task(self) -> str:
        """The task for the verdict: tensors at a cut are no results of a task."""
        return "signal" if self.cut_at else "auto"

    @classmethod
    def of(
        cls,
        model: str | Path | ModelProto | Parts,
        target: str,
        config: QConfig,
        extra: Mapping[str, str],
        min_sqnr: float | None,
    ) -> Given:
        """Load the model, and check the options and the number format.

        Args:
            model: as for ``deploy``.
            target: as for ``deploy``.
            config: the settings of the caller.
            extra: further options of the provider.
            min_sqnr: the minimum, unless the settings have one.

        Raises:
            ConfigError: the device does not take the options or the number format.
        """
        tail, cut_at = None, tuple[str, ...]()
        if isinstance(model, Parts):
            tail, cut_at, model = load(model.second), model.tensors, model.first
        front = load(model)
        npu_of(target)  # an unknown target is an error before others
        coded = is_coded(front, config)
        kind = preflight(front, target).kind if coded else format_of(config)
        check_options(extra, npu_of(target), kind)
        # Another compiler takes other formats and operators, whatever the device.
        row = npu_of(compiled_for(target, extra))
        config = config.with_(target=row.name)
        why = refusal(row, config)
        if coded:
            why = unfit_codes(preflight(front, row.name))
        if why:
            raise ConfigError(why)
        if config.min_sqnr is None:
            config = config.with_(min_sqnr=min_sqnr)
        return cls(front, tail, cut_at, coded, kind, row, config)


def _read(
    legal: ModelProto, data: CalibrationData | None, given: Given
) -> tuple[Reader, list[Sample]]:
    """Return a reader of the calibration data, and the samples to ship."""
    # A model of 16 bits is quantized in float32. Samples are shipped in the model's own types, in
    # which an application feeds it.
    wide, narrowing = upcast_to_float32(legal)
    if data is None and (given.coded or not given.config.measures):
        # Nothing is measured: the shipped sample may be a random one.
        sample = random_sample(Graph.of(wide), Reference(wide))
        data = None if sample is None else [sample]
    reader = reader_for(Graph.of(wide), data, given.config)
    return reader, _shipped(reader, narrowing.inputs)


def _reference(
    float_model: str | Path | ModelProto | None,
    model: str | Path | ModelProto | Parts,
    data: CalibrationData | None,
    given: Given,
) -> ModelProto | None:
    """Return the float model, cut as the quantized one was; None if there is none.

    Raises:
        ConfigError: the quantized model cannot be compared with it.
    """
    if float_model is None:
        return None
    if not given.coded:
        raise ConfigError("the model is a float model: leave out float_model")
    if data is None:
        raise ConfigError("float_model needs data, to compare the models on")
    if is_coded(load(float_model), given.config):
        raise ConfigError(
            "float_model is quantized; give the model that was quantized, or leave it out"
        )
    if given.cut_at:
        reference = cut(float_model, given.cut_at).first
    else:
        reference = load(float_model)
    # Without the constants that a model lists as inputs.
    names, names_of_float = (
        [value.name for value in Graph.of(each).fed]
        for each in (given.front, reference)
    )
    if set(names) != set(names_of_float):
        quantized = f" {model}" if isinstance(model, str | Path) else ""
        original = f" {float_model}" if isinstance(float_model, str | Path) else ""
        raise ConfigError(
            f"the quantized model{quantized} has the inputs {', '.join(names)}, and the float"
            f" model{original} has {', '.join(names_of_float)}; give the one that was quantized"
        )
    return reference


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


def is_coded(model: ModelProto, config: QConfig) -> bool:
    """Return whether a model is quantized already, and is not to be quantized further."""
    if config.keep_existing:
        return False
    return any(map(is_quantizing, Graph.of(inlined(model)).nodes))


def unfit_codes(forecast: Preflight) -> str:
    """Return the reason to refuse a quantized model, with this forecast; empty if accepted."""
    target = forecast.target
    if not forecast.quantized:
        return (
            "the model has operators on integers and no Q/DQ pairs, which the compilers take;"
            " quantize its float model"
        )
    if forecast.kind in target.presets:
        return ""
    return (
        f"the model is {forecast.kind}, but {target.name} ({target.summary}) takes"
        f" {', '.join(target.presets)}; quantize its float model to one of them"
    )


def _compared(
    reference: ModelProto,
    model: ModelProto,
    data: CalibrationData,
    given: Given,
    progress: bool | None,
) -> Comparison:
    """Compare a quantized model with its float model.

    Raises:
        AccuracyError: an output has a lower signal-to-noise ratio than the gate.
    """
    comparison = compare(reference, model, data, task=given.task, progress=progress)
    gate = given.config.min_sqnr
    if gate is not None and comparison.sqnr < gate:
        raise AccuracyError(
            f"the worst output has {decibels(comparison.sqnr)} dB SQNR, the minimum is"
            f" {gate:g} dB (change it by --min-sqnr, min_sqnr)",
            outputs=comparison.outputs,
        )
    verdict = comparison.verdict
    if verdict is None or comparison.warnings:
        return comparison
    # Settings of the quantization change nothing of a model that is quantized.
    return replace(comparison, verdict=replace(verdict, next_steps=()))


def _quantized(
    legal: ModelProto, given: Given, reader: Reader, progress: bool | None
) -> Result:
    """Quantize a legalized model; the check of the preprocessing sees the float model.

    The statistics of the first BatchNormalization show the scaling of the training data, and
    legalization folds them into weights.
    """
    # Bfloat16 tensors show the error alone; the device's compiler makes its own.
    config = given.config.with_(target="") if given.kind == "BF16" else given.config
    front = given.front
    folded = any(node.op_type == "BatchNormalization" for node in front.graph.node)
    job = Job.open(legal, config, None, external=False)
    try:
        job = replace(job, trained=front if folded else None, task=given.task)
        return run(job, reader, None, progress)
    except AccuracyError as error:
        # Changes of the configuration are tried on this model, not on the caller's.
        error.model = legal
        raise
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
    """Settings of the engine in a bundle.

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
    if _record(folder, samples, bundle.tail):
        _text(folder / _BOXES, Path(boxes.__file__).read_text(encoding="utf-8"))
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
    verdict = {"band": bundle.band, "sentence": bundle.sentence}
    findings = list(map(str, bundle.check.findings))
    _json(
        folder / "report.json",
        {
            "verdict": verdict,
            "accuracy": report,
            "forecast": forecast,
            "warnings": findings,
        },
    )
    write_page(bundle.forecast, folder / "forecast.html", _MODEL)
    _text(
        folder / "README.md",
        readme(bundle, others=settings),
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


def _record(folder: Path, samples: Sequence[Sample], tail: ModelProto | None) -> bool:
    """Write samples and the outputs that the model computes on the CPU.

    Returns:
        Whether the model, with the one after it, is a detector.
    """
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
        results = session.run(None, dict(sample))
        for number, value in enumerate(results):
            outputs |= arrays_of(f"output_{number}", value)
        _arrays(folder / "outputs" / f"{index:04}.npz", outputs)
    names = [value.name for value in session.get_outputs()]
    last, found = load(folder / _MODEL), dict(zip(names, results, strict=True))
    if tail is not None:
        last, found = tail, run_tail(tail, {**sample, **found})
    # Texts are no boxes.
    numbers = {
        name: value
        for name, value in boxes.arrays_of(found).items()
        if value.dtype.kind in "biuf"
    }
    task = find_task(last, boxes.arrays_of(sample), numbers)
    return task.name == "detector" and task.layout is not None


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
