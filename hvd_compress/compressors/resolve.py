"""The compressors that users mean by what they pass as `compression` and `policy`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Union

import horovod.tensorflow as hvd

from ..common.error_text import error_text
from .base import Compressor
from .registry import parse

CompressionLike = Union[Compressor, str, type, None]


def resolve(compression: CompressionLike) -> Compressor:
    """The compressor that a user means by `compression`.

    Args:
        compression: A compressor; a subclass of `Compressor` or one of Horovod's own (`hvd.Compression.fp16`);
            a spec string; or None for the environment variable `HVD_COMPRESS`, and no compression if it is not set.

    Raises:
        ValueError: A spec string, or the environment variable's, does not parse.
        TypeError: It is none of these.
    """
    if compression is None:
        try:
            return parse(os.environ.get("HVD_COMPRESS", "").strip() or "none")
        except ValueError as error:
            raise ValueError(f"environment variable HVD_COMPRESS: {error}") from None
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, str):
        return parse(compression)
    if compression is hvd.Compression.none:
        return parse("none")
    if compression is hvd.Compression.fp16:
        return parse("fp16")
    if isinstance(compression, type) and issubclass(compression, Compressor) and compression is not Compressor:
        return _instance(compression)
    raise TypeError(
        f"compression must be a hvdc.Compressor, a spec string such as 'int8' or 'topk:ratio=0.01', or None; "
        f"got {error_text(compression)}"
    )


def policies(policy: Mapping[str, CompressionLike] | None) -> tuple[tuple[str, Compressor], ...]:
    """Pairs of a pattern and its compressor, in the order of `policy`.

    Raises:
        TypeError: It is not a mapping from strings, or a value is not a compressor.
        ValueError: A spec string does not parse.
    """
    if policy is None:
        return ()
    if not isinstance(policy, Mapping) or not all(isinstance(pattern, str) for pattern in policy):
        raise TypeError(
            f"policy must map patterns on variable paths to compressors, such as {{'*embedding*': 'none'}}; "
            f"got {error_text(policy)}"
        )
    pairs = []
    for pattern, compression in policy.items():
        if compression is None:
            raise TypeError(f"policy[{pattern!r}] is None: write 'none' for no compression")
        try:
            pairs.append((pattern, resolve(compression)))
        except (TypeError, ValueError) as error:
            raise type(error)(f"policy[{pattern!r}]: {error}") from None
    return tuple(pairs)


@functools.cache
def _instance(cls: type) -> Compressor:
    """One instance per class: the residuals of a custom training loop are looked up by it."""
    try:
        return cls()
    except TypeError as error:
        raise TypeError(
            f"compression={cls.__name__} is a class that needs arguments: "
            f"pass an instance, {cls.__name__}(...) ({error})"
        ) from None
