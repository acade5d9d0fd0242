"""Functions for the argument `log` of `hvdc.callbacks.CompressionMonitor`: `hvdc.loggers`."""

from .monitor.loggers import MLflow, Prometheus, WandB

__all__ = ["MLflow", "Prometheus", "WandB"]
