"""Settings that environment variables make, where the arguments leave them out."""

from __future__ import annotations

import os

from ..common.error_text import error_text
from ..engine.settings import BUCKET_BYTES

EXCHANGE = "HVD_COMPRESS_EXCHANGE"


def resolve_bucket_bytes(bucket_bytes: int | None) -> int:
    """Returns `bucket_bytes`; if it is None, HVD_COMPRESS_BUCKET_BYTES; if that is not set, 25 MiB.

    Raises:
        ValueError: The environment variable is not a whole number of at least 1.
    """
    if bucket_bytes is not None:
        return bucket_bytes
    text = os.environ.get("HVD_COMPRESS_BUCKET_BYTES", "").strip()
    if not text:
        return BUCKET_BYTES
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"environment variable HVD_COMPRESS_BUCKET_BYTES must be a whole number from 1 on, got {text!r}"
        )
    return int(text)


def resolve_exchange() -> dict[str, int]:
    """What HVD_COMPRESS_EXCHANGE says, by which `hvd-compress tune` sets `local_steps` or `delay` of a script.

    Returns:
        {"local_steps": 8} for "local_steps=8", {"delay": 1} for "delay=1", and {} if it is not set.

    Raises:
        ValueError: It is something else.
    """
    text = os.environ.get(EXCHANGE, "").strip()
    if not text:
        return {}
    name, _, number = text.partition("=")
    if name not in ("local_steps", "delay") or not number.isdecimal():
        raise ValueError(
            f"environment variable {EXCHANGE} must be like 'delay=1' or 'local_steps=8', got {error_text(text)}"
        )
    return {name: int(number)}
