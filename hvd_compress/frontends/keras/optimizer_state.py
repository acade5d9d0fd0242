"""The variables of optimizers, which each version of Keras keeps in other attributes, and their broadcast."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ...common.elastic import is_elastic

# Entries of an optimizer's configuration that may differ between ranks.
_NOT_COMPARED = {"name", "learning_rate", "jit_compile", "is_legacy_optimizer"}


def tf_variable(variable: Any) -> Any:
    """The `tf.Variable` inside a Keras 3 variable; returns anything else unchanged."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def innermost(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer; returns any other optimizer unchanged."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def distributed_optimizer(optimizer: Any) -> Any:
    """The distributed optimizer that `optimizer`, a LossScaleOptimizer for example, is or contains; None if none."""
    while not hasattr(optimizer, "_hvdc") and hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer if hasattr(optimizer, "_hvdc") else None


def accumulation_steps(optimizer: Any) -> int:
    """The number of gradients that Keras accumulates for one update."""
    return getattr(innermost(optimizer), "gradient_accumulation_steps", None) or 1


def passes_per_step(optimizer: Any) -> int:
    """The number of batches for one update of a distributed optimizer."""
    passes: int = optimizer._hvdc.settings.backward_passes_per_step
    return passes * accumulation_steps(optimizer)


def batches_per_exchange(optimizer: Any) -> int:
    """The number of batches between two exchanges of a distributed optimizer."""
    return passes_per_step(optimizer) * (optimizer._hvdc.settings.local_steps or 1)


def own_momentum(optimizer: Any) -> str:
    """The argument that gives an optimizer momentum, such as "momentum=0.9" or "beta_1=0.9"; empty if there is none."""
    config = innermost(optimizer).get_config()
    for name in ("momentum", "beta_1", "adam_beta_1"):
        value = config.get(name)
        if isinstance(value, (int, float)) and value:
            return f"{name}={value}"
    return ""


def facts_of(optimizer: Any) -> dict[str, str]:
    """What ranks compare of an optimizer, and of those inside it: the class, and plain values of `get_config`.

    With other values, weights would drift apart, or ranks would not exchange in the same steps. The learning rate is
    left out, since callbacks change it. An optimizer of the user's without a configuration has no values. In an elastic
    job, callbacks may have changed values before a rank joins, so only those count that decide when ranks exchange.
    """
    classes: list[str] = []
    values: dict[str, str] = {}
    while optimizer is not None:
        classes.append(type(optimizer).__name__)
        config: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # whatever a user's own `get_config` raises
            config = dict(optimizer.get_config())
        if is_elastic():
            config = {key: value for key, value in config.items() if key == "gradient_accumulation_steps"}
        values |= {f"the optimizer's {key}": repr(v) for key, v in config.items() if _is_compared(key, v)}
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return {"the optimizer": " of ".join(classes), **values} if classes else {}


def _is_compared(key: str, value: Any) -> bool:
    """Whether ranks compare this entry of a configuration: nothing that may hold names, learning rates or addresses."""
    if isinstance(value, (list, tuple)):
        return all(_is_compared(key, item) for item in value)
    return key not in _NOT_COMPARED and (value is None or isinstance(value, (bool, str, numbers.Real)))


def is_adaptive(optimizer: Any) -> bool:
    """Whether an optimizer scales each element by the size of its past gradients, as all of Keras but SGD do."""
    return not any(cls.__name__ == "SGD" for cls in type(innermost(optimizer)).__mro__)


def is_normalized(optimizer: Any) -> bool:
    """Whether an optimizer divides the update of each layer by its norm, as LAMB does."""
    return any(cls.__name__.lower() == "lamb" for cls in type(innermost(optimizer)).__mro__)


def learning_rate(optimizer: Any) -> Any:
    """The variable with the learning rate, or the schedule or function that computes it, or None."""
    optimizer = innermost(optimizer)
    # The public `learning_rate` evaluates a schedule, except in the legacy optimizers (with `get_slot`).
    return getattr(optimizer, "learning_rate" if hasattr(optimizer, "get_slot") else "_learning_rate", None)


def create_variables(optimizer: Any, variables: list[Any]) -> None:
    """Creates the optimizer's state for these variables if it does not exist yet."""
    if hasattr(optimizer, "_create_all_weights"):  # Keras 2's legacy optimizers
        optimizer._create_all_weights(variables)
    elif variables and not getattr(optimizer, "built", False):
        optimizer.build(variables)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """All variables that must be equal on all ranks: slots, iterations, learning rate, loss scale."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    # Keras 2 does not list the learning rate, nor its LossScaleOptimizer the scale.
    scale = getattr(optimizer, "_loss_scale", None)
    unlisted = [learning_rate(optimizer), getattr(scale, "current_loss_scale", None), getattr(scale, "counter", None)]
    unlisted = [variable for variable in unlisted if isinstance(tf_variable(variable), tf.Variable)]
    return [*(variables() if callable(variables) else variables), *unlisted]


def velocities(model: Any) -> Iterable[Any]:
    """The momentum buffers that include the learning rate: those of SGD and RMSprop, but not of Adam or Muon."""
    optimizer = innermost(model.optimizer)
    kinds = {(base.__module__.split(".")[0], base.__name__) for base in type(optimizer).__mro__}
    if kinds.isdisjoint((package, name) for package in ("keras", "tf_keras") for name in ("SGD", "RMSprop")):
        return []
    if hasattr(optimizer, "get_slot"):  # legacy: the slot exists if there is momentum
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots]
    return getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])


def unique(variables: Sequence[Any]) -> list[tf.Variable]:
    """The `tf.Variable`s in these variables of TensorFlow or Keras, without duplicates, in their order."""
    return list({v.ref(): v for v in map(tf_variable, variables)}.values())


def moving_statistics(model: Any) -> list[Any]:
    """The float weights of a model that are not trained although their layers are, as those of batch normalization."""
    if model is None:
        return []
    frozen = {id(variable) for layer in _layers(model) if not layer.trainable for variable in layer.weights}
    weights = [weight for weight in model.non_trainable_weights if id(weight) not in frozen]
    return [weight for weight in weights if tf.as_dtype(weight.dtype).is_floating]


def _layers(model: Any) -> Iterable[Any]:
    """The layers of a model, and those of the models among them."""
    for layer in getattr(model, "layers", []):
        yield layer
        yield from _layers(layer)


def broadcast(
    variables: Sequence[tf.Variable], root_rank: int, name: str, process_set: Any = hvd.global_process_set
) -> None:
    """Assigns the values of rank `root_rank` to the variables of all ranks, which have the same order and shapes."""

    @tf.function(autograph=False)
    def broadcast_all() -> None:
        # Numbered, because names may differ: `dense` on one rank may be `dense_1` on another.
        for number, variable in enumerate(variables):
            value = tf.convert_to_tensor(variable)
            as_uint16 = value.dtype == tf.bfloat16  # Horovod reduces bfloat16, but does not broadcast it
            value = tf.bitcast(value, tf.uint16) if as_uint16 else value
            value = hvd.broadcast(value, root_rank, name=f"{name}.{number}", process_set=process_set)
            variable.assign(tf.bitcast(value, tf.bfloat16) if as_uint16 else value)

    broadcast_all()
