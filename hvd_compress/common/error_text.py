"""Values in the text of errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_LONGEST = 100


def error_text(value: Any) -> str:
    """`value` in one line of an error: not too long, and without addresses, which differ from rank to rank."""
    if isinstance(value, (list, tuple, set)):
        found = f"[{', '.join(map(error_text, value))}]"
    elif isinstance(value, dict):
        found = f"{{{', '.join(f'{error_text(key)}: {error_text(item)}' for key, item in value.items())}}}"
    elif hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, np.generic):
        # A tensor, an array, a variable: its values are each rank's own.
        found = f"a {type(value).__name__} of {getattr(value.dtype, 'name', value.dtype)} {value.shape}"
    else:
        found = repr(value)
    text = " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", found).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
