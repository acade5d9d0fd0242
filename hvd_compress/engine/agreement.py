"""Checks once for each plan, before its first collective, and when a `fit` begins, that all ranks do the same.

Ranks that disagree would wait for each other for ever, or add up gradients of different variables. So each rank sends
what it is about to do, and all ranks find the first difference by the same rule. A rank that makes no plan, because it
trains without this package or goes on with an earlier plan, cannot be found. The others wait for it, and say so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

from ..common import determinism, verbosity
from ..common.names import path_of, renumbered
from ..compressors import Compressor
from ..kernels import native
from ..version import __version__
from .grouping import positions
from .settings import Settings

# The fact that holds the prefix of the names of collectives, see `of_plan`.
TRAINED_BEFORE = "how many optimizers and models they have trained before"
# It depends on nothing that may differ between ranks: else the allgather itself would hang.
_NAME = "hvdc_agreement"
_LENGTH_BYTES = 4
_PATIENCE, _LONGEST = 60.0, 600.0  # seconds
_WATCHED, _OWN = "whether somebody watches", "own"
_GRADIENT, _TRAINED = "gradient ", "trained variable "
NUMBER_TRAINED = "the number of trained variables"
# Settings that are not compared as text: devices may differ from rank to rank, ranks of different process sets do not
# find each other (except in `fit`), and the others are compared by their specs or positions.
_NOT_COMPARED = {"compressor", "policy", "groups", "process_set", "device_dense", "device_sparse"}

T = TypeVar("T")
Facts = dict[str, str]  # the name of each thing that is compared, in this order, and its value on a rank


def check(
    plan: str,
    settings: Settings,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    watched: bool = False,
    first: bool = True,
    of_optimizer: Callable[[], Facts] = dict,
) -> bool:
    """Checks that all ranks of the process set are about to do the same; costs one allgather.

    Args:
        plan: The prefix of the names of the plan's collectives.
        settings: How gradients are reduced.
        gradients: Tensors, IndexedSlices or None, one for each of `variables`.
        variables: The gradients' variables.
        watched: Whether this rank records its steps; it may differ between ranks.
        first: Whether this is the first plan of an optimizer or tape.
        of_optimizer: Returns what else must be the same on all ranks, of the optimizer that applies the gradients.

    Returns:
        Whether any rank records its steps.

    Raises:
        ValueError: Ranks disagree. The text is the same on every rank, and says which rank has which value.
    """
    if not tf.executing_eagerly():  # graphs of TensorFlow 1: they exchange nothing before they run
        return False
    facts = of_plan(plan, settings, gradients, variables, of_optimizer())
    all_facts = gathered(facts | {_WATCHED: str(watched)}, _NAME, settings.process_set, first)
    are_watched = [rank_facts.pop(_WATCHED, "") for rank_facts in all_facts]
    raise_difference(all_facts, settings.process_set.ranks)
    return "True" in are_watched


def gathered(facts: Facts, name: str, group: Any, first: bool = True) -> list[Facts]:
    """The facts of all ranks of a process set, in their order; costs one allgather of this name."""
    with tf.device("CPU"):
        packed = _packed(facts)
        with _waiting(first):
            joined = hvd.allgather(packed, name=name, process_set=group)
    return _unpacked(joined.numpy().tobytes())


def raise_difference(facts: Sequence[Facts], ranks: Sequence[int]) -> None:
    """Raises a ValueError that names the first difference between the facts of these ranks, if there is one."""
    error = difference(facts, ranks)
    if error:
        raise ValueError(error)


def on_arguments(callback: Any, arguments: Mapping[str, Any], group: Any, own: str = "") -> list[str]:
    """Checks that a callback has the same arguments on all ranks of a process set; costs one allgather.

    Returns:
        `own` of all ranks: text that is not compared.

    Raises:
        ValueError: On all ranks: arguments differ.
    """
    name = type(callback).__name__
    facts = {f"{name}'s {argument}": repr(value) for argument, value in arguments.items()}
    all_facts = gathered(facts | {_OWN: own}, f"hvdc_{name}", group)
    texts = [rank_facts.pop(_OWN, "") for rank_facts in all_facts]
    raise_difference(all_facts, group.ranks)
    return texts


def difference(facts: Sequence[Facts], ranks: Sequence[int]) -> str | None:
    """Describes the first difference between the facts of these ranks in one line; None if there is none."""
    if all(rank_facts == facts[0] for rank_facts in facts):  # the usual case, which should take no time
        return None
    compared = [_renumbered(rank_facts) for rank_facts in facts]
    for key in dict.fromkeys(key for rank_facts in facts for key in rank_facts):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, rank_facts in zip(ranks, compared):
            ranks_by_value.setdefault(rank_facts.get(key, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            own = dict(zip(ranks, facts))
            values = [f"{_have(some)} {own[some[0]].get(key, 'nothing')}" for some in ranks_by_value.values()]
            return f"ranks disagree on {key}: {', '.join(values)}; start all ranks with the same code and environment"
    return None


def _renumbered(facts: Facts) -> Facts:
    """The facts with numbers in the names of variables that do not depend on what a rank has made before."""
    texts = {key: text for key, text in facts.items() if key.startswith((_GRADIENT, _TRAINED))}
    return facts | dict(zip(texts, renumbered(list(texts.values()))))


def on_all(group: Any, name: str, what: str, action: Callable[[], T], error: type[Exception] = ValueError) -> list[T]:
    """Runs `action` on all ranks of a process set and returns their results, in this order; costs one allgather.

    Args:
        group: The process set.
        name: The name of the collective.
        what: The subject of the error message.
        action: A function that may fail on any rank.
        error: The class of the error.

    Raises:
        error: On every rank, if the action failed on any rank, with the message of the first such rank.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as raised:  # any exception: the others must not wait for ever
        failure = str(raised) if isinstance(raised, (OSError, ValueError)) else repr(raised)
    gathered = hvd.allgather_object((result, failure), name=name, process_set=group)
    for rank, (_, failure) in enumerate(gathered):
        if failure is not None:
            raise error(f"{what}, rank {rank}: {failure}")
    return [result for result, _ in gathered]


