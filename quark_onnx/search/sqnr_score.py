"""Score: the worst output's SQNR of a quantized model on held-out samples, for a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnx import ModelProto

from calibrators.onnx_runtime.remembering import RememberingSession
from calibrators.readers.spool import Spool
from quark_onnx.common.errors import ModelError
from quark_onnx.engines import selected
from quark_onnx.graph.random_operators import may_be_random
from quark_onnx.report.measure import Measurement, lanes_for, measure
from quark_onnx.report.parts import JoinedParts
from quark_onnx.running.function_bodies import with_bodies
from quark_onnx.running.run import Reference
from quark_onnx.trials.quantized_session import open_equivalent

#: Maximum size of remembered float outputs in bytes; further outputs are computed again.
_MEMORY = 1 << 28


class SqnrScore(NamedTuple):
    """The score of a model.

    Attributes:
        sqnr: the SQNR of the worst output in dB. An output that joins boxes and scores of a
            detector has the mean SQNR of these parts.
        samples: number of measured samples.
        pruned: whether the measurement ended before the last sample.
    """

    sqnr: float
    samples: int
    pruned: bool


class SqnrScorer:
    """The float model on held-out samples, as the reference of every candidate."""

    def __init__(self, reference: Reference, samples: Spool) -> None:
        """Find the outputs that have an SQNR.

        Args:
            reference: the float model.
            samples: samples, at least one.

        Raises:
            ModelError: no output is float and repeatable.
        """
        self._reference = RememberingSession(
            reference.session, _MEMORY, may_be_random=may_be_random(reference.model)
        )
        self._samples = samples
        # The float model against itself on one sample: an integer output has no SQNR, nor has a
        # random one.
        session = reference.session
        itself = measure(session, session, [samples[0]])
        self._names = [error.name for error in itself if error.sqnr is not None]
        if not self._names:
            names = ", ".join(error.name for error in itself)
            raise ModelError(
                f"no output ({names}) is float and repeatable, so none has an SQNR;"
                " give a metric",
            )

    def score(
        self,
        model: ModelProto,
        hopeless: Callable[[float, int], bool],
        every: int,
    ) -> SqnrScore:
        """Return the score of a quantized model.

        Args:
            model: the quantized model.
            hopeless: function of the SQNR so far and the number of samples; True ends the
                measurement.
            every: number of samples between calls of ``hopeless``.

        Raises:
            ModelError: the model cannot be run.
        """
        parts, count = JoinedParts(), 0
        try:
            engine = selected()
            if engine is None:
                session = open_equivalent(model)
            else:
                session = engine.open(with_bodies(model), what="the quantized model")
            measurement = Measurement(self._reference, session, self._names)
            with lanes_for(self._reference) as lanes:
                runs = lanes.in_order(measurement.run, self._samples)
                for count, run in enumerate(runs, 1):
                    measurement.add(run)
                    parts.add(*run)
                    # After the last sample nothing is saved by ending early.
                    if count % every or count == len(self._samples):
                        continue
                    worst = parts.least_sqnr(measurement.so_far())
                    if worst is not None and hopeless(worst, count):
                        return SqnrScore(worst, count, pruned=True)
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"the quantized model cannot be judged: {error}",
            ) from error
        worst = parts.least_sqnr(measurement.so_far())
        assert worst is not None, "only outputs with an SQNR are compared"
        return SqnrScore(worst, count, pruned=False)
