"""Trains a recommender: which id comes next? Its embedding is large, and a batch looks up few of its rows.

    horovodrun -np 2 python examples/keras_recommender.py
    horovodrun -np 2 python examples/keras_recommender.py --ids purchases.txt --embedding-compression int4

The ids are the words of the source of Python's standard library, some 50,000 different ones, or those of a file
(`--ids`, see examples/ids.py). The last eight ids are embedded and make a vector. Its dot product with the embedding of
an id is the id's score. Training compares the next id with 64 others, drawn by frequency: this is the loss InfoNCE (van
den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018).

The gradient of the embedding is IndexedSlices: only the rows that the batch has looked up are sent, each once.
"""

from __future__ import annotations

import argparse
import time

import common
import horovod.tensorflow as hvd
import ids
import numpy as np
from tensorflow import keras

import hvd_compress as hvdc

CONTEXT = 8  # ids before the one to predict
COLUMNS = 64  # of the embedding
TESTED = 10_000  # positions of the validation part


def build_model(count: int, columns: int = COLUMNS, context: int = CONTEXT) -> keras.Model:
    """The network for `count` different ids.

    Its inputs are the ids before, int32 [batch, context], and candidates, int32 [batch, any]. Its output are the
    candidates' scores, float32 [batch, any]: logits of which one comes next, relative to their frequencies.
    """
    before = keras.Input([context], dtype="int32", name="before")
    candidates = keras.Input([None], dtype="int32", name="candidates")
    embedding = keras.layers.Embedding(count + 1, columns, name="embedding")
    x = keras.layers.Flatten()(embedding(before))
    x = keras.layers.Dense(2 * columns, activation="relu")(x)
    x = keras.layers.Dense(columns, name="next")(x)
    scores = keras.layers.Dot(axes=(2, 1))([embedding(candidates), x])
    return keras.Model([before, candidates], scores)


def loss() -> keras.losses.Loss:
    """InfoNCE: the cross-entropy of the candidates, of which the first one is right."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Recall:
    """The share of positions at which the next id is among those with the highest scores, out of all ids.

    A model gives scores relative to frequencies (those of the ids that it was compared with), so the logarithm of the
    frequency is added.

    Attributes:
        popular: The recall of recommending the most frequent ids, whatever came before.
    """

    def __init__(self, data: ids.Ids, context: int = CONTEXT, top: int = 10) -> None:
        stream, positions = ids.windows(data.validation, context)
        positions = np.random.default_rng(0).permutation(positions)[:TESTED]
        self._before = stream[positions[:, None] + np.arange(-context, 0)]
        self._next, self._top = stream[positions], top
        counts = np.bincount(np.concatenate(data.train), minlength=data.count + 1)
        self._log_frequency = np.log(np.maximum(counts, 1e-9)).astype(np.float32)  # id 0 does not occur
        self.popular = float(np.mean(self._next <= top))  # ids are numbered by frequency

    def __call__(self, model: keras.Model) -> float:
        """Measures the model."""
        table = model.get_layer("embedding").get_weights()[0].T
        vectors = np.asarray(keras.Model(model.inputs[0], model.get_layer("next").output)(self._before))
        hits = 0
        for first in range(0, len(vectors), 200):  # the scores of all at once would take gigabytes
            scores = vectors[first : first + 200] @ table + self._log_frequency
            own = np.take_along_axis(scores, self._next[first : first + 200, None], 1)
            hits += int(np.sum((scores > own).sum(1) < self._top))
        return hits / len(vectors)


def arguments() -> argparse.Namespace:
    """Parses the command line, and loads the ids: `data` of the result."""
    parser = common.arguments(
        "Train a recommender whose embedding is sent in rows.", "keras_recommender.py", 256, 0.001, inputs="positions"
    )
    parser.add_argument(
        "--ids", metavar="FILE",
        help="a sequence of ids in each line, separated by white space (default: words of Python's standard library)",
    )  # fmt: skip
    parser.add_argument("--epochs", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="train about this many steps, instead of --epochs")
    parser.add_argument(
        "--embedding-compression", metavar="SPEC", type=common.compressor,
        help="of the embedding's rows (default: as --compression)",
    )  # fmt: skip
    parser.add_argument("--sparse-as-dense", action="store_true", help="send the whole embedding's gradient")
    args = parser.parse_args()
    try:
        args.data = ids.load(args.ids)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    """Trains and reports."""
    args = arguments()
    hvd.init()
    common.share_devices()
    keras.utils.set_random_seed(args.seed + hvd.rank())  # different shuffling and candidates on each worker

    rank, size = hvd.rank(), hvd.size()
    batches, steps_per_epoch = ids.dataset(args.data.train, CONTEXT, args.batch_size, rank, size)
    validation, validation_steps = ids.dataset(args.data.validation, CONTEXT, args.batch_size, rank, size)
    steps = args.steps or args.epochs * steps_per_epoch
    if min(steps_per_epoch, validation_steps) == 0:
        raise SystemExit(f"{args.data.name}: too few ids for a batch of {args.batch_size} on each of {size} workers")

    model = build_model(args.data.count)
    optimizer = hvdc.DistributedOptimizer(
        keras.optimizers.Adam(args.lr * size),
        compression=args.compression,
        policy={"*embedding*": args.embedding_compression} if args.embedding_compression else None,
        sparse_as_dense=args.sparse_as_dense,
    )
    # Horovod cannot run inside XLA, so the training step must not be compiled.
    model.compile(optimizer, loss(), jit_compile=False)

    start = time.perf_counter()
    model.fit(
        batches,
        epochs=min(steps, 10),  # of the progress shown, not of the data
        steps_per_epoch=steps // min(steps, 10),
        validation_data=validation,
        validation_steps=min(validation_steps, 20),
        callbacks=[
            hvdc.callbacks.BroadcastGlobalVariablesCallback(0),  # all start with the first worker's weights
            hvdc.callbacks.MetricAverageCallback(),
        ],
        verbose=2 if rank == 0 else 0,
    )
    seconds = time.perf_counter() - start

    if rank == 0:  # all workers have the same weights
        recall = Recall(args.data)
        common.report(
            optimizer,
            data=f"{args.data.name}, {args.data.count:,} ids",
            metrics={"recall at ten": f"{recall(model):.2%} (the most frequent ids: {recall.popular:.2%})"},
            steps=int(optimizer.iterations.numpy()),
            seconds=seconds,
            compression=args.compression,
        )


if __name__ == "__main__":
    main()
