"""Recipes of ``quantize_quark.py``: quantize, write, reload, evaluate."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError, DataError, MissingDependency
from quark_onnx.common.wording import counted
from quark_onnx.torch.calibration.eval_tasks import Tasks
from quark_onnx.torch.calibration.perplexity import perplexity
from quark_onnx.torch.calibration.text import read_windows
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.recast import recast
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.exports.kinds import exported
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.file_to_file import Writing
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import Text, ptq, tokenizer_of
from quark_onnx.torch.quantization.api import COMPLETED
from quark_onnx.torch.quantization.params import load_params, save_params
from quark_onnx.torch.quantize_quark.arguments import notes_on, parse
from quark_onnx.torch.quantize_quark.settings import (
    batch_of,
    can_be_stored,
    exports_of,
    model_folder,
    torch_config,
)

#: The data set for evaluation in AMD Quark's script, and its held-out split.
_USUAL_TEXT = {None: "wikitext_test", "wikitext": "wikitext_test"}
#: AMD Quark's variants of the set with a prompt of gpt-oss.
_VARIANTS = ("wikitext_gpt_oss_120b", "wikitext_gpt_oss_20b")
_PERPLEXITY = "perplexity"

#: Values by metric: before and after quantization, or one value.
Metrics = dict[str, tuple[float, ...]]


@dataclass
class Results:
    """Results of a run.

    Attributes:
        headline: a summary in one sentence; empty if nothing was quantized.
        metrics: perplexity, and metrics of tasks.
        notes: notes for the user.
    """

    headline: str = ""
    metrics: Metrics = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Evaluation:
    """Evaluation of a model: the perplexity of a text, and tasks of lm-eval.

    Args:
        args: the arguments of the script.
        notes: list to which a note is appended if the default text is not available.

    Raises:
        ConfigError: a text or a task is unknown.
        MissingDependency: lm-eval is not installed.
    """

    def __init__(self, args: Namespace, notes: list[str]) -> None:
        # Both are checked before the model is quantized, which may take hours.
        self.text = None if args.skip_evaluation else _text(args, notes)
        # -1 is AMD's "all", for which lm-eval takes None.
        limit = None if args.num_eval_data < 0 else args.num_eval_data
        self.tasks: Tasks | None = None
        if args.tasks:
            self.tasks = Tasks(
                args.tasks,
                shots=args.num_fewshot,
                limit=limit,
                batch=batch_of(args),
                most=args.max_eval_batch_size,
                chat=args.apply_chat_template,
            )

    def of(self, model: nn.Module, folder: Path, trust_code: bool) -> dict[str, float]:
        """Return the metrics of a model in memory.

        Args:
            model: a transformers model, float or quantized.
            folder: the folder of its tokenizer.
            trust_code: run Python files of the tokenizer.

        Raises:
            DataError: the text or a task cannot be read.
        """
        metrics = dict[str, float]()
        if self.text is not None:
            # Windows depend on the tokenizer, and so on the model.
            tokenizer = tokenizer_of(folder, trust_code)
            text = self.text
            windows = read_windows(text.source, tokenizer, text.length, text.count)
            metrics[_PERPLEXITY] = perplexity(model, windows)
        if self.tasks is not None:
            scores = self.tasks.scores_of(model, folder, trust_code=trust_code)
            metrics |= {
                f"{task}: {name}": value
                for task, row in scores.items()
                for name, value in row.items()
            }
        return metrics


def run(args: Namespace) -> Results:
    """Run the recipe of the arguments.

    Raises:
        QuarkError: an argument is refused, or the model, the data or a setting is wrong.
    """
    # A refused argument raises here, before anything is read.
    results = Results(notes=list(notes_on(args)))
    evaluation = Evaluation(args, results.notes)
    # Each of the three asks for a quantized model that exists already.
    if args.model_reload or args.import_model_dir or args.params_load:
        _reload(args, evaluation, results)
    elif args.skip_quantization:
        _evaluate_float(args, evaluation, results)
    else:
        with _source(args) as source:
            _quantize(args, source, evaluation, results)
    if args.save_metrics_to_csv:
        _write_csv(Path(args.metrics_output_dir), results.metrics)
    return results


def main(words: Sequence[str] | None = None) -> None:
    """Run the script and print its results.

    Args:
        words: the command line; that of the process if None.

    Raises:
        QuarkError: an argument is refused, or the model, the data or a setting is wrong.
    """
    results = run(parse(words))
    if results.headline:
        print(results.headline)
    for note in results.notes:
        print(f"note: {note}")
    for name, values in results.metrics.items():
        # The metric of a task has a colon behind the task already.
        colon = " " if ": " in name else ": "
        print(f"{name}{colon}{_described(values)}")
    if results.headline:
        print(COMPLETED)


def _described(values: tuple[float, ...]) -> str:
    """Return the values of a metric as text.

    >>> _described((5.5,)), _described((5.5, 6.25))
    ('5.5000', '5.5000 before, 6.2500 after')
    """
    # One value: a float or a reloaded model is only evaluated.
    if len(values) == 1:
        return f"{values[0]:.4f}"
    before, after = values
    return f"{before:.4f} before, {after:.4f} after"


def _text(args: Namespace, notes: list[str]) -> Text | None:
    """Return the evaluation text, or None if the default text is not available.

    Raises:
        ConfigError: the text is a variant that is not supported.
    """
    asked = args.evaluation_dataset
    if asked in _VARIANTS:
        raise ConfigError(
            f"--evaluation_dataset {asked} is not supported: it puts the prompt of"
            " gpt-oss around wikitext; write that text into a file and name the file",
        )
    # "wikitext" alone is the split for calibration.
    text = Text(_USUAL_TEXT.get(asked, asked), length=args.seq_len)
    if asked is not None:
        return text
    try:
        # One window of two characters tells whether the text is there, without a tokenizer.
        read_windows(text.source, _characters, 2, 1)
    except (DataError, MissingDependency) as error:
        notes.append(f"no perplexity is computed: {error}")
        return None
    return text


def _characters(text: str, **_: Any) -> dict[str, list[int]]:
    """Tokenize a text into characters, to check whether the text is available."""
    return {"input_ids": list(map(ord, text))}


@contextmanager
def _source(args: Namespace) -> Iterator[FloatCheckpoint]:
    """Yield the float model with tensors in the requested dtype."""
    folder, output = model_folder(args), Path(args.output_dir)
    if args.data_type == "auto":
        yield FloatCheckpoint(folder, trust_code=args.trust_remote_code)
        return
    # The recast model is as large as the source: it goes to the disk of the output, not to the
    # temporary folder of the system.
    output.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(output.parent, f"{output.name}.{args.data_type}") as scratch:
        changed = recast(folder, scratch / "float", args.data_type)
        yield FloatCheckpoint(changed, trust_code=args.trust_remote_code)


def _device(name: str, notes: list[str]) -> str:
    """Return the named device; the CPU, with a note, if torch finds no GPU.

    cuda is the default of AMD's script, and therefore common in command lines.
    """
    if name.startswith("cuda") and not torch.cuda.is_available():
        notes.append(f"--device {name}: torch finds no GPU; the CPU is used")
        return "cpu"
    return name


def _quantize(
    args: Namespace,
    source: FloatCheckpoint,
    evaluation: Evaluation,
    results: Results,
) -> None:
    """Quantize into files, or in memory.

    The model is quantized in memory if nothing is written or the layout does not support the
    scheme.

    Args:
        results: receives metrics, notes and the headline.
    """
    config = torch_config(args, source)
    # None means that no format is named, so that the scheme decides whether a checkpoint is
    # written.
    kinds = exports_of(args, results.notes)
    writing = Writing(
        args.pack_method,
        layout=args.custom_mode,
        weight_format=args.export_weight_format,
        device=_device(args.device, results.notes),
    )
    # A layout that is named explicitly raises its own error for an unsupported scheme.
    stored = args.custom_mode != "quark" or can_be_stored(writing.form, config)
    # --params_save alone writes codes of a model in memory.
    if kinds is None and (not stored or args.params_save):
        if not stored:
            results.notes.append(
                f"no checkpoint layout supports {args.quant_scheme}: the model is"
                " evaluated, and not written",
            )
        _quantize_in_memory(args, source, config, evaluation, results)
        return
    output = Path(args.output_dir)
    text = Text(args.dataset, args.num_calib_data, args.seq_len)
    notes = list[str]()
    # GGUF and ONNX are made of a checkpoint, which is temporary if it is not requested itself.
    with exported(kinds or ["hf_format"], source, config, output, notes) as folder:
        outcome = ptq(
            source,
            text,
            config,
            folder,
            evaluate=evaluation.text,
            writing=writing,
            announce=lambda expected: print(f"this takes {expected}", flush=True),
        )
        # Inside the block: the temporary checkpoint is gone after it.
        scores: Mapping[str, Mapping[str, tuple[float, float]]] = {}
        if evaluation.tasks is not None:
            scores = evaluation.tasks.compared(
                source.folder, folder, trust_code=source.trust_code
            )
        if args.params_save:
            _save_params(args, load_checkpoint(folder, trust_code=source.trust_code))
    if outcome.before is not None and outcome.after is not None:
        results.metrics[_PERPLEXITY] = (outcome.before, outcome.after)
    for task, row in scores.items():
        results.metrics |= {f"{task}: {name}": values for name, values in row.items()}
    results.headline = outcome.report.headline
    results.notes += outcome.report.notes + notes


def _quantize_in_memory(
    args: Namespace,
    source: FloatCheckpoint,
    config: TorchConfig,
    evaluation: Evaluation,
    results: Results,
) -> None:
    """Quantize the loaded model without a checkpoint, and evaluate before and after.

    Args:
        results: receives metrics, notes and the headline.
    """
    trusted = source.trust_code
    model = load_checkpoint(source.folder, trust_code=trusted)
    data = None
    if config.needs_data:
        tokenizer = tokenizer_of(source.folder, trusted)
        windows = read_windows(
            args.dataset, tokenizer, args.seq_len, args.num_calib_data
        )
        # Shape (1, length): a batch of one window.
        data = [window[None] for window in windows]
    # Before the quantization, which replaces layers of the same model.
    before = evaluation.of(model, source.folder, trusted)
    report = quantize_model(model, data, config)
    after = evaluation.of(model, source.folder, trusted)
    results.metrics |= {name: (before[name], value) for name, value in after.items()}
    results.headline = report.headline
    results.notes += report.notes
    if args.params_save:
        _save_params(args, model)


def _evaluate_float(args: Namespace, evaluation: Evaluation, results: Results) -> None:
    """Evaluate the float model."""
    folder = model_folder(args)
    model = load_checkpoint(folder, trust_code=args.trust_remote_code)
    metrics = evaluation.of(model, folder, args.trust_remote_code)
    results.metrics |= {name: (value,) for name, value in metrics.items()}


def _reload(args: Namespace, evaluation: Evaluation, results: Results) -> None:
    """Load a quantized model and evaluate it.

    Raises:
        ConfigError: a file is not named, or an export is requested.
    """
    # The codes exist already: another format would be a conversion.
    if args.model_export is not None:
        raise ConfigError(
            "--model_export is given, but a model that is read again is evaluated"
            " alone; leave it out",
        )
    if args.params_load:
        folder = model_folder(args)
        model: Any = load_checkpoint(folder, trust_code=args.trust_remote_code)
        # The float model gives the structure; both files give layers and tensors.
        model = load_params(
            model,
            json_path=args.json_path or "",
            safetensors_path=args.safetensors_path or "",
        )
    else:
        if args.import_model_dir is None:
            raise ConfigError(
                "--import_model_dir is missing; name the folder of the quantized model",
            )
        folder = Path(args.import_model_dir)
        model = load_checkpoint(folder, trust_code=args.trust_remote_code)
    # 0 tells the user that a float folder was named by mistake.
    count = len(instances(model, QuantizedLayer))
    layers = counted(count, f"layer of {folder} is", f"layers of {folder} are")
    results.notes.append(f"{layers} quantized")
    metrics = evaluation.of(model, folder, args.trust_remote_code)
    results.metrics |= {name: (value,) for name, value in metrics.items()}


def _save_params(args: Namespace, model: Any) -> None:
    save_params(
        model,
        model.config.model_type,
        export_dir=args.save_dir,
        reorder=args.pack_method == "reorder",
    )


def _write_csv(folder: Path, metrics: Metrics) -> None:
    """Write metrics.csv: a row per metric, with its values before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("metric", "before", "after"))
        for name, values in metrics.items():
            rows.writerow((name, *values))
