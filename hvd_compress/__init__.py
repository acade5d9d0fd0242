"""Gradient compression for Horovod with TensorFlow and Keras.

import horovod.tensorflow.keras as hvd
import hvd_compress as hvdc

opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(1e-3), compression="int8")
"""

from . import (
    _requirements,  # noqa: F401  (first: says clearly what is missing)
    elastic,
)
from .allreduce import allreduce, grouped_allreduce
from .checkpoint.residuals import load_residuals, save_residuals
from .compression import Compression
from .compressors import Compressor
from .cost import CostModel, Link
from .cost.calibrate import calibrate
from .keras import callbacks
from .keras.optimizer import DistributedOptimizer
from .payload import Payload
from .sensitivity import sensitivity
from .tape import DistributedGradientTape
from .version import __version__

__all__ = [
    "Compression",
    "Compressor",
    "CostModel",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Link",
    "Payload",
    "__version__",
    "allreduce",
    "calibrate",
    "callbacks",
    "elastic",
    "grouped_allreduce",
    "load_residuals",
    "save_residuals",
    "sensitivity",
]
