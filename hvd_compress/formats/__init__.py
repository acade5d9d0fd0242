"""What is known of a compressor without running it: its arguments, its spec string and the sizes of what it sends.

Pure Python: sizes and times can be predicted where neither TensorFlow nor Horovod is installed. The compressors
(`hvd_compress.compressors`) are subclasses of these classes that add the tensor operations.
"""

from .base import Format as Format
from .cast import BFloat16 as BFloat16
from .cast import Float16 as Float16
from .cast import NoCompression as NoCompression
from .dgc import DGC as DGC
from .hadamard import Hadamard as Hadamard
from .int2 import Int2 as Int2
from .power_sgd import PowerSGD as PowerSGD
from .quantize import OneBit as OneBit
from .quantize import Quantize as Quantize
from .registry import parse as parse
from .sparse import BlockSparse as BlockSparse
from .sparse import BlockTopK as BlockTopK
from .sparse import Hybrid as Hybrid
from .sparse import RandomK as RandomK
from .sparse import TopK as TopK
