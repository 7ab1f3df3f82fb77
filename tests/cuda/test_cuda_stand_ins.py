"""The stand-ins for the CUDA libraries count what ONNX Runtime asks for, and refuse what a driver refuses."""

# ruff: noqa: F811 - a test's parameter has the name of the fixture that is imported

from __future__ import annotations

from collections import Counter
from pathlib import Path

from onnx import TensorProto, helper

from support.cuda import stand_ins as cuda_stand_ins
from support.cuda.fixtures import Asked, asked, linear, stand_ins, write_graph  # noqa: F401
from support.cuda.placement import place

LINEAR = {"kernel_launches": 1, "library_calls": 1}
BYTES = 3 * 64 * 2


def test_a_bound_run_launches_and_copies_nothing(asked: Asked, linear: Path, tmp_path: Path) -> None:
    program = """
session = opened()
assert session.get_providers()[0] == "CUDAExecutionProvider"
binding = bound(session, on_device([3, 64]), on_device([3, 64]))
for _ in range(2): ask(lambda: session.run_with_iobinding(binding))
ask(lambda: session.run(None, {"x": array}))
print(json.dumps(steps))
"""
    *bound, fed = asked(program, linear, trace=tmp_path / "trace")
    assert bound == [LINEAR, LINEAR]
    assert fed == {**LINEAR, "copies": 2, "bytes_to_device": BYTES, "bytes_to_host": BYTES}
    lines = Counter((tmp_path / "trace").read_text().splitlines())
    assert lines["cublasGemmEx 1"] == 3
    assert (lines[f"copy-to-device {BYTES}"], lines[f"copy-to-host {BYTES}"]) == (1, 1)
    names = {line.rpartition(" ")[0] for line in lines if line.startswith("_Z")}
    (kernel,) = cuda_stand_ins.demangled(names).values()
    assert "BroadcastBiasKernel" in kernel


def test_a_captured_graph_is_launched_and_nothing_else(asked: Asked, linear: Path, tmp_path: Path) -> None:
    program = """
session = opened(enable_cuda_graph="1")
binding = bound(session, on_device([3, 64]), on_device([3, 64]))
for _ in range(3): ask(lambda: session.run_with_iobinding(binding))
print(json.dumps(steps))
"""
    first, *later = asked(program, linear, trace=tmp_path / "trace")
    # ONNX Runtime runs a graph twice before it captures it, all in the first run that is asked of it.
    twice = {name: 2 * n for name, n in LINEAR.items()}
    assert first == {**twice, "captured": 2, "captures": 1, "graph_launches": 1}
    assert later == [{"graph_launches": 1}] * 2
    lines = (tmp_path / "trace").read_text().splitlines()
    assert lines.count("captured:cublasGemmEx 1") == 1


def test_a_copy_to_the_host_in_a_capture_is_illegal(asked: Asked, linear: Path) -> None:
    program = """
session = opened(enable_cuda_graph="1")
session.run(None, {"x": array})
print(json.dumps([cuda_stand_ins.counts().illegal_during_capture]))
"""
    assert asked(program, linear) == [2]  # of the input, and of the output


CAPTURING = """
import ctypes
cuda = ctypes.CDLL("libcudart.so.13")
stream, graph, address, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
value = on_device([4])
cuda.cudaStreamCreate(ctypes.byref(stream))

def state():
    cuda.cudaStreamIsCapturing(stream, ctypes.byref(status))
    return status.value

def malloc(): return cuda.cudaMalloc(ctypes.byref(address), 8)
def wait_for_stream(): return cuda.cudaStreamSynchronize(stream)
def wait_for_device(): return cuda.cudaDeviceSynchronize()
def copy(): return cuda.cudaMemcpy(ctypes.c_void_p(value.data_ptr()), (ctypes.c_char * 8)(), 8, 1)
def nothing(): return 0

for call in (malloc, wait_for_stream, wait_for_device, copy, nothing):
    before, outside = cuda_stand_ins.counts(), state()
    cuda.cudaStreamBeginCapture(stream, 0)
    inside, error, after = state(), call(), state()
    end = cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
    illegal = (cuda_stand_ins.counts() - before).illegal_during_capture
    steps.append([call.__name__, outside, inside, error, after, end, graph.value is None, illegal, state(), call()])
print(json.dumps(steps))
"""


def test_what_a_driver_refuses_during_a_capture(asked: Asked) -> None:
    *refused, nothing = asked(CAPTURING)
    assert [row[0] for row in refused] == ["malloc", "wait_for_stream", "wait_for_device", "copy"]
    for _, *row in refused:
        assert row == [0, 1, 900, 2, 901, True, 1, 0, 0]  # cudaErrorStreamCapture: Unsupported, Invalidated
    assert nothing[1:] == [0, 1, 0, 1, 0, False, 0, 0, 0]


def test_memory_grows_and_is_given_back(asked: Asked, linear: Path) -> None:
    program = """
start = cuda_stand_ins.counts()
session = opened()
binding = bound(session, on_device([1 << 15, 64]), on_device([1 << 15, 64]))
grown = cuda_stand_ins.counts() - start
del binding
session = None
left = cuda_stand_ins.counts() - start
print(json.dumps([vars(grown), vars(left)]))
"""
    grown, left = asked(program, linear)
    tensors = 2 * (1 << 15) * 64 * 2
    assert grown["bytes_allocated"] == grown["peak_bytes"] >= tensors
    assert grown["mallocs"] >= 2
    assert grown["frees"] == 0
    assert left["frees"] >= 1
    assert left["bytes_allocated"] < grown["bytes_allocated"]
    assert left["peak_bytes"] == grown["peak_bytes"]


