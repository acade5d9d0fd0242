"""Selects the save from which a run resumes, and reads a rank's part of it. It does not communicate."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..common.error_text import error_text, one_line
from ..common.names import path_of, without_counters
from . import files, plan_state
from .plan_state import PlanState


def check_settings(saved: dict[str, Any], own: dict[str, Any], path: str) -> None:
    """Raises ValueError if a setting of the save at `path` differs from that of this run."""
    for name, value in own.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} was saved with {name}={error_text(saved.get(name))}, and this run has {error_text(value)}: "
                "use the same, or start without residuals (another directory, or resume=False)"
            )


def find(directory: str, step: int | None) -> tuple[int, dict[str, Any]] | None:
    """The number and the manifest of the newest complete save of a step (None: of any step); None if there is no save.

    A damaged manifest hides only its own save: the saves of other steps can still be found.

    Raises:
        ValueError: There are saves, but none of this step, or the manifest of one that may be of this step is damaged.
    """
    steps: list[int] = []
    damaged: ValueError | None = None
    for number in reversed(files.complete(directory)):
        try:
            manifest = files.read_manifest(directory, number)
        except ValueError as error:
            if step is None:  # an older save would not be the newest
                raise
            damaged = damaged or error
            continue
        if step in (None, manifest["step"]):
            return number, manifest
        steps.append(manifest["step"])
    if damaged is not None:
        raise damaged
    if not steps:
        return None
    raise ValueError(
        f"{directory} has residuals of steps {sorted(steps)}, and the model is at step {step}: restore the model of "
        "one of these steps, or start without residuals (another directory, or resume=False)"
    )


def read(
    directory: str, number: int, manifest: dict[str, Any], rank: int, ranks: int, variables: Sequence[Any] | None
) -> list[PlanState]:
    """Reads this rank's states, one for each plan, from a save.

    If the number of ranks has changed, rank r of m gets the sum of the states of ranks r, r + m, r + 2 m, ...
    `variables` are the trained ones of the model, or None if they are not known yet.

    Raises:
        ValueError: A file is missing, damaged, or of another format version, save or model.
    """
    saved_ranks = manifest["ranks"]
    needs = "each rank needs the file that it wrote"
    if saved_ranks != ranks:
        needs = f"{ranks} ranks instead of {saved_ranks} need a file system that all of them share"

    def read_one(source: int) -> list[PlanState]:
        path = files.rank_path(directory, number, source, saved_ranks)
        if not os.path.exists(path):
            raise ValueError(f"{path} is missing: {needs}, or start without residuals (resume=False)")
        metadata, arrays = files.read_rank(path, lambda metadata: PlanState.names(metadata["plans"]))
        expected = {**manifest, "rank": source}
        if {name: metadata.get(name) for name in expected} != expected:
            raise ValueError(f"{path} belongs to another save than its manifest.json: files were mixed up or changed")
        try:
            states = [PlanState.unpacked(str(i), plan, arrays) for i, plan in enumerate(metadata["plans"])]
            for state in states:
                state.check()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: its entries do not fit together ({one_line(repr(error))})") from None
        except ValueError as error:
            raise ValueError(f"{path} cannot be used: {one_line(str(error))}") from None
        if variables is not None:
            _check_model(states, variables, path)
        return states

    if saved_ranks == ranks:
        return read_one(rank)
    if rank >= saved_ranks:  # it takes over nothing, and reads a file for the shapes of its zeros
        return [plan_state.zeroed(state) for state in read_one(0)]
    by_file = [read_one(source) for source in range(rank, saved_ranks, ranks)]
    if len({len(states) for states in by_file}) > 1:
        raise ValueError(f"{files.save_path(directory, number)}: the ranks had different gradients")
    return [plan_state.merged(states) for states in zip(*by_file)]


def _check_model(states: Sequence[PlanState], variables: Sequence[Any], path: str) -> None:
    """Raises ValueError if a state belongs to a variable that the model does not have."""
    shapes = Counter((without_counters(path_of(v)), tuple(v.shape)) for v in variables)
    names = {name for name, _ in shapes}
    for state in states:
        members = [m for m in state.members if m.kind != "own"]
        dense = [m for m in members if m.kind == "dense" and not _is_piece(m, shapes)]
        missing = Counter((without_counters(m.path), m.shape) for m in dense) - shapes
        foreign = [m for m in dense if (without_counters(m.path), m.shape) in missing]
        foreign += [m for m in members if without_counters(m.path) not in names]
        if foreign:
            shape = f" of shape {foreign[0].shape}" if foreign[0].kind == "dense" else ""
            raise ValueError(
                f"{path} belongs to another model: it has {foreign[0].path}{shape}, which is not among the trained "
                f"variables ({len(variables)})"
            )


def _is_piece(member: plan_state.Member, shapes: Counter[Any]) -> bool:
    """Whether a member is some rows of a variable: of a fragment of local steps."""
    name, shape = without_counters(member.path), member.shape
    return any(
        name == other and len(shape) == len(whole) > 1 and shape[1:] == whole[1:] and shape[0] < whole[0]
        for other, whole in shapes
    )
