"""quark-onnx explain: the quantization plan of a model, without data."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from calibrators.shown import printable
from quark_onnx import api
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    add_common_options,
    add_html_option,
    add_model_argument,
)
from quark_onnx.cli.settings import add_config_options, config_of
from quark_onnx.common.wording import counted
from quark_onnx.config import to_dict
from quark_onnx.graph import Node
from quark_onnx.page.blocks import (
    Block,
    Facts,
    Judgement,
    Reasons,
    Text,
    TitledTable,
)
from quark_onnx.page.browser import write_page
from quark_onnx.plan import BiasOf, Keep, Plan, Quantize, SameAs, Use, explain
from quark_onnx.planning.subgraph_plans import SubgraphPlan, all_plans, plan_bodies
from quark_onnx.report import summarize

NAME = "explain"
SUMMARY = (
    "print the quantization plan: the format of each tensor, and why some stay float"
)
USAGE = "%(prog)s MODEL [OPTION ...]"
EXAMPLE = """\
example:
  quark-onnx explain model.onnx --preset A16W8 --exclude '/head/*'

Calibration can change the plan: a Concat of very different ranges, for instance, stays float."""

_DECISIONS = {Quantize: "quantize", SameAs: "same_as", BiasOf: "bias", Keep: "float"}


def add_arguments(parser: Parser) -> None:
    add_model_argument(parser, "float model, an .onnx file")
    add_config_options(parser)
    add_html_option(parser, "write a page with the plan")
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    config = config_of(options)
    plan = api.plan_for(options.model, config)
    body_plans = plan_bodies(plan.graph, config)
    plans = [plan, *all_plans(body_plans)]
    # Operator type -> (number of quantized nodes, number of nodes).
    operators, kept, kept_tensors = summarize(*plans)
    quantized_nodes = sum(quantized for quantized, _ in operators.values())
    total = sum(count for _, count in operators.values())
    shares = [
        f"{kind} {quantized}/{count}" for kind, (quantized, count) in operators.items()
    ]
    summary = f"{quantized_nodes} of {counted(total, 'node')} would be quantized"
    if shares:
        summary += f": {', '.join(shares)}"
    below = "each node with the tensors that it reads (<) and computes (>)"
    facts = {
        "model": [str(options.model)],
        "config": str(config).splitlines(),
        "plan": [summary],
        "below": [below],
    }
    body: list[str | Block] = [Facts((), facts), "", explain(plan)]
    body += _bodies(body_plans)
    document = {
        "model": options.model,
        "config": to_dict(config),
        "quantized_nodes": quantized_nodes,
        "operators": operators,
        "kept_nodes": kept,
        "nodes": [
            {
                "name": node.name,
                "operator": node.kind,
                "float": planned.kept.get(node.name),
                "inputs": [_tensor(planned, use) for use in planned.reads(node)],
                "outputs": [
                    _tensor(planned, Use(tensor)) for tensor in node.outputs if tensor
                ],
            }
            for planned in plans
            for node in planned.graph.nodes
        ],
    }
    rows = [
        (node.name, node.kind, ", ".join(_formats(plan, node)))
        for plan in plans
        for node in plan.graph.nodes
    ]
    counts = [
        (kind, str(done), str(count)) for kind, (done, count) in operators.items()
    ]
    page: list[Block] = [
        Judgement("unknown", summary.partition(":")[0]),
        TitledTable("Operators", ("operator", "quantized", "nodes"), counts),
        Reasons("Float nodes", kept, "node", "nodes"),
        Reasons("Float tensors", kept_tensors, "tensor", "tensors"),
        TitledTable("Nodes", ("node", "operator", "tensors that it computes"), rows),
        Text("Settings", str(config)),
    ]
    write_page(options.html, "Quantization plan", options.model.name, page)
    return Answer(body, document)


def _formats(plan: Plan, node: Node) -> Iterator[str]:
    """Yield the tensors that a node computes, with their decisions."""
    for tensor in node.outputs:
        if tensor:
            entry_of_tensor = _tensor(plan, Use(tensor))
            # The reasons of float tensors have a section of their own.
            is_float = entry_of_tensor["decision"] == "float"
            yield f"{tensor}: {'float' if is_float else entry_of_tensor['detail']}"


def _bodies(body_plans: Sequence[SubgraphPlan]) -> Iterator[str]:
    """Yield the plans of bodies of If, Loop and Scan at any depth, each below its title."""
    for body_plan in body_plans:
        where = printable(f"{body_plan.body.attribute} of {body_plan.body.node.name}")
        yield f"\nin {where}:"
        yield explain(body_plan.plan)
        yield from _bodies(body_plan.body_plans)


def _tensor(plan: Plan, use: Use) -> dict[str, str]:
    """Return the decision for a tensor.

    A tensor that shares the scale of a float tensor stays float for the same reason.
    """
    decision = plan.entry(use)
    # entry() follows shared scales to their source; a tensor without an entry was never asked for.
    if use not in plan.entries:
        decision = Keep(plan.ineligible(use.tensor) or "nothing asks for it")
    # Quantized: the tensor's own entry says how, for example "same as x".
    elif not isinstance(decision, Keep):
        decision = plan.entries[use]
    detail = decision.reason if isinstance(decision, Keep) else str(decision)
    # A bias that is not stored as codes stays float.
    kept = isinstance(decision, BiasOf) and not decision.stored
    return {
        "tensor": use.tensor,
        "decision": "float" if kept else _DECISIONS[type(decision)],
        "detail": detail,
    }
