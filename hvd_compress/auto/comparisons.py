"""When `auto` compares candidates that are not in the graph."""

from __future__ import annotations

import collections

import numpy as np

# The newest measurements that are kept until candidates are compared.
_KEPT = 8
# The first step in which candidates are compared.
_FIRST = 8
# So many steps in a row whose exchange takes so many times as long as usual are a reason to compare earlier.
_IN_A_ROW, _SLOW = 3, 3.0


class Comparisons:
    """Keeps what the ranks measured, and says in which steps candidates are compared.

    These are the steps 8, 16, 32 and so on, counted from where this process began. When the exchange takes three times
    as long as usual, they are also compared in the third, sixth, twelfth of such steps in a row. A comparison takes
    10 to 20 ms, which would be too much in each step. All ranks come to the same result, from numbers that are
    the same.
    """

    def __init__(self) -> None:
        self._numbers: collections.deque[np.ndarray] = collections.deque(maxlen=_KEPT)
        self._spans: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._usual = 0.0  # the median of spans; 0 before there are enough
        self._steps = -1  # before this one
        self._slow = 0  # steps in a row

    def add(self, numbers: np.ndarray, span: float) -> bool:
        """Adds the numbers of a step, whose exchange took `span` seconds, and returns whether to compare now."""
        self._steps += 1
        self._numbers.append(numbers)
        if span > 0.0:  # otherwise the step was not timed
            self._spans.append(span)
        is_slow = 0.0 < _SLOW * self._usual < span
        self._slow = self._slow + 1 if is_slow else 0
        is_due = self._steps % _FIRST == 0 and _is_power_of_two(self._steps // _FIRST)
        is_unknown = self._usual == 0.0
        if len(self._spans) == _KEPT and (is_unknown or (is_due and not is_slow)):
            self._usual = float(np.median(self._spans))
        times, rest = divmod(self._slow, _IN_A_ROW)
        return is_due or (rest == 0 and _is_power_of_two(times))

    def restart(self) -> None:
        """Called when the step is traced again: exchanges take another time from now on."""
        self._usual, self._slow = 0.0, 0
        self._spans.clear()

    def take(self) -> list[np.ndarray]:
        """The numbers that were kept since the last call, oldest first."""
        numbers = list(self._numbers)
        self._numbers.clear()
        return numbers

    def seen(self) -> list[np.ndarray]:
        """What `take` would return."""
        return list(self._numbers)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
