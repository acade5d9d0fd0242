"""What quantizers keep of an array, in NumPy."""

import numpy as np


def levels_of_int8(x):
    """`x` rounded to the nearest of the 256 evenly spaced values of its block of 256, of which one is zero."""
    blocks = x.astype(np.float64).reshape(-1, 256)
    step = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / 255
    step[step == 0.0] = 1.0
    lowest = np.rint(blocks.min(1, keepdims=True) / step)
    codes = np.clip(np.rint(blocks / step) - lowest, 0, 255)
    return ((codes + lowest) * step).reshape(x.shape)
