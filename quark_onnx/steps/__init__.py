"""quantize_static in reading order, one file a step."""

from quark_onnx.steps.bodies import OLD_DOMAIN, RENAMED, define_functions, with_bodies
from quark_onnx.steps.calibrate import HoldOut, Ranges, calibrate, stretch, unmeasured
from quark_onnx.steps.destination import destination, keeps_weights_beside
from quark_onnx.steps.dynamic import quantized_before, read_floats
from quark_onnx.steps.finish import Finished, check, finish, hand_back
from quark_onnx.steps.fuse import Agreement, fuse
from quark_onnx.steps.guard import guard
from quark_onnx.steps.insert import insert
from quark_onnx.steps.inside import Inside, all_plans, give_up_late, plan_insides, wanted
from quark_onnx.steps.insides import quantize_insides
from quark_onnx.steps.journal import check_folder, sample_key
from quark_onnx.steps.make_plan import make_plan
from quark_onnx.steps.means import accept_biases, correct_biases
from quark_onnx.steps.mixed import describe, mix
from quark_onnx.steps.opsets import lower_opset, raise_opset_for
from quark_onnx.steps.optimize import give_biases, optimize_float
from quark_onnx.steps.prepare import clean, prepare, rewritten
from quark_onnx.steps.probe import probe
from quark_onnx.steps.read import first_sample, input_specs, reader_for
from quark_onnx.steps.refine import refine
from quark_onnx.steps.run import Reference, Sample
from quark_onnx.steps.run_data import Planned, RunData
from quark_onnx.steps.search import search
from quark_onnx.steps.settle import Limits, settle
from quark_onnx.steps.share import share_transposed
from quark_onnx.steps.solve import Params, solve, solve_biases
from quark_onnx.steps.spare_movers import spare_movers
from quark_onnx.steps.tolerate import tolerated
from quark_onnx.steps.worth import Before, worst_sqnr

__all__ = [
    "OLD_DOMAIN",
    "RENAMED",
    "Agreement",
    "Before",
    "Finished",
    "HoldOut",
    "Inside",
    "Limits",
    "Params",
    "Planned",
    "Ranges",
    "Reference",
    "RunData",
    "Sample",
    "accept_biases",
    "all_plans",
    "calibrate",
    "check",
    "check_folder",
    "clean",
    "correct_biases",
    "define_functions",
    "describe",
    "destination",
    "finish",
    "first_sample",
    "fuse",
    "give_biases",
    "give_up_late",
    "guard",
    "hand_back",
    "input_specs",
    "insert",
    "keeps_weights_beside",
    "lower_opset",
    "make_plan",
    "mix",
    "optimize_float",
    "plan_insides",
    "prepare",
    "probe",
    "quantize_insides",
    "quantized_before",
    "raise_opset_for",
    "read_floats",
    "reader_for",
    "refine",
    "rewritten",
    "sample_key",
    "search",
    "settle",
    "share_transposed",
    "solve",
    "solve_biases",
    "spare_movers",
    "stretch",
    "tolerated",
    "unmeasured",
    "wanted",
    "with_bodies",
    "worst_sqnr",
]
