"""Gradients of local variables, which are not reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import tensorflow as tf

from ..common.gradients import with_values
from ..engine.reducer import Reducer


def reduce_shared(
    reducer: Reducer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    local: Set[int],
    so_far: tf.Tensor | None = None,
) -> list[Any]:
    """Reduces the gradients over the ranks, except those of local variables.

    With `scale_local_gradients`, those are divided by the number of ranks, as Horovod does.

    Args:
        reducer: Reduces the others.
        gradients: Tensors, IndexedSlices or None, one for each of `variables`.
        variables: The gradients' variables.
        local: The ids of local variables.
        so_far: See `Reducer`.
    """
    shared = [i for i, variable in enumerate(variables) if id(variable) not in local]
    reduced = reducer([gradients[i] for i in shared], [variables[i] for i in shared], so_far)
    result = list(gradients)
    if reducer.settings.scale_local_gradients:
        size = reducer.settings.process_set.size()
        for i in set(range(len(result))) - set(shared):
            result[i] = with_values(result[i], lambda values: values / size)
    for i, gradient in zip(shared, reduced):
        result[i] = gradient
    return result
