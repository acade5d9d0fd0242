"""`hvdc.compare`: what each compressor does to a user's own gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..common import checks, devices, host_memory
from ..compressors import Compressor, Seeds
from ..compressors.resolve import CompressionLike, resolve
from ..engine.layout import is_compressed
from ..engine.model_layout import model_layout
from ..engine.packing import pack
from ..engine.plan import Plan
from ..engine.selector import selector_for
from ..engine.settings import MIN_COMPRESS_SIZE, Settings
from ..engine.state import new_state
from ..engine.step import Step
from ..engine.transforms import transforms_for
from ..exchange import coding
from ..exchange.local_input import LocalInput
from ..exchange.one_rank import OneRank
from ..exchange.volume import payload_bytes
from ..kernels import noise
from .comparison import ComparedCompressor, Comparison
from .named_steps import named_steps

# What is compared by default: usual settings of all built-in compressors.
SPECS = (
    "none", "fp16", "bf16", "int8", "int4", "quantize:bits=3", "quantize:bits=2", "int2", "hadamard", "onebit",
    "topk:ratio=0.01", "block_topk:ratio=0.01", "block_sparse:ratio=0.1,block=32", "randomk:ratio=0.01",
    "hybrid:ratio=0.1,bits=4", "hybrid:ratio=0.05,bits=4", "hybrid:ratio=0.01,bits=4",
    "dgc:ratio=0.01,warmup_epochs=0", "powersgd:rank=4", "powersgd:rank=2", "powersgd:rank=1",
)  # fmt: skip
# Each is timed so often, after one call that compiles; less often after so many seconds, but twice.
_REPEATS, _SECONDS = 5, 1.0
_IN_CACHE = 2**16  # elements
# Steps of `error_with_residual` if gradients of one step only are given.
_STEPS = 8


def compare(
    gradients: Any,
    specs: CompressionLike | Sequence[CompressionLike] | None = None,
    steps: int | None = None,
    *,
    min_compress_size: int = MIN_COMPRESS_SIZE,
    watch: Callable[[str], Any] = lambda spec: None,
) -> Comparison:
    """Measures compressors on gradients: bytes, times, errors. One process is enough, without `hvd.init()`.

    Gradients are divided into chunks and encoded as in training on two ranks, in which nothing is compressed twice. For
    each compressor:

    1. It encodes and decodes the gradients of the first step several times: times are medians, without compiling. Each
       time, stochastic compressors draw other numbers. From C(x) - x follow `mse`, `relative_error` and `bias`.
       The square of the bias is the mean of <e, e'> / ||x||^2 over all pairs of errors e and e' of two draws: the part
       of the errors that is not independent.
    2. It makes `steps` steps of training, as the optimizer does on one rank: with residuals, the momentum of `dgc`, and
       the warm start of `powersgd`. The mean of what was sent, c, is compared with the mean gradient g. With error
       feedback, what is missing of the sum is the last residual, so the error falls with the number of steps.

    `relative_error` is that of the first step of training, as in the files of `hvdc.callbacks.CompressionMonitor`. With
    `powersgd`, it is that of a random start.

    For `dgc`, g is the mean of the velocities that momentum makes of the gradients without compression. A warm-up is
    left out: its last density is measured.

    Example:
        result = hvdc.compare("logs/run-1/gradients.npz", ["int8", "int4", "topk:ratio=0.01"])
        print(result)
        opt = hvdc.DistributedOptimizer(optimizer, compression=result.best(max_error=0.1))

    Args:
        gradients: The gradients of one step: arrays or tensors of floating point numbers, a list or a dict of them.
            Or a list of steps, each of which is such a list or dict. Or the path of a file that `CompressionMonitor`,
            `hvdc.profile`, `hvdc.record_gradients` or `numpy.savez` wrote. All steps have the same arrays.
        specs: Compressors as in `hvdc.DistributedOptimizer`, except `auto`. None: usual settings of all built-in ones.
        steps: The number of steps of `error_with_residual`. If there are fewer, they are repeated from the first on.
            None: as many as are given; 8 if it is only one.
        min_compress_size: As in `hvdc.DistributedOptimizer`: arrays of one dimension or of fewer elements are not
            compressed; 0 compresses all.
        watch: Called with each spec before it is measured.

    Returns:
        A `Comparison` with a row for each compressor.

    Raises:
        TypeError: `gradients` or a compressor is none of these.
        ValueError: The file cannot be read, an array is not finite, steps differ, no array is large enough to be
            compressed, or another argument is not valid.
    """
    compressors = _compressors(specs)
    checks.integer("compare: min_compress_size", min_compress_size, 0)
    recorded = named_steps(gradients)
    default = len(recorded) if len(recorded) > 1 else _STEPS
    steps = default if steps is None else checks.integer("compare: steps", steps, 1)
    shapes = {name: array.shape for name, array in recorded[0].items()}
    compressed = [name for name, shape in shapes.items() if is_compressed(shape, min_compress_size)]
    elements = sum(map(math.prod, shapes.values()))
    if not compressed:
        raise ValueError(
            "compare: no array is compressed, as none has two dimensions or more and at least "
            f"{min_compress_size} elements: give matrices, or min_compress_size=0"
        )
    host_memory.keep_freed_memory()
    sequence = [[tf.constant(step.pop(name)) for name in compressed] for step in recorded]
    count = sum(math.prod(shapes[name]) for name in compressed)
    total = _sum_of_steps(sequence, steps)
    rows = []
    for compressor in compressors:
        watch(compressor.spec)
        if compressor.uncompressed:
            rows.append(ComparedCompressor(compressor.spec, 4 * elements, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
            continue
        plan = _plan(compressor.stages[-1], compressed, sequence[0], min_compress_size)
        error_of_steps = _error_with_residual(plan, sequence, steps, total)
        rows.append(_row(plan, sequence[0], 4 * elements, error_of_steps, compressor.spec))
    return Comparison(tuple(rows), elements, count, steps, len(recorded))


def _compressors(specs: Any) -> list[Compressor]:
    specs = SPECS if specs is None else specs
    given = specs if isinstance(specs, (list, tuple)) else [specs]
    if not given:
        raise ValueError("compare: specs is an empty list: name at least one compressor")
    found: list[Compressor] = []
    for compressor in map(resolve, given):
        if compressor.automatic:
            raise ValueError("compare: auto chooses among compressors in training: name some of these instead")
        if compressor.stages_in_words:
            raise ValueError("compare: a schedule uses one compressor after the other: name each of them instead")
        if compressor not in found:  # may have no hash
            found.append(compressor)
    return found


def _plan(compressor: Compressor, names: Sequence[str], gradients: Sequence[tf.Tensor], min_size: int) -> Plan:
    """How training on one rank reduces these gradients, all of which are large enough to be compressed."""
    variables = [tf.TensorSpec(gradient.shape, tf.float32, name) for name, gradient in zip(names, gradients)]
    settings = Settings(compressor, "compare", process_set=OneRank(), min_compress_size=min_size)
    layout = model_layout(settings, variables, variables)
    state = new_state("compare", settings, layout)
    selectors = [selector_for(layout.group_of(b).compressor, state) for b in range(len(layout.buckets))]
    return Plan("compare", settings, layout, state, selectors, transforms_for(settings))


def _row(
    plan: Plan, gradients: Sequence[tf.Tensor], nbytes: int, error_of_steps: float, spec: str
) -> ComparedCompressor:
    """The measurements of one step; `nbytes` is the size of all gradients, those that are not compressed included."""
    (group,) = plan.layout.param_groups
    size = group.layout.tensors.numel
    sent = payload_bytes(group.compressor, group.layout.shapes) + nbytes - 4 * size
    once = _encode_and_decode(plan, gradients)
    energy = _energy(gradients)

    def relative(lost: float) -> float:
        return math.sqrt(lost / energy) if energy else 0.0

    return ComparedCompressor(
        spec,
        sent,
        nbytes / sent,
        once.encode_ms,
        once.decode_ms,
        once.energy / size,
        relative(once.energy),
        relative(once.bias_energy),
        error_of_steps,
    )


class _Once(NamedTuple):
    """Several encodings of the same gradients."""

    encode_ms: float
    decode_ms: float
    energy: float  # of C(x) - x: the mean over the draws
    bias_energy: float  # of E[C(x)] - x


def _encode_and_decode(plan: Plan, gradients: Sequence[tf.Tensor]) -> _Once:
    (group,) = plan.layout.param_groups
    compressor, layout = group.compressor, group.layout
    members = [gradients[i] for i in layout.tensors.members]
    keep = plan.settings.feeds_back(compressor)
    chunks = [tf.identity(chunk) for chunk in pack(layout, members, range(len(layout.shapes)))]
    residuals = [tf.zeros(shape) if keep else None for shape in layout.shapes]
    sums = [tf.zeros(shape) for shape in layout.shapes]
    seconds, energies = [], []
    for draw in range(1 + _REPEATS):
        shared = noise.fold(tf.constant(draw), 0)
        local = LocalInput([[chunk] for chunk in chunks], residuals, 1.0, keep, Seeds(shared, noise.fold(shared, 1)))
        devices.wait()
        start = time.perf_counter()
        shard = coding.encode(compressor, local)
        devices.wait()
        encoded = time.perf_counter()
        decoded = coding.decode(compressor, list(layout.shapes), [shard.payload], shard.contexts, tf.constant(1.0))
        devices.wait()
        seconds.append((encoded - start, time.perf_counter() - encoded))
        sums, energy = _add_errors(sums, decoded, chunks)
        energies.append(float(energy))
        if draw >= 2 and np.sum(seconds) > _SECONDS:
            break
    draws = len(energies)
    # The square of the sum, less the squares of its terms, are the products of all pairs.
    pairs = (_energy(sums) - sum(energies)) / (draws * (draws - 1))
    encode, decode = 1e3 * np.median(seconds[1:], axis=0)
    return _Once(float(encode), float(decode), float(np.mean(energies)), max(0.0, pairs))


@tf.function(autograph=False)
def _add_errors(
    sums: list[tf.Tensor], decoded: list[tf.Tensor], chunks: list[tf.Tensor]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The sums plus decoded - chunks, and the energy of the latter."""
    errors = [c - tf.reshape(x, c.shape) for c, x in zip(chunks, decoded)]
    return [s - e for s, e in zip(sums, errors)], 2.0 * tf.add_n([tf.nn.l2_loss(e) for e in errors])


