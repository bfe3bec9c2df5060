"""The steps of quantize_static in reading order, a module per step."""

from quark_onnx.steps.apply_target_constraints import Limits, apply_target_constraints
from quark_onnx.steps.calibrate import (
    Calibrated,
    HoldOut,
    Ranges,
    calibrate,
    missing,
    stretch,
    unmeasured,
)
from quark_onnx.steps.calibration import Calibration, Keyed
from quark_onnx.steps.clipping import measure_clipping
from quark_onnx.steps.compute_qparams import (
    Params,
    ResolvedPlan,
    compute_bias_qparams,
    compute_qparams,
)
from quark_onnx.steps.destination import destination, keeps_weights_beside
from quark_onnx.steps.dynamic import quantized_before, read_floats
from quark_onnx.steps.finish import Finished, Judging, check, finish, hand_back
from quark_onnx.steps.function_bodies import (
    OLD_DOMAIN,
    RENAMED,
    define_functions,
    with_bodies,
)
from quark_onnx.steps.fuse import Agreement, fuse
from quark_onnx.steps.insert import insert
from quark_onnx.steps.insert_subgraphs import quantize_insides
from quark_onnx.steps.keep_sensitive_float import keep_sensitive_ops_float
from quark_onnx.steps.make_plan import make_plan
from quark_onnx.steps.mixed_precision import describe, mix
from quark_onnx.steps.nonfinite_inputs import allowed_nonfinite
from quark_onnx.steps.nothing_to_quantize import (
    has_nothing_to_quantize,
    require_something_to_quantize,
)
from quark_onnx.steps.open_data import first_sample, input_specs, reader_for
from quark_onnx.steps.opsets import lower_opset
from quark_onnx.steps.overwrites import (
    SAMPLE_SUFFIXES,
    Input,
    Output,
    refuse_overwrites,
    refuse_overwritten_arguments,
)
from quark_onnx.steps.plan_at_opset import plan_at_opset
from quark_onnx.steps.prepare import clean, prepare, prepare_again, settled
from quark_onnx.steps.provenance import write_provenance
from quark_onnx.steps.random_sample import random_sample
from quark_onnx.steps.range_files import FORMATS, GivenRanges, load_ranges, save_ranges
from quark_onnx.steps.run import Reference, Sample
from quark_onnx.steps.run_data import Planned, RunData
from quark_onnx.steps.scale_search import search
from quark_onnx.steps.spare_movers import spare_movers
from quark_onnx.steps.subgraph_plans import (
    SubgraphPlan,
    all_plans,
    give_up_late,
)
from quark_onnx.steps.tie_transposed_weights import tie_transposed_weights
from quark_onnx.steps.unfused_sums import unfuse_sums

__all__ = [
    "FORMATS",
    "OLD_DOMAIN",
    "RENAMED",
    "SAMPLE_SUFFIXES",
    "Agreement",
    "Calibrated",
    "Calibration",
    "Finished",
    "GivenRanges",
    "HoldOut",
    "Input",
    "Judging",
    "Keyed",
    "Limits",
    "Output",
    "Params",
    "Planned",
    "Ranges",
    "Reference",
    "ResolvedPlan",
    "RunData",
    "Sample",
    "SubgraphPlan",
    "all_plans",
    "allowed_nonfinite",
    "apply_target_constraints",
    "calibrate",
    "check",
    "clean",
    "compute_bias_qparams",
    "compute_qparams",
    "define_functions",
    "describe",
    "destination",
    "finish",
    "first_sample",
    "fuse",
    "give_up_late",
    "hand_back",
    "has_nothing_to_quantize",
    "input_specs",
    "insert",
    "keep_sensitive_ops_float",
    "keeps_weights_beside",
    "load_ranges",
    "lower_opset",
    "make_plan",
    "measure_clipping",
    "missing",
    "mix",
    "plan_at_opset",
    "prepare",
    "prepare_again",
    "quantize_insides",
    "quantized_before",
    "random_sample",
    "read_floats",
    "reader_for",
    "refuse_overwrites",
    "refuse_overwritten_arguments",
    "require_something_to_quantize",
    "save_ranges",
    "search",
    "settled",
    "spare_movers",
    "stretch",
    "tie_transposed_weights",
    "unfuse_sums",
    "unmeasured",
    "with_bodies",
    "write_provenance",
]
