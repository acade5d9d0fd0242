"""What can be said of a compressor without running it: its arguments, its spec string, and what it sends.

Pure Python, so that sizes and times can be predicted where neither TensorFlow nor Horovod is installed. The
compressors (`hvd_compress.compressors`) are these classes with the tensors added.
"""

from .base import Format, Part, is_summed
from .cast import BFloat16, Float16, NoCompression
from .dgc import DGC
from .power_sgd import PowerSGD
from .quantize import OneBit, Quantize
from .sparse import BlockSparse, BlockTopK, Hybrid, RandomK, Strided, TopK
from .specs import CANDIDATES, PRESETS, parse

__all__ = [
    "CANDIDATES",
    "DGC",
    "PRESETS",
    "BFloat16",
    "BlockSparse",
    "BlockTopK",
    "Float16",
    "Format",
    "Hybrid",
    "NoCompression",
    "OneBit",
    "Part",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Strided",
    "TopK",
    "is_summed",
    "parse",
]
