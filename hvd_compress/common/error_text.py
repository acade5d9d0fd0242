"""The text of values in error messages."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_LONGEST = 100


def error_text(value: Any) -> str:
    """`value` for an error of one line: not too long, and without addresses, which differ from rank to rank."""
    if isinstance(value, (list, tuple, set)):
        text = f"[{', '.join(map(error_text, value))}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{error_text(key)}: {error_text(item)}' for key, item in value.items())}}}"
    elif hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, np.generic):
        # The values of a tensor, an array or a variable differ from rank to rank.
        text = f"a {type(value).__name__} of {getattr(value.dtype, 'name', value.dtype)} {value.shape}"
    else:
        text = repr(value)
    text = " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", text).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
