"""Graph: look-ups stay right after every edit, and protobuf comes back as it was."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph, Node, reach
from tests.cases import loop_over
from tests.models import (
    MODELS,
    branches,
    loop,
    name_collisions,
    nameless,
    old_ir,
    own_domain,
    parse,
    residual,
    run,
)

DIAMOND = """g (float[N,2] x) => (float[N,2] y) {
    [a] h = Relu (x)
    [b] l = Neg (h)
    [c] r = Exp (h)
    [d] y = Add (l, r)
}"""


def diamond() -> Graph:
    return Graph.of(parse(DIAMOND))


def node(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


def names(nodes: object) -> list[str]:
    return [node.name for node in nodes]


def assert_indices(graph: Graph) -> None:
    """Producers and consumers are those that a scan over all nodes finds."""
    produced = {name: node for node in graph.nodes for name in node.outputs if name}
    read = {
        name for node in graph.nodes for name in (*node.inputs, *node.captures) if name
    }
    for name in graph.names | produced.keys() | read:
        assert graph.producer(name) is produced.get(name)
        readers = [
            node for node in graph.nodes if name in (*node.inputs, *node.captures)
        ]
        assert sorted(names(graph.consumers(name))) == sorted(names(readers)), name
        assert name in graph.names or not (graph.consumers(name) or produced.get(name))


# Reading


def test_neighbours() -> None:
    graph = diamond()
    assert names(graph.consumers("h")) == ["b", "c"]
    assert graph.producer("y") is node(graph, "d")
    assert graph.producer("x") is None
    assert names(graph.followers(node(graph, "a"))) == ["b", "c"]
    assert names(graph.leaders(node(graph, "d"))) == ["b", "c"]
    assert names(reach([node(graph, "b")], graph.followers)) == ["b", "d"]
    assert graph.is_input("x") and graph.is_output("y") and not graph.is_output("h")


def test_a_subgraph_reads_what_it_captures() -> None:
    graph = Graph.of(branches())
    assert names(graph.consumers("h")) == ["if"]
    assert names(graph.consumers("w")) == ["fc", "if"]
    assert graph.captured("h") and graph.captured("w") and not graph.captured("x")
    assert names(graph.leaders(node(graph, "if"))) == ["fc"]


def test_a_body_captures_through_two_levels_but_not_its_own_names() -> None:
    graph = Graph.of(
        parse("""g (float[2] x, bool c) => (float[2] y) {
                [outer] y = If (c) <
                    then_branch = a () => (float[2] t) { own = Neg (x) t = If (c) <
                        then_branch = b () => (float[2] u) { u = Add (own, x) },
                        else_branch = d () => (float[2] v) { v = Identity (own) }
                    > },
                    else_branch = e () => (float[2] w) { w = Identity (x) }
                >
            }""")
    )
    assert node(graph, "outer").captures == ("x", "c")


def test_constants() -> None:
    model = residual()
    model.graph.input.append(
        helper.make_tensor_value_info("b1", TensorProto.FLOAT, [4])
    )  # a default, not a constant
    graph = Graph.of(model)
    assert (
        graph.is_constant("w1")
        and not graph.is_constant("b1")
        and graph.constant("b1") is None
    )
    np.testing.assert_array_equal(
        graph.constant("w1"), numpy_helper.to_array(model.graph.initializer[0])
    )
    assert graph.constant("x") is None


def test_types_and_shapes_are_inferred() -> None:
    graph = Graph.of(residual())
    assert (
        graph.shape("x") == ("N", 4, 8, 8)
        and graph.shape("m") == ("N", 4, 4, 4)
        and graph.shape("w3") == (10, 4)
    )
    assert graph.elem_type("f") == TensorProto.FLOAT
    assert (
        graph.shape("no such") is None
        and graph.elem_type("no such") == TensorProto.UNDEFINED
    )


@pytest.mark.parametrize(
    ("quantize", "dequantize", "domain"),
    [
        ("ExtendedQuantizeLinear", "ExtendedDequantizeLinear", "com.amd.quark"),
        ("VitisQuantizeLinear", "VitisDequantizeLinear", "com.vai.quantize"),
        ("BFPFixNeuron", "MXQuantizeDequantize", ""),
    ],
)
def test_shapes_go_through_operators_of_vendors(
    quantize: str, dequantize: str, domain: str
) -> None:
    model = parse(
        "g (float[1,3] x) => (float[1,A] y) { q = Relu (x) d = Relu (q) y = Concat"
        " <axis = 1> (d, d) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "s"))
    model.graph.initializer.append(numpy_helper.from_array(np.int8(0), "z"))
    for node, kind in zip(model.graph.node, (quantize, dequantize), strict=False):
        node.op_type, node.domain = (
            kind,
            domain or ("com.vai.quantize" if "Fix" in kind else "com.amd.quark"),
        )
        node.input.extend(["s", "z"] if domain else [])
    graph = Graph.of(model)
    assert graph.shape("d") == (1, 3) and graph.elem_type("q") == (
        TensorProto.INT8 if domain else TensorProto.FLOAT
    )


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize(
    "pads",
    ["pads = [0,0,0,0]", "pads = [0,0,1,1]", "pads = [1,1,1,1]", 'auto_pad = "VALID"'],
)
@pytest.mark.parametrize(("taps", "stride"), [(1, 2), (2, 2), (2, 3), (3, 2), (3, 4)])
def test_no_window_begins_in_the_padding(
    taps: int, stride: int, pads: str, size: int
) -> None:
    if taps == 1 and "1" in pads:
        pytest.skip("pads are less than a window")
    window = f"kernel_shape = [{taps},{taps}], strides = [{stride},{stride}]"
    model = parse(f"""g (float[1,2,{size},{size}] x) => (float[1,2,H,W] y) {{
        p = MaxPool <{window}, {pads}, ceil_mode = 1> (x) q = MaxPool <{window}, {pads}, ceil_mode = 1> (p)
        y = Relu (q) }}""")  # noqa: E501
    graph = Graph.of(model)
    model.graph.output[0].name = "q"
    model.graph.node.pop()
    assert (
        graph.shape("q")
        == run(model, {"x": np.zeros((1, 2, size, size), np.float32)})[0].shape
    )


def test_what_cannot_be_inferred_is_unknown() -> None:
    model = parse(DIAMOND)
    model.graph.node[1].op_type = "NoSuchOperator"
    graph = Graph.of(model)
    assert graph.shape("l") is None and graph.elem_type("l") == 0


def test_an_initializer_that_cannot_be_read_is_named() -> None:
    model = residual()
    model.graph.initializer[0].raw_data = b"123"
    with pytest.raises(ModelError, match="initializer 'w1' cannot be read"):
        Graph.of(model).constant("w1")


# Names and order


def test_fresh_names_avoid_every_name_there_is() -> None:
    graph = Graph.of(name_collisions())
    # a tensor, a node, a value_info, and two tensors inside a subgraph
    for name in (
        "x_QuantizeLinear_Output",
        "x_QuantizeLinear",
        "x_DequantizeLinear_Output",
        "w_quantized",
        "x_scale",
    ):
        assert graph.fresh(name) == f"{name}_1"
    assert (
        graph.fresh("new") == "new"
        and graph.fresh("new") == "new_1"
        and graph.fresh("new") == "new_2"
    )


def test_nodes_without_names_get_their_own() -> None:
    graph = Graph.of(nameless())
    assert all(found := names(graph.nodes)) and len(set(found)) == len(found)


def test_nodes_of_one_name_are_told_apart() -> None:
    model = parse(DIAMOND)
    for proto in model.graph.node:
        proto.name = "same"
    assert names(Graph.of(model).nodes) == ["same", "same_1", "same_2", "same_3"]


def test_nodes_are_sorted_and_stay_where_they_can() -> None:
    model = parse(DIAMOND)
    shuffled = [model.graph.node[i] for i in (3, 2, 0, 1)]
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    copy.graph.node.extend(shuffled)
    assert names(Graph.of(model).nodes) == ["a", "b", "c", "d"]
    order = names(Graph.of(copy).nodes)
    assert (
        order[0] == "a" and order[-1] == "d" and sorted(order) == ["a", "b", "c", "d"]
    )


def test_what_a_subgraph_captures_comes_before_it() -> None:
    model = loop()
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert names(Graph.of(model).nodes) == ["fc", "loop"]


def test_a_cycle_is_an_error() -> None:
    model = parse(DIAMOND)
    model.graph.node[0].input[0] = "y"
    with pytest.raises(ModelError, match=r"the graph has a cycle through node '[abd]'"):
        Graph.of(model)


def test_a_long_chain_needs_no_recursion() -> None:
    chain = "\n".join(f"t{i + 1} = Neg (t{i})" for i in range(3000))
    graph = Graph.of(parse(f"g (float[2] t0) => (float[2] t3000) {{ {chain} }}"))
    assert len(graph.nodes) == len(reach(graph.nodes[:1], graph.followers)) == 3000


# Editing


def test_add() -> None:
    graph = diamond()
    graph.add("Neg", ["h"], ["n"], name="d")
    assert names(graph.nodes)[-1] == "d_1" and graph.producer("n") is graph.nodes[-1]
    assert_indices(graph)


def test_add_constant() -> None:
    graph = diamond()
    assert graph.add_constant("h", np.float32([1, 2])) == "h_1"
    assert graph.shape("h_1") == (2,) and graph.is_constant("h_1")
    codes = graph.add_constant("codes", np.array(3, np.uint16))
    assert graph.elem_type(codes) == TensorProto.UINT16 and graph.constant(codes) == 3


def test_removals_one_by_one_make_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes remove thousands of nodes, each on its own: a list for each took quadratic time."""
    looked_up = list[Node]()

    def counted(node: Node) -> int:
        looked_up.append(node)
        return object.__hash__(node)

    layers = " ".join(f"[n{i}] t{i + 1} = Relu (t{i})" for i in range(300))
    graph = Graph.of(parse(f"g (float[2] t0) => (float[2] t300) {{ {layers} }}"))
    monkeypatch.setattr(Node, "__hash__", counted)
    for each in graph.nodes[1:-1]:
        graph.add("Neg", [each.inputs[0]], [graph.fresh("n")])
        assert graph.bypass(each)
    # A new list looks up each of the 300 nodes and more among those that are removed.
    assert len(looked_up) < 30 * 300
    assert [each.kind for each in graph.nodes] == ["Relu", "Relu", *["Neg"] * 298]
    assert_indices(graph)