@contextlib.contextmanager
def _waiting(first: bool) -> Iterator[None]:
    """Says so if what is inside takes long. If this is not the `first` plan, ends the job after some minutes.

    Before the first plan, ranks may wait for one that prepares its data. Later, the others train on.
    """

    def say(text: str) -> None:
        verbosity.say(f"rank {hvd.rank()} {text}", "error")

    def end() -> None:
        say(f"has waited for {_LONGEST:g} s: Horovod is shut down, on all ranks")
        hvd.shutdown()

    why = (
        f"has waited for {_PATIENCE:g} s to agree with the other ranks on what they do. If they train other variables "
        "(a layer was frozen on some ranks only?), in another process set, without hvd_compress, or without the same "
        "callbacks, or call no allreduce, they will never come"
    )
    timers = [threading.Timer(_PATIENCE, say, [why])] + ([] if first else [threading.Timer(_LONGEST, end)])
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for timer in timers:
            # Horovod's own shutdown at exit would wait for ever beside one that has not returned yet.
            timer.join()


def of_plan(
    plan: str, settings: Settings, gradients: Sequence[Any], variables: Sequence[Any], of_optimizer: Facts | None = None
) -> Facts:
    """All facts of this rank, see `check`. Causes come before their effects, so that the error names the cause."""
    facts = of_settings(settings, of_optimizer or {})
    facts["groups"] = str(positions(settings.groups, variables))
    facts["the number of gradients"] = str(len(gradients))
    facts |= {f"{_GRADIENT}{i}": _described(*pair) for i, pair in enumerate(zip(gradients, variables))}
    # Last, since it depends on what was made before: it may differ even if all of the above is equal.
    facts[TRAINED_BEFORE] = plan
    return facts


