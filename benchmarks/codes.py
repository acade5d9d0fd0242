"""Which codes of 2 and 3 bits lose the least of real gradients, and what that saves in steps.

    python benchmarks/codes.py                          # errors; five minutes on two cores
    python benchmarks/codes.py --train --seeds 0 1      # steps to the loss of uncompressed training; half an hour

Trains the transformer (Adam) and the ResNet-20 (SGD with momentum) of benchmarks/tasks.py in one process, and records
the gradient of a few steps: uncompressed, and with the residual of `quantize:bits=2`, as the compressor sees it. Then
it encodes these vectors with compressors of this package and with codes in NumPy that did not become compressors. The
error is ||x - decoded||^2 / ||x||^2.

`benchmarks/kernels.py --only "2 bits"` measures the kernels.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import horovod.tensorflow as hvd
import numpy as np
import tasks
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc

RECORDED = (5, 30, 100, 300)  # steps
WINDOW = 30  # steps whose losses are averaged
SPECS = ("quantize:bits=2", "hadamard", "quantize:bits=3", "int4")
# Positive levels of the Lloyd-Max quantizers for a normal distribution, by bits (Max 1960, Table I).
LEVELS = {2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152)}
CLIPS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.22, 0.16)


def train(
    task_name: str, spec: str, steps: int, seed: int, stop_at: float = 0.0
) -> tuple[list[float], dict[int, np.ndarray]]:
    """Trains with error feedback. Returns the losses, and what was compressed in the steps of `RECORDED`."""
    task = tasks.TASKS[task_name]()
    keras.utils.set_random_seed(seed)
    model, optimizer = task.build_model(), tasks.optimizer(task_name, "", None)
    batches = task.batches(np.random.default_rng(seed))
    compressor = hvdc.Compression.parse(spec)
    variables = model.trainable_variables
    optimizer.build(variables)
    # As in training on several ranks: the last gradients first, small and one-dimensional ones uncompressed.
    large = [i for i, v in enumerate(variables) if len(v.shape) > 1 and np.prod(v.shape) >= 1024][::-1]
    sizes = [int(np.prod(variables[i].shape)) for i in large]
    residual = tf.Variable(tf.zeros([sum(sizes)]), trainable=False)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = task.loss(y, model(x, training=True))
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
        compressed = tf.concat([tf.reshape(gradients[i], [-1]) for i in large], 0) + residual
        sent = compressor.decompress(*compressor.compress(compressed))
        residual.assign(compressed - sent)
        for i, part in zip(large, tf.split(sent, sizes)):
            gradients[i] = tf.reshape(part, variables[i].shape)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss, compressed

    losses: list[float] = []
    recorded = {}
    for number in common.progress(range(1, steps + 1), f"{task_name}, {spec}"):
        loss, compressed = step(*map(tf.convert_to_tensor, next(batches)))
        losses.append(float(loss))
        if number in RECORDED:
            recorded[number] = compressed.numpy()
        if len(losses) >= WINDOW and np.mean(losses[-WINDOW:]) <= stop_at:
            break
    return losses, recorded


# Codes in NumPy: blocks, float [rows, size] -> what they decode to


def nearest(x: np.ndarray, bits: int) -> np.ndarray:
    """The levels of a normal distribution, times the scale of each row that loses the least."""
    levels = np.concatenate([-np.array(LEVELS[bits][::-1]), LEVELS[bits]])
    deviation = np.sqrt(np.mean(x * x, 1, keepdims=True))
    codes = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x / np.where(deviation > 0, deviation, 1))]
    return codes * np.sum(x * codes, 1, keepdims=True) / np.sum(codes * codes, 1, keepdims=True)


def best_clip(x: np.ndarray, bits: int) -> np.ndarray:
    """`quantize` with the smaller step, out of eight, that loses the least of a row."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    decoded = []
    for clip in CLIPS:
        step = np.where(high > low, clip * (high - low) / (2**bits - 1), 1)
        base = np.round(clip * low / step)
        decoded.append(np.clip(np.round(x / step), base, base + 2**bits - 1) * step)
    best = np.argmin([np.sum((x - d) ** 2, 1) for d in decoded], 0)
    return np.stack(decoded)[best, np.arange(len(x))]


def own_levels(x: np.ndarray, bits: int) -> np.ndarray:
    """Levels of each row's own, after 20 rounds of Lloyd's algorithm."""
    levels = np.quantile(x, (np.arange(2**bits) + 0.5) / 2**bits, axis=1).T
    for _ in range(20):
        codes = np.sum(x[:, :, None] > (levels[:, None, 1:] + levels[:, None, :-1]) / 2, -1)
        one_hot = codes[:, :, None] == np.arange(2**bits)
        count = one_hot.sum(1)
        levels = np.where(count > 0, (x[:, :, None] * one_hot).sum(1) / np.maximum(count, 1), levels)
    return np.take_along_axis(levels, codes, 1)


