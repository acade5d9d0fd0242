"""What `hvdc.DistributedOptimizer` and `hvdc.DistributedGradientTape` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from ..common import checks
from ..common.gradients import with_values
from ..compressors.resolve import policies, resolve
from ..engine.reducer import Reducer
from ..engine.settings import Settings
from .environment import EXCHANGE, resolve_bucket_bytes, resolve_exchange


def check_undistributed(name: str, wrapped: Any, ours: type, wrapper: str) -> None:
    """Raises TypeError if the argument `name` is distributed already, by our class or by Horovod's `wrapper`."""
    if isinstance(wrapped, ours):
        raise TypeError(f"{name} is distributed already: wrap it only once")
    if checks.is_horovods(wrapped):
        raise TypeError(
            f"{name} is distributed by Horovod already: leave hvd.{wrapper} out, hvdc.{wrapper} takes its place"
        )


def settings_from(arguments: Mapping[str, Any], name: str) -> Settings:
    """Turns a frontend's arguments into `Settings`.

    Args:
        arguments: All arguments of the frontend by name. Those that are fields of `Settings` are taken over;
            `compression`, `policy`, `bucket_bytes` and Horovod's deprecated `num_groups` are resolved first, and the
            environment decides on `delay` and `local_steps` where both are left out. Others are ignored.
        name: The prefix of the names of operations.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is not valid.
    """
    fields = {field.name: arguments[field.name] for field in dataclasses.fields(Settings) if field.name in arguments}
    if fields["groups"] is None:
        fields["groups"] = arguments["num_groups"] or None
    fields |= {
        "compressor": resolve(arguments["compression"]),
        "name": name,
        "bucket_bytes": resolve_bucket_bytes(arguments["bucket_bytes"]),
        "policy": policies(arguments["policy"]),
    }
    exchange: dict[str, int] = {}
    if "delay" in fields and not fields["delay"] and fields.get("local_steps") is None:
        exchange = resolve_exchange()
        if not exchange.keys() <= fields.keys():
            raise ValueError(f"environment variable {EXCHANGE}: {name} has no local_steps, use hvdc.LocalSteps")
    try:
        settings = Settings(**fields | exchange)
    except ValueError as error:
        if not exchange:
            raise
        Settings(**fields)  # raises another error if these settings are wrong in themselves
        said = ", ".join(f"{key}={value}" for key, value in exchange.items())
        raise ValueError(f"environment variable {EXCHANGE}, {said}: {error}") from None
    if settings.round_lengths and "local_steps" not in fields:
        raise ValueError(
            f"auto:local_steps belongs to hvdc.DistributedOptimizer and hvdc.LocalSteps, which see the weights; {name} "
            "only sees gradients"
        )
    return settings


def reduce_shared(
    reducer: Reducer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    local: Set[int],
    so_far: tf.Tensor | None = None,
) -> list[Any]:
    """Reduces the gradients over the ranks, except those of variables whose ids are in `local`.

    With `scale_local_gradients`, those are divided by the number of ranks, as Horovod does. See `Reducer` for the other
    arguments.
    """
    shared = [i for i, variable in enumerate(variables) if id(variable) not in local]
    reduced = reducer([gradients[i] for i in shared], [variables[i] for i in shared], so_far)
    result = list(gradients)
    if reducer.settings.scale_local_gradients:
        size = reducer.settings.process_set.size()
        result = [with_values(g, lambda x: x / size) if id(v) in local else g for g, v in zip(gradients, variables)]
    for i, gradient in zip(shared, reduced):
        result[i] = gradient
    return result
