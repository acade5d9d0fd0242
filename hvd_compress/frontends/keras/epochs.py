"""Which epoch it is, told to what asks for it: `dgc`, for its warm-up."""

from __future__ import annotations

from typing import Any

from ...engine import progress


def begin(model: Any, epoch: int) -> None:
    """Says that epoch `epoch` (from 0 on) begins; on all ranks."""
    reducer = _reducer(model)
    if reducer is not None:
        progress.begin_epoch(reducer, epoch)


def end(model: Any) -> None:
    """Says that the epoch is over."""
    reducer = _reducer(model)
    if reducer is not None:
        progress.end_epoch(reducer)


def _reducer(model: Any) -> Any:
    optimizer: Any = getattr(model, "optimizer", None)
    while not hasattr(optimizer, "_hvdc") and hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer._hvdc.reducer if hasattr(optimizer, "_hvdc") else None
