"""The text of values in error messages."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_LONGEST, _LONGEST_LINE = 100, 300


def error_text(value: Any) -> str:
    """`value` for an error of one line: not too long, and without addresses, which differ from rank to rank."""
    try:
        return _shortened(" ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", _text(value)).split()), _LONGEST)
    except RecursionError:
        return f"a {type(value).__name__} of very many levels"


def one_line(text: str) -> str:
    """Text that may contain anything, for an error of one line: not too long, without control characters."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return _shortened(" ".join(text.split()), _LONGEST_LINE)


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple, set)):
        return f"[{', '.join(map(error_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{error_text(key)}: {error_text(item)}' for key, item in value.items())}}}"
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, np.generic):
        # The values of a tensor, an array or a variable differ from rank to rank.
        return f"a {type(value).__name__} of {getattr(value.dtype, 'name', value.dtype)} {value.shape}"
    return repr(value)
