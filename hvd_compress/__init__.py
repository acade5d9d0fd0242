"""Gradient compression for Horovod with TensorFlow and Keras.

import horovod.tensorflow.keras as hvd
import hvd_compress as hvdc

opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(1e-3), compression="int8")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

# What type checkers and editors see. ruff cannot evaluate `__all__`.
# ruff: noqa: F401
if TYPE_CHECKING:
    from . import callbacks, cost, elastic, loggers, optimizers
    from .analysis.compare import compare
    from .analysis.record_gradients import record_gradients
    from .analysis.sensitivity import sensitivity
    from .common.verbosity import set_verbosity
    from .compressors import Compressor
    from .compressors.namespace import Compression
    from .compressors.payload import Payload
    from .cost import CostModel, Link
    from .cost.calibrate import calibrate
    from .exchange.hosts import init
    from .frontends.allreduce import allreduce, grouped_allreduce
    from .frontends.keras.optimizer import DistributedOptimizer
    from .frontends.local_steps import LocalSteps
    from .frontends.residuals import load_residuals, save_residuals
    from .frontends.tape import DistributedGradientTape
    from .monitor.profile import profile

# The modules that define the public names. A module is imported when one of its names is first used (PEP 562):
# importing hvd_compress and predicting with the cost model need neither TensorFlow nor Horovod.
_WITHOUT_TENSORFLOW = {"CostModel": "cost", "Link": "cost", "set_verbosity": "common.verbosity"}
_WITH_TENSORFLOW = {
    "Compression": "compressors.namespace",
    "Compressor": "compressors",
    "DistributedGradientTape": "frontends.tape",
    "DistributedOptimizer": "frontends.keras.optimizer",
    "LocalSteps": "frontends.local_steps",
    "Payload": "compressors.payload",
    "allreduce": "frontends.allreduce",
    "calibrate": "cost.calibrate",
    "compare": "analysis.compare",
    "grouped_allreduce": "frontends.allreduce",
    "init": "exchange.hosts",
    "load_residuals": "frontends.residuals",
    "profile": "monitor.profile",
    "record_gradients": "analysis.record_gradients",
    "save_residuals": "frontends.residuals",
    "sensitivity": "analysis.sensitivity",
}
_MODULES = ("callbacks", "cost", "elastic", "loggers", "optimizers")
__all__ = ["__version__", *_MODULES, *_WITHOUT_TENSORFLOW, *_WITH_TENSORFLOW]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    module = _WITHOUT_TENSORFLOW.get(name) or _WITH_TENSORFLOW.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITH_TENSORFLOW:
        importlib.import_module(".common.requirements", __name__)  # says clearly what is missing
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
