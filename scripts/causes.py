"""Causes and cures of error messages, for the page of errors.

A rule applies to messages whose template has its text. The first rule wins; a message without one
has the entry of its class. A test fails if a rule applies to no message, or a class has no entry.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """Cause and cure of the messages that match a regular expression."""

    pattern: str
    cause: str
    cure: str


#: Cause and cure by the class of the error.
CLASSES = {
    "UsageError": (
        "The command line has an unknown, missing or contradictory option.",
        "Take the nearest name of the message, or see `quark-onnx COMMAND --help`.",
    ),
    "ConfigError": (
        "A setting is unknown, malformed, contradictory, or without effect on this model.",
        "Correct the key or the value; see [settings](reference/settings.md).",
    ),
    "ConfigNotFoundError": (
        "A file of settings or of custom operators does not exist.",
        "Correct the path; it is relative to the current folder.",
    ),
    "CallError": (
        "An argument of a translated API (onnxruntime, AMD Quark) has no counterpart.",
        "Follow the alternative in the message; see the pages on migration.",
    ),
    "ModelError": (
        "The model cannot be read, checked, run or written.",
        "Run `onnx.checker` and the float model in onnxruntime; export the model again.",
    ),
    "ModelNotFoundError": (
        "A file of the model does not exist.",
        "Correct the path; it is relative to the current folder.",
    ),
    "TimeLimitError": (
        "A part of the work did not end within its time limit.",
        "Raise the limit or the budget, or use fewer samples.",
    ),
    "NotWalkable": (
        "A layer of a language model does not run on its own, so blocks cannot be streamed.",
        "Quantize the model in memory with `quantize_model`.",
    ),
    "RuntimeCrashError": (
        "onnxruntime crashed on the model. Its process is isolated, so only the run is lost.",
        "Try another version of onnxruntime, or leave operators float with `--exclude`.",
    ),
    "RunError": (
        "onnxruntime opens the model, and cannot run it on a sample.",
        "Compare the sample's shapes and types with the model's inputs. A model that takes a file"
        " at once needs `--batch-axis none`.",
    ),
    "UnknownOperatorError": (
        "onnxruntime lacks a custom operator of the model.",
        "Give its library: `--custom-op-library FILE`, `custom_op_libraries(file)` in Python.",
    ),
    "InliningError": (
        "onnx cannot inline the functions of the model.",
        "Inline them where the model is exported, or try another version of onnx.",
    ),
    "UnknownOperator": (
        "onnxruntime lacks a custom operator of the model.",
        "As for UnknownOperatorError.",
    ),
    "RuntimeCrash": (
        "onnxruntime crashed; the package `calibrators` raises this error.",
        "As for RuntimeCrashError.",
    ),
    "DataError": (
        "The calibration data cannot be read, or do not fit the model's inputs.",
        "Compare names, shapes and types with the message; see [data](howto/data.md).",
    ),
    "DataNotFoundError": (
        "The path of data or labels does not exist.",
        "Correct the path; it is relative to the current folder.",
    ),
    "DataNotFound": (
        "The path of the data does not exist; the package `calibrators` raises this error.",
        "As for DataNotFoundError.",
    ),
    "EmptyReader": (
        "The data have no sample, or a generator was consumed before.",
        "Pass a list, or a new generator; check the folder.",
    ),
    "ReaderEndedEarly": (
        "A reader has fewer samples than it announced, or cannot be read twice.",
        "Pass a list, or give the reader a working `rewind`.",
    ),
    "NonFiniteSample": (
        "A sample, or a tensor of the model, has NaN or infinity.",
        "Correct the preprocessing, or leave out the sample that is named.",
    ),
    "SampleMismatch": (
        "A sample has another name, type, rank or size than an input of the model.",
        "Correct the names and shapes; for NHWC data use `--input-layout nhwc`.",
    ),
    "CalibrationError": (
        "A calibrator or a reader has an impossible setting.",
        "Correct the setting; see [calibrators](reference/registries.md#calibrators).",
    ),
    "ConstraintError": (
        "Rules of a processor contradict each other on this model.",
        "Exclude one of the named tensors, or choose another target.",
    ),
    "AccuracyError": (
        "The result is less accurate than the gate allows. Nothing was written.",
        "See [accuracy is too low](howto/accuracy.md), or lower the gate.",
    ),
    "MissingDependency": (
        "An optional package is not installed.",
        "Run the `pip install` command of the message.",
    ),
    "PlanError": (
        "An operator rule or a kernel made an impossible decision: a defect of the package.",
        "Report the defect with the model; leave the node float with `--exclude` meanwhile.",
    ),
    "MetaTensorError": (
        "A language model computes something from weights that are not loaded yet.",
        "Report the model's family; quantize the model in memory with `quantize_model`.",
    ),
}
#: Causes and cures by text, the more specific first.
RULES = (
    Rule(
        r"accuracy gate",
        "An output misses the gate: `--min-sqnr`, or the 10 dB of `npu deploy`.",
        "Run `quark-onnx analyze`, then see [accuracy is too low](howto/accuracy.md).",
    ),
    Rule(
        r"quantized already",
        "The input has Q/DQ pairs, integer operators, or a `quantization_config`.",
        "Start from the float model, or use `--keep-existing` for ONNX models.",
    ),
    Rule(
        r"is not installed|pip install",
        "An optional package is not installed.",
        "Run the `pip install` command of the message.",
    ),
    Rule(
        r"protobuf message ends at 2 GB",
        "A protobuf file cannot exceed 2 GB.",
        "Save the model with external data; see [models over 2 GB](howto/large_models.md).",
    ),
    Rule(
        r"above the limit of|raise_it\(",
        "A tensor, an array or an image is larger than the limit (1 GB by default).",
        "Set `QUARK_ONNX_TENSOR_LIMIT_GB` if the size is intended.",
    ),
    Rule(
        r"onnxruntime (cannot|could not) (load|open|run)|cannot be run|model cannot be measured",
        "onnxruntime refuses the model or a sample: an unknown operator, an opset that is too"
        " new, or inputs that do not fit.",
        "Run the float model in onnxruntime on the same sample; try another version, or"
        " `quark-onnx convert --to opset`.",
    ),
    Rule(
        r"needs opset|cannot be lowered|cannot be raised|cannot convert the model to opset",
        "A number format needs another opset than the model has, and onnx cannot convert it.",
        "Export the model at the opset of the message, or choose another format.",
    ),
    Rule(
        r"hard links|lies outside the model's folder|cannot be found|is not the name of a file",
        "Weights in other files are not where the model says, or not safe to read.",
        "Copy the files into the model's folder; keep the `.data` file next to the `.onnx`.",
    ),
    Rule(
        r"cannot be written|is a device or a pipe|exists; remove|which exists and is not"
        r"|holds .* which is of no earlier",
        "The output path cannot be written, or holds something else.",
        "Name a new file or folder; check permissions and free space.",
    ),
    Rule(
        r"is damaged|truncated|ends after|ends before|is not valid|holds no graph"
        r"|cannot be read",
        "A file is damaged, incomplete, or of another kind than its name says.",
        "Download or export the file again.",
    ),
    Rule(
        r"infinite or no number|infinite or none|no finite float32|are infinite or no numbers",
        "A weight or an activation has NaN or infinity.",
        "Check the float model on the same sample; for fp16 models try float32.",
    ),
    Rule(
        r"no calibration data|no sample|calibration data is empty|needs data_config"
        r"|calibration_data_reader is None|samples are too few|at least two samples",
        "Static quantization needs samples, and there are none or too few.",
        "Pass `--data`, or use `--dynamic` or `--weights-only`, which need no data.",
    ),
    Rule(
        r"twice",
        "The same thing is given or defined twice.",
        "Remove one of the two.",
    ),
    Rule(
        r"unknown|is not known|is not supported|nearest\(|must be one of|choose of",
        "A name is misspelled, or does not exist in this version.",
        "Take the nearest name of the message; `quark-onnx list` prints all names.",
    ),
    Rule(
        r"it must (be|take)|must be a|neither True nor False|is not a ",
        "A value has another type or lies outside of its range.",
        "Give a value as the message describes.",
    ),
    Rule(
        r"leave it out|leave out|choose one of|of the two",
        "Two settings contradict each other, or one has no effect here.",
        "Leave out the one that the message names.",
    ),
    Rule(
        r"layout",
        "The layout of the checkpoint does not support the format or the layer.",
        "Choose one of the layouts of the message; see [layouts](llm.md#layouts).",
    ),
    Rule(
        r"llama\.cpp|GGUF|gguf",
        "llama.cpp or the GGUF format does not support this part of the model.",
        "Choose another `--kind` or scheme, or export a checkpoint for vLLM.",
    ),
    Rule(
        r"tokenizer",
        "The folder has no tokenizer, or one of an unsupported type.",
        "Copy the tokenizer's files into the folder, or give token ids (.npy, .npz).",
    ),
    Rule(
        r"config\.json|safetensors|checkpoint",
        "The folder of a language model is incomplete or inconsistent.",
        "Download all files of the model again.",
    ),
    Rule(
        r"this is a defect|is a defect",
        "An internal check failed: a defect of the package.",
        "Report the defect with the command and the model.",
    ),
)
