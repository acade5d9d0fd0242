"""Times how long compressors encode and decode."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..common import devices, tracing
from ..compressors import Compressor
from ..compressors.base import no_seeds
from ..exchange import coding
from ..exchange.local_input import LocalInput
from .defaults import CPU, GPU, Defaults

# Chunks of gradient that are timed together.
_CHUNKS = 4
_REPEATS = 5
# For the machine's speed: together they take longer than a time slice, in which another thread may have the core.
_REPEATS_OF_SPEED = 20
_CALLS_OF_GPU = 20


def measure_kernels(
    compressor: Compressor, elements: int, ranks: int, call: float
) -> tuple[float, float, float, float]:
    """The fields of a `KernelCost`.

    Payloads of `ranks` ranks are decoded, as in the exchange, so that no kernel is compiled for this measurement only.
    Chunks have so many `elements`; `call` is the seconds that an empty call takes, see `call_time`.
    """
    if compressor.uncompressed:
        return 0.0, 0.0, 0.0, 0.0  # nothing is encoded
    rows = min(512, math.isqrt(elements))
    shape = (rows, elements // rows) if compressor.per_tensor else (elements,)
    gradients = [tf.random.stateless_normal(shape, [1, i]) for i in range(_CHUNKS)]
    keep = compressor.error_feedback
    residuals = [tf.zeros(shape) if keep else None] * _CHUNKS
    nbytes = _CHUNKS * 4 * math.prod(shape)

    # In graphs only, as in training: kernels that are called eagerly would be compiled once more.
    @tf.function(autograph=False)
    def encode(gradients: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor | None]) -> Any:
        encoded = coding.encode(compressor, LocalInput([[x] for x in gradients], residuals, 1.0, keep, no_seeds()))
        return encoded.payload, [residual for residual in encoded.residuals if keep]

    @tf.function(autograph=False)
    def decode(gradient: tf.Tensor, residual: tf.Tensor | None, payloads: int) -> Any:
        encoded = coding.encode(compressor, LocalInput([[gradient]], [residual], 1.0, keep, no_seeds()))
        # With a different factor each: TensorFlow would decode equal sums only once.
        factors = [tf.constant(1.0 + i) for i in range(_CHUNKS)]
        received = [encoded.payload] * payloads
        return [coding.decode(compressor, [shape], received, encoded.contexts, factor) for factor in factors]

    encoding = max(0.0, _time_of(lambda: encode(gradients, residuals)) - call)

    def decoding(payloads: int) -> float:
        seconds = _time_of(lambda: decode(gradients[0], residuals[0], payloads))
        return max(0.0, seconds - call - encoding / _CHUNKS)

    if compressor.model_wide:  # its factors are summed before they are decoded
        return call, encoding / nbytes, decoding(1) / nbytes, 0.0
    payloads = min(max(ranks, 2), coding.RANKS_PER_KERNEL)
    all_payloads = decoding(payloads)
    # Two ranks never decode a single payload.
    one_payload = decoding(1) if ranks > 2 else 2.0 / 3.0 * all_payloads
    per_rank = max(0.0, (all_payloads - one_payload) / (payloads - 1))
    return call, encoding / nbytes, max(0.0, one_payload - per_rank) / nbytes, per_rank / nbytes


def default_costs() -> Defaults:
    """The default costs of a GPU if TensorFlow uses one in this process, else those of a core.

    They are not in `defaults`, because `plan` starts without TensorFlow.
    """
    return GPU if devices.has_gpu() else CPU


def call_time() -> float:
    """Seconds that calling a small function takes."""
    add_one = tf.function(lambda x: x + 1.0, autograph=False)
    small = tf.zeros([16])
    return _time_of(lambda: add_one(small))


def measure_speed() -> float:
    """How many times as long as on the machine of `defaults` this machine takes, for a pass over 4 MB."""
    total, x = tracing.variable(tf.zeros([2**20]), "hvdc_measure_speed"), tf.zeros([2**20])
    # In place: the operating system clears new memory page by page, which takes up to 30 times as long as the pass. The
    # shortest time counts, since costs are those of an idle machine.
    shortest = min(_times_of(lambda: total.assign_add(x, read_value=False), _REPEATS_OF_SPEED))
    return max(0.01, shortest / default_costs().pass_seconds)


def _time_of(run: Callable[[], Any]) -> float:
    """Seconds of a call, the median."""
    return float(np.median(_times_of(run)))


def _times_of(run: Callable[[], Any], repeats: int = _REPEATS) -> list[float]:
    """Seconds of a call, measured so many times after a first call."""
    # In a training step, nothing waits for a GPU after each call.
    calls = _CALLS_OF_GPU if devices.has_gpu() else 1

    def run_and_wait() -> None:
        for _ in range(calls):
            run()
        devices.wait()

    run_and_wait()
    return [seconds / calls for seconds in timeit.repeat(run_and_wait, number=1, repeat=repeats)]
