"""What local steps cost in accuracy, in a simulation of several ranks in NumPy.

    python benchmarks/local_steps.py --seeds 3      # half an hour on one core

Trains a network (64-128-128-10, Adam) on scikit-learn's digits with four simulated ranks, each on its own quarter of
the training set, by the rules of `hvdc.LocalSteps` without compression. `tests/parallel/test_local_steps.py` compares
the package with such a simulation, step by step. Prints the accuracy and the loss on the validation set after the same
number of steps: the mean and the standard deviation over the seeds. With "average", the mean of the ranks' weights is
validated, with "nesterov" the synchronized weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from sklearn.datasets import load_digits

RANKS, STEPS, BATCH, WIDTH, TRAINED = 4, 900, 16, 128, 1437
SHAPES = [(64, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 10), (10,)]
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


def unflat(flat: np.ndarray) -> list[np.ndarray]:
    """Views of the layers' weights."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), SHAPES)]


def forward(flat: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two hidden layers and the probabilities."""
    w1, b1, w2, b2, w3, b3 = unflat(flat)
    first = np.maximum(x @ w1 + b1, 0.0)
    second = np.maximum(first @ w2 + b2, 0.0)
    logits = second @ w3 + b3
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    return first, second, exponents / exponents.sum(1, keepdims=True)


def gradient(flat: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean cross-entropy."""
    _, _, w2, _, w3, _ = unflat(flat)
    first, second, probabilities = forward(flat, x)
    d3 = (probabilities - np.eye(10)[y]) / len(y)
    d2 = (d3 @ w3.T) * (second > 0)
    d1 = (d2 @ w2.T) * (first > 0)
    parts = [x.T @ d1, d1.sum(0), first.T @ d2, d2.sum(0), second.T @ d3, d3.sum(0)]
    return np.concatenate([part.ravel() for part in parts])


def train(
    seed: int, local_steps: int, outer: tuple[float, float] | None, streams: bool, alpha: float
) -> tuple[float, float]:
    """Accuracy and loss on the validation set; `local_steps` of 0 averages gradients, `outer` is lr and momentum."""
    random = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    images, order = images / 16.0, random.permutation(len(images))
    x, y, x_val, y_val = (
        images[order[:TRAINED]],
        labels[order[:TRAINED]],
        images[order[TRAINED:]],
        labels[order[TRAINED:]],
    )
    starts = [
        random.standard_normal(shape) * np.sqrt(gain / shape[0]) if len(shape) > 1 else np.zeros(shape)
        for shape, gain in zip(SHAPES, (2, 0, 2, 0, 1, 0))
    ]
    synchronized = np.concatenate([start.ravel() for start in starts])
    local = [synchronized.copy() for _ in range(RANKS)]
    adams = [(np.zeros(SIZE), np.zeros(SIZE)) for _ in range(RANKS)]
    momentum = np.zeros(SIZE)
    shards = [np.arange(rank, TRAINED, RANKS) for rank in range(RANKS)]
    borders = np.linspace(0, SIZE, max(1, local_steps) + 1).astype(int)

    def movement(part: slice) -> np.ndarray:
        return np.mean([synchronized[part] - weights[part] for weights in local], 0)

    def exchange(part: slice, delta: np.ndarray) -> None:
        if outer is None:
            synchronized[part] -= delta
        else:
            lr, factor = outer
            momentum[part] = factor * momentum[part] + delta
            synchronized[part] -= lr * (delta + factor * momentum[part])
        for weights in local:
            weights[part] = alpha * weights[part] + (1.0 - alpha) * synchronized[part]

    for step in range(1, STEPS + 1):
        if streams:
            turn = (step - 1) % local_steps
            part = slice(borders[turn], borders[turn + 1])
            before = movement(part)
        batches = [random.choice(shard, BATCH) for shard in shards]
        gradients = [gradient(weights, x[batch], y[batch]) for weights, batch in zip(local, batches)]
        if not local_steps:
            gradients = [np.mean(gradients, 0)] * RANKS
        for weights, (m, v), g in zip(local, adams, gradients):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            weights -= 1e-3 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-7)
        if streams:
            exchange(part, before)
        elif local_steps and step % local_steps == 0:
            exchange(slice(0, SIZE), movement(slice(0, SIZE)))

    final = np.mean(local, 0) if outer is None else synchronized
    probabilities = forward(final, x_val)[2]
    loss = -np.log(probabilities[np.arange(len(y_val)), y_val] + 1e-12).mean()
    return float((probabilities.argmax(1) == y_val).mean()), float(loss)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--local-steps", type=int, nargs="+", default=[8, 30])
    options = parser.parse_args(arguments)
    diloco = (0.7, 0.9)
    cases = {"gradients in each step": (0, None, False, 0.0)}
    for h in options.local_steps:
        for name, outer in (("average", None), ("nesterov", diloco)):
            cases[f"local_steps={h}, {name}"] = (h, outer, False, 0.0)
            for alpha in (0.0, 0.5):
                cases[f"local_steps={h}, {name}, stream, alpha={alpha:g}"] = (h, outer, True, alpha)
    for name, case in cases.items():
        results = np.array([train(seed, *case) for seed in range(options.seeds)])
        (accuracy, loss), (spread, spread_of_loss) = results.mean(0), results.std(0, ddof=1)
        of_loss = f"loss {loss:.3f} ± {spread_of_loss:.3f}"
        print(f"{name:45} accuracy {100 * accuracy:.1f} ± {100 * spread:.1f} %  {of_loss}", flush=True)


if __name__ == "__main__":
    main()
