"""The default cost of kernels, measured with TensorFlow 2.21 on one core of a server (AMD EPYC) and on a GPU (H200).

Medians over chunks of gradient, timed as `calibrate` does. On the core, these are native kernels where there are any,
else those of XLA, and chunks of 4 MB. On the GPU, they are those of XLA and chunks of 32 MB, or of 4 MB for compressors
that need the shapes of gradients (`docs/results/gpu/kernels.json`). They are a first estimate: calibrate on your
machine.
"""

from __future__ import annotations

from typing import NamedTuple

from .kernels import KernelCost


class Defaults(NamedTuple):
    """The costs on one machine."""

    pass_seconds: float  # of `x + 1` on 4 MB, without the time for new memory
    kernels: dict[str, KernelCost]  # by the compressor's name; call, encode, decode, decode_rank
    # None where the time grows with the bytes. Else chunks take the same time whatever their size, and these are the
    # elements of those that were timed.
    elements: int | None = None


CPU = Defaults(
    1.5e-4,
    {
        "none": KernelCost(),
        "fp16": KernelCost(1.6e-4, 8.7e-11, 4.9e-11, 2.3e-11),
        "bf16": KernelCost(1.6e-4, 9.0e-11, 5.0e-11, 2.3e-11),
        "quantize": KernelCost(1.6e-4, 1.7e-10, 4.6e-11, 1.8e-11),  # at 8 bits
        "int4": KernelCost(1.6e-4, 1.7e-10, 4.1e-11, 2.0e-11),
        "int2": KernelCost(1.6e-4, 1.7e-10, 4.1e-11, 2.0e-11),  # as int4: the same times, side by side
        "hadamard": KernelCost(1.6e-4, 3.2e-10, 1.1e-10, 4.5e-11),
        "onebit": KernelCost(1.6e-4, 1.7e-10, 5.0e-11, 1.9e-11),
        "topk": KernelCost(1.6e-4, 2.9e-10, 5.1e-11, 5.5e-12),  # at 1%
        "randomk": KernelCost(1.6e-4, 2.8e-10, 9.3e-11, 2.7e-12),  # at 1%
        "block_topk": KernelCost(1.6e-4, 2.1e-10, 3.7e-11, 5.0e-12),  # at 1%
        "block_sparse": KernelCost(1.6e-4, 5.3e-10, 1.3e-10, 2.7e-11),  # at 1%, blocks of 16 x 16
        "hybrid": KernelCost(1.6e-4, 2.2e-10, 4.2e-11, 5.9e-12),  # at 1%, 4 bits
        "powersgd": KernelCost(1.6e-4, 2.3e-10, 6.0e-11, 0.0),  # at rank 2
    },
)
GPU = Defaults(
    3.9e-5,
    {
        "none": KernelCost(),
        "fp16": KernelCost(1.8e-4, 5.6e-12, 2.2e-12, 0.0),
        "bf16": KernelCost(1.8e-4, 4.9e-12, 2.1e-12, 0.0),
        "quantize": KernelCost(1.8e-4, 6.9e-12, 1.9e-12, 0.0),  # at 8 bits
        "int4": KernelCost(1.8e-4, 6.7e-12, 3.5e-12, 0.0),
        "int2": KernelCost(1.8e-4, 6.7e-12, 3.5e-12, 0.0),  # not measured: those of int4
        "hadamard": KernelCost(1.8e-4, 1.1e-11, 4.3e-12, 2.5e-13),
        "onebit": KernelCost(1.8e-4, 6.2e-12, 3.2e-12, 0.0),
        "topk": KernelCost(1.8e-4, 2.6e-11, 8.0e-12, 9.5e-14),  # at 1%
        "randomk": KernelCost(1.8e-4, 9.3e-12, 4.0e-12, 0.0),  # at 1%
        "block_topk": KernelCost(1.8e-4, 6.1e-12, 3.6e-12, 0.0),  # at 1%
        "block_sparse": KernelCost(1.8e-4, 1.8e-10, 6.6e-11, 2.8e-12),  # at 1%, blocks of 16 x 16
        "hybrid": KernelCost(1.8e-4, 1.0e-11, 2.5e-12, 6.0e-14),  # at 1%, 4 bits
        "powersgd": KernelCost(1.8e-4, 9.7e-11, 3.0e-11, 0.0),  # at rank 2
    },
    elements=2**23,
)
