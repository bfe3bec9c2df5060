"""StudyJournal: the candidates and records of a study, stored by Optuna.

Optuna (Akiba et al. 2019, "Optuna: A Next-generation Hyperparameter Optimization Framework")
proposes combinations, prunes hopeless candidates, and stores the records in a file. An interrupted
search continues from the journal, and several processes may share it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from calibrators.json_file import Entry, parse_json
from calibrators.shown import short
from quark_onnx.common.errors import ConfigError, MissingDependency
from quark_onnx.common.extras import pip_install
from quark_onnx.common.resume_folder import access_errors
from quark_onnx.study.record import Record

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

#: Names of user attributes of Optuna's trials and, for the last one, studies.
_RECORD, _KEY, _OWNER, _IDENTITY = "record", "config_key", "owner", "identity"
#: Number of candidates without pruning, and minimum number of samples before pruning.
_WARM_TRIALS, WARM_SAMPLES = 6, 8
#: Age at which a running candidate counts as abandoned, even if its process may be alive: more than
#: the quantization of a large language model takes.
_ABANDONED = timedelta(days=1)
#: Age up to which a running candidate without an owner counts as being started.
_STARTING = timedelta(minutes=1)
#: Number of polls for the key of a candidate that is being started, and seconds between them.
_POLLS, _POLL_SECONDS = 50, 0.02
#: What to do about a damaged journal.
_REMEDY = "remove the line, or name another file to search anew"


class Combination(Protocol):
    """A choice on each axis of a search space, and the configuration of the choices."""

    @property
    def name(self) -> str:
        """The name in tables."""

    @property
    def choices(self) -> Mapping[str, str]:
        """The label of the choice on each axis."""

    @property
    def key(self) -> str:
        """The key of the configuration; other choices may have the same one."""

    @property
    def document(self) -> Mapping[str, Any]:
        """The configuration as plain values."""


C = TypeVar("C", bound=Combination)


class StudyJournal(Generic[C]):
    """The records of a ``Study``: a study of Optuna over the axes of a space.

    Args:
        path: path of the file, created if missing; None to keep Optuna's study in memory.
        identity: dependencies of the records besides the configuration. A journal holds any number
            of searches, which differ in their identity.
        axes: labels of the choices on each axis of the space.
        combine: function from the label of a choice on each axis to the combination.

    Raises:
        ConfigError: the file is no journal, is damaged, or cannot be read and written.
        MissingDependency: Optuna is not installed.
    """

    def __init__(
        self,
        path: Path | None,
        identity: Mapping[str, Any],
        axes: Mapping[str, Sequence[str]],
        combine: Callable[[Mapping[str, str]], C],
    ) -> None:
        self._optuna = _import_optuna()
        self._path = path
        self._axes = {axis: list(labels) for axis, labels in axes.items()}
        self._identity = dict(identity)
        self._combine = combine
        # Optuna fixes the choices of a parameter for the life of a study, so each space has a study
        # of its own.
        text = json.dumps([self._identity, self._axes], sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        with self.quiet():
            self._storage = None if path is None else _open_journal(path)
            self.optuna = self._optuna.create_study(
                study_name=f"quark_onnx {name}",
                storage=self._storage,
                # Scores are better the higher they are.
                direction="maximize",
                pruner=self._optuna.pruners.MedianPruner(
                    n_startup_trials=_WARM_TRIALS,
                    n_warmup_steps=WARM_SAMPLES,
                ),
                load_if_exists=True,
            )
            if self.optuna.direction != self._optuna.study.StudyDirection.MAXIMIZE:
                raise ConfigError(
                    f"journal {path}: the study {self.optuna.study_name!r} has another"
                    f" direction; {_REMEDY}",
                )
            # The name is a hash; the identity itself is stored to be compared by later searches.
            self.optuna.set_user_attr(_IDENTITY, self._identity)
            self._known = self._records_elsewhere()
        # The running candidate of this process.
        self._running: tuple[C, optuna.Trial] | None = None

    def known(self, combination: C) -> Record | None:
        """Return the record of a configuration from another search in the journal."""
        return self._known.get(combination.key)

    def finished(self) -> list[tuple[C, Record]]:
        """Return each candidate with its record, in starting order.

        Returns:
            Combinations and records, including those of other processes and failed ones.
        """
        records = dict[str, tuple[C, Record]]()
        for trial in self._trials():
            # A trial with a record counts in any state: the record is stored before the state, and
            # the process may have died in between.
            if _RECORD not in trial.user_attrs:
                continue
            combination = self._combine(self._choices(trial))
            # A label may have changed its meaning, such as the path of a file that was edited.
            key = self._attribute(trial, _KEY).text()
            if key == combination.key and key not in records:
                records[key] = combination, self._record(trial)
        return list(records.values())

    def running(self) -> list[Hashable]:
        """Return the keys of configurations in evaluation by other processes."""
        return [
            self._attribute(trial, _KEY).text()
            for trial in self._running_elsewhere()
            if _KEY in trial.user_attrs
        ]

    def propose(self) -> C:
        """Return a proposal of Optuna's sampler, which is marked as running."""
        return self._ask(None)

    def claim(self, combination: C) -> bool:
        """Mark a candidate as running; return False if another process has it.

        Args:
            combination: a combination, or the last proposal.
        """
        if self._running is None or self._running[0].key != combination.key:
            self._ask(combination)
        if combination.key in self._earlier_keys():
            self.drop()
            return False
        return True

    def report(self, score: float, samples: int) -> bool:
        """Report an intermediate score of the running candidate.

        Args:
            score: score on the samples so far, higher is better.
            samples: number of these samples.

        Returns:
            True if the evaluation should end.
        """
        assert self._running is not None
        trial = self._running[1]
        with self.quiet():
            trial.report(score, samples)
            return bool(trial.should_prune())

    def keep(self, record: Record) -> None:
        """Store the record of the running candidate; it is on the disk on return."""
        assert self._running is not None
        combination, trial = self._running
        states = self._optuna.trial.TrialState
        with self.quiet():
            # For readers of the journal and of the dashboard; this package reads the record.
            trial.set_user_attr("config", combination.document)
            trial.set_user_attr(_RECORD, asdict(record))
            if record.score is None:
                self.optuna.tell(trial, state=states.FAIL)
            elif record.pruned:
                self.optuna.tell(trial, state=states.PRUNED)
            else:
                self.optuna.tell(trial, record.score)
        self._running = None

    def drop(self) -> None:
        """End the running candidate, if there is one, without a record."""
        if self._running is None:
            return
        trial, self._running = self._running[1], None
        with self.quiet():
            self.optuna.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def _ask(self, wanted: C | None) -> C:
        """Mark the next candidate as running, and return it.

        Args:
            wanted: the combination to mark; None for a proposal of Optuna's sampler.
        """
        self.drop()
        with self.quiet():
            # the number of trials as seed makes an interrupted search reproducible
            self.optuna.sampler = self._optuna.samplers.TPESampler(
                n_startup_trials=1,
                seed=len(self._trials()),
                constant_liar=True,  # parallel processes avoid equal trials
            )
            while True:
                if wanted is not None:
                    # The next ask() returns the enqueued trial instead of a proposal.
                    self.optuna.enqueue_trial(dict(wanted.choices))
                asked = self.optuna.ask()
                # Every axis is asked for, in one order: the sampler models all of them.
                choices = {
                    axis: asked.suggest_categorical(axis, labels)
                    for axis, labels in self._axes.items()
                }
                combination = self._combine(choices)
                if wanted is None or combination.key == wanted.key:
                    break
                # Another process enqueued this trial, and was killed before it asked.
                self.optuna.tell(asked, state=self._optuna.trial.TrialState.FAIL)
            asked.set_user_attr("name", combination.name)
            # With the host, as a process number is unique on one machine alone. Before the key: a
            # candidate with a key always has an owner.
            asked.set_user_attr(_OWNER, f"{socket.gethostname()}:{os.getpid()}")
            asked.set_user_attr(_KEY, combination.key)
        self._running = combination, asked
        return combination

    def _earlier_keys(self) -> list[str]:
        """Return the keys of candidates that were finished, or begun before the running one.

        If several processes begin the same candidate at the same time, the first one keeps it.
        """
        assert self._running is not None
        number = self._running[1].number
        for _ in range(_POLLS):
            running = self._running_elsewhere()
            keys = [
                trial.user_attrs.get(_KEY, "")
                for trial in running
                if trial.number < number
            ]
            if all(keys):
                break
            sleep(_POLL_SECONDS)  # the other process is about to store the key
        finished_keys = [combination.key for combination, _ in self.finished()]
        return [*keys, *finished_keys]

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        with self.quiet():
            trials: list[optuna.trial.FrozenTrial] = self.optuna.get_trials(
                # Copies of all trials would cost time in each round; the trials are only read.
                deepcopy=False,
            )
        return trials

    def _running_elsewhere(self) -> list[optuna.trial.FrozenTrial]:
        """Return the running trials of other processes, and fail those of dead processes."""
        states = self._optuna.trial.TrialState
        number = None if self._running is None else self._running[1].number
        running: list[optuna.trial.FrozenTrial] = []
        for trial in self._trials():
            if trial.state != states.RUNNING or trial.number == number:
                continue
            if _is_running(trial):
                running.append(trial)
                continue
            # Another process may end it at the same time.
            ended_already = self._optuna.exceptions.UpdateFinishedTrialError
            with self.quiet(), suppress(ended_already):
                self.optuna.tell(trial.number, state=states.FAIL, skip_if_finished=True)
        return running

    def _records_elsewhere(self) -> dict[str, Record]:
        """Return the records of other studies in the journal with an equal identity."""
        if self._storage is None:
            return {}
        summaries = self._optuna.get_all_study_summaries(self._storage)
        if not self._trials() and len(summaries) > 1:
            logger.info(
                "journal %s: a new study, as those in it have another version, model, data, score"
                " or space",
                self._path,
            )
        records = dict[str, Record]()
        for summary in summaries:
            # Studies of one identity have the same model, data and metric, and another space: equal
            # configurations have equal records.
            is_same = summary.user_attrs.get(_IDENTITY) == self._identity
            if not is_same or summary.study_name == self.optuna.study_name:
                continue
            study = self._optuna.load_study(
                study_name=summary.study_name,
                storage=self._storage,
            )
            for trial in study.get_trials(deepcopy=False):
                if _RECORD in trial.user_attrs:
                    # ``_ask`` sets the key, before any record.
                    key = self._attribute(trial, _KEY).text()
                    records[key] = self._record(trial)
        return records

    def _attribute(self, trial: optuna.trial.FrozenTrial, name: str) -> Entry:
        """Return an attribute of a trial."""
        return self._entry(trial, trial.user_attrs)[name]

    def _entry(self, trial: optuna.trial.FrozenTrial, value: Any) -> Entry:
        where = f"journal {self._path}, trial {trial.number}"
        return Entry(value, where, remedy=_REMEDY, error=ConfigError)

    def _record(self, trial: optuna.trial.FrozenTrial) -> Record:
        """Return the record of a trial.

        Raises:
            ConfigError: a value is missing or of another type.
        """
        record = self._attribute(trial, _RECORD)
        score, size = record["score"], record["bytes"]
        # Records of earlier versions have no runtime, or no scatter.
        runtime = record.object().get("runtime")
        scatter = record.object().get("scatter")
        if score.value is not None and type(score.value) not in (int, float):
            raise score.wrong("a number, or null")
        return Record(
            score.value,
            record["seconds"].number(),
            None if size.value is None else size.integer(),
            record["error"].text(),
            record["judged"].integer(),
            record["pruned"].boolean(),
            None if runtime is None or runtime.value is None else runtime.number(),
            0.0 if scatter is None else scatter.number(),
        )

    def _choices(self, trial: optuna.trial.FrozenTrial) -> dict[str, str]:
        """Return the label on each axis of a trial.

        Raises:
            ConfigError: an axis is missing, or a label is none of its labels.
        """
        params = self._entry(trial, trial.params)
        return {
            axis: params[axis].one_of(labels) for axis, labels in self._axes.items()
        }

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Hide Optuna's messages, and name the journal in its errors."""
        optuna_logging = self._optuna.logging
        verbosity = optuna_logging.get_verbosity()
        optuna_logging.set_verbosity(optuna_logging.WARNING)
        errors: AbstractContextManager[None] = nullcontext()
        if self._path is not None:
            errors = access_errors(f"journal {self._path}")
        try:
            with warnings.catch_warnings(), errors:
                warnings.simplefilter(
                    "ignore",
                    self._optuna.exceptions.ExperimentalWarning,
                )
                yield
        finally:
            optuna_logging.set_verbosity(verbosity)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingDependency(
            f"{error.name or error} is not installed; a search needs Optuna:"
            f" {pip_install('search')}",
        ) from error
    return optuna


