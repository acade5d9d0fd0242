"""How gradients are reduced: what the optimizer and the tape are told."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import horovod.tensorflow as hvd

from .compressors import Compressor, NoCompression

BUCKET_BYTES = 25 * 2**20
MIN_COMPRESS_SIZE = 1024


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
        if self.momentum_correction == 1.0:
            raise ValueError("momentum_correction must be below 1, got 1.0")
        if self.momentum_correction and not (self.compressor.sparse and self.feeds_back):
            raise ValueError(
                f"momentum_correction needs a sparse compressor with a residual, such as topk; "
                f"{self.compressor.spec} sends every element every step or keeps no residual"
            )

    @property
    def feeds_back(self) -> bool:
        """Whether residuals are kept."""
        if isinstance(self.compressor, NoCompression):
            return False
        return self.compressor.error_feedback if self.error_feedback is None else self.error_feedback


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