def of_settings(settings: Settings, of_optimizer: Facts) -> Facts:
    """The facts of this rank that do not depend on variables."""
    compressors = [
        one
        for compressor in settings.compressors
        for one in (*compressor.stages, *compressor.candidates, compressor.for_rows())
    ]
    facts = of_environment()
    if any(not compressor.uncompressed for compressor in compressors):  # the size of chunks depends on it
        facts["the device"] = "a GPU" if settings.on_gpu else "the CPU"
    facts |= of_kernels(compressors)
    facts["compression"] = settings.compressor.spec
    facts["policy"] = str({pattern: compressor.spec for pattern, compressor in settings.policy})
    facts |= of_optimizer
    for field in dataclasses.fields(settings):
        if field.name not in _NOT_COMPARED:
            facts[field.name] = str(getattr(settings, field.name))
    facts["op"] = settings.op_name
    return facts


def of_environment() -> Facts:
    """The facts of this rank that depend on nothing but where it runs."""
    facts = {
        "the version of hvd_compress": __version__,
        "the version of TensorFlow": tf.__version__,
        "the version of Horovod": horovod.__version__,
    }
    for name in ("HVD_COMPRESS", "HVD_COMPRESS_BUCKET_BYTES", "HVD_COMPRESS_EXCHANGE"):
        facts[f"the environment variable {name}"] = os.environ.get(name, "").strip() or "no value"
    return facts


def of_kernels(compressors: Sequence[Compressor]) -> Facts:
    """The facts of this rank on which the results of these compressors depend."""
    facts: Facts = {}
    # They round differently, so ranks that mix them would have different weights.
    if any(compressor.native_format is not None for compressor in compressors):
        facts["the kernels"] = f"{native.kind()} ({native.VARIABLE})"
    return facts | {"whether operations are deterministic": str(determinism.is_enabled())}


def of_variables(variables: Sequence[Any]) -> Facts:
    """The facts of the variables that this rank trains."""
    facts = {NUMBER_TRAINED: str(len(variables))}
    return facts | {f"{_TRAINED}{i}": _described(variable, variable) for i, variable in enumerate(variables)}


def without_variables(facts: Facts) -> Facts:
    """The facts without those of `of_variables`."""
    return {key: text for key, text in facts.items() if key != NUMBER_TRAINED and not key.startswith(_TRAINED)}


def _described(gradient: Any, variable: Any) -> str:
    """A variable, and the kind and dtype of its gradient. Pass the variable twice if there is no gradient yet."""
    path = path_of(variable) or "a tensor"
    if gradient is None:
        return f"no gradient of {path}"
    kind = "IndexedSlices of " if isinstance(gradient, tf.IndexedSlices) else ""
    return f"{path} {kind}{tf.as_dtype(gradient.dtype).name} {tf.TensorShape(variable.shape)}"


def _have(ranks: Sequence[int]) -> str:
    """`rank 0 has`, `ranks 1-3, 5 have`."""
    # In a run of consecutive ranks, all have the same distance from their positions.
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text} has" if len(ranks) == 1 else f"ranks {text} have"


def _packed(facts: Facts) -> tf.Tensor:
    """Packs facts into uint8 [n], after their length. All versions of the package must be able to unpack them."""
    text = zlib.compress(json.dumps(facts).encode())
    return tf.io.decode_raw(len(text).to_bytes(_LENGTH_BYTES, "big") + text, tf.uint8)


def _unpacked(joined: bytes) -> list[Facts]:
    """Unpacks the concatenated facts of all ranks, see `_packed`."""
    facts = []
    while joined:
        end = _LENGTH_BYTES + int.from_bytes(joined[:_LENGTH_BYTES], "big")
        facts.append(json.loads(zlib.decompress(joined[_LENGTH_BYTES:end])))
        joined = joined[end:]
    return facts
