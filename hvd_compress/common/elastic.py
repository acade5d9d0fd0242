"""Whether this is an elastic job, in which ranks come and go."""

from __future__ import annotations

import os


def is_elastic() -> bool:
    """Whether `horovodrun` has started an elastic job."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"
