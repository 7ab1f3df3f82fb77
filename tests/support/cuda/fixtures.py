"""ONNX Runtime's CUDA provider with no GPU: the stand-ins, programs that run over them, and a small graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.cuda import stand_ins as cuda_stand_ins

Asked = Callable[..., Any]

PRELUDE = """
import json, os, sys
import numpy as np
import onnxruntime
from support.cuda import stand_ins as cuda_stand_ins

def ask(call):
    before = cuda_stand_ins.counts()
    result = call()
    asked = cuda_stand_ins.counts() - before
    steps.append({name: n for name, n in vars(asked).items() if n and name != "synchronizations"})
    return result

def on_device(shape):
    return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float16, "cuda", 0)

def bound(session, x, y):
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    return binding

def opened(**provider_options):
    return onnxruntime.InferenceSession(sys.argv[1], providers=[("CUDAExecutionProvider", provider_options)])

steps, array = [], np.ones((3, 64), np.float16)
"""


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-ins."""
    if reason := cuda_stand_ins.unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("stand-ins")
    cuda_stand_ins.compile_into(folder)
    return folder


@pytest.fixture
def asked(stand_ins: Path, tmp_path: Path) -> Asked:
    """`asked(program, *arguments, ...)`: what a program printed as its last line, in JSON; it begins with PRELUDE."""

    def run(program: str, *arguments: object, **settings: Any) -> Any:
        done = cuda_stand_ins.run(stand_ins, PRELUDE + program, *arguments, **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def write_graph(
    path: Path, nodes: list[onnx.NodeProto], dtype: int, shape: list[int | str], out: list[int]
) -> Path:
    """x and the weights w [64, 64] and b [64] -> y."""
    array = helper.tensor_dtype_to_np_dtype(dtype)
    weights = [
        numpy_helper.from_array(np.ones((64, 64), array), "w"),
        numpy_helper.from_array(np.ones(64, array), "b"),
    ]
    x, y = (
        helper.make_tensor_value_info(name, dtype, dims) for name, dims in (("x", shape), ("y", out or shape))
    )
    graph = helper.make_graph(nodes, "graph", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """One Gemm for ONNX Runtime: a call of cuBLAS, and a kernel that spreads the bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"], name="product"),
        helper.make_node("Add", ["t", "b"], ["y"], name="sum"),
    ]
    return write_graph(tmp_path / "linear.onnx", nodes, TensorProto.FLOAT16, ["n", 64], [])
