"""How gradients are reduced: what the optimizer and the tape are told."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import numbers
import os
from typing import Any

import horovod.tensorflow as hvd

from . import nonfinite
from .compressors import Auto, Compressor, NoCompression
from .geometry import BUCKET_BYTES as BUCKET_BYTES
from .geometry import MIN_COMPRESS_SIZE as MIN_COMPRESS_SIZE


@dataclasses.dataclass(frozen=True)
class Settings:
    """How gradients are reduced; see `hvdc.DistributedOptimizer` for the meaning of each.

    Raises:
        ValueError: A value is not valid, or two contradict each other.
    """

    compressor: Compressor
    name: str = "DistributedOptimizer"
    op: Any = hvd.Average
    gradient_predivide_factor: float = 1.0
    process_set: Any = hvd.global_process_set
    groups: Any = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    scale_local_gradients: bool = True
    min_compress_size: int = MIN_COMPRESS_SIZE
    bucket_bytes: int = BUCKET_BYTES
    error_feedback: bool | None = None
    residual_decay: float = 1.0
    residual_dtype: str = "float32"
    momentum_correction: float = 0.0
    policy: Any = ()  # (pattern, compressor) pairs; see `policies`
    on_nonfinite: str = "propagate"

    def __post_init__(self) -> None:
        if self.op not in (hvd.Average, hvd.Sum):
            raise ValueError("op currently only supports Average and Sum")
        if self.gradient_predivide_factor != 1.0 and self.op != hvd.Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        _check_groups(self.groups)
        _check_number("min_compress_size", self.min_compress_size, 0, math.inf, whole=True)
        _check_number("bucket_bytes", self.bucket_bytes, 1, math.inf, whole=True)
        _check_number("residual_decay", self.residual_decay, 0.0, 1.0)
        _check_number("momentum_correction", self.momentum_correction, 0.0, 1.0)
        if self.residual_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"residual_dtype must be 'float32' or 'bfloat16', got {self.residual_dtype!r}")
        if self.on_nonfinite not in nonfinite.POLICIES:
            raise ValueError(f"on_nonfinite must be one of {nonfinite.POLICIES}, got {self.on_nonfinite!r}")
        if self.momentum_correction == 1.0:
            raise ValueError("momentum_correction must be below 1, got 1.0")
        compressors = (self.compressor, *(compressor for _, compressor in self.policy))
        for compressor in compressors:
            plain = isinstance(compressor, NoCompression) and compressor is not self.compressor
            if (
                self.momentum_correction
                and not plain
                and not (compressor.sparse and self.feeds_back(compressor))
            ):
                raise ValueError(
                    f"momentum_correction needs a sparse compressor with a residual, such as topk; "
                    f"{compressor.spec} sends every element every step or keeps no residual"
                )

        autos = [compressor for compressor in compressors if isinstance(compressor, Auto)]
        if any(auto != autos[0] for auto in autos):
            raise ValueError("policy: there can be only one auto, got " + " and ".join(a.spec for a in autos))

    def compressor_of(self, path: str) -> Compressor:
        """The compressor for the variable of this path: of the first pattern of `policy` that matches it."""
        found = (compressor for pattern, compressor in self.policy if fnmatch.fnmatchcase(path, pattern))
        return next(found, self.compressor)

    def feeds_back(self, compressor: Compressor) -> bool:
        """Whether residuals are kept of what this compressor loses."""
        if isinstance(compressor, NoCompression):
            return False
        return compressor.error_feedback if self.error_feedback is None else self.error_feedback


def resolve_bucket_bytes(bucket_bytes: int | None) -> int:
    """What a user means by `bucket_bytes`: where it is None, what the environment variable says, else 25 MiB.

    Raises:
        ValueError: The environment variable holds no whole number from 1 on.
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


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups):
        return
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return
    raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")


def _check_number(name: str, value: Any, low: float, high: float, whole: bool = False) -> None:
    kind: Any = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        limits = f"from {low} on" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name} must be {what} {limits}, got {value!r}")
