"""Tracks which runs of pages are free.

       hole     used    used    hole    used         `allocate` cuts the smallest hole that fits. `free` merges a run
    |........|#######|#######|......|#########|      with its neighbouring holes. Every page is in one run or one hole.

Block sizes differ between layouts, so free pages may lie apart. `window` returns which used runs must be freed beside a
given run for a longer hole. No page is reserved for one size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable


class FreeList:
    """Allocates runs of pages, named by their first page. O(log n) per call, n = number of different hole lengths."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free_pages = 0
        self._holes: dict[int, int] = {}  # start -> length, as in `_used`
        self._hole_starts: dict[int, int] = {}  # end -> start, as in `_used_starts`
        self._holes_of: dict[int, dict[int, None]] = {}  # length -> starts
        self._lengths: list[int] = []  # of holes, each once, sorted
        self._used: dict[int, int] = {}
        self._used_starts: dict[int, int] = {}
        if num_pages:
            self._open(0, num_pages)

    def allocate(self, num_pages: int) -> int | None:
        """Return the first page of a run, or None if no hole is that long."""
        index = bisect_left(self._lengths, num_pages)
        if index == len(self._lengths):
            return None
        length = self._lengths[index]
        start = next(iter(self._holes_of[length]))
        self._close(start)
        if length > num_pages:
            self._open(start + num_pages, length - num_pages)
        self._used[start] = num_pages
        self._used_starts[start + num_pages] = start
        return start

    def grow(self, num_pages: int) -> None:
        """Add free pages at the end, up to `num_pages` in all; fewer than there are change nothing."""
        start, end = self.num_pages, num_pages
        if end <= start:
            return
        self.num_pages = end
        if start in self._hole_starts:
            start -= self._close(self._hole_starts[start])
        self._open(start, end - start)

    def free(self, start: int) -> None:
        assert start in self._used, f"the run at page {start} is freed, and is not allocated"
        end = start + self._used.pop(start)
        del self._used_starts[end]
        if end in self._holes:
            end += self._close(end)
        if start in self._hole_starts:
            start -= self._close(self._hole_starts[start])
        self._open(start, end - start)

    def window(self, start: int, num_pages: int, may_free: Callable[[int], bool]) -> list[int] | None:
        """Return the used runs to free, the one at `start` first, for one hole of `num_pages`.

        None: a neighbour that may not be freed is in the way.
        """
        to_free = [start]
        first, end = self._hole_starts.get(start, start), start + self._used[start]
        end += self._holes.get(end, 0)
        while end - first < num_pages:
            before = self._used_starts.get(first)
            if end in self._used and may_free(end):
                to_free.append(end)
                end += self._used[end]
                end += self._holes.get(end, 0)
            elif before is not None and may_free(before):
                to_free.append(before)
                first = self._hole_starts.get(before, before)
            else:
                return None
        return to_free

    def check(self) -> None:
        """Assert that every page is in exactly one run or hole, and that no two holes touch."""
        page, was_hole = 0, False
        while page < self.num_pages:
            is_hole = page in self._holes
            assert is_hole != (page in self._used), f"page {page} is the start of a run and of a hole, or of neither"
            assert not (was_hole and is_hole), f"two holes touch at page {page}"
            page += self._holes[page] if is_hole else self._used[page]
            was_hole = is_hole
        assert page == self.num_pages, f"a run or hole ends at page {page} of {self.num_pages}"
        assert self.num_free_pages == sum(self._holes.values()), "free pages are miscounted"
        assert len(self._holes) == sum(map(len, self._holes_of.values())), "holes are not filed by their length"
        assert self._lengths == sorted(self._holes_of), "the lengths of holes are not those of the holes"

    def _open(self, start: int, length: int) -> None:
        self.num_free_pages += length
        self._holes[start] = length
        self._hole_starts[start + length] = start
        if length not in self._holes_of:
            self._holes_of[length] = {}
            insort(self._lengths, length)
        self._holes_of[length][start] = None

    def _close(self, start: int) -> int:
        """Forget a hole and return its length."""
        length = self._holes.pop(start)
        self.num_free_pages -= length
        del self._hole_starts[start + length], self._holes_of[length][start]
        if not self._holes_of[length]:
            del self._holes_of[length], self._lengths[bisect_left(self._lengths, length)]
        return length
