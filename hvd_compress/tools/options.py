"""Options that several subcommands have."""

from __future__ import annotations

from typing import Any

import click

from ..engine.layout import BUCKET_BYTES
from . import console, units

# The candidates of `auto` are among them.
SPECS = (
    "none", "fp16", "bf16", "int8", "int4", "int2", "hadamard", "onebit", "topk:ratio=0.01", "block_topk:ratio=0.01",
    "randomk:ratio=0.01", "hybrid:ratio=0.1,bits=4", "hybrid:ratio=0.05,bits=4", "hybrid:ratio=0.01,bits=4",
    "powersgd:rank=4", "powersgd:rank=1",
)  # fmt: skip

compressors = click.option(
    "--compressor", "-c", "specs", type=units.SPEC, multiple=True, default=SPECS, show_default=False,
    help="Instead of all; may be repeated.",
)  # fmt: skip
bucket_bytes = click.option(
    "--bucket-bytes", type=units.BYTES, default=BUCKET_BYTES, show_default=False,
    help="Of a bucket.  [default: 25MiB]",
)  # fmt: skip

backward = click.option("--backward", type=units.SECONDS, default="0", help="The backward pass, such as 120ms.")
forward = click.option("--forward", type=units.SECONDS, default="0", help="Rest of a step: forward, update.")


def output(text: str, **settings: Any) -> Any:
    """The option that names the file to write."""
    return click.option("--output", "-o", type=console.OUTPUT_FILE, help=text, **settings)


def with_none(specs: tuple[str, ...]) -> tuple[str, ...]:
    """The compressors, each once; no compression, with which the others are compared, comes first."""
    return tuple(dict.fromkeys(["none", *specs]))
