"""Whether all ranks do the same: asked once for each plan, before its first collective.

Ranks that disagree would wait for each other for ever, or add up what does not belong together. Here each rank
says what it is about to do, and all find the first difference by the same rule. What this cannot find is a
rank that makes no plan at all (it trains without this package, say): the others wait for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

from ..common.names import path_of
from ..version import __version__
from .settings import Settings

# Depends on nothing in which ranks may differ, else they would not even meet to find out.
_NAME = "hvdc_agreement"
_LENGTH_BYTES = 4
_WATCHED = "whether somebody watches"
# Devices may differ from rank to rank; who takes part in the exchange is of the same process set.
_LOCAL = {"compressor", "policy", "groups", "process_set", "device_dense", "device_sparse"}

T = TypeVar("T")
Facts = dict[str, str]  # what is compared, in this order, and what it is on a rank


def check(
    plan: str, settings: Settings, gradients: Sequence[Any], variables: Sequence[Any], watched: bool = False
) -> bool:
    """Compares with the other ranks of the process set what this one is about to do; costs one allgather.

    Args:
        plan: The name that the plan's collectives will begin with.
        settings: How gradients are reduced.
        gradients: Tensors, IndexedSlices or None, one for each of `variables`.
        variables: What the gradients belong to.
        watched: Whether somebody watches this rank's steps, in which ranks may differ.

    Returns:
        Whether any rank is watched.

    Raises:
        ValueError: Ranks disagree; with the same text on every rank, which says who has what.
    """
    if not tf.executing_eagerly():  # TensorFlow 1's graphs: nothing can be known before they run
        return False
    facts = _facts(plan, settings, gradients, variables)
    with tf.device("CPU"):
        packed = _packed(facts | {_WATCHED: str(watched)})
        gathered = hvd.allgather(packed, name=_NAME, process_set=settings.process_set)
    told = _unpacked(gathered.numpy().tobytes())
    watchers = [rank.pop(_WATCHED, "") for rank in told]
    complaint = difference(told, settings.process_set.ranks)
    if complaint:
        raise ValueError(complaint)
    return "True" in watchers


def difference(facts: Sequence[Facts], ranks: Sequence[int]) -> str | None:
    """The first thing in which ranks differ, in one line; None where there is none.

    Args:
        facts: What each rank has.
        ranks: Their numbers, in the same order.
    """
    for what in dict.fromkeys(key for rank in facts for key in rank):
        holders: dict[str, list[int]] = {}
        for rank, own in zip(ranks, facts):
            holders.setdefault(own.get(what, "nothing"), []).append(rank)
        if len(holders) > 1:
            who = ", ".join(f"{_plural(found)} {value}" for value, found in holders.items())
            return f"ranks disagree on {what}: {who}; start all ranks with the same code and environment"
    return None


def on_all(
    group: Any, name: str, what: str, action: Callable[[], T], error: type[Exception] = ValueError
) -> list[T]:
    """The results of `action` on all ranks, in their order; costs one allgather.

    Args:
        group: The process set; all of its ranks call this.
        name: Of the collective.
        what: They are about, for the message.
        action: May fail on any rank.
        error: What is raised then.

    Raises:
        error: On every rank, with what went wrong on the first rank on which anything did.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as raised:  # whatever it is: the others must not wait for ever
        failure = str(raised) if isinstance(raised, (OSError, ValueError)) else repr(raised)
    everyone = hvd.allgather_object((result, failure), name=name, process_set=group)
    for rank, (_, failed) in enumerate(everyone):
        if failed is not None:
            raise error(f"{what}, rank {rank}: {failed}")
    return [result for result, _ in everyone]


def _facts(plan: str, settings: Settings, gradients: Sequence[Any], variables: Sequence[Any]) -> Facts:
    """In the order in which differences should be named: causes first."""
    facts = {
        "the version of hvd_compress": __version__,
        "the version of TensorFlow": tf.__version__,
        "the version of Horovod": horovod.__version__,
        **{
            f"the environment variable {name}": os.environ.get(name, "").strip() or "no value"
            for name in ("HVD_COMPRESS", "HVD_COMPRESS_BUCKET_BYTES")
        },
        "compression": settings.compressor.spec,
        "policy": str({pattern: compressor.spec for pattern, compressor in settings.policy}),
    }
    for field in dataclasses.fields(settings):
        if field.name not in _LOCAL:
            facts[field.name] = str(getattr(settings, field.name))
    facts["op"] = settings.op_name
    facts["groups"] = _groups(settings.groups, variables)
    facts["the number of gradients"] = str(len(gradients))
    for i, (gradient, variable) in enumerate(zip(gradients, variables)):
        facts[f"gradient {i}"] = _described(gradient, variable)
    # Last, since it may differ where all of the above is equal: it counts what was made before.
    facts["how many optimizers and models they have trained before"] = plan
    return facts


def _described(gradient: Any, variable: Any) -> str:
    path = path_of(variable) or "a tensor"
    if gradient is None:
        return f"no gradient of {_unnumbered(path)}"
    kind = "IndexedSlices of " if isinstance(gradient, tf.IndexedSlices) else ""
    return f"{_unnumbered(path)} {kind}{gradient.dtype.name} {tf.TensorShape(variable.shape)}"


def _unnumbered(path: str) -> str:
    """A variable's path without the numbers that Keras gives layers of one class.

    They count all that a process has made: a rank that has looked at another model before is no error.
    """
    return re.sub(r"_\d+(?=/|$)", "", path)


def _groups(groups: Any, variables: Sequence[Any]) -> str:
    if not isinstance(groups, (list, tuple)):
        return str(groups)
    position = {id(variable): i for i, variable in enumerate(variables)}
    return str([[position.get(id(variable)) for variable in group] for group in groups])


def _plural(ranks: Sequence[int]) -> str:
    """`rank 0 has`, `ranks 1-3, 5 have`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text} has" if len(ranks) == 1 else f"ranks {text} have"


def _packed(facts: Facts) -> tf.Tensor:
    """As bytes, uint8 [any number], that say their own length; must stay readable for other versions."""
    text = zlib.compress(json.dumps(facts).encode())
    return tf.io.decode_raw(len(text).to_bytes(_LENGTH_BYTES, "big") + text, tf.uint8)


def _unpacked(joined: bytes) -> list[Facts]:
    """The inverse of `_packed`, of all ranks."""
    facts = []
    while joined:
        end = _LENGTH_BYTES + int.from_bytes(joined[:_LENGTH_BYTES], "big")
        facts.append(json.loads(zlib.decompress(joined[_LENGTH_BYTES:end])))
        joined = joined[end:]
    return facts
