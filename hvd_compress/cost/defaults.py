"""The default cost of kernels, measured with TensorFlow 2.21 on one core of a server (AMD EPYC) and on a GPU (H200).

On the core, medians over 4 MB of gradient: native kernels where there are any, else those of XLA. On the GPU, XLA's
kernels on chunks of 64 KB to 16 MB (`docs/results/gpu_kernels.json`). The size made no difference there, so `call` is
the mean of encoding and decoding, and the times per byte are those of four and of two passes over the GPU's memory, at
the 4 TB/s that were measured. They are timed as `calibrate` does, and a first estimate: calibrate on your machine.
"""

from __future__ import annotations

from typing import NamedTuple

from .kernels import KernelCost


class Defaults(NamedTuple):
    """The costs on one machine."""

    pass_seconds: float  # of `x + 1` on 4 MB
    kernels: dict[str, KernelCost]  # by the compressor's name; call, encode, decode, decode_rank


CPU = Defaults(
    1.5e-4,
    {
        "none": KernelCost(),
        "fp16": KernelCost(1.6e-4, 8.7e-11, 4.9e-11, 2.3e-11),
        "bf16": KernelCost(1.6e-4, 9.0e-11, 5.0e-11, 2.3e-11),
        "quantize": KernelCost(1.6e-4, 1.7e-10, 4.6e-11, 1.8e-11),  # at 8 bits
        "int4": KernelCost(1.6e-4, 1.7e-10, 4.1e-11, 2.0e-11),
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
        "fp16": KernelCost(1.6e-4, 2e-12, 1e-12, 1e-12),
        "bf16": KernelCost(1.6e-4, 2e-12, 1e-12, 1e-12),
        "quantize": KernelCost(1.9e-4, 2e-12, 1e-12, 1e-12),  # at 8 bits
        "int4": KernelCost(1.8e-4, 2e-12, 1e-12, 1e-12),
        "hadamard": KernelCost(2.8e-4, 2e-12, 1e-12, 1e-12),
        "onebit": KernelCost(2.1e-4, 2e-12, 1e-12, 1e-12),
        "topk": KernelCost(6.1e-4, 2e-12, 1e-12, 1e-12),  # at 1%
        "randomk": KernelCost(2.8e-4, 2e-12, 1e-12, 1e-12),  # at 1%
        "block_topk": KernelCost(2.6e-4, 2e-12, 1e-12, 1e-12),  # at 1%
        "block_sparse": KernelCost(5.2e-4, 2e-12, 1e-12, 1e-12),  # at 1%, blocks of 16 x 16
        "hybrid": KernelCost(3.1e-4, 2e-12, 1e-12, 1e-12),  # at 1%, 4 bits
        "powersgd": KernelCost(2.7e-4, 2e-12, 1e-12, 0.0),  # at rank 2
    },
)
