"""How much of white noise a compressor loses in a step; it loses less of most gradients."""

from __future__ import annotations

import functools

import numpy as np

from ..formats import BlockSparse, BlockTopK, Format, Hybrid, OneBit, PowerSGD, Quantize, RandomK, TopK
from ..formats.quantize import BLOCK


@functools.cache
def noise_lost(compressor: Format) -> float:
    """The share of the energy of white noise that one step loses, from samples."""
    samples = np.random.default_rng(0).standard_normal(2**18)
    if isinstance(compressor, Quantize):
        # Evenly spaced levels lose step^2 / 12 per element.
        steps = np.ptp(samples.reshape(-1, BLOCK), 1) / (2**compressor.bits - 1)
        return float(np.mean(np.square(steps / 12**0.5)))
    if isinstance(compressor, OneBit):
        # Signs with a common magnitude lose 1 - (mean |x|)^2 / mean x^2.
        return float(1.0 - np.mean(np.abs(samples)) ** 2 / np.mean(np.square(samples)))
    if isinstance(compressor, RandomK):
        return 1.0 - compressor.ratio
    if isinstance(compressor, (BlockTopK, Hybrid)):
        block = round(1.0 / compressor.ratio)
        return float(1.0 - np.mean(_energies(samples, block).max(1)) / block)
    if isinstance(compressor, (TopK, BlockSparse)):
        side = getattr(compressor, "block", 1)
        energies = np.sort(_energies(samples, side**2).sum(1))
        return _share_left(energies[::-1], max(1, round(compressor.ratio * energies.size)))
    if isinstance(compressor, PowerSGD):
        # Of square matrices, once the factors have converged.
        return _share_left(np.square(np.linalg.svd(samples.reshape(512, 512), compute_uv=False)), compressor.rank)
    return 0.0


def _energies(samples: np.ndarray, block: int) -> np.ndarray:
    """The squares of the samples, [blocks, block]."""
    return np.square(samples[: samples.size // block * block].reshape(-1, block))


def _share_left(energies: np.ndarray, count: int) -> float:
    """The share that the first `count` leave out."""
    return float(1.0 - energies[:count].sum() / energies.sum())
