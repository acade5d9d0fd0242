"""How long an exchange takes: formulas, and a simulation for networks that no formula fits.

Predictions need neither TensorFlow nor Horovod; only `calibrate` does.
"""

from .calibration import Calibration
from .fat_tree import FatTree
from .kernels import KernelCost
from .link import Link
from .model import CostModel, Prediction
from .scaling import Scaled, pays, weak_scaling
from .topology import Ring, Star, Topology, Tree, TwoLevel

__all__ = [
    "Calibration",
    "CostModel",
    "FatTree",
    "KernelCost",
    "Link",
    "Prediction",
    "Ring",
    "Scaled",
    "Star",
    "Topology",
    "Tree",
    "TwoLevel",
    "pays",
    "weak_scaling",
]
