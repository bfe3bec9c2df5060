"""Ryzen AI processors: rules, forecasts, deployment and bit-exact simulation."""

from quark_onnx.npu.choose import choose
from quark_onnx.npu.cut import Parts, cut
from quark_onnx.npu.deploy import Bundle, deploy
from quark_onnx.npu.deploy_forecast import DeployForecast, deploy_forecast
from quark_onnx.npu.ep_report import EPReport, Scored, read_report, score
from quark_onnx.npu.legalize import Legalized, legalize
from quark_onnx.npu.placement import NodePlacement
from quark_onnx.npu.preflight import Preflight, preflight
from quark_onnx.npu.simulate import Simulation, Simulator, simulate
from quark_onnx.recipes import Choice, Recipe
from quark_onnx.targets.check import Check, check
from quark_onnx.targets.finding import RULES, Finding, Rule

__all__ = [
    "RULES",
    "Bundle",
    "Check",
    "Choice",
    "DeployForecast",
    "EPReport",
    "Finding",
    "Legalized",
    "NodePlacement",
    "Parts",
    "Preflight",
    "Recipe",
    "Rule",
    "Scored",
    "Simulation",
    "Simulator",
    "check",
    "choose",
    "cut",
    "deploy",
    "deploy_forecast",
    "legalize",
    "preflight",
    "read_report",
    "score",
    "simulate",
]
