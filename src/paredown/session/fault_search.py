"""Which slots are at fault: the smallest sets that fail together, by tests of halves (QuickXplain, Junker 2004).

A test stores some slots alone, and fails if gradients are off then. One slot of n that fails alone is found by about 2 log2(n) tests, k of
them by k times that; slots that fail together alone, such as two that are wrongly stored as one, are found as a set.

>>> Search(100).minimal_groups(list("abcdefgh"), lambda names: "c" in names or {"a", "h"} <= set(names))
([['c'], ['a', 'h']], False)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_GROUPS = 4
Fails = Callable[[Sequence[str]], bool]


class Search:
    """A search of at most `max_tests` tests, after which sets are left as large as they are."""

    def __init__(self, max_tests: int) -> None:
        self.left = max_tests
        self.is_spent = False

    def minimal_groups(self, slots: Sequence[str], fails: Fails) -> tuple[list[list[str]], bool]:
        """Sets of slots that fail, from which nothing can be left out, no slot in two of them; and whether it fails without any slot."""
        groups, rest = list[list[str]](), list(slots)
        if self._fails(fails, ()):
            return groups, True
        while rest and not self.is_spent and len(groups) < MAX_GROUPS and self._fails(fails, rest):
            group = self._minimal(fails, [], rest, is_known=True)
            groups.append(sorted(group, key=rest.index))
            rest = [slot for slot in rest if slot not in group]
        return groups, False

    def _minimal(self, fails: Fails, kept: list[str], candidates: list[str], *, is_known: bool) -> list[str]:
        """What to add to `kept`, out of `candidates`, for it to fail; `is_known`: `kept` alone does not."""
        if not is_known and self._fails(fails, kept):
            return []
        if len(candidates) == 1 or self.is_spent:
            return candidates
        first, second = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
        of_second = self._minimal(fails, kept + first, second, is_known=False)
        return self._minimal(fails, kept + of_second, first, is_known=not of_second) + of_second

    def _fails(self, fails: Fails, names: Sequence[str]) -> bool:
        if self.left <= 0:
            self.is_spent = True
            return False
        self.left -= 1
        return fails(names)
