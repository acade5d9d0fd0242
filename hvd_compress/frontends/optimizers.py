"""Optimizers that are distributed by themselves: `hvdc.optimizers`."""

from .keras.onebit_adam import OneBitAdam

__all__ = ["OneBitAdam"]