def _open_journal(path: Path) -> Any:
    """Open a journal, and remove the partial line of a killed process.

    Args:
        path: path of the file, which is created if missing. A partial last line is removed.

    Returns:
        Optuna's ``JournalStorage``.

    Raises:
        ConfigError: the file is no journal, or is damaged.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    lock = JournalFileOpenLock(str(path))
    if path.exists():
        # Before the lock, so that no lock file appears next to a file of another kind.
        _check_journal(path, path.read_bytes())
        lock.acquire()
        try:
            # Read again under the lock: another process may have appended a line.
            content = path.read_bytes()
            with path.open("ab") as file:
                # rfind is -1 without a line, which empties the file: the first line was partial.
                file.truncate(content.rfind(b"\n") + 1)
        finally:
            lock.release()
    try:
        # Reads and applies all lines.
        return JournalStorage(JournalFileBackend(str(path), lock))
    # Lines that contradict each other fail in whatever Optuna does first.
    except Exception as error:
        if isinstance(error, OSError) or not path.exists():
            raise
        raise ConfigError(
            f"journal {path}: its lines contradict each other"
            f" ({type(error).__name__}: {short(str(error))}); {_REMEDY}",
        ) from error


def _check_journal(path: Path, content: bytes) -> None:
    """Raise ConfigError if a file is no journal of Optuna, or is damaged.

    Args:
        path: path of the file, for messages.
        content: content of the file; a last line without a line break is not checked.

    Raises:
        ConfigError: the first line is no entry, or a later line is damaged.
    """
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    # A process that was killed at its start leaves an empty file, or the beginning of a first line.
    if not lines and not b'{"op_code":'.startswith(content[:11]):
        raise _no_journal(path)
    for number, line in enumerate(lines, 1):
        try:
            where = f"journal {path}, line {number}"
            _check_operation(parse_json(line, where, ConfigError, _REMEDY))
        except ConfigError:
            if number == 1:
                raise _no_journal(path) from None
            raise


def _check_operation(entry: Entry) -> None:
    """Raise ConfigError if a line is no operation of Optuna's journal."""
    operation = entry["op_code"].integer(most=len(_OPERATIONS) - 1)
    entry["worker_id"].text()
    for key, check in _OPERATIONS[operation].items():
        check(entry[key])


