"""What is kept of a gradient: one file per idea, all on the interface of `base.Compressor`."""

from .auto import Auto
from .base import Compressor, Encoded, Seeds
from .block_sparse import BlockSparse
from .cast import BFloat16, Float16, NoCompression
from .dgc import DGC
from .hybrid import Hybrid
from .onebit import OneBit
from .power_sgd import PowerSGD
from .quantize import Quantize
from .sparse import BlockTopK, RandomK, TopK

__all__ = [
    "DGC",
    "Auto",
    "BFloat16",
    "BlockSparse",
    "BlockTopK",
    "Compressor",
    "Encoded",
    "Float16",
    "Hybrid",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Seeds",
    "TopK",
]