def test_a_list_of_nodes_stays_as_it_was_read() -> None:
    graph = diamond()
    before = graph.nodes
    graph.remove([node(graph, "d")])
    graph.add("Neg", ["l"], ["n"])
    assert names(before) == ["a", "b", "c", "d"]
    graph.remove([node(graph, "n_Neg")])
    assert names(graph.nodes) == ["a", "b", "c"]


def test_remove() -> None:
    graph = diamond()
    graph.remove([node(graph, "b"), node(graph, "d")])
    assert names(graph.nodes) == ["a", "c"] and names(graph.consumers("h")) == ["c"]
    assert_indices(graph)


def test_set_input_and_output() -> None:
    graph = diamond()
    graph.set_input(node(graph, "d"), 1, "h")
    graph.append_input(node(graph, "b"), "x")
    graph.set_output(node(graph, "c"), 0, "renamed")
    assert node(graph, "d").inputs == ("l", "h") and node(graph, "b").inputs == (
        "h",
        "x",
    )
    assert graph.producer("r") is None and graph.producer("renamed") is node(graph, "c")
    assert_indices(graph)


def test_a_node_may_read_a_tensor_twice() -> None:
    graph = Graph.of(parse("g (float[2] x) => (float[2] y) { [twice] y = Add (x, x) }"))
    assert names(graph.consumers("x")) == ["twice"]
    graph.set_input(graph.nodes[0], 0, graph.add_constant("one", np.float32(1)))
    assert names(graph.consumers("x")) == ["twice"]
    assert_indices(graph)


