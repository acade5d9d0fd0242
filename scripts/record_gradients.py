#!/usr/bin/env python3
"""Records the gradients that `hvd-compress bench` and the benchmarks send: hvd_compress/tools/data/gradients.npz.

    python scripts/record_gradients.py

A small causal transformer is trained on the source of Python's standard library, and ResNet-20 on scikit-learn's
handwritten digits. Before they have converged, the gradients of two batches are written. This takes about a minute on
two cores. Gradients are multiplied by 1024, so that float16 holds the small ones, too: no relative error changes.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras

FILE = Path(__file__).resolve().parent.parent / "hvd_compress" / "tools" / "data" / "gradients.npz"
SCALE = 1024.0
WIDTH, CONTEXT = 96, 64
layers = keras.layers


def transformer() -> keras.Model:
    """Two blocks with causal attention, on bytes; 0.3 million weights."""
    tokens = layers.Input([CONTEXT], dtype="int32")
    positions = tf.range(CONTEXT)
    x = layers.Embedding(256, WIDTH)(tokens) + layers.Embedding(CONTEXT, WIDTH)(positions)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(WIDTH)(y)
    return keras.Model(tokens, layers.Dense(256)(layers.LayerNormalization()(x)))


def resnet20() -> keras.Model:
    """He et al. 2015, section 4.2, for images of 16x16 in shades of gray; 0.27 million weights."""

    def conv(x: Any, filters: int, stride: int = 1, size: int = 3) -> Any:
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    images = layers.Input([16, 16, 1])
    x = layers.ReLU()(conv(images, 16))
    for filters, first in ((16, 1), (32, 2), (64, 2)):
        for stride in (first, 1, 1):
            y = conv(layers.ReLU()(conv(x, filters, stride)), filters)
            x = layers.ReLU()(y + (x if stride == 1 else conv(x, filters, stride, 1)))
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def text_batches(rng: np.random.Generator) -> Any:
    """Endless batches of 32 excerpts and their next bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    while True:
        excerpts = text[rng.integers(0, len(text) - CONTEXT, 32)[:, None] + np.arange(CONTEXT + 1)]
        yield excerpts[:, :-1], excerpts[:, 1:]


def digit_batches(rng: np.random.Generator) -> Any:
    """Endless batches of 64 digits, enlarged."""
    digits = load_digits()
    images = np.kron(digits.images / 16.0, np.ones([2, 2]))[..., None].astype(np.float32)
    while True:
        chosen = rng.integers(0, len(images), 64)
        yield images[chosen], digits.target[chosen]


def record(name: str, steps: int, model: keras.Model, optimizer: Any, batches: Any) -> list[dict[str, np.ndarray]]:
    """Trains a model for some steps, then returns the gradients of two batches by the variables' paths."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def gradients_of(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]

    for step in range(steps):
        loss, gradients = gradients_of(*next(batches))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if (step + 1) % 20 == 0:
            print(f"{name}: step {step + 1}, loss {float(loss):.3f}")
    paths = [f"{name}/{variable.path}" for variable in model.trainable_variables]
    return [dict(zip(paths, gradients_of(*next(batches))[1])) for _ in range(2)]


def main() -> None:
    """Trains, and writes the file."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    recorded = [
        record("gpt", 300, transformer(), keras.optimizers.Adam(1e-3), text_batches(rng)),
        record("resnet20", 40, resnet20(), keras.optimizers.SGD(0.05, momentum=0.9), digit_batches(rng)),
    ]
    arrays = {}
    for of_model in recorded:
        for step, gradients in enumerate(of_model):
            for path, gradient in gradients.items():
                array = np.asarray(SCALE * gradient, np.float16)
                assert np.isfinite(array).all(), path
                arrays[f"{step}/{path}"] = array
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)
    elements = sum(array.size for array in arrays.values())
    print(f"{FILE}: {len(arrays)} arrays, {elements:,} elements, {FILE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
