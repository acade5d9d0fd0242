"""The trainings that train.py compares compressors on: model, batches, loss and metric of each task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import data
import ids
import keras_gpt
import keras_mnist
import keras_recommender
import resnet
import text
from custom_loop import tf_variables

Arrays = tuple[np.ndarray, np.ndarray]
Batches = Iterator[tuple[Any, Any]]  # inputs and labels, arrays or tensors


class Task(NamedTuple):
    """One training.

    Attributes:
        build_model: Makes the model; its weights follow from the global seed.
        batches: From a random generator, which differs between ranks and seeds, the endless batches of this rank.
        loss: From labels and outputs, the mean loss of a batch.
        metric: From the model, the metric of this rank's share of the validation data, or of all of it.
        metric_name: What the metric is.
        higher_is_better: Whether the metric grows as training succeeds.
    """

    build_model: Callable[[], keras.Model]
    batches: Callable[[np.random.Generator], Batches]
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    metric: Callable[[keras.Model], float]
    metric_name: str
    higher_is_better: bool


def _batches_of(x: np.ndarray, y: np.ndarray, batch_size: int, random: np.random.Generator) -> Batches:
    """Endless epochs over arrays; each has an order of its own and leaves out what fills no batch."""
    while True:
        order = random.permutation(len(x))
        for first in range(0, len(x) - batch_size + 1, batch_size):
            batch = order[first : first + batch_size]
            yield x[batch], y[batch]


def _images(build_model: Callable[[], keras.Model], shape: tuple[int, int, int], batch_size: int) -> Task:
    """Classifies scikit-learn's handwritten digits."""
    images = data.load("digits", shape)
    x, y = data.share(images)
    x_test, y_test = images.x_test[hvd.rank() :: hvd.size()], images.y_test[hvd.rank() :: hvd.size()]

    def accuracy(model: keras.Model) -> float:
        scores = model(tf.constant(x_test), training=False).numpy()
        return float((scores.argmax(1) == y_test).mean() * 100)

    return Task(
        build_model=build_model,
        batches=lambda random: _batches_of(x, y, batch_size, random),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metric=accuracy,
        metric_name="test accuracy, %",
        higher_is_better=True,
    )


def digits() -> Task:
    """The network of examples/keras_mnist.py: 1.2M parameters."""
    return _images(keras_mnist.build_model, (28, 28, 1), 32)


def resnet20() -> Task:
    """ResNet-20 on the same digits: 0.27M parameters in 65 tensors."""
    return _images(lambda: resnet.resnet20(10, 32), (32, 32, 3), 32)


def _regression(build_model: Callable[[], keras.Model], train: Arrays, test: Arrays, batch_size: int = 64) -> Task:
    """Predicts real numbers; the metric is of all of the test data."""
    loss = keras.losses.MeanSquaredError()
    x_test, y_test = test
    return Task(
        build_model=build_model,
        batches=lambda random: _batches_of(*train, batch_size, random),
        loss=loss,
        metric=lambda model: 100 * float(loss(y_test, model(x_test, training=False))),
        metric_name="test MSE x 100",
        higher_is_better=False,
    )


def autoencoder() -> Task:
    """Dense layers that reproduce the same digits through a bottleneck of 24 values: 2.2M parameters."""
    images = data.load("digits", (28, 28, 1))
    x, x_test = (part.reshape(len(part), -1) for part in (data.share(images)[0], images.x_test))

    def build_model() -> keras.Model:
        outputs = inputs = keras.Input([x.shape[1]])
        for width in (1024, 256, 24, 256, 1024):
            outputs = keras.layers.Dense(width, "relu" if width > 24 else None)(outputs)
        return keras.Model(inputs, keras.layers.Dense(x.shape[1], "sigmoid")(outputs))

    return _regression(build_model, (x, x), (x_test, x_test))


def regression() -> Task:
    """Dense layers on the first function of Friedman (1991), with noise: 1.1M parameters.

    The only task that waits for the network and trains with SGD.
    """

    def examples(count: int, random: np.random.Generator) -> Arrays:
        x = random.random([count, 10], np.float32)
        y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        noise = random.normal(size=count)
        return 2 * x - 1, ((y + noise - 14.4) / 5)[:, None].astype(np.float32)

    def build_model() -> keras.Model:
        outputs = inputs = keras.Input([10])
        for _ in range(2):
            outputs = keras.layers.Dense(1024, "relu")(outputs)
        return keras.Model(inputs, keras.layers.Dense(1)(outputs))

    train, test = (examples(4096, np.random.default_rng(seed)) for seed in (1 + hvd.rank(), 0))
    return _regression(build_model, train, test)


def gpt(context: int = 64) -> Task:
    """The transformer of examples/keras_gpt.py on Python's standard library: 1.0M parameters."""
    return _language_model(lambda: keras_gpt.build_model(2, 192, context, 4), context)


def gpt2(context: int = 256) -> Task:
    """The same with the layers, the width and the heads of GPT-2 small: 85M parameters, for GPUs."""
    return _language_model(lambda: keras_gpt.build_model(12, 768, context, 12), context)


def mlp(context: int = 16) -> Task:
    """Dense layers that predict the next byte of the same text from the last 16 (Bengio et al. 2003): 3.4M parameters.

    They compute little for so many parameters, so training waits for the network.
    """

    def build_model() -> keras.Model:
        inputs = keras.Input([context], dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(256, 64)(inputs))
        for width in (1536, 1024):
            x = keras.layers.LayerNormalization()(keras.layers.Dense(width, "relu")(x))
        return keras.Model(inputs, keras.layers.Dense(256)(x))

    return _language_model(build_model, context, batch_size=128, validation=4096, predicted=-1)


