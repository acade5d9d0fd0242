"""A Keras model's loss, and its gradients, as functions of batches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# float16 would flush small gradients to zero; multiplied by a power of two they lose nothing.
_LOSS_SCALE = 1024.0
_FORMS = "(x, y) or (x, y, sample_weight)"


class Batch(NamedTuple):
    """Samples: tensors, or nests of them, whose first dimension is the samples'."""

    x: Any
    y: Any
    sample_weight: Any = None

    @property
    def size(self) -> int:
        """The number of samples."""
        return int(tf.nest.flatten(self.x)[0].shape[0])


class Objective:
    """What a model's training minimizes, with training=False: a function of its weights and nothing else.

    Attributes:
        model: The model.
        variables: Its trainable ones.
    """

    def __init__(self, model: Any, loss: Any, example: Batch) -> None:
        """Builds the model with `example` if it is not built yet.

        Raises:
            ValueError: There is no loss, or nothing to train.
        """
        if loss is None and not getattr(model, "compiled", getattr(model, "_is_compiled", False)):
            raise ValueError(
                "sensitivity: the model is not compiled: call model.compile(loss=...) first, or pass loss="
            )
        if not getattr(model, "built", True):
            model(example.x, training=False)
        self.model = model
        self.variables = list(model.trainable_variables)
        if not self.variables:
            raise ValueError(
                "sensitivity: the model has no trainable weights: set trainable = True on a layer"
            )
        self._loss = None if loss is None else tf.keras.losses.get(loss)
        eager = getattr(model, "run_eagerly", False)
        self._value = self._value_of if eager else tf.function(self._value_of, reduce_retracing=True)
        self._slope = self._slope_of if eager else tf.function(self._slope_of, reduce_retracing=True)

    def value(self, batches: Sequence[Batch]) -> float:
        """The mean loss of the batches' samples; infinite where it is not finite."""
        total = sum(batch.size * float(self._value(*batch)) for batch in batches)
        mean = total / sum(batch.size for batch in batches)
        return mean if math.isfinite(mean) else math.inf

    def gradient(self, batch: Batch) -> list[tf.Tensor]:
        """The loss's gradient, dense and float32, for each variable; zeros where the loss does not depend on it."""
        gradients: list[tf.Tensor] = self._slope(*batch)
        return gradients

    def _value_of(self, x: Any, y: Any, sample_weight: Any) -> tf.Tensor:
        predicted = self.model(x, training=False)
        if self._loss is None:
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
            return tf.cast(loss, tf.float32)
        if hasattr(self._loss, "reduction"):
            loss = self._loss(y, predicted, sample_weight=sample_weight)
        else:
            loss = _weighted(tf.convert_to_tensor(self._loss(y, predicted)), sample_weight)
        return tf.add_n([tf.cast(part, tf.float32) for part in (loss, *self.model.losses)])

    def _slope_of(self, x: Any, y: Any, sample_weight: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            scaled = _LOSS_SCALE * self._value_of(x, y, sample_weight)
        gradients = tape.gradient(scaled, self.variables)
        return [
            tf.zeros(v.shape) if g is None else tf.cast(tf.convert_to_tensor(g), tf.float32) / _LOSS_SCALE
            for g, v in zip(gradients, self.variables)
        ]


def _weighted(losses: tf.Tensor, sample_weight: Any) -> tf.Tensor:
    """The mean of `losses` ([samples, ...], or a scalar), each sample's multiplied by its weight ([samples])."""
    losses = tf.cast(losses, tf.float32)
    if sample_weight is not None:
        ones = [1] * (losses.shape.rank - 1)
        losses *= tf.reshape(tf.cast(sample_weight, tf.float32), [-1, *ones])
    return tf.reduce_mean(losses)


def batches_of(data: Any, count: int, batch_size: int) -> list[Batch]:
    """The first `count` batches of `data`, or as many as there are.

    Args:
        data: A tuple of arrays, of which batches of `batch_size` are drawn without replacement, always the same
            ones; a sequence of batches (a Keras PyDataset); or an iterable of them (a tf.data.Dataset).
        count: How many at most.
        batch_size: Samples per batch of a tuple of arrays.

    Raises:
        ValueError: It does not consist of (x, y) or (x, y, sample_weight).
    """
    if isinstance(data, tuple):
        data = _drawn(data, count, batch_size)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        data = map(data.__getitem__, range(len(data)))
    elif not isinstance(data, Iterable):
        raise ValueError(
            f"sensitivity: data must be batches or a tuple of arrays, {_FORMS}, got {type(data).__name__}"
        )
    return [_batch(parts) for parts in itertools.islice(data, count)]


def _drawn(arrays: tuple[Any, ...], count: int, batch_size: int) -> Iterator[Any]:
    leaves = [leaf for leaf in tf.nest.flatten(arrays) if leaf is not None]
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        raise ValueError(
            f"sensitivity: the arrays of data must have as many samples each, got {sorted(lengths)}"
        )
    order = np.random.default_rng(0).permutation(lengths.pop())
    for start in range(0, min(len(order), count * batch_size), batch_size):
        yield tf.nest.map_structure(functools.partial(_taken, order[start : start + batch_size]), arrays)


def _taken(samples: np.ndarray, array: Any) -> Any:
    return None if array is None else np.asarray(array)[samples]


def _batch(parts: Any) -> Batch:
    if not isinstance(parts, (tuple, list)) or len(parts) not in (2, 3):
        raise ValueError(f"sensitivity: data must hold {_FORMS}, got {type(parts).__name__}")
    return Batch(*(tf.nest.map_structure(_tensor, part) for part in parts))


def _tensor(value: Any) -> Any:
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


class Restored:
    """Gives a model's variables, and its metrics', the values back that they have on entry."""

    def __init__(self, model: Any) -> None:
        variables = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
        self._saved = [(variable, tf.identity(tf.convert_to_tensor(variable))) for variable in variables]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for variable, value in self._saved:
            variable.assign(value)
