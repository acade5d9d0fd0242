"""Tells the reducer of a model's optimizer which epoch it is; the warm-up of `dgc` depends on it."""

from __future__ import annotations

from typing import Any

from .optimizer_state import distributed_optimizer


def begin(model: Any, epoch: int) -> None:
    """Epoch `epoch`, counted from 0, begins. To be called on all ranks."""
    optimizer = distributed_optimizer(getattr(model, "optimizer", None))
    if optimizer is not None:
        optimizer._hvdc.reducer.begin_epoch(epoch)


def end(model: Any) -> None:
    """The epoch has ended."""
    optimizer = distributed_optimizer(getattr(model, "optimizer", None))
    if optimizer is not None:
        optimizer._hvdc.reducer.end_epoch()