def rotated(x: np.ndarray, bits: int) -> np.ndarray:
    """`nearest` of rows that a Hadamard matrix with random signs has rotated."""
    hadamard = np.ones([1, 1])
    while len(hadamard) < x.shape[1]:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    rotation = hadamard * np.random.default_rng(0).choice([-1, 1], len(hadamard)) / len(hadamard) ** 0.5
    return nearest(x @ rotation.T, bits) @ rotation


# Name, size of a block, its bytes besides the codes, code.
CODES: list[tuple[str, int, int, Callable[[np.ndarray, int], np.ndarray]]] = [
    ("quantize, best of 8 clips", 256, 8, best_clip),
    ("normal levels, not rotated", 128, 4, nearest),
    ("own levels of each block", 256, 16, own_levels),
    ("rotated 16", 16, 2, rotated),
    ("rotated 64", 64, 2, rotated),
    ("rotated 256", 256, 4, rotated),
    ("rotated 1024", 1024, 4, rotated),
]


def errors(vectors: Sequence[np.ndarray]) -> Iterator[tuple[str, float, list[float]]]:
    """Name, bytes per element and relative errors, of compressors and codes."""
    for spec in SPECS:
        compressor = hvdc.Compression.parse(spec)
        decoded = [compressor.decompress(*compressor.compress(tf.constant(x))).numpy() for x in vectors]
        yield spec, compressor.wire_bytes(10**6) / 1e6, [relative(x, y) for x, y in zip(vectors, decoded)]
    for bits in (2, 3):
        for name, size, header, code in CODES:
            header = 2 * 2**bits if code is own_levels else header  # a float16 for each level
            decoded = []
            for x in vectors:
                blocks = np.pad(x.astype(np.float64), (0, -len(x) % size)).reshape(-1, size)
                decoded.append(np.concatenate([code(b, bits).ravel() for b in np.array_split(blocks, 16)])[: len(x)])
            found = [relative(x, y) for x, y in zip(vectors, decoded)]
            yield f"{bits} bits: {name}", bits / 8 + header / size, found


def relative(x: np.ndarray, decoded: np.ndarray) -> float:
    """||x - decoded||^2 / ||x||^2."""
    return float(np.sum((x - decoded.astype(np.float64)) ** 2) / np.sum(x.astype(np.float64) ** 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="count steps of the transformer instead")
    parser.add_argument("--specs", nargs="+", default=SPECS, help="of --train (default: %(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="of uncompressed training (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    args = parser.parse_args()
    hvd.init()
    if args.train:
        found = {}
        for seed in args.seeds:
            target = float(np.mean(train("gpt", "none", args.steps, seed)[0][-WINDOW:]))
            for spec in args.specs:
                losses, _ = train("gpt", spec, 2 * args.steps, seed, target)
                found.setdefault(spec, []).append(len(losses) if len(losses) < 2 * args.steps else None)
        rows = [[spec, *map(str, steps)] for spec, steps in found.items()]
        title = f"steps to the loss that uncompressed training has after {args.steps}"
        common.print_table(title, ["compressor", *(f"seed {seed}" for seed in args.seeds)], rows)
        common.save(args.json, {"benchmark": "codes", "uncompressed_steps": args.steps, "steps": found})
        return
    vectors = {
        f"{task}, {'with residual' if spec != 'none' else 'gradient'}, step {step}": x
        for task in ("gpt", "resnet20")
        for spec in ("none", "quantize:bits=2")
        for step, x in train(task, spec, max(RECORDED), args.seeds[0])[1].items()
    }
    table = list(errors(list(vectors.values())))
    groups = [np.arange(i, i + len(RECORDED)) for i in range(0, len(vectors), len(RECORDED))]
    columns = [list(vectors)[group[0]].rpartition(",")[0] for group in groups]
    rows = [[name, f"{size:.3f}", *(f"{np.mean(np.array(e)[g]):.4f}" for g in groups)] for name, size, e in table]
    common.print_table(f"errors, means of steps {RECORDED}", ["code", "bytes per value", *columns], rows)
    result = {name: {"bytes": size, "errors": dict(zip(vectors, e))} for name, size, e in table}
    common.save(args.json, {"benchmark": "codes", "codes": result})


if __name__ == "__main__":
    main()
