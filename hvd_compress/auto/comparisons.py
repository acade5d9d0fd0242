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
# Seconds. A trace takes about so long, or longer.
_LEAST_TRACE = 1.0


class Comparisons:
    """Keeps what the ranks measured, and says in which steps candidates are compared.

    These are the steps 8, 16, 32 and so on, counted from where this process began. When the exchange takes three times
    as long as usual, they are also compared in the third, sixth, twelfth of such steps in a row. A comparison takes 50
    to 150 ms, which would be too much in each step. None is made before a trace may pay: when the seconds that each
    step might save come to the least that a trace takes, in as many steps as so far. All ranks come to the same result,
    from numbers that are the same.
    """

    def __init__(self) -> None:
        self._numbers: collections.deque[np.ndarray] = collections.deque(maxlen=_KEPT)
        self._spans: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._savings: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._usual = 0.0  # the median of spans; 0 before there are enough
        self._steps = -1  # before this one
        self._slow = 0  # steps in a row

    def slowdown(self, span: float) -> float:
        """How many times as long as usual an exchange of `span` seconds takes; 1 in the first steps of a trace."""
        return span / self._usual if self._usual > 0.0 else 1.0

    def add(self, numbers: np.ndarray, span: float, saving: float) -> bool:
        """Adds the numbers of a step, and returns whether to compare now.

        The exchange took `span` seconds. Other candidates might have saved `saving` seconds, see `Traces`.
        """
        self._steps += 1
        self._numbers.append(numbers)
        if span > 0.0:  # otherwise the step was not timed
            self._spans.append(span)
        self._savings.append(saving)
        is_slow = self.slowdown(span) > _SLOW
        self._slow = self._slow + 1 if is_slow else 0
        is_due = self._steps % _FIRST == 0 and _is_power_of_two(self._steps // _FIRST)
        is_unknown = self._usual == 0.0
        if len(self._spans) == _KEPT and (is_unknown or (is_due and not is_slow)):
            self._usual = float(np.median(self._spans))
        times, rest = divmod(self._slow, _IN_A_ROW)
        has_slowed = rest == 0 and _is_power_of_two(times)
        if not is_due and not has_slowed:
            return False
        # If the link has become slower, the savings of the steps before say nothing.
        newest = list(self._savings)[-_IN_A_ROW:] if has_slowed else self._savings
        return float(np.median(newest)) * self._steps >= _LEAST_TRACE

    def restart(self) -> None:
        """Called when other candidates are traced: exchanges take another time from now on."""
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
