"""Placeholder until the collectives are merged."""

from typing import Any

Collective = Any
