"""How much of white noise a compressor loses in a step; it loses less of most gradients."""

from __future__ import annotations

import functools

import numpy as np

from ..formats import BlockSparse, BlockTopK, Format, Hybrid, OneBit, PowerSGD, Quantize, RandomK, TopK
from ..formats.quantize import BLOCK


@functools.cache
def noise_lost(compressor: Format) -> float:
    """The share of the energy of white noise that one step loses, from samples."""
    return float(_lost(compressor, np.random.default_rng(0).standard_normal(2**18)))


@functools.singledispatch
def _lost(compressor: Format, samples: np.ndarray) -> float:
    return 0.0


@_lost.register
def _(compressor: Quantize, samples: np.ndarray) -> float:
    # Evenly spaced levels lose step^2 / 12 per element.
    steps = np.ptp(samples.reshape(-1, BLOCK), 1) / (2**compressor.bits - 1)
    return float(np.mean(np.square(steps / 12**0.5)))


@_lost.register
def _(compressor: OneBit, samples: np.ndarray) -> float:
    # Signs with a common magnitude lose 1 - (mean |x|)^2 / mean x^2.
    return float(1.0 - np.mean(np.abs(samples)) ** 2 / np.mean(np.square(samples)))


@_lost.register
def _(compressor: RandomK, samples: np.ndarray) -> float:
    return 1.0 - compressor.ratio


@_lost.register(BlockTopK)
@_lost.register(Hybrid)
def _(compressor: BlockTopK | Hybrid, samples: np.ndarray) -> float:
    block = round(1.0 / compressor.ratio)
    return float(1.0 - np.mean(_energies(samples, block).max(1)) / block)


@_lost.register(TopK)
@_lost.register(BlockSparse)
def _(compressor: TopK | BlockSparse, samples: np.ndarray) -> float:
    side = getattr(compressor, "block", 1)
    energies = np.sort(_energies(samples, side**2).sum(1))
    return _share_left(energies[::-1], max(1, round(compressor.ratio * energies.size)))


@_lost.register
def _(compressor: PowerSGD, samples: np.ndarray) -> float:
    # Of square matrices, once the factors have converged.
    return _share_left(np.square(np.linalg.svd(samples.reshape(512, 512), compute_uv=False)), compressor.rank)


def _energies(samples: np.ndarray, block: int) -> np.ndarray:
    """The squares of the samples, [blocks, block]."""
    return np.square(samples[: samples.size // block * block].reshape(-1, block))


def _share_left(energies: np.ndarray, count: int) -> float:
    """The share that the first `count` leave out."""
    return float(1.0 - energies[:count].sum() / energies.sum())
