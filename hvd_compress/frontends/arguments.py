"""The arguments that `hvdc.DistributedOptimizer` and `hvdc.DistributedGradientTape` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..compressors.resolve import policies, resolve
from ..engine.settings import Settings, resolve_bucket_bytes


def settings_from(arguments: Mapping[str, Any], name: str) -> Settings:
    """Turns a frontend's arguments into `Settings`.

    Args:
        arguments: All arguments of the frontend by name. Those that are fields of `Settings` are taken over;
            `compression`, `policy`, `bucket_bytes` and Horovod's deprecated `num_groups` are resolved first. Others are
            ignored.
        name: The prefix of the names of operations.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is not valid.
    """
    fields = {field.name: arguments[field.name] for field in dataclasses.fields(Settings) if field.name in arguments}
    if fields["groups"] is None:
        fields["groups"] = arguments["num_groups"] or None
    fields |= {
        "compressor": resolve(arguments["compression"]),
        "name": name,
        "bucket_bytes": resolve_bucket_bytes(arguments["bucket_bytes"]),
        "policy": policies(arguments["policy"]),
    }
    return Settings(**fields)
