"""Would every step stay on a GPU? Walks the traced graph of a reduction.

`gpu_kernels.json` lists the operations that have a GPU kernel with its results in GPU memory, and for which
types, as TensorFlow 2.21's build for CUDA registers them (DEVICE_GPU and DEVICE_DEFAULT of
`get_all_registered_kernels`). Functions compiled with XLA run on the GPU as a whole.
"""

import json
from pathlib import Path

import introspect
import pytest
import tensorflow as tf
from marks import slow
from specs import ALL, SCATTERED
from tensorflow.python.framework import op_def_registry

from hvd_compress.common import devices

pytestmark = pytest.mark.usefixtures("fixed_costs", "xla_kernels")

KERNELS = json.loads((Path(__file__).parent / "gpu_kernels.json").read_text())
SHAPES = [(3, 3, 16, 64), (64,), (100, 333), (150, 100)]
BOOKKEEPING = {"Const", "Placeholder", "NoOp", "Identity", "_Arg", "_Retval"}
# Host values by their nature: shapes, and predicates and scalars of a few bytes.
SMALL = 16
# What this package itself puts on the host: the numbers of `auto`.
NUMBERS = 4096
PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}


def operations(graph, functions=None):
    """All operations of a graph and of the functions that it calls, those compiled with XLA left out."""
    functions = functions if functions is not None else set()
    for op in graph.get_operations():
        attrs = op.node_def.attr.values()
        called = [f for a in attrs for f in ([a.func] if a.HasField("func") else a.list.func)]
        for name in {f.name for f in called} - functions:
            functions.add(name)
            function = graph._get_function(name)
            if not function.definition.attr["_XlaMustCompile"].b:
                of_function = operations(function.graph, functions)
                # The candidates of `auto` are simulated on the host, but samples are taken where the gradients are.
                yield from (op for op in of_function if "simulate" not in name or "CPU" not in op.device)
        yield op


def on_the_host(op):
    """Why an operation would leave the GPU, or None."""
    if op.type in BOOKKEEPING or op.type.startswith("Horovod"):
        return None
    if op.type in KERNELS:
        types = {a.name: tf.as_dtype(op.get_attr(a.name)) for a in attributes(op) if a.type == "type"}
        bad = [
            dtype.name
            for name, dtype in types.items()
            if KERNELS[op.type].get(name) and graph_name(dtype) not in KERNELS[op.type][name]
        ]
        if not bad:
            return None
    sizes = [tensor.shape.num_elements() for tensor in (*op.outputs, *(op.inputs if op.type in PYTHON else ()))]
    if "CPU" in op.device and all(size is None or size <= NUMBERS for size in sizes):
        return None
    if sizes and all(size is not None and size <= SMALL for size in sizes):
        return None
    return f"{op.type} of {[(t.dtype.name, t.shape) for t in op.outputs]} ({op.name})"


def attributes(op):
    return op_def_registry.get(op.type).attr


def graph_name(dtype):
    return {"float32": "float", "float16": "half", "float64": "double"}.get(dtype.name, dtype.name)


def traced(spec, watched=False, **settings):
    settings = {"bucket_bytes": 2**17, **settings}  # two buckets: more have the same operations
    reducer = introspect.new_reducer(spec, watched, **settings)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    @tf.function
    def reduce(*gradients):
        return reducer(list(gradients), variables)

    return reduce.get_concrete_function(*[tf.TensorSpec(shape) for shape in SHAPES]).graph


def check(graph, *expected, python=0):
    """Asserts that there are the operations `expected`, and `python` calls of Python functions on the host."""
    ops = list(operations(graph))
    kinds = [op.type for op in ops]
    assert set(kinds).issuperset(expected), set(kinds)
    assert sum(kind in PYTHON for kind in kinds) == python
    assert not [why for why in map(on_the_host, ops) if why]


