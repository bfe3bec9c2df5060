"""Evaluation tasks of lm-evaluation-harness."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import ConfigError, DataError, MissingDependency, nearest
from quark_onnx.common.extras import pip_install
from quark_onnx.torch.checkpoints.load import load_checkpoint

if TYPE_CHECKING:
    from torch import nn

#: By task, then by metric.
Scores = Mapping[str, Mapping[str, float]]


class Tasks:
    """Tasks on which models are scored.

    Args:
        names: names of tasks and task groups of lm-eval, possibly with wildcards; or folders of
            definitions (.yaml), of which all are used. Files that a definition names are looked up
            in the current folder.
        shots: number of few-shot examples; the task's default if None.
        limit: maximum number of questions per task; all if None.
        batch: batch size, or "auto".
        most: maximum batch size of "auto".
        chat: whether to apply the chat template of the tokenizer.

    Raises:
        ConfigError: there is no such task, or a folder has none.
        MissingDependency: lm-eval is not installed.
    """

    def __init__(  # noqa: PLR0913
        self,
        names: Sequence[str],
        *,
        shots: int | None = None,
        limit: int | None = None,
        batch: int | str = 8,
        most: int = 64,
        chat: bool = False,
    ) -> None:
        evaluator = _library("lm_eval.evaluator")
        manager = _library("lm_eval.tasks").TaskManager
        # Imported here to report a missing package before a model is loaded or quantized.
        _library("lm_eval.models.huggingface")
        # An empty name would be the current folder.
        folders = [name for name in names if name and Path(name).is_dir()]
        others = [name for name in names if name not in folders]
        self._manager = manager(
            include_path=folders or None,
            include_defaults=bool(others),
        )
        self.names = list[str]()
        for name in names:
            # match_tasks knows names and wildcards; a folder stands for all the tasks that its
            # files define.
            tasks = self._manager.match_tasks([name])
            if name in folders:
                tasks = manager(include_path=name, include_defaults=False).all_subtasks
            if not tasks:
                reason = "has no definition of a task"
                if name not in folders:
                    hint = nearest(name, self._manager.all_tasks)
                    reason = f"is no task of lm-eval{hint}"
                raise ConfigError(f"{name!r} {reason}; 'lm-eval ls tasks' lists them")
            # A task that belongs to two of the names runs once.
            self.names += [task for task in tasks if task not in self.names]
        self._evaluate = evaluator.simple_evaluate
        self._settings = {
            "num_fewshot": shots,
            "limit": limit,
            "apply_chat_template": chat,
        }
        self._batches = {"batch_size": batch, "max_batch_size": most}

    def scores(self, folder: Path | str, *, trust_code: bool = False) -> Scores:
        """Return the scores of a checkpoint, float or quantized, by task and metric.

        Args:
            folder: the checkpoint.
            trust_code: run Python files of the checkpoint.

        Raises:
            DataError: a task cannot be run: its data is missing, or the model has no tokenizer.
        """
        return self.scores_of(
            load_checkpoint(folder, trust_code=trust_code),
            folder,
            trust_code=trust_code,
        )

    def scores_of(
        self,
        model: nn.Module,
        folder: Path | str,
        *,
        trust_code: bool = False,
    ) -> Scores:
        """Return the scores of a model in memory, by task and metric.

        Args:
            model: a transformers model, float or quantized.
            folder: the folder of its tokenizer.
            trust_code: run Python files of the tokenizer.

        Raises:
            DataError: a task cannot be run: its data is missing, or the model has no tokenizer.
        """
        from transformers import AutoTokenizer

        # HFLM takes a model in memory: a quantized one runs without a checkpoint of its own.
        wrapped = _library("lm_eval.models.huggingface").HFLM
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder),
                trust_remote_code=trust_code,
            )
            evaluation = self._evaluate(
                model=wrapped(pretrained=model, tokenizer=tokenizer, **self._batches),
                tasks=self.names,
                task_manager=self._manager,
                log_samples=False,
                **self._settings,
            )
        # Data sets, tokenizers and metrics raise unrelated types.
        except Exception as error:
            raise DataError(
                f"{', '.join(self.names)} cannot be run on {folder}: {error}",
            ) from error
        return {task: _numbers(row) for task, row in evaluation["results"].items()}

    def compared(
        self,
        source: Path | str,
        output: Path | str,
        *,
        trust_code: bool = False,
    ) -> dict[str, dict[str, tuple[float, float]]]:
        """Return the scores of two checkpoints, by task and metric.

        Args:
            source: the first checkpoint.
            output: the second checkpoint.
            trust_code: run Python files of the checkpoints.

        Raises:
            DataError: a task cannot be run.
        """
        # One after the other: the first model is released before the second is loaded.
        before = self.scores(source, trust_code=trust_code)
        after = self.scores(output, trust_code=trust_code)
        scores = dict[str, dict[str, tuple[float, float]]]()
        for task, row in before.items():
            scores[task] = {name: (was, after[task][name]) for name, was in row.items()}
        return scores


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a task without standard errors, and name answer filters.

    >>> _numbers({"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 1.0})
    {'acc': 0.5, 'exact_match,strict': 1.0}
    """
    return {
        # lm-eval names metrics "metric,filter" and standard errors "metric_stderr,filter"; other
        # keys, such as "alias", are no metrics.
        key.removesuffix(",none"): float(value)
        for key, value in row.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    }


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or "lm_eval"
        raise MissingDependency(
            f"{missing} is not installed; tasks need it: {pip_install('eval')}",
        ) from error
