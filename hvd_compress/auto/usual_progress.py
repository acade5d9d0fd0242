"""How much progress compressors usually make, before it is measured. Needs no TensorFlow.

Measured with Adam on two transformers of 1.0M parameters (docs/results.md is one of them): steps of an uncompressed
training to a validation loss, divided by the steps of a training with the compressor, and the share of white noise that
it lets through.

    hadamard 0.94 (0.88)        hybrid 10% 0.77 (0.38)      powersgd:rank=4 0.75 and 0.77 (0.03)
    2 bits 0.92 and 0.94 (0.70) hybrid 5% 0.60 and 0.63 (0.25)  powersgd:rank=2 0.60 and 0.63 (0.015)
    4 bits 1.0 (0.99)           hybrid 1% 0.45 and 0.47 (0.08)  powersgd:rank=1 0.41 (0.008)
    onebit 0.48 and 0.55 (0.64) topk 5% 0.75 and 0.80 (0.28)    int2 0.97 (0.79)

On dense layers with 128 examples per rank (mlp in docs/results.md, one seed), sparse compressors and signs make more:
hybrid 5% 0.95, hybrid 1% 0.83, topk 5% 0.95, onebit 0.76, powersgd:rank=4 0.79, powersgd:rank=2 0.59. In an autoencoder
(docs/auto.md, one seed), hybrid 5% makes 0.2 and hybrid 1% 0.13: 700 steps lead as far as 135 and 90 without
compression. In a CNN (docs/auto.md), they make 0.67 and 0.40. The powers are not fitted to these three.

With LAMB, on one of the transformers, hadamard makes 0.79, and 2 and 4 bits make 1.0. With hybrid 5%, topk 5% and
powersgd:rank=4, 300 steps lead as far as 140, 165 and 200 without compression (docs/results/lamb_steps_gpt.json).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Fitted to 0.88, 0.79 and 0.73 with 8, 32 and 90 local steps (docs/local-steps.md).
_ROUND_POWER = 0.07
# Of a step with delay=1: 0.44 and 0.70 were measured, and 0.63 after a warm-up (docs/delay.md).
OF_DELAY = 0.6
# By the compressor's name: a factor, and a power of the share. Gradients are closer to low rank than noise, and signs
# keep the sizes of a block's values from the optimizer.
_FITTED = {"": (1.0, 0.36), "int2": (1.0, 0.13), "topk": (1.1, 0.36), "powersgd": (3.6, 0.44), "onebit": (1.0, 1.5)}
# The power of the lower bound, if not 1. In the trainings that were measured (Adam: a transformer, the digits, dense
# layers, an autoencoder), `int2` lost at most 3% of the progress.
_LEAST_POWER = {"int2": 0.5}
# A candidate makes about as much progress as no compression if it loses less than this share of white noise.
LOSES_LITTLE = 0.02
# A candidate that usually makes at least the first share, and in any case the second, is hardly in doubt. It is
# measured later: the simulation of one candidate makes the first trace 0.4 s longer on a slow processor.
SURE_USUALLY, SURE_AT_LEAST = 0.96, 0.85
_LITTLE_NOISE = 0.9  # see `hoped`
# A factor with an optimizer that normalizes updates, for all that lose more but these: they round small values to 0,
# which adds little to the norm.
_NORMALIZED = 0.8
_ROUND_TO_ZERO = ("quantize", "int2")


def usual(lost: float, name: str = "", normalized: bool = False) -> float:
    """The relative progress of a step, at most 1: a power of the share that gets through, and its factor, were fitted.

    Args:
        lost: The share of the energy of white noise that is lost.
        name: The compressor's name; "" for one of which only `lost` is known.
        normalized: Whether the optimizer divides the update of each layer by its norm, as LAMB does.
    """
    factor, power = _FITTED.get(name, _FITTED[""])
    return float(min(1.0, factor * max(0.0, 1.0 - lost) ** power)) * _of_norm(lost, name, normalized)


def at_least(lost: float, name: str = "", normalized: bool = False) -> float:
    """A lower bound: what gets through of white noise is not out of date. With LAMB, its factor is fitted, too.

    With `int2` it is the root of that share.

    Arguments as for `usual`.
    """
    return float(max(0.0, 1.0 - lost) ** _LEAST_POWER.get(name, 1.0)) * _of_norm(lost, name, normalized)


def assumed(lost: float, name: str = "", normalized: bool = False) -> float:
    """The progress that a first choice counts with. Arguments as above.

    It is the usual one. For powersgd, it is between that and the lower bound: its kernels take seconds to compile.
    """
    expected = usual(lost, name, normalized)
    return math.sqrt(at_least(lost, name, normalized) * expected) if name == "powersgd" else expected


def hoped(usual_progress: Sequence[float], names: Sequence[str], measured: Mapping[int, float]) -> list[float]:
    """The progress that candidates may make, in a training in which that of some was measured.

    Candidates of the same name fare alike: if a measured one makes the power p of its usual progress, so do they. p is
    known well only if the usual progress is below 0.9.

    Args:
        usual_progress: Of each candidate.
        names: The compressors' names; "" for those without one.
        measured: The measured progress of candidates, by their positions.
    """
    powers: dict[str, list[float]] = {}
    for c, progress in measured.items():
        if names[c] and 0.0 < usual_progress[c] < _LITTLE_NOISE:
            powers.setdefault(names[c], []).append(math.log(progress) / math.log(usual_progress[c]))
    mean_powers = {name: sum(of_name) / len(of_name) for name, of_name in powers.items()}
    return [progress ** mean_powers.get(name, 1.0) for name, progress in zip(names, usual_progress)]


def of_round(local_steps: int) -> float:
    """The relative progress of a step in a round of so many local steps, with outer="average"."""
    return float(local_steps**-_ROUND_POWER)


def _of_norm(lost: float, name: str, normalized: bool) -> float:
    return _NORMALIZED if normalized and lost >= LOSES_LITTLE and name not in _ROUND_TO_ZERO else 1.0
