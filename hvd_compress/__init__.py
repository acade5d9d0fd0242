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
    from . import cost
    from .analysis.sensitivity import sensitivity
    from .compressors import Compressor
    from .compressors.namespace import Compression
    from .compressors.payload import Payload
    from .cost import CostModel, Link
    from .cost.calibrate import calibrate
    from .exchange.hosts import init
    from .frontends import elastic, optimizers
    from .frontends.allreduce import allreduce, grouped_allreduce
    from .frontends.keras import callbacks
    from .frontends.keras.optimizer import DistributedOptimizer
    from .frontends.residuals import load_residuals, save_residuals
    from .frontends.tape import DistributedGradientTape
    from .monitor.profile import profile

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
    "Compression": "compressors.namespace",
    "Compressor": "compressors",
    "DistributedGradientTape": "frontends.tape",
    "DistributedOptimizer": "frontends.keras.optimizer",
    "Payload": "compressors.payload",
    "allreduce": "frontends.allreduce",
    "calibrate": "cost.calibrate",
    "callbacks": "frontends.keras.callbacks",
    "elastic": "frontends.elastic",
    "grouped_allreduce": "frontends.allreduce",
    "init": "exchange.hosts",
    "load_residuals": "frontends.residuals",
    "optimizers": "frontends.optimizers",
    "profile": "monitor.profile",
    "save_residuals": "frontends.residuals",
    "sensitivity": "analysis.sensitivity",
}
_MODULES = ("callbacks", "cost", "elastic", "optimizers")  # themselves, not something in them


def __getattr__(name: str) -> Any:
    home = _ANYWHERE.get(name) or _WITH_HOROVOD.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITH_HOROVOD:
        importlib.import_module(".common.requirements", __name__)  # says clearly what is missing
    module = importlib.import_module(f".{home}", __name__)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
