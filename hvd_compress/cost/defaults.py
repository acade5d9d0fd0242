"""The default cost of kernels, measured on one core of a server (AMD EPYC, TensorFlow 2.21).

Medians over 4 MB of gradient, timed as `calibrate` does. XLA's kernels were measured there. Where there are native
ones, the times are scaled by the ratio of both on another machine, which was 0.5 to 0.7 for encoding. They are a first
estimate: calibrate on your machine.
"""

from __future__ import annotations

from .kernels import KernelCost

# Seconds of `x + 1` on 4 MB, on such a machine. Not measured there: estimated from the times of `KERNELS` on a machine
# where it takes 0.24 ms.
PASS_SECONDS = 3e-4
# By the compressor's name; call, encode, decode, decode_rank.
KERNELS: dict[str, KernelCost] = {
    "none": KernelCost(),
    "fp16": KernelCost(3.1e-4, 2.2e-10, 6.0e-11, 2.2e-11),
    "bf16": KernelCost(2.8e-4, 1.6e-10, 3.0e-11, 6.2e-12),
    "quantize": KernelCost(2.2e-4, 3.2e-10, 1.3e-11, 1.3e-11),  # at 8 bits
    "int4": KernelCost(3.0e-4, 3.6e-10, 2.3e-11, 2.2e-11),
    "hadamard": KernelCost(3.0e-4, 4.4e-10, 1.4e-10, 2.7e-11),
    "onebit": KernelCost(3.1e-4, 2.9e-10, 1.7e-11, 9.4e-12),
    "topk": KernelCost(2.6e-4, 7.2e-10, 9.0e-11, 1.0e-11),  # at 1%
    "randomk": KernelCost(2.6e-4, 5.2e-10, 8.0e-11, 6.1e-12),  # at 1%
    "block_topk": KernelCost(3.2e-4, 3.7e-10, 2.7e-11, 3.3e-11),  # at 1%
    "block_sparse": KernelCost(2.8e-4, 1.1e-9, 3.5e-10, 8.3e-11),  # at 1%, blocks of 16 x 16
    "hybrid": KernelCost(3.0e-4, 4.8e-10, 8.0e-12, 1.8e-11),  # at 1%, 4 bits
    # At rank 2; measured on another machine, and scaled by the ratio of XLA's `hybrid` on both.
    "powersgd": KernelCost(3.0e-4, 4.9e-10, 6.7e-11, 0.0),
}
