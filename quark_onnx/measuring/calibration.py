"""Statistics of a model's activations, measured once and reused by many runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from onnx import ModelProto

from calibrators import Grid, GroupedHistogram, MovingExtremes, Range, Statistic
from calibrators.derived import derived
from calibrators.json_file import Entry
from calibrators.onnx_runtime.control_flow import Observation
from calibrators.scratch import written
from calibrators.stored import kind_of, read_statistic, to_plain
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.version import __version__
from quark_onnx.graph import model_key
from quark_onnx.running.run import Sample, sample_key

#: The first name in a file, and the version of its layout.
TITLE, _FORMAT = "quark_onnx_ranges", 1


@dataclass
class Measured:
    """The statistics of a tensor.

    Attributes:
        name: name of the tensor, for people.
        axis: axis of the channels with a row each; None for one row.
        statistics: statistics of different kinds, none derivable from another.
    """

    name: str
    axis: int | None
    statistics: list[Statistic] = field(default_factory=list)


class Calibration:
    """Statistics of the activations of one model on calibration samples.

    A tensor is identified by its computation (``tensor_keys``). Statistics therefore serve
    every configuration, and a tensor that an optimizer changes is measured again.

    Args:
        model: the key of the float model.
        samples: number of measured samples.
        source: the source file, for messages.

    Attributes:
        digests: hashes of the measured samples, in their order.
    """

    def __init__(self, model: str, samples: int = 0, source: str = "") -> None:
        self.model = model
        self.samples = samples
        self.source = source
        self.digests: dict[str, None] = {}
        # By key and channel axis.
        self._tensors: dict[tuple[str, int | None], Measured] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def require_model(self, model: ModelProto) -> None:
        """Check that the statistics belong to a model; unassigned statistics are assigned to it.

        Raises:
            ConfigError: they were measured on another model.
        """
        # A hash, as the file may have moved.
        key = model_key(model)
        if not self.model:
            self.model = key
        if self.model != key:
            raise ConfigError(
                f"ranges {self.source or 'given'} were measured on another model;"
                " measure anew with quark-onnx calibrate",
            )

    def has_seen(self, sample: Sample) -> bool:
        """Return whether the statistics may depend on a sample.

        A file of an earlier version does not know its samples, and may have seen any.
        """
        if self.samples and not self.digests:
            return True
        return sample_key(sample) in self.digests

    def entries(self) -> Iterator[tuple[str, Measured]]:
        """Return the key and the statistics of every tensor, in graph order."""
        for (key, _), entry in self._tensors.items():
            yield key, entry

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of statistics."""
        return sorted(
            {
                kind_of(statistic)
                for entry in self._tensors.values()
                for statistic in entry.statistics
            }
        )

    def find(self, key: str, axis: int | None, wanted: Statistic) -> Statistic | None:
        """Return the statistic of a tensor; None without a measurement.

        Args:
            key: key of the tensor.
            axis: axis of the channels with a row each.
            wanted: an empty statistic of the required kind.
        """
        entry = self._tensors.get((key, axis))
        for statistic in entry.statistics if entry is not None else ():
            # A histogram has the extremes, too, and a grouped histogram has both.
            match = derived(statistic, wanted)
            if match is not None:
                return match
        return None

    def add(self, name: str, key: str, axis: int | None, statistic: Statistic) -> None:
        """Store a statistic unless it follows from a stored statistic.

        Args:
            name: name of the tensor, for people.
            key: key of its computation.
            axis: axis of the channels with a row each; None for one row.
            statistic: the statistic; one of a kind that files do not store is ignored.
        """
        if not kind_of(statistic) or self.find(key, axis, statistic) is not None:
            return
        entry = self._tensors.setdefault((key, axis), Measured(name, axis))
        # Statistics that the new one implies would only take space.
        kept = [
            known for known in entry.statistics if derived(statistic, known) is None
        ]
        entry.statistics = [*kept, statistic]

    def save(self, path: str | Path) -> None:
        """Write a file for ``load_ranges``, atomically.

        Raises:
            ConfigError: the file cannot be written.
        """
        tensors = list[dict[str, Any]]()
        for (key, axis), entry in self._tensors.items():
            tensors.append(
                {
                    "name": entry.name,
                    "key": key,
                    "axis": axis,
                    "statistics": list(map(to_plain, entry.statistics)),
                }
            )
        document = {
            TITLE: _FORMAT,
            "version": __version__,
            "model": self.model,
            "samples": self.samples,
            "digests": list(self.digests),
            "tensors": tensors,
        }
        # NaN and infinity are no JSON, and a statistic with them would be a defect.
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        write_ranges(path, text)

    @classmethod
    def of_document(cls, document: Entry, source: str) -> Calibration:
        """Return the calibration from a document written by ``save``.

        Args:
            document: the content of a JSON file.
            source: the file, for messages.

        Raises:
            ConfigError: the document is damaged, or of a later version.
        """
        if document[TITLE].value != _FORMAT:
            raise ConfigError(
                f"ranges {source}: the file is not of this version of the package;"
                " measure anew with quark-onnx calibrate",
            )
        result = cls(document["model"].text(), document["samples"].integer(), source)
        # Files of earlier versions do not have them.
        if (digests := document.get("digests")) is not None:
            result.digests = dict.fromkeys(entry.text() for entry in digests.array())
        for row in document["tensors"].array():
            axis = None if row["axis"].value is None else row["axis"].integer(-64, 63)
            name, key = row["name"].text(), row["key"].text()
            for values in row["statistics"].array():
                statistic = read_statistic(values)
                rows = len(statistic.lo)
                # Nothing was observed where there are no rows.
                if axis is None and rows > 1:
                    raise values["lo"].invalid(f"of {rows} rows, and the axis is null")
                result.add(name, key, axis, statistic)
        return result