def _one_attribute(entry: Entry) -> None:
    if len(entry.object()) != 1:
        raise entry.wrong("an object with one key")


def _scores(entry: Entry) -> None:
    # A failed trial has null, and a finished one has the score of its single objective.
    if entry.value is not None:
        scores = entry.array()
        if len(scores) != 1:
            raise entry.wrong("null, or an array of one number")
        _score(scores[0])


def _score(entry: Entry) -> None:
    # Python's JSON has infinity and NaN, and a score may be either.
    if type(entry.value) not in (int, float):
        raise entry.wrong("a number")


#: Checks of the keys of each operation, by its number in Optuna's enumeration JournalOperation
#: (optuna/storages/journal/_storage.py).
_OPERATIONS: list[dict[str, Callable[[Entry], object]]] = [
    # CREATE_STUDY
    {"study_name": Entry.text, "directions": Entry.array},
    # DELETE_STUDY
    {"study_id": Entry.integer},
    # SET_STUDY_USER_ATTR
    {"study_id": Entry.integer, "user_attr": _one_attribute},
    # SET_STUDY_SYSTEM_ATTR
    {"study_id": Entry.integer, "system_attr": _one_attribute},
    # CREATE_TRIAL
    {"study_id": Entry.integer},
    # SET_TRIAL_PARAM
    {
        "trial_id": Entry.integer,
        "param_name": Entry.text,
        "param_value_internal": _score,
        "distribution": Entry.text,
    },
    # SET_TRIAL_STATE_VALUES
    {"trial_id": Entry.integer, "state": Entry.integer, "values": _scores},
    # SET_TRIAL_INTERMEDIATE_VALUE
    {"trial_id": Entry.integer, "step": Entry.integer, "intermediate_value": _score},
    # SET_TRIAL_USER_ATTR
    {"trial_id": Entry.integer, "user_attr": _one_attribute},
    # SET_TRIAL_SYSTEM_ATTR
    {"trial_id": Entry.integer, "system_attr": _one_attribute},
    # DISCARD_TRIALS, of another implementation (Rustuna); Optuna ignores it
    {},
]


