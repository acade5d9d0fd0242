"""Trains a small language model on the source of Python's standard library, and lets it write some Python.

    horovodrun -np 2 python examples/keras_gpt.py
    horovodrun -np 2 python examples/keras_gpt.py --directory gpt --compression int8
    horovodrun -np 2 python examples/keras_gpt.py --directory gpt --compression int8 --resume --epochs 20

With the default settings, two cores take 8 minutes to a perplexity of 3.9 per byte. The model is a causal
transformer (Radford et al., Language Models are Unsupervised Multitask Learners, 2019).

With --directory, each epoch is saved, with the residuals of all workers. A run that resumes continues as if it had
never stopped: on a CPU the weights are the same to the bit (with `auto`, if it chooses the same compressors). Only the
patience of EarlyStopping starts anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from pathlib import Path

import common
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import text
from tensorflow import keras

import hvd_compress as hvdc

VOCABULARY = 256  # bytes
CHECKPOINT = "epoch-{epoch:04d}.weights.h5"  # weights and the state of the optimizer


@keras.utils.register_keras_serializable("hvd_compress_examples")
class AddPositions(keras.layers.Layer):
    """Adds a trained vector to each position of [batch, context, width]."""

    def build(self, input_shape: tuple) -> None:
        self.positions = self.add_weight(name="positions", shape=input_shape[1:], initializer="uniform")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.positions


def build_model(layers: int, width: int, context: int, heads: int = 4) -> keras.Model:
    """A causal transformer: the logits of the next byte at each position.

    Args:
        layers: Blocks of attention and a network of two dense layers, each behind a layer normalization.
        width: Values at each position; a multiple of `heads`.
        context: Bytes that the model sees.
        heads: Attention heads of each block.

    Returns:
        A model from int32 [batch, context] to float32 [batch, context, 256].
    """
    inputs = keras.layers.Input([context], dtype="int32")
    x = AddPositions()(keras.layers.Embedding(VOCABULARY, width)(inputs))
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        x = keras.layers.Add()([x, y])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(y))
        x = keras.layers.Add()([x, y])
    logits = keras.layers.Dense(VOCABULARY, dtype="float32")(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, logits)


def training_set(
    train: np.ndarray, context: int, batch_size: int, steps: int, epochs: range, seed: int
) -> tf.data.Dataset:
    """This worker's batches of the epochs, `steps` for each.

    An epoch cuts the text into contexts, from a random first byte on, and shuffles them. It depends on nothing but its
    number and the seed, so it is the same after a restart. The workers take contexts in turn.
    """

    def starts_of(epoch: tf.Tensor) -> tf.data.Dataset:
        key = tf.stack([tf.constant(seed, tf.int64), epoch])
        first = tf.random.stateless_uniform([], key, maxval=context, dtype=tf.int64)
        starts = tf.range(first, len(train) - context, context)
        starts = tf.data.Dataset.from_tensor_slices(tf.random.experimental.stateless_shuffle(starts, key))
        return starts.repeat().shard(hvd.size(), hvd.rank()).take(steps * batch_size)

    dataset = tf.data.Dataset.range(epochs.start, epochs.stop).flat_map(starts_of)
    return _batches(dataset, train, context, batch_size)


def validation_set(validation: np.ndarray, context: int, batch_size: int) -> tf.data.Dataset:
    """This worker's share of the contexts of the text for validation; equally many batches on all workers."""
    starts = np.arange(0, len(validation) - context, context)
    batches = len(starts) // (batch_size * hvd.size())
    if batches == 0:
        raise SystemExit(
            f"the text for validation has {len(starts)} contexts of {context} bytes, fewer than the "
            f"{batch_size * hvd.size()} of one batch on all workers: lower --batch-size or --context"
        )
    dataset = tf.data.Dataset.from_tensor_slices(starts).shard(hvd.size(), hvd.rank()).take(batches * batch_size)
    return _batches(dataset, validation, context, batch_size)


