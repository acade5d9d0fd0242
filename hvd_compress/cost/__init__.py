"""How long an exchange takes: formulas, and a simulation for networks that no formula fits.

Predictions need neither TensorFlow nor Horovod; only `calibrate` does.
"""

from .calibration import Calibration as Calibration
from .fat_tree import FatTree as FatTree
from .kernels import KernelCost as KernelCost
from .link import Link as Link
from .model import CostModel as CostModel
from .model import Prediction as Prediction
from .scaling import Scaled as Scaled
from .scaling import pays as pays
from .scaling import weak_scaling as weak_scaling
from .topology import Ring as Ring
from .topology import Star as Star
from .topology import Topology as Topology
from .topology import Tree as Tree
from .topology import TwoLevel as TwoLevel