def _no_journal(path: Path) -> ConfigError:
    return ConfigError(
        f"journal {path} exists and is no journal of a search; it is not overwritten",
    )


def _is_running(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether the process that started a trial may still evaluate it."""
    # Optuna stores local times without a zone.
    age = datetime.now() - (trial.datetime_start or datetime.now())
    owner = str(trial.user_attrs.get(_OWNER, ""))
    if not owner:  # ``_ask`` is about to set the owner
        return age < _STARTING
    return age < _ABANDONED and _is_alive(owner)


def _is_alive(owner: str) -> bool:
    """Return True if the process that started a candidate may still be running.

    Args:
        owner: host and process number, joined by a colon.

    Returns:
        False if the process has ended, or if it is this process. True for processes of other
        machines and, on Windows, for any owner.
    """
    host, _, number = owner.rpartition(":")
    # On Windows, os.kill ends a process. There, and for other machines, the age alone decides.
    if host != socket.gethostname() or not number.isdigit() or os.name != "posix":
        return True
    if int(number) == os.getpid():  # an earlier search of this process
        return False
    try:
        # Signal 0 only asks whether the process exists.
        os.kill(int(number), 0)
    # OverflowError: no process has so large a number.
    except (ProcessLookupError, OverflowError):
        return False
    # The process exists, and belongs to another user.
    except PermissionError:
        return True
    return True
