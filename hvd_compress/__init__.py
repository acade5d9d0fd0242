"""Gradient compression for Horovod with TensorFlow and Keras.

import horovod.tensorflow.keras as hvd
import hvd_compress as hvdc

opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(1e-3), compression="int8")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import cost, elastic, optimizers
    from .checkpoint.residuals import load_residuals, save_residuals
    from .collectives import allreduce, grouped_allreduce
    from .compression import Compression
    from .compressors import Compressor
    from .cost import CostModel, Link
    from .cost.calibrate import calibrate
    from .hosts import init
    from .keras import callbacks
    from .keras.optimizer import DistributedOptimizer
    from .monitor.profile import profile
    from .payload import Payload
    from .sensitivity_run import sensitivity
    from .tape import DistributedGradientTape

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
    "cost",
    "elastic",
    "grouped_allreduce",
    "init",
    "load_residuals",
    "optimizers",
    "profile",
    "save_residuals",
    "sensitivity",
]

# Loaded when they are first asked for (PEP 562): predictions need neither TensorFlow nor Horovod.
_ANYWHERE = {"CostModel": "cost", "Link": "cost", "cost": "cost"}
_WITH_HOROVOD = {
    "Compression": "compression",
    "Compressor": "compressors",
    "DistributedGradientTape": "tape",
    "DistributedOptimizer": "keras.optimizer",
    "Payload": "payload",
    "allreduce": "collectives",
    "calibrate": "cost.calibrate",
    "callbacks": "keras.callbacks",
    "elastic": "elastic",
    "grouped_allreduce": "collectives",
    "init": "hosts",
    "load_residuals": "checkpoint.residuals",
    "optimizers": "optimizers",
    "profile": "monitor.profile",
    "save_residuals": "checkpoint.residuals",
    "sensitivity": "sensitivity_run",
}
_MODULES = ("callbacks", "cost", "elastic", "optimizers")  # themselves, not something in them


def __getattr__(name: str) -> Any:
    home = _ANYWHERE.get(name) or _WITH_HOROVOD.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITH_HOROVOD:
        importlib.import_module("._requirements", __name__)  # says clearly what is missing
    module = importlib.import_module(f".{home}", __name__)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
