"""Residual networks (He et al., Deep Residual Learning for Image Recognition, 2015)."""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow import keras


@keras.utils.register_keras_serializable("examples")
class Shortcut(keras.layers.Layer):
    """Halves height and width, and fills up with channels of zeros: a shortcut without weights."""

    def __init__(self, filters: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.filters = filters

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [0, self.filters - x.shape[-1]]])

    def compute_output_shape(self, shape: tuple) -> tuple:
        return (shape[0], -(-shape[1] // 2), -(-shape[2] // 2), self.filters)

    def get_config(self) -> dict:
        return {**super().get_config(), "filters": self.filters}


def conv(x, filters: int, size: int = 3, stride: int = 1, gamma: str = "ones"):
    """A convolution without a bias, and batch normalization."""
    x = keras.layers.Conv2D(
        filters,
        size,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(5e-5),  # its gradient equals a weight decay of 1e-4
    )(x)
    return keras.layers.BatchNormalization(momentum=0.9, gamma_initializer=gamma)(x)


def head(inputs, x, classes: int, **kwargs) -> keras.Model:
    """Averages over the image, and classifies. The softmax needs float32, even under a policy of 16 bits."""
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(classes, activation="softmax", dtype="float32", **kwargs)(x)
    return keras.Model(inputs, outputs)


def resnet20(classes: int = 10, image_size: int = 32) -> keras.Model:
    """Nine residual blocks with two layers each (section 4.2 of the paper); 0.27 million weights for ten classes."""
    inputs = keras.layers.Input([image_size, image_size, 3])
    x = keras.layers.ReLU()(conv(inputs, 16))
    for filters, first_stride in ((16, 1), (32, 2), (64, 2)):
        for stride in (first_stride, 1, 1):
            y = keras.layers.ReLU()(conv(x, filters, stride=stride))
            shortcut = x if stride == 1 else Shortcut(filters)(x)
            x = keras.layers.ReLU()(keras.layers.Add()([conv(y, filters), shortcut]))
    return head(inputs, x, classes)


def resnet50(classes: int = 1000, image_size: int = 224) -> keras.Model:
    """Sixteen residual blocks with three layers each; 25.6 million weights for a thousand classes.

    As in Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677), section 5.1: the 3x3 convolutions have the
    strides, and the last normalization of each block starts with zeros, so that the block passes on its input.
    """
    inputs = keras.layers.Input([image_size, image_size, 3])
    x = keras.layers.ReLU()(conv(inputs, 64, 7, 2))
    x = keras.layers.MaxPooling2D(3, 2, padding="same")(x)
    for filters, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            y = keras.layers.ReLU()(conv(x, filters, 1))
            y = keras.layers.ReLU()(conv(y, filters, 3, stride))
            y = conv(y, 4 * filters, 1, gamma="zeros")
            shortcut = conv(x, 4 * filters, 1, stride) if block == 0 else x
            x = keras.layers.ReLU()(keras.layers.Add()([y, shortcut]))
    return head(
        inputs,
        x,
        classes,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        kernel_regularizer=keras.regularizers.L2(5e-5),
    )


class AverageBatchNormalization(keras.callbacks.Callback):
    """Averages the moving means and variances of all workers before each validation.

    Those of a worker are of its own images. With the averages, all workers validate and save the same model.
    """

    def on_test_begin(self, logs: dict | None = None) -> None:
        variables = self.model.non_trainable_weights
        for variable, mean in zip(variables, hvd.grouped_allreduce([tf.convert_to_tensor(v) for v in variables])):
            variable.assign(mean)
