"""Edges of onnxscript's builder that graphs/ works around. When an upgrade mends one, its workaround can go."""

import onnx_ir as ir
from onnxscript import GraphBuilder, nn

_ERROR = "pkg.onnxscript.shape_inference_error"


def empty_graph():
    graph = ir.Graph([], [], nodes=[], name="g", opset_imports={"": 24})
    builder = GraphBuilder(graph)
    return graph, builder.op, builder.input("x", ir.DataType.FLOAT16, ["batch", 8])


class Scale(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.weight = nn.Parameter([8], dtype)

    def forward(self, op, x):
        return op.Mul(x, self.weight)


def test_a_module_is_registered_in_the_first_graph_only():
    """Hence build_decoder makes the tree anew for each graph."""
    scale, registered = Scale(ir.DataType.FLOAT16), []
    for _ in range(2):
        graph, op, x = empty_graph()
        scale(op, x)
        registered.append(list(graph.initializers))
    assert registered == [["weight"], []]


def test_a_parameter_is_f32_unless_told():
    """Hence every Parameter in graphs/ states its type."""
    _, op, x = empty_graph()
    y = Scale()(op, x)
    assert y.type is None
    assert _ERROR in y.producer().metadata_props


def test_inference_errors_do_not_raise():
    """Hence _finish turns what is left in the metadata into an exception."""
    _, op, x = empty_graph()
    y = op.RMSNormalisation(x)  # no such operator
    assert "No schema" in y.producer().metadata_props[_ERROR]


def test_nodes_are_named_by_scope_and_a_running_number():
    """Hence _name_by_scope: numbers would change with every node added before."""
    graph, op, x = empty_graph()
    op.Relu(op.Relu(x))
    assert [node.name for node in graph] == ["Relu_node_0", "Relu_node_1"]


def test_two_readers_of_a_tied_parameter_are_one_initializer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Scale(ir.DataType.FLOAT16), Scale(ir.DataType.FLOAT16)
            self.second.weight = self.first.weight

        def forward(self, op, x):
            return self.second(op, self.first(op, x))

    graph, op, x = empty_graph()
    Tied()(op, x)
    assert list(graph.initializers) == ["first.weight"]
