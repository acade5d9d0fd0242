"""Which epoch it is, told to what asks for it: `dgc`, for its warm-up."""

from __future__ import annotations

from typing import Any


def begin(model: Any, epoch: int) -> None:
    """Says that epoch `epoch` (from 0 on) begins; on all ranks."""
    reducer = _reducer(model)
    if reducer is not None:
        reducer.begin_epoch(epoch)


def end(model: Any) -> None:
    """Says that the epoch is over."""
    reducer = _reducer(model)
    if reducer is not None:
        reducer.end_epoch()


def _reducer(model: Any) -> Any:
    optimizer: Any = getattr(model, "optimizer", None)
    while not hasattr(optimizer, "_hvdc") and hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer._hvdc.reducer if hasattr(optimizer, "_hvdc") else None