def test_the_free_memory_is_what_is_not_allocated(asked: Asked) -> None:
    program = """
import ctypes
value = on_device([1 << 20])
free, total = ctypes.c_size_t(), ctypes.c_size_t()
ctypes.CDLL("libcudart.so.13").cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
print(json.dumps([total.value - free.value, cuda_stand_ins.counts().bytes_allocated]))
"""
    taken, allocated = asked(program)
    assert taken == allocated >= 2 << 20


def test_memory_can_be_made_to_run_out(asked: Asked, linear: Path) -> None:
    program = """
session = opened()
limit = cuda_stand_ins.counts().bytes_allocated + (4 << 20)
os.environ["QWEN_STAND_IN_FAIL_MALLOC_ABOVE"] = str(limit)
try:
    session.run(None, {"x": np.ones((1 << 16, 64), np.float16)})
    message = ""
except Exception as error:
    message = str(error)
assert cuda_stand_ins.counts().peak_bytes <= limit
ask(lambda: session.run(None, {"x": array}))
print(json.dumps([message, steps]))
"""
    message, steps = asked(program, linear)
    assert "Failed to allocate memory" in message
    assert steps[0]["bytes_to_device"] == BYTES


def test_copies_are_counted_by_their_direction(asked: Asked) -> None:
    program = """
value, other = on_device([3, 64]), on_device([3, 64])
ask(lambda: value.update_inplace(array))
assert (ask(value.numpy) == 1).all()
ask(lambda: other.update_inplace(value))
assert (other.numpy() == 1).all()
ask(lambda: onnxruntime.OrtValue.ortvalue_from_numpy(array))
ask(lambda: onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
print(json.dumps(steps))
"""
    to, back, on, host, made = asked(program)
    assert to == made == {"copies": 1, "bytes_to_device": BYTES}
    assert back == {"copies": 1, "bytes_to_host": BYTES}
    assert on == {"copies": 1, "bytes_on_device": BYTES}
    assert host == {}


def test_a_copy_must_lie_in_device_memory(asked: Asked) -> None:
    program = """
import ctypes
cuda, address, host = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p(), (ctypes.c_char * 64)()
assert cuda.cudaMalloc(ctypes.byref(address), 32) == 0
errors = [cuda.cudaMemcpy(address, host, size, 1) for size in (32, 33)]
errors += [cuda.cudaMemcpy(host, host, 8, kind) for kind in (0, 1, 2, 3)]
assert cuda.cudaFree(address) == 0
errors += [cuda.cudaMemcpy(address, host, 32, 1), cuda.cudaFree(address)]
print(json.dumps(errors))
"""
    assert asked(program) == [0, 1, 0, 1, 1, 1, 1, 1]


def test_new_memory_is_not_a_number(asked: Asked) -> None:
    program = """
from onnxruntime import OrtValue
nan = [bool(np.isnan(OrtValue.ortvalue_from_shape_and_type([1000], dtype, "cuda", 0).numpy()).all())
       for dtype in (np.float16, np.float32)]
print(json.dumps(nan))
"""
    assert asked(program) == [True, True]
    assert asked(program, env={"QWEN_STAND_IN_FILL": "0"}) == [False, False]


def test_placement_shows_what_has_no_cuda_kernel(stand_ins: Path, linear: Path, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"], name="product"),
        helper.make_node("Det", ["t"], ["d"], name="determinant"),
        helper.make_node("Add", ["d", "b"], ["y"], name="sum"),
    ]
    mixed = write_graph(tmp_path / "mixed.onnx", nodes, TensorProto.FLOAT, [64, 64], [64])
    placed = place(stand_ins, mixed, capture=True)
    assert placed.cpu == [("Det", "determinant")]
    assert placed.cuda == {"MatMul": 1, "Add": 1}
    assert (placed.memcpy, placed.casts, placed.capture_accepted) == (2, 0, False)

    placed = place(stand_ins, linear, capture=True)
    assert (placed.cuda, placed.cpu, placed.memcpy) == ({"Gemm": 1}, [], 0)
    assert placed.capture_accepted
    assert place(stand_ins, linear, capture=False).capture_accepted is None


def test_placement_is_that_of_the_optimized_graph(stand_ins: Path, tmp_path: Path) -> None:
    """Fusions and casts are counted, of which the record of the partitioning has neither."""
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Sigmoid", ["c"], ["s"], name="sigmoid"),
        helper.make_node("Mul", ["c", "s"], ["m"], name="silu"),
        helper.make_node("Cast", ["m"], ["y"], to=TensorProto.FLOAT16, name="back"),
    ]
    placed = place(
        stand_ins, write_graph(tmp_path / "silu.onnx", nodes, TensorProto.FLOAT16, [3, 64], []), capture=False
    )
    assert placed.cuda == {"Cast": 2, "QuickGelu": 1}
    assert (placed.cpu, placed.memcpy, placed.casts) == ([], 0, 2)
