"""Trial: a quantized model before it is written, and its errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from onnx import ModelProto

from calibrators.onnx_runtime.worker import Session
from quark_onnx.graph import Graph
from quark_onnx.report.measure import least_sqnr, measure
from quark_onnx.report.parts import JoinedParts
from quark_onnx.running.run import Reference, Sample
from quark_onnx.scales.encoded_constants import EncodedConstants
from quark_onnx.trials.quantized_session import open_graph

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """The model that a configuration gives, as the run would write it.

    Attributes:
        graph: the quantized graph.
        reference: the float model, whose outputs are computed once a sample.
        encoded: codes of the graph, which sessions of several trials share.
    """

    graph: Graph
    reference: Reference
    encoded: EncodedConstants = field(default_factory=EncodedConstants)

    @cached_property
    def model(self) -> ModelProto:
        """The quantized model."""
        return self.graph.to_model()

    @cached_property
    def session(self) -> Session:
        """A session with the results of the model, on the kernels that are fastest."""
        return open_graph(self.graph, self.encoded)

    def sqnr(self, samples: Sequence[Sample]) -> float:
        """Return the least SQNR over the outputs in dB; infinity without a measurable error."""
        errors = measure(self.reference.remembering, self.session, samples)
        return least_sqnr(errors, np.inf)

    def sqnr_to_decide(self, samples: Sequence[Sample]) -> float | None:
        """Return the least SQNR over the outputs in dB, for a choice between two trials.

        An output that joins boxes and scores of a detector has the mean SQNR of these parts.

        Returns:
            The SQNR; None if none can be measured, for example without samples.
        """
        if not samples:
            return None
        parts = JoinedParts()
        try:
            errors = measure(
                self.reference.remembering, self.session, samples, parts.add
            )
        # onnxruntime raises several unrelated types; the check of the final model reports the error
        except Exception as error:
            logger.debug("the SQNR of a trial cannot be measured: %s", error)
            return None
        return parts.least_sqnr(errors)
