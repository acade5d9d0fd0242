"""Marks of parametrized tests."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Cases that only `make test SLOW=1` runs, because the test's other cases check most of it.

    A tuple has the values of several parameters.
    """
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