def test_replace_uses_leaves_subgraphs_and_outputs_alone() -> None:
    graph = Graph.of(branches())
    graph.replace_uses("w", graph.add_constant("v", np.eye(4, dtype=np.float32)))
    assert node(graph, "fc").inputs == ("x", "v") and names(graph.consumers("w")) == [
        "if"
    ]
    assert_indices(graph)


def test_bypass_in_the_middle() -> None:
    graph = Graph.of(
        parse(
            "g (float[2] x) => (float[2] y) { [a] h = Neg (x) [b] i = Identity (h) [c]"
            " y = Exp (i) }"
        )
    )
    assert graph.bypass(node(graph, "b"))
    assert names(graph.nodes) == ["a", "c"] and graph.nodes[1].inputs == ("h",)
    assert_indices(graph)


def test_bypass_at_an_output_keeps_the_outputs_name() -> None:
    graph = Graph.of(
        parse(
            "g (float[2] x) => (float[2] y) { [a] h = Neg (x) [b] y = Identity (h) [c]"
            " z = Exp (h) }"
        )
    )
    assert graph.bypass(node(graph, "b"))
    assert graph.producer("y") is node(graph, "a") and node(graph, "c").inputs == ("y",)
    assert_indices(graph)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] x) => (float[2] y) { [b] y = Identity (x) }",
        (
            "g (float[2] x) => (float[2] y, float[2] h) { [a] h = Neg (x) [b] y ="
            " Identity (h) }"
        ),
        """g (float[2] x, bool c) => (float[2] z) { [a] h = Neg (x) [b] y = Identity (h) [f] z = If (c) <
            then_branch = t () => (float[2] u) { u = Neg (y) },
            else_branch = e () => (float[2] v) { v = Exp (y) }> }""",  # noqa: E501
    ],
    ids=["input to output", "two outputs", "captured"],
)
def test_what_cannot_be_bypassed_stays(text: str) -> None:
    graph = Graph.of(parse(text))
    before = graph.to_model()
    assert not graph.bypass(node(graph, "b"))
    assert graph.to_model() == before