@pytest.mark.parametrize("spec", ALL)
def test_allgather_and_allreduce(spec):
    check(traced(spec), "HorovodGroupedAllreduce", *([] if spec == "none" else ["HorovodAllreduce"]))


@pytest.mark.np4
@pytest.mark.parametrize("spec", ["int8", *slow(*(spec for spec in SCATTERED if spec != "int8"))])
def test_scatter_reduce(spec, monkeypatch):
    introspect.prefer_scatter_reduce(monkeypatch)
    check(traced(spec), "HorovodAlltoall", "HorovodAllgather")


@pytest.mark.np4
@pytest.mark.parametrize("spec", ["int8", "auto:candidates=(int8|topk:ratio=0.01)"])
def test_two_levels(spec, two_hosts):
    graph = traced(spec, watched=True, hierarchical=True, residual_dtype="bfloat16", residual_decay=0.9)
    check(graph, "HorovodAlltoall", "StatelessIf", python=int(spec.startswith("auto")))


@pytest.mark.slow
def test_auto():
    check(traced("auto"), "Case", "Timestamp", python=1)


def test_auto_with_a_candidate_for_all_buckets():
    check(traced("auto:candidates=(none|int8|powersgd:rank=2)", watched=True), "Case", "MatMul", python=1)


@pytest.mark.parametrize(
    "spec",
    [pytest.param("auto", marks=pytest.mark.slow), "topk:ratio=0.01", "quantize:bits=2,rounding=stochastic", "none"],
)
def test_watched(spec):
    graph = traced(spec, watched=True)
    check(graph, "ResourceScatterNdUpdate", python=int(spec == "auto"))
    # Clocks wait for what they time, and not for each other.
    clocks = [op for op in graph.get_operations() if is_clock(op)]
    assert clocks and not any(is_clock(before) for op in clocks for before in op.control_inputs)


def is_clock(op):
    return op.type == "PartitionedCall" and "_timestamp" in op.get_attr("f").name


def test_on_a_gpu_nothing_waits_for_a_timestamp(monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    ops = list(operations(traced("auto:candidates=(none|int8)", watched=True)))
    assert any(map(is_clock, ops))
    assert not [op for op in ops if any(map(is_clock, op.control_inputs))]


def test_momentum_correction_and_short_residuals():
    check(traced("topk:ratio=0.1", momentum_correction=0.9, residual_dtype="bfloat16", residual_decay=0.9))


def test_the_check_finds_what_has_no_gpu_kernel():
    @tf.function
    def step(x):
        x = tf.reduce_max(tf.cast(x, tf.int32), 1) + 1  # integers are reduced on the host
        return tf.numpy_function(lambda y: y, [x], tf.int32)

    graph = step.get_concrete_function(tf.TensorSpec([100, 100])).graph
    found = [why for why in map(on_the_host, operations(graph)) if why]
    assert [why.split()[0] for why in found] == ["Max", "AddV2", "PyFunc"]


def test_device_dense_is_where_everything_runs():
    graph = traced("int8", device_dense="/cpu:0")
    placed = {op.device for op in graph.get_operations() if op.type.startswith(("Horovod", "Partitioned"))}
    assert placed == {"/device:CPU:0"}, placed


@pytest.mark.parametrize("spec", ["int8", "onebit", *slow("none", "bf16", "quantize:bits=3,rounding=stochastic")])
def test_rows_of_embeddings(spec):
    reducer = introspect.new_reducer(spec, watched=True, residual_dtype="bfloat16")
    tables = [tf.Variable(tf.zeros(shape)) for shape in [(70_000, 24), (500, 300)]]

    @tf.function
    def reduce(first, second):
        slices = [tf.IndexedSlices(v, tf.range(tf.shape(v, tf.int64)[0])) for v in (first, second)]
        return reducer(slices, tables)

    specs = [tf.TensorSpec([None, table.shape[1]]) for table in tables]
    check(reduce.get_concrete_function(*specs).graph, "HorovodGroupedAllgather", "TensorScatterAdd")
