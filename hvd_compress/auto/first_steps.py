"""The first steps of `auto`: their graph has the first choice only, so other candidates are compared outside of it."""

from __future__ import annotations

import collections

import numpy as np

# The newest measurements that are kept until candidates are compared.
_KEPT = 8
# The first step in which candidates are compared.
_FIRST = 8
# Steps that take so many times as long as expected are a reason to compare earlier.
_SLOW = 2.0


class FirstSteps:
    """Keeps what the ranks measured, and says in which steps all candidates are compared.

    These are the steps 8, 16, 32 and so on. After steps that take twice as long as when candidates were compared, they
    are compared in the second, fourth, eighth of such steps in a row. A comparison takes 50 to 100 ms, which would be
    too much in each step. All ranks come to the same result, from numbers that are the same.
    """

    def __init__(self) -> None:
        self._numbers: collections.deque[np.ndarray] = collections.deque(maxlen=_KEPT)
        self._usual = 0.0  # seconds from the first ready bucket to the last result, when candidates were compared
        self._slow = 0  # steps in a row

    def add(self, step: int, numbers: np.ndarray, span: float) -> bool:
        """Adds the numbers of a step, whose exchange took `span` seconds. Returns whether to compare now."""
        self._numbers.append(numbers)
        is_slow = 0.0 < self._usual < span / _SLOW
        self._slow = self._slow + 1 if is_slow else 0
        if step >= _FIRST and _is_power_of_two(step):
            self._usual = span
            return True
        return self._slow >= 2 and _is_power_of_two(self._slow)

    def take(self) -> list[np.ndarray]:
        """The numbers that were kept since the last call, oldest first."""
        numbers = list(self._numbers)
        self._numbers.clear()
        return numbers

    def seen(self) -> list[np.ndarray]:
        """What `take` would return."""
        return list(self._numbers)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