def _error_with_residual(plan: Plan, sequence: Sequence[Any], steps: int, total: Sequence[tf.Tensor]) -> float:
    """The error of the sum of what is sent; `total` is that of the gradients."""
    if plan.settings.dgc is not None:
        total = _sum_of_steps(sequence, steps, plan.settings.momentum_correction, plan.transforms.prepare)

    def step(gradients_and_sent: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        gradients, sent = gradients_and_sent
        return [s + g for s, g in zip(sent, Step(plan, gradients).run())]

    # Traced here: TensorFlow would warn of a function that is traced again for each compressor.
    specs = [tf.TensorSpec(tensor.shape, tf.float32) for tensor in total]
    traced = tf.function(step, autograph=False).get_concrete_function([specs, specs])
    sent = [tf.zeros(tensor.shape) for tensor in total]
    for i in range(steps):
        sent = traced([sequence[i % len(sequence)], sent])
    energy = _energy(total)
    return math.sqrt(_energy([t - s for t, s in zip(total, sent)]) / energy) if energy else 0.0


def _sum_of_steps(
    sequence: Sequence[Any], steps: int, momentum: float = 0.0, prepare: Callable[[list[Any]], list[Any]] = list
) -> list[tf.Tensor]:
    """The sum over the steps of the velocities, momentum * velocity + gradient, which replace the gradients."""
    total = [tf.zeros(tensor.shape) for tensor in sequence[0]]
    velocities: list[tf.Tensor] = total
    for i in range(steps):
        gradients = prepare(sequence[i % len(sequence)])
        velocities = [momentum * v + g for v, g in zip(velocities, gradients)] if momentum else gradients
        total = [t + v for t, v in zip(total, velocities)]
    return total


def _energy(tensors: Iterable[tf.Tensor]) -> float:
    """The sum of the squares of all elements; in float64, because float32 may overflow."""
    total = 0.0
    for tensor in tensors:
        flat = tensor.numpy().reshape(-1)
        for first in range(0, flat.size, _IN_CACHE):
            block = flat[first : first + _IN_CACHE].astype(np.float64)
            total += float(block @ block)
    return total
