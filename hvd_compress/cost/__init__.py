"""How long an exchange takes: formulas, and a simulation for networks that no formula fits.

Nothing here runs a tensor: predictions are numbers from numbers.
"""

from .calibration import Calibration
from .kernels import KernelCost
from .link import Link
from .model import CostModel, Prediction
from .topology import Ring, Star, Topology, Tree, TwoLevel

__all__ = [
    "Calibration",
    "CostModel",
    "KernelCost",
    "Link",
    "Prediction",
    "Ring",
    "Star",
    "Topology",
    "Tree",
    "TwoLevel",
]