def write_ranges(path: str | Path, text: str) -> None:
    """Write a file of ranges, atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with written(Path(path)) as file:
            file.write(text.encode())
    except (OSError, ValueError) as error:
        # ValueError for a path with a null character has no strerror.
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"ranges {path} cannot be written: {reason}") from error


@dataclass(frozen=True)
class Everything:
    """A calibrator whose statistic implies every statistic except moving averages.

    Attributes:
        by_sample: the statistic depends on the boundaries between samples.
    """

    by_sample: ClassVar[bool] = True

    def statistic(self) -> GroupedHistogram:
        return GroupedHistogram()

    def range(self, statistic: GroupedHistogram, grid: Grid) -> Range:
        """Return the full observed range."""
        return Range(statistic.lo, statistic.hi)


class GraphCalibration:
    """A calibration with the tensor keys of a graph.

    Args:
        calibration: known statistics; a run adds its measurements.
        keys: tensor keys by name, as computed by ``tensor_keys``.
        rich: measure statistics that serve every calibrator, instead of the wanted ones.
    """

    def __init__(
        self, calibration: Calibration, keys: Mapping[str, str], *, rich: bool = True
    ) -> None:
        self.calibration = calibration
        self._keys = keys
        self._rich = rich
        # statistics of tensors without a key, valid for this run only
        self._others = Calibration("")

    def known(
        self, observations: Iterable[Observation]
    ) -> dict[Observation, Statistic]:
        """Return the stored statistics of the given observations.

        Args:
            observations: the observations.

        Returns:
            The statistics of those that are stored, of the kind that each calibrator needs.
        """
        statistics = {}
        for observation in observations:
            store, key = self._store_and_key(observation)
            wanted = observation.calibrator.statistic()
            statistic = store.find(key, observation.axis, wanted)
            if statistic is not None:
                statistics[observation] = statistic
        return statistics

    def richer(self, observations: Iterable[Observation]) -> list[Observation]:
        """Return equivalent observations for every calibrator, if the calibration is rich.

        Args:
            observations: the observations.

        Returns:
            The observations without duplicates if the calibration is rich, otherwise as given.
            Moving averages are observed as they are.
        """
        if not self._rich:
            return list(observations)
        rich = dict[Observation, None]()
        for observation in observations:
            # A moving average depends on the order of the samples, and follows from no histogram.
            if not isinstance(observation.calibrator.statistic(), MovingExtremes):
                observation = replace(observation, calibrator=Everything())
            rich[observation] = None
        return list(rich)

    def keep(
        self, observations: Sequence[Observation], statistics: Sequence[Statistic]
    ) -> None:
        """Store new statistics.

        Args:
            observations: the observations, with or without a key.
            statistics: a statistic for each observation.
        """
        for observation, statistic in zip(observations, statistics, strict=True):
            store, key = self._store_and_key(observation)
            store.add(observation.tensor, key, observation.axis, statistic)

    def counted(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Yield and count the samples; the count is stored once all are read."""
        count = 0
        for sample in samples:
            yield sample
            count += 1
        self.calibration.samples = max(self.calibration.samples, count)

    def measured(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples that are measured, and remember them if the calibration is rich.

        Other statistics serve this run alone, which knows its samples.
        """
        for sample in samples:
            if self._rich:
                self.calibration.digests[sample_key(sample)] = None
            yield sample

    def _store_and_key(self, observation: Observation) -> tuple[Calibration, str]:
        key = self._keys.get(observation.tensor)
        if key is None:
            return self._others, observation.tensor
        return self.calibration, key
