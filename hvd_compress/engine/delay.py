"""A delay of one step: what a step encodes waits, and the next step exchanges it beside its own computation.

A step with `delay=1` does this with each bucket:

1. Read what waits: the payload that the step before encoded. It is there before the forward pass.
2. Exchange and decode it. The result takes the place of the step's own reduced gradients.
3. Encode the step's own gradients, with the residuals. The payload waits from now on.

The exchange waits for the step's data and for no gradient, so TensorFlow runs it beside the forward and backward pass.
What waits is a payload, not a copy of the gradients; uncompressed gradients wait as they are. With error feedback
nothing is lost: over all ranks, gradient + old residual = what waits + new residual.

In the first step, zeros wait. In the steps of the warm-up, each step exchanges its own payload, and zeros stay.

A payload that holds a value that is not finite has its flag down. A step later it makes the result NaN on all ranks, as
without delay. The rank that encoded it has kept its old residuals. The others have encoded theirs: what they put into
that payload is lost with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..compressors import Compressor
from ..compressors.base import no_seeds
from ..exchange import choice
from ..exchange.coding import EncodedShard
from ..exchange.collective import Collective, Reduction
from ..exchange.group import Group
from ..exchange.local_input import LocalInput
from ..formats.base import Shape
from .settings import Settings


def nothing(settings: Settings, compressor: Compressor, shapes: Sequence[Shape]) -> list[tf.Tensor]:
    """What waits of a bucket before the first step: the payload of zeros. Not for use in a graph."""
    collective = choice.choose(compressor, shapes, settings.process_set.size())
    # With residuals of zeros, so that kernels are compiled once for this and for training.
    keep = settings.feeds_back(compressor)
    residuals = [tf.zeros(shape, settings.residual_dtype) if keep else None for shape in shapes]
    zeros = LocalInput([[tf.zeros(s)] for s in shapes], residuals, settings.residual_decay, keep, no_seeds())
    return _tensors(collective.encode(compressor, zeros, Group(settings.process_set, None)))


def take_turns(
    new: Sequence[tf.Tensor], waiting: Sequence[tf.Tensor], is_warm_up: tf.Tensor | None
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """What is exchanged in this step, and what waits after it; `is_warm_up` is a bool scalar, or None for never."""
    new, waiting = list(new), list(waiting)
    if is_warm_up is None:
        return waiting, new
    # TensorFlow divides the cond, so that what is exchanged does not wait for what is kept.
    exchanged, kept = tf.cond(is_warm_up, lambda: (new, waiting), lambda: (waiting, new))
    return exchanged, kept


def reduce(
    collective: Collective,
    compressor: Compressor,
    local_input: LocalInput,
    waiting: Sequence[tf.Tensor],
    is_warm_up: tf.Tensor | None,
    scale: float,
    group: Group,
) -> tuple[Reduction, list[tf.Tensor]]:
    """As `Collective.reduce`, with what waits in place of this step's payload. Also returns what waits after this step.

    In the result, `residuals` and `outgoing` are those of this step's gradients, and `ok` is whether these are finite
    on this rank (in the warm-up: on all ranks).
    """
    encoded = collective.encode(compressor, local_input, group)
    exchanged, kept = take_turns(_tensors(encoded), waiting, is_warm_up)
    reduction = collective.exchange(compressor, _with_tensors(encoded, exchanged), local_input, scale, group)
    # Residuals of the second encoding of a scatter-reduce. The old ones have gone into `encoded.sums`.
    residuals = [
        new if new is own or new is None else tf.where(reduction.ok, new, tf.zeros_like(new))
        for new, own in zip(reduction.residuals, encoded.residuals)
    ]
    ok = encoded.finite()
    if is_warm_up is not None:
        ok = tf.where(is_warm_up, reduction.ok, ok)
    return reduction._replace(residuals=residuals, ok=ok, outgoing=encoded.outgoing), kept


def _tensors(encoded: EncodedShard) -> list[tf.Tensor]:
    """What an exchange in a later step needs. Contexts hold a tensor only if it depends on the step."""
    flat = tf.nest.flatten((encoded.payload, encoded.sums, encoded.contexts))
    return [value for value in flat if tf.is_tensor(value)]


def _with_tensors(encoded: EncodedShard, tensors: Sequence[tf.Tensor]) -> EncodedShard:
    """The inverse of `_tensors`; all else is that of `encoded`."""
    remaining = iter(tensors)

    def replaced(value: Any) -> Any:
        return next(remaining) if tf.is_tensor(value) else value

    payload, sums, contexts = tf.nest.map_structure(replaced, (encoded.payload, encoded.sums, encoded.contexts))
    return encoded._replace(payload=payload, sums=sums, contexts=contexts)