def _batches(starts: tf.data.Dataset, content: np.ndarray, context: int, batch_size: int) -> tf.data.Dataset:
    """Batches of contexts that start at these positions, and the bytes that follow each byte of them."""
    content = tf.constant(content)

    def cut(starts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        cuts = tf.cast(tf.gather(content, starts[:, None] + tf.range(context + 1, dtype=tf.int64)), tf.int32)
        return cuts[:, :-1], cuts[:, 1:]

    return starts.batch(batch_size, drop_remainder=True).map(cut).prefetch(2)


class Perplexity(keras.callbacks.Callback):
    """Adds the perplexity to the results of the epoch: the exponential of the loss in nats per byte."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        logs["val_perplexity"] = math.exp(logs["val_loss"])


def sample(model: keras.Model, prompt: str, count: int, seed: int, temperature: float = 0.8) -> str:
    """Continues `prompt` by `count` bytes, drawn from the model's probabilities with the given temperature."""
    context = model.input_shape[1]
    next_logits = tf.function(lambda x, last: model(x, training=False)[0, last])
    random = np.random.default_rng(seed)
    content = list(prompt.encode() or b"\n")
    for _ in range(count):
        recent = content[-context:]
        padded = recent + [0] * (context - len(recent))  # no position sees those behind it
        logits = next_logits(tf.constant([padded], tf.int32), tf.constant(len(recent) - 1)).numpy() / temperature
        probabilities = np.exp(logits.astype(np.float64) - logits.max())
        content.append(int(random.choice(VOCABULARY, p=probabilities / probabilities.sum())))
    return bytes(content).decode(errors="replace")


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = common.arguments(
        "Train a small language model with compressed gradients.", "keras_gpt.py", 16, 0.001, inputs="contexts"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: the source of Python's standard library")
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=192, help="a multiple of 4 (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--steps-per-epoch", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--warmup-epochs", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--mixed-precision", action="store_true", help="compute in float16 on a GPU and in bfloat16 on a CPU"
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="save checkpoints, the model and logs here")
    parser.add_argument("--resume", action="store_true", help="continue after the last epoch in --directory")
    parser.add_argument("--prompt", default="def ", help="the text that the model continues (default: %(default)r)")
    parser.add_argument("--sample", type=int, default=300, metavar="BYTES", help="default: %(default)s")
    args = parser.parse_args()
    numbers = ("layers", "width", "context", "batch_size", "epochs", "steps_per_epoch", "warmup_epochs")
    for name in numbers:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.width % 4:
        parser.error(f"--width must be a multiple of 4, the number of attention heads, got {args.width}")
    if args.resume and args.directory is None:
        parser.error("--resume needs the --directory of the run to continue")
    try:
        if args.directory is not None:
            args.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot write to --directory {args.directory}: {error.strerror}")
    return args


def last_checkpoint(args: argparse.Namespace) -> tuple[int, Path | None]:
    """The number of epochs that are saved, and the file of the last one, which rank 0 has; the same on all workers."""
    files = sorted(args.directory.glob(CHECKPOINT.format(epoch=0).replace("0000", "*"))) if args.directory else []
    file = hvd.broadcast_object(files[-1] if files else None, 0)
    if file is None:
        return 0, None
    epochs = int(file.name.split("-")[1].split(".")[0])
    if not args.resume:
        raise SystemExit(f"{args.directory} has checkpoints of another run: add --resume, or name another directory")
    if epochs >= args.epochs:
        raise SystemExit(f"{args.directory} has {epochs} epochs already: set --epochs to more than that")
    return epochs, file


def main() -> None:
    """Trains, writes some text and reports."""
    args = arguments()
    hvd.init()
    common.share_devices()
    keras.utils.set_random_seed(args.seed)
    if args.mixed_precision:
        on_gpu = bool(tf.config.get_visible_devices("GPU"))
        keras.mixed_precision.set_global_policy("mixed_float16" if on_gpu else "mixed_bfloat16")

    content = text.load(args.text)
    first_epoch, checkpoint = last_checkpoint(args)
    epochs = range(first_epoch, args.epochs)
    train = training_set(content.train, args.context, args.batch_size, args.steps_per_epoch, epochs, args.seed)
    validation = validation_set(content.validation, args.context, args.batch_size)

    model = build_model(args.layers, args.width, args.context)
    lr = args.lr * hvd.size()
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(lr), compression=args.compression)
    # Horovod cannot run inside XLA, so the training step must not be compiled.
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    if checkpoint is not None and hvd.rank() == 0:  # the other workers get everything by the broadcast
        model.optimizer.build(model.trainable_variables)
        try:
            model.load_weights(checkpoint)
        except (OSError, ValueError, KeyError):
            raise SystemExit(
                f"{checkpoint} is damaged or of another model: pass the --layers, --width and --context of its run, or "
                "delete it to resume from the epoch before"
            ) from None

    # The order matters. Each callback may use what those before it have done.
    callbacks = [
        hvdc.callbacks.BroadcastGlobalVariablesCallback(0),  # all continue with the first worker's state
        hvdc.callbacks.MetricAverageCallback(),  # the callbacks below get the averages
        Perplexity(),
        hvdc.callbacks.LearningRateWarmupCallback(lr, args.warmup_epochs, verbose=1),
        # On all workers, which get the same averages and so stop in the same epoch.
        keras.callbacks.EarlyStopping("val_loss", patience=3, verbose=1 if hvd.rank() == 0 else 0),
    ]
    if args.directory is not None:
        # Residuals differ, so each worker saves its own. They come first: each saved model then has its residuals.
        callbacks.append(hvdc.callbacks.ResidualCheckpoint(args.directory / "residuals", resume=args.resume))
        if hvd.rank() == 0:  # the rest is the same on all workers
            callbacks.append(keras.callbacks.ModelCheckpoint(str(args.directory / CHECKPOINT), save_weights_only=True))
            if importlib.util.find_spec("tensorboard"):
                callbacks.append(keras.callbacks.TensorBoard(str(args.directory / "tensorboard")))

    start = time.perf_counter()
    history = model.fit(
        train,
        shuffle=False,  # it is shuffled
        initial_epoch=first_epoch,
        epochs=args.epochs,
        steps_per_epoch=args.steps_per_epoch,
        validation_data=validation,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:  # all workers have the same model
        if args.directory is not None:
            model.save(args.directory / "model.keras")
        print(f"\n{sample(model, args.prompt, args.sample, args.seed)}")
        common.report(
            optimizer,
            data=f"{content.name}, {len(content.train):,} bytes, validated on {len(content.validation):,} others",
            metrics={"perplexity": f"{history.history['val_perplexity'][-1]:.2f} per byte"},
            steps=args.steps_per_epoch * len(history.epoch),
            seconds=seconds,
            compression=args.compression,
        )


if __name__ == "__main__":
    main()
