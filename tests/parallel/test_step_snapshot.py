"""Each spec's step stays as it was: how many operations of which type, which collectives in which order, of what.

`step_snapshot.json` holds what was traced, for two ranks and for four. It is the same with all versions of TensorFlow.
Where a step is meant to change, write the file anew and look at what `git diff --word-diff` says:

    HVD_COMPRESS_SNAPSHOT=write python scripts/run_tests.py tests/parallel/test_step_snapshot.py
"""

import collections
import contextlib
import difflib
import json
import math
import os
import re
from pathlib import Path

import pytest
import tensorflow as tf

import hvd_compress as hvdc

FILE = Path(__file__).with_name("step_snapshot.json")
pytestmark = pytest.mark.usefixtures("fixed_costs", "xla_kernels")

WRITE = os.environ.get("HVD_COMPRESS_SNAPSHOT") == "write"
SHAPES = [(24, 40), (40,), (40, 48), (48,), (48, 40), (40, 10)]
LARGE = [(1000, 800), (800,), (800, 1000)]  # in chunks, which are worth a collective more
TABLE = (60, 8)
POLICY = {"*embedding*": "none", "*kernel_2*": "int4"}
DGC = "dgc:ratio=0.01,momentum=0.9,clipnorm=1.0,steps_per_epoch=10"

# A name, and the arguments of the tape; `rows` adds an embedding, `watched` traces inside of hvdc.profile.
STEPS = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "onebit": {},
    "quantize:bits=2": {},
    "quantize:bits=4,clip=99": {},
    "quantize:bits=8,rounding=stochastic": {},
    "topk:ratio=0.05": {},
    "randomk:ratio=0.1": {},
    "randomk:ratio=0.1,unbiased=true": {},
    "block_topk:ratio=0.05": {},
    "block_sparse:ratio=0.1,block=4": {},
    "hybrid:ratio=0.05,bits=4": {},
    "powersgd:rank=2": {},
    DGC: {},
    "auto:candidates=(none|int8|int4)": {},
    "auto:candidates=(none|int8|powersgd:rank=2)": {},
    "int8, no error feedback": {"error_feedback": False},
    "int8, bfloat16 residual that decays": {"residual_dtype": "bfloat16", "residual_decay": 0.9},
    "int8, predivided": {"gradient_predivide_factor": 2.0},
    "int8, nonfinite skipped": {"on_nonfinite": "skip"},
    "int8, in two groups": {"groups": 2},
    "int8, all tensors": {"min_compress_size": 0},
    "topk:ratio=0.05, momentum correction": {"momentum_correction": 0.9},
    "topk:ratio=0.05, policy": {"policy": POLICY, "rows": True},
    "none, rows": {"rows": True},
    "int8, rows": {"rows": True},
    "int8, rows as dense": {"rows": True, "sparse_as_dense": True},
    "none, watched": {"watched": True},
    "int8, rows, watched": {"rows": True, "watched": True},
    "auto:candidates=(none|int8|int4), watched": {"watched": True},
}
FOUR_RANKS = {
    "int8": {},
    "int8, large": {"large": True},
    "topk:ratio=0.05, large": {"large": True},
    "auto:candidates=(none|int8|int4), large": {"large": True},
    "int8, two levels": {"hierarchical": True},
    "onebit, large, two levels": {"large": True, "hierarchical": True},
    "auto:candidates=(none|int8|int4), two levels": {"hierarchical": True},
}


@pytest.fixture(scope="module")
def stored(size, rank):
    """What the file holds for this number of ranks."""
    param_groups = json.loads(FILE.read_text())
    if WRITE:
        param_groups[f"{size} ranks"] = {}
    yield param_groups[f"{size} ranks"]
    if WRITE and rank == 0:
        FILE.write_text(as_text(param_groups))


def traced(name, rows=False, watched=False, large=False, **options):
    """The graph of one step of a small model."""
    shapes = LARGE if large else SHAPES
    kernels = [tf.Variable(tf.zeros(shape), name=f"kernel_{i}") for i, shape in enumerate(shapes)]
    tables = [tf.Variable(tf.zeros(TABLE), name="embedding")] if rows else []
    options = {"compression": name.split(", ")[0], "min_compress_size": 100, **options}
    options["bucket_bytes"] = 3_000_000 if large else 9_000

    @tf.function
    def step(words, *pulls):
        with tf.GradientTape() as tape:
            losses = [tf.reduce_sum(kernel * pull) for kernel, pull in zip(kernels, pulls)]
            losses += [tf.reduce_sum(tf.gather(table, words)) for table in tables]
            loss = tf.add_n(losses)
        tape = hvdc.DistributedGradientTape(tape, **options)
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, kernels + tables)]

    words = tf.TensorSpec([16], tf.int32)
    with hvdc.profile() if watched else contextlib.nullcontext():
        return step.get_concrete_function(words, *map(tf.TensorSpec, shapes)).graph


