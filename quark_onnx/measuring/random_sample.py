"""A random sample for models without data, to verify rewrites by running the model."""

from __future__ import annotations

import logging
import warnings

from calibrators.errors import CalibrationError
from calibrators.onnx_runtime.extensions import DOMAINS
from calibrators.readers.open import RandomData
from quark_onnx.common.errors import ModelError, raise_crash
from quark_onnx.graph import Graph
from quark_onnx.measuring.open_data import check_sample, input_specs
from quark_onnx.running.run import Reference, Sample

logger = logging.getLogger(__name__)

#: Sizes to try for the symbolic dimensions of a model.
_SIZES = (1, 2, 8, 32, 224)


def random_sample(graph: Graph, reference: Reference) -> Sample | None:
    """Return random inputs accepted by the float model.

    Args:
        graph: the float graph.
        reference: the float model; the outputs on the sample are kept in it.

    Returns:
        The sample; None if no inputs are found, or if a file decoder would read them.

    Raises:
        ModelError: onnxruntime cannot load the float model, or its process ended on a sample.
    """
    reference.session  # noqa: B018  (a model that cannot be loaded is nothing to begin with)
    if any(node.domain in DOMAINS for node in graph.nodes):
        return None  # an image decoder crashes the process on other input
    specs = input_specs(graph)
    sizes = [size for spec in specs for size in (spec.shape or ())]
    symbols = [size for size in sizes if isinstance(size, str)]
    # Small sizes run fastest; a network whose strides leave nothing of a small picture needs 224.
    for size in _SIZES:
        try:
            with warnings.catch_warnings():
                # The sample is not used for calibration.
                warnings.simplefilter("ignore")
                [sample] = RandomData(1, dims=dict.fromkeys(symbols, size)).draw(specs)
            check_sample(graph, sample)
            reference.outputs(sample)
        except (CalibrationError, ModelError) as error:
            raise_crash(error)
            logger.debug("no sample with dimensions of %d: %s", size, error)
            # Without symbolic dimensions every size gives the same sample.
            if not symbols:
                break
        else:
            return sample
    return None
