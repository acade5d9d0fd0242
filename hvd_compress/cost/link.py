"""Changes of all links of a topology."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..common.link import Link as Link


def with_links(topology: Any, change: Callable[[Link], Link]) -> Any:
    """A topology, a link or a mapping of these with `change` applied to all links; anything else stays as it is."""
    if isinstance(topology, Mapping):
        return {name: with_links(link, change) for name, link in topology.items()}
    if isinstance(topology, Link):
        return change(topology)
    if not dataclasses.is_dataclass(topology) or isinstance(topology, type):
        return topology
    fields = {f.name: getattr(topology, f.name) for f in dataclasses.fields(topology) if f.init}
    return dataclasses.replace(topology, **{name: with_links(value, change) for name, value in fields.items()})