def traced_allreduce(name):
    """The graph of `hvdc.allreduce` and of `hvdc.grouped_allreduce`."""

    @tf.function
    def both(first, *tensors):
        single = hvdc.allreduce(first, name="single", compression=name)
        return [single, *hvdc.grouped_allreduce(list(tensors), name="group", compression=name)]

    return both.get_concrete_function(*map(tf.TensorSpec, SHAPES)).graph


def operations(graph, functions):
    """All operations of a graph; where one calls a function, that function's come first, with each call."""
    for op in graph.get_operations():
        attrs = [attr for _, attr in sorted(op.node_def.attr.items())]  # a map's own order is arbitrary
        for called in (f.name for a in attrs for f in ([a.func] if a.HasField("func") else a.list.func)):
            if called not in functions:
                functions[called] = list(operations(graph._get_function(called).graph, functions))
            yield from functions[called]
        yield op


def description(graph):
    """What the file holds of a step."""
    types, collectives, nbytes = collections.Counter(), [], 0
    for op in operations(graph, {}):
        types[op.type] += 1
        if op.type.startswith("Horovod"):
            shapes = [tensor.shape.as_list() for tensor in op.inputs]
            # The number that counts reducers depends on what this process has made before.
            name = re.sub(r"hvdc_\d+_DistributedGradientTape", "tape", op.name.rpartition("/")[2])
            tensors = ", ".join(f"{t.dtype.name}{shape}" for t, shape in zip(op.inputs, shapes))
            collectives.append(f"{op.type.removeprefix('Horovod')} {name}: {tensors}")
            nbytes += sum(math.prod(shape) * t.dtype.size for t, shape in zip(op.inputs, shapes) if None not in shape)
    return {"bytes": nbytes, "operations": dict(sorted(types.items())), "collectives": collectives}


def differences(name, before, after):
    """A line for each thing that differs."""
    lines = []
    if before["bytes"] != after["bytes"]:
        lines.append(f"{name}: bytes: {before['bytes']} before, {after['bytes']} now")
    then, now = before["operations"], after["operations"]
    lines += [
        f"{name}: operation {op}: {then.get(op, 0)} before, {now.get(op, 0)} now"
        for op in sorted({*then, *now})
        if then.get(op, 0) != now.get(op, 0)
    ]
    lines += [
        f"{name}: collective {line}"
        for line in difflib.unified_diff(before["collectives"], after["collectives"], "before", "now", lineterm="")
    ]
    return lines


def as_text(param_groups):
    """JSON with one line for each step's numbers, and one for each of its collectives."""
    lines = []
    for param_group, steps in param_groups.items():
        entries = []
        for name, step in steps.items():
            numbers = ", ".join(f"{json.dumps(key)}: {json.dumps(step[key])}" for key in step if key != "collectives")
            collectives = ",\n".join(f"   {json.dumps(line)}" for line in step["collectives"])
            entries.append(f' {json.dumps(name)}: {{\n  {numbers},\n  "collectives": [\n{collectives}]}}')
        lines.append(f"{json.dumps(param_group)}: {{\n" + ",\n".join(entries) + "}")
    return "{" + ",\n".join(lines) + "}\n"


def check(name, now, stored):
    if WRITE:
        stored[name] = now
        return
    assert name in stored, f"{FILE.name} has no step {name}"
    lines = differences(name, stored[name], now)
    assert not lines, "the step has changed:\n" + "\n".join(lines)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_as_it_was(name, stored):
    check(name, description(traced(name, **STEPS[name])), stored)


@pytest.mark.parametrize("compression", ["none", "int8", "topk:ratio=0.05", "powersgd:rank=2"])
def test_allreduce_is_as_it_was(compression, stored):
    check(f"allreduce, {compression}", description(traced_allreduce(compression)), stored)


@pytest.mark.np4
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_a_step_of_four_ranks_is_as_it_was(name, stored, request):
    if "two levels" in name:
        request.getfixturevalue("two_hosts")
    check(name, description(traced(name, **FOUR_RANKS[name])), stored)
