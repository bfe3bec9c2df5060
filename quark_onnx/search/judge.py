"""Judge: scores quantized models by the worst output's SQNR on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import ModelProto

from calibrators.readers.spool import Spool
from quark_onnx.common.containers import names_of, subset
from quark_onnx.common.errors import ModelError
from quark_onnx.report.measure import OutputTotals, measure
from quark_onnx.report.parts import JoinedParts
from quark_onnx.running.run import Reference
from quark_onnx.trials.quantized_session import open_equivalent

#: Maximum size of cached float outputs in bytes; further outputs are computed again.
_MEMORY = 1 << 28


class Judge:
    """The float model's outputs on held-out samples, as reference for other models.

    Args:
        reference: the float model.
        samples: samples, at least one.

    Raises:
        ModelError: no output is float and repeatable.
    """

    def __init__(self, reference: Reference, samples: Spool) -> None:
        self._session = reference.session
        self._samples = samples
        # The float model against itself on one sample: an integer output has no SQNR, nor has a
        # random one.
        itself = measure(self._session, self._session, [samples[0]])
        self._names = [error.name for error in itself if error.sqnr is not None]
        if not self._names:
            names = ", ".join(names_of(itself))
            raise ModelError(
                f"no output ({names}) is float and repeatable, so none has an SQNR;"
                " give a metric",
            )
        # Float outputs by sample, which every candidate of a search is compared with.
        self._kept: dict[int, list[Any]] = {}
        self._room = _MEMORY

    def score(
        self,
        model: ModelProto,
        hopeless: Callable[[float, int], bool],
        every: int,
    ) -> tuple[float, int, bool]:
        """Return the SQNR of the worst output in dB.

        An output that joins boxes and scores of a detector has the mean SQNR of these parts.

        Args:
            model: a quantized model.
            hopeless: function of the score so far and the number of samples; True ends the
                evaluation.
            every: number of samples between calls of ``hopeless``.

        Returns:
            The SQNR, its number of samples, and True if the evaluation ended early.

        Raises:
            ModelError: the model cannot be run.
        """
        errors = _Errors(self._names)
        count = 0
        try:
            session = open_equivalent(model)
            # A quantized model may lack an input that only removed nodes read.
            inputs = names_of(session.get_inputs())
            for count, sample in enumerate(self._samples, 1):
                feed = subset(sample, inputs)
                outputs = session.run(self._names, feed)
                expected = self._expected(count - 1, sample)
                errors.add(sample, expected, outputs)
                # After the last sample nothing is saved by ending early, and the score is exact.
                last = count == len(self._samples)
                if count % every == 0 and not last and hopeless(errors.worst(), count):
                    return errors.worst(), count, True
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"the quantized model cannot be judged: {error}",
            ) from error
        return errors.worst(), count, False

    def _expected(self, place: int, sample: Any) -> list[Any]:
        """Return the float model's outputs on a sample.

        Args:
            place: index of the sample, the key of kept outputs.
            sample: inputs by name.

        Returns:
            The compared outputs, in the order of their names. They are kept in memory while there
            is room.
        """
        if place in self._kept:
            return self._kept[place]
        names = names_of(self._session.get_inputs())
        feed = subset(sample, names)
        outputs: list[Any] = self._session.run(self._names, feed)
        # A sequence or a map has no nbytes, and counts as the whole cache.
        size = sum(getattr(output, "nbytes", _MEMORY) for output in outputs)
        if size <= self._room:
            self._room -= size
            self._kept[place] = outputs
        return outputs


class _Errors:
    """The errors of the outputs of one model, sample by sample."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._totals = OutputTotals(names)
        self._parts = JoinedParts()

    def add(self, sample: Any, expected: Sequence[Any], found: Sequence[Any]) -> None:
        """Add the outputs of the float and of the quantized model on a sample.

        Args:
            sample: inputs by name.
            expected: outputs of the float model, in the order of the names.
            found: outputs of the quantized model, in the same order.
        """
        before = dict(zip(self._names, expected, strict=True))
        after = dict(zip(self._names, found, strict=True))
        self._totals.add(self._names, before, after)
        self._parts.add(sample, before, after)

    def worst(self) -> float:
        """Return the SQNR of the worst output in dB."""
        worst = self._parts.least_sqnr(self._totals.results())
        # Only outputs that have an SQNR on the first sample are compared.
        assert worst is not None
        return worst
