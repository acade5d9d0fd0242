"""Optimizers that compress by themselves: `hvdc.optimizers`.

- `OneBitAdam`: 1-bit Adam, which exchanges its momentum instead of gradients. Do not wrap it in
  `hvdc.DistributedOptimizer`.
"""

from .frontends.keras.onebit_adam import OneBitAdam

__all__ = ["OneBitAdam"]