def test_drop_unused_keeps_what_outputs_and_subgraphs_need() -> None:
    graph = Graph.of(branches())
    graph.add("Neg", [graph.add_constant("k", np.float32(1))], ["nobody"])
    graph.drop_unused()
    assert names(graph.nodes) == ["fc", "if"] and list(graph.initializers) == ["w"]
    assert_indices(graph)


def test_require_raises_and_never_lowers() -> None:
    graph = diamond()
    graph.require(13)
    assert (graph.opset, graph.ir_version) == (17, 8)
    graph.require(21)
    assert (graph.opset, graph.ir_version) == (21, 10)
    graph.import_domain("com.microsoft")
    graph.import_domain("com.microsoft", 9)
    assert [(o.domain, o.version) for o in graph.to_model().opset_import] == [
        ("", 21),
        ("com.microsoft", 1),
    ]


def test_the_standard_operators_have_two_spellings() -> None:
    model = parse(DIAMOND)
    model.opset_import[0].domain = model.graph.node[0].domain = "ai.onnx"
    graph = Graph.of(model)
    assert graph.nodes[0].kind == "Relu" and graph.opset == 17
    graph.require(21)
    assert [(o.domain, o.version) for o in graph.to_model().opset_import] == [
        ("ai.onnx", 21)
    ]


def test_metadata_is_set_once() -> None:
    graph = diamond()
    graph.set_metadata("by", "one")
    graph.set_metadata("by", "two")
    assert [(p.key, p.value) for p in graph.to_model().metadata_props] == [
        ("by", "two")
    ]


# Protobuf


def test_a_copy_is_independent() -> None:
    graph = diamond()
    before = graph.to_model()
    copy = graph.copy()
    copy.remove([node(copy, "d")])
    copy.set_input(copy.nodes[1], 0, "x")
    copy.nodes[0].set_attribute("alpha", 1.0)
    copy.add_constant("new", np.float32(1))
    assert graph.to_model() == before
    assert_indices(graph)


def test_the_model_that_is_handed_in_never_changes() -> None:
    for make in MODELS.values():
        model, same = make(), make()
        graph = Graph.of(model)
        graph.remove(list(graph.nodes))
        graph.set_metadata("a", "b")
        graph.require(21)
        assert model == same


def test_everything_in_a_model_comes_back() -> None:
    model = own_domain()
    model.producer_name, model.producer_version, model.domain, model.model_version = (
        "maker",
        "1",
        "org",
        7,
    )
    model.doc_string = "about the model"
    model.metadata_props.add(key="licence", value="MIT")
    model.graph.doc_string, model.graph.node[0].doc_string = (
        "about the graph",
        "about the node",
    )
    model.graph.value_info.append(
        helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", 4])
    )
    model.graph.value_info[0].doc_string = "about a tensor"
    dense = numpy_helper.from_array(np.float32([2.0]), "sparse")
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            dense, numpy_helper.from_array(np.int64([1]), "sparse_indices"), [4]
        )
    )
    model.graph.quantization_annotation.add(tensor_name="h")
    again = Graph.of(model).to_model()
    values = {value.name: value for value in again.graph.value_info}
    assert values["h"] == model.graph.value_info[0]
    for both in (model, again):
        del both.graph.value_info[:]  # that of inferred tensors was added
    assert again == model


@loop_over("make", MODELS)
def test_models_come_back_valid(make: object) -> None:
    model: ModelProto = make()
    again = Graph.of(model).to_model()
    onnx.checker.check_model(again, full_check=True)
    assert list(again.graph.output) == list(model.graph.output)
    assert [n.op_type for n in again.graph.node] == [
        n.op_type for n in model.graph.node
    ]
    assert again == Graph.of(again).to_model()


def test_initializers_that_old_models_list_as_inputs_are_none() -> None:
    graph = Graph.of(old_ir())
    assert [value.name for value in graph.inputs] == ["x"] and graph.is_constant("w")


# Node


def test_attributes() -> None:
    proto = helper.make_node(
        "Conv", ["x", "", "b"], ["y"], pads=[1, 2], auto_pad="VALID", domain="ai.onnx"
    )
    conv = Node(proto)
    assert (conv.kind, conv.input(0), conv.input(1), conv.input(9)) == (
        "Conv",
        "x",
        "",
        "",
    )
    assert (
        conv.attribute("pads") == [1, 2]
        and conv.attribute("auto_pad") == "VALID"
        and conv.attribute("group", 1) == 1
    )
    conv.set_attribute("pads", [0, 0])
    conv.drop_attribute("auto_pad")
    assert conv.attribute("pads") == [0, 0] and conv.attribute("auto_pad") is None
    assert Node(helper.make_node("Op", [], [], domain="my.own")).kind == "my.own::Op"
