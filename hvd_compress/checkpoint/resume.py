"""Which save a run goes on from, and what each rank reads of it. Without communication."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..common.names import path_of, without_counters
from . import files, plan_state
from .plan_state import PlanState


def check_settings(saved: dict[str, Any], own: dict[str, Any], path: str) -> None:
    """Compares the settings of a save with one's own.

    Raises:
        ValueError: They differ.
    """
    for name, value in own.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} was saved with {name}={saved.get(name)!r}, and this run has {value!r}: use the same, or "
                "start without residuals (another directory, or resume=False)"
            )


def find(directory: str, step: int | None) -> tuple[int, dict[str, Any]] | None:
    """The newest complete save of this step (None: of any), and its manifest; None if there is no save.

    Raises:
        ValueError: There are saves, but none of this step, or a manifest is damaged.
    """
    steps = []
    for number in reversed(files.complete(directory)):
        manifest = files.read_manifest(directory, number)
        if step in (None, manifest["step"]):
            return number, manifest
        steps.append(manifest["step"])
    if not steps:
        return None
    raise ValueError(
        f"{directory} has residuals of steps {sorted(steps)}, and the model is at step {step}: restore the model of "
        "one of these steps, or start without residuals (another directory, or resume=False)"
    )


def read(
    directory: str,
    number: int,
    manifest: dict[str, Any],
    rank: int,
    ranks: int,
    variables: Sequence[Any] | None,
) -> list[PlanState]:
    """The state that this rank of `ranks` takes over from a save, one for each plan.

    Args:
        directory: Where the saves are.
        number: Of the save.
        manifest: Its manifest.
        rank: This rank.
        ranks: How many there are now.
        variables: What the model trains, or None if that is not known yet.

    Raises:
        ValueError: A file is missing, damaged, of another version, save or model.
    """
    saved = manifest["ranks"]
    mine = range(rank, saved, ranks) if saved != ranks else [rank]
    by_file = [_read_one(directory, number, manifest, q, ranks, variables) for q in mine or [0]]
    if saved == ranks:
        return by_file[0]
    if not mine:
        by_file = [[plan_state.zeroed(state) for state in by_file[0]]]
    if len({len(states) for states in by_file}) > 1:
        raise ValueError(f"{files.save_path(directory, number)}: the ranks had different gradients")
    return [plan_state.merged(states) for states in zip(*by_file)]


def _read_one(
    directory: str,
    number: int,
    manifest: dict[str, Any],
    rank: int,
    ranks: int,
    variables: Sequence[Any] | None,
) -> list[PlanState]:
    saved = manifest["ranks"]
    path = files.rank_path(directory, number, rank, saved)
    if not os.path.exists(path):
        needs = "each rank needs the file that it wrote"
        if saved != ranks:
            needs = f"{ranks} ranks instead of {saved} need a file system that all of them share"
        raise ValueError(f"{path} is missing: {needs}, or start without residuals (resume=False)")
    metadata, arrays = files.read_rank(path)
    expected = {**manifest, "rank": rank}
    if {name: metadata.get(name) for name in expected} != expected:
        raise ValueError(
            f"{path} belongs to another save than its manifest.json: files were mixed up or changed"
        )
    states = [PlanState.unpacked(str(i), plan, arrays) for i, plan in enumerate(metadata["plans"])]
    if variables is not None:
        _check_model(states, variables, path)
    return states


def _check_model(states: Sequence[PlanState], variables: Sequence[Any], path: str) -> None:
    """Raises ValueError if a state belongs to a variable that the model has not."""
    shapes = Counter((without_counters(path_of(v)), tuple(v.shape)) for v in variables)
    names = {name for name, _ in shapes}
    for state in states:
        dense = [m for m in state.members if m.kind == "dense"]
        missing = Counter((without_counters(m.path), m.shape) for m in dense) - shapes
        other = next((m for m in dense if (without_counters(m.path), m.shape) in missing), None)
        other = other or next((m for m in state.members if without_counters(m.path) not in names), None)
        if other is not None:
            shape = f" of shape {other.shape}" if other.kind == "dense" else ""
            raise ValueError(
                f"{path} belongs to another model: it has {other.path}{shape}, which is not among the trained "
                f"variables ({len(variables)})"
            )
