"""The shapes of real models' trainable variables, first layer first."""

from __future__ import annotations

from ..engine.grouping import Shape


def mnist() -> list[Shape]:
    """The network of examples/keras_mnist.py: 1.2M parameters."""
    return [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,)]


def resnet50() -> list[Shape]:
    """He et al. 2016, convolutions without bias: 161 tensors, 25.56M parameters."""
    shapes: list[Shape] = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, 1, channels, 4 * width))
            for kernel in convolutions:
                shapes += [kernel, (kernel[3],), (kernel[3],)]
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def bert_base() -> list[Shape]:
    """Devlin et al. 2019, without a task's head: 109.5M parameters."""
    shapes: list[Shape] = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
    for _ in range(12):
        shapes += [(768, 768), (768,)] * 4 + [(768,), (768,)]
        shapes += [(768, 3072), (3072,), (3072, 768), (768,), (768,), (768,)]
    return [*shapes, (768, 768), (768,)]


def of_size(parameters: int) -> list[Shape]:
    """Matrices of up to 1,024 rows of 1,024 parameters, rounded to whole rows; a vector if there is less than a row."""
    if parameters < 1024:
        return [(parameters,)]
    rows = max(1, round(parameters / 1024))
    return [(min(1024, rows - first), 1024) for first in range(0, rows, 1024)]


MODELS = {"mnist": mnist, "resnet50": resnet50, "bert_base": bert_base}
