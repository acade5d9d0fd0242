"""The compressors: one file per algorithm, all subclasses of `base.Compressor`."""

from .auto import Auto as Auto
from .base import Compressor as Compressor
from .base import Encoded as Encoded
from .base import Seeds as Seeds
from .block_sparse import BlockSparse as BlockSparse
from .cast import BFloat16 as BFloat16
from .cast import Float16 as Float16
from .cast import NoCompression as NoCompression
from .dgc import DGC as DGC
from .hadamard import Hadamard as Hadamard
from .hybrid import Hybrid as Hybrid
from .int2 import Int2 as Int2
from .onebit import OneBit as OneBit
from .power_sgd import PowerSGD as PowerSGD
from .quantize import Quantize as Quantize
from .schedule import Schedule as Schedule
from .sparse import BlockTopK as BlockTopK
from .sparse import RandomK as RandomK
from .sparse import TopK as TopK