def _language_model(
    build_model: Callable[[], keras.Model],
    context: int,
    batch_size: int = 8,
    validation: int = 256,
    predicted: int | slice = slice(None),
) -> Task:
    """Predicts the bytes at the places `predicted` of each window, from those before; with `validation` windows."""
    source = text.load(None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def windows(text_bytes: np.ndarray, starts: np.ndarray) -> Arrays:
        inputs, labels = _windows(text_bytes, starts, context)
        return inputs, labels[:, predicted]

    starts = np.arange(validation) * (len(source.validation) // (validation + 1))
    inputs, labels = map(tf.constant, windows(source.validation, starts[hvd.rank() :: hvd.size()]))

    def batches(random: np.random.Generator) -> Batches:
        while True:  # any windows: in so short a training, ranks hardly ever meet the same
            yield windows(source.train, random.integers(0, len(source.train) - context - 1, batch_size))

    return Task(
        build_model=build_model,
        batches=batches,
        loss=loss,
        metric=lambda model: float(loss(labels, model(inputs, training=False))),
        metric_name="validation loss, nats per byte",
        higher_is_better=False,
    )


def _windows(source: np.ndarray, starts: np.ndarray, context: int) -> Arrays:
    """Bytes of the text, and for each the byte that follows; both int32 [windows, context]."""
    windows = source[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return windows[:, :-1], windows[:, 1:]


def recommender(batch_size: int = 512) -> Task:
    """The network of examples/keras_recommender.py on the same text: an embedding of some 50,000 x 64."""
    content = ids.load()
    recall = keras_recommender.Recall(content)

    def batches(random: np.random.Generator) -> Batches:
        """Their order follows from TensorFlow's seed, which must have been set before."""
        dataset, _ = ids.dataset(content.train, keras_recommender.CONTEXT, batch_size, hvd.rank(), hvd.size())
        return iter(dataset)

    return Task(
        build_model=lambda: keras_recommender.build_model(content.count),
        batches=batches,
        loss=keras_recommender.loss(),
        metric=lambda model: 100 * recall(model),
        metric_name="recall at ten, %",
        higher_is_better=True,
    )


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits, "resnet20": resnet20, "gpt": gpt, "gpt2": gpt2, "mlp": mlp,
    "recommender": recommender, "autoencoder": autoencoder, "regression": regression,
}  # fmt: skip


def begin(name: str, seed: int) -> tuple[Task, keras.Model, Batches]:
    """A task, its model with the same weights on all workers, and this worker's batches; all follow from the seed."""
    task = TASKS[name]()
    keras.utils.set_random_seed(seed)
    model = task.build_model()
    keras.utils.set_random_seed(1000 * (seed + 1) + hvd.rank())  # dropout differs between ranks
    return task, model, task.batches(np.random.default_rng([seed, hvd.rank()]))


# Optimizers other than SGD by the kinds that methods name, as Keras calls them.
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "lamb": "Lamb", "lion": "Lion", "muon": "Muon"}
# Learning rates for two workers. The first kind of optimizer is the usual one for the task.
RATES = {
    "digits": {"adam": 2e-3, "sgd": 0.05, "adamw": 2e-3, "lamb": 1e-2},
    "resnet20": {"sgd": 0.1, "adam": 2e-3},
    "gpt": {"adam": 1e-3, "sgd": 0.2, "adamw": 1e-3, "lamb": 1e-2, "lion": 3e-4, "muon": 1e-3},
    "gpt2": {"adam": 3e-4},
    "mlp": {"adam": 1e-3},
    "autoencoder": {"adam": 1e-3},
    "regression": {"sgd": 0.01},
    "recommender": {"adam": 2e-3, "sgd": 0.2},
}


def optimizer(task: str, kind: str, spec: str | None, options: str = "", decay_steps: int = 0) -> Any:
    """The optimizer of one training.

    Args:
        task: Name of the task.
        kind: "sgd", another key of `OPTIMIZERS`, or "" for the task's usual one.
        spec: A compressor, "OneBitAdam", or None for an optimizer whose gradients Horovod's tape reduces.
        options: More arguments of `hvdc.DistributedOptimizer`, such as "local_steps=30 outer=average", or of
            `OneBitAdam`.
        decay_steps: The learning rate falls to 0 along a cosine in so many steps; 0 keeps it.
    """
    kind = kind or next(iter(RATES[task]))
    rate: Any = RATES[task][kind]
    if decay_steps:
        rate = keras.optimizers.schedules.CosineDecay(rate, decay_steps)
    arguments = dict(option.split("=", 1) for option in options.split())
    values: dict[str, Any] = {name: int(text) if text.isdecimal() else text for name, text in arguments.items()}
    values |= {name: text == "True" for name, text in arguments.items() if text in ("True", "False")}
    if spec == "OneBitAdam":
        return hvdc.optimizers.OneBitAdam(rate, **values)
    if kind == "sgd":
        momentum = 0.0 if spec and spec.startswith("dgc") else 0.9  # dgc brings its own momentum
        inner = keras.optimizers.SGD(rate, momentum=momentum)
    else:
        inner = getattr(keras.optimizers, OPTIMIZERS[kind])(rate)
    return hvdc.DistributedOptimizer(inner, compression=spec, **values) if spec else inner


def training_step(task: Task, model: keras.Model, optimizer: Any) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """A function that trains the model on a batch and returns its loss."""
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(x: Any, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = task.loss(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, tf_variables(variables)), variables))
        return loss

    return step


def tensors(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """A batch of arrays or tensors as tensors."""
    return tf.nest.map_structure(tf.convert_to_tensor, batch)
