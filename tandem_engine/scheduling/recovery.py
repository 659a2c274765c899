"""Is it faster to load a preempted request's blocks from the KV service, or to compute them again?

Its full blocks were offered to the service as they were filled, so handing them over costs nothing more; what is
decided is whether they are to come back. Both sides are measured: the seconds per block of copies into this pool, and
the seconds that prompt tokens add to a step.
"""

from __future__ import annotations

from tandem_engine.scheduling.step_time import StepTimeModel

_SHARE_OF_NEWEST = 1 / 8
_MOST_CHANGE = 2.0  # one copy changes the mean by no more than if it had been so many times slower


class CopyRate:
    """Mean seconds per block of copies from other processes' memory, the newest counting most."""

    def __init__(self) -> None:
        self._seconds_per_block: float | None = None

    def observe(self, num_blocks: int, seconds: float) -> None:
        if num_blocks < 1 or seconds <= 0:
            return
        measured, mean = seconds / num_blocks, self._seconds_per_block
        if mean is None:
            self._seconds_per_block = measured
        else:
            self._seconds_per_block = mean + _SHARE_OF_NEWEST * (min(measured, _MOST_CHANGE * mean) - mean)

    def seconds(self, num_blocks: int) -> float | None:
        """Return how long so many blocks should take; None before the first copy."""
        return None if self._seconds_per_block is None else num_blocks * self._seconds_per_block


class Recovery:
    """Decides by what is measured; while either side is not, loading is tried."""

    def __init__(self, model: StepTimeModel, block_size: int, window: int | None = None) -> None:
        self.copies = CopyRate()
        self._model = model
        self._block_size = block_size
        self._window = window

    def is_loading_faster(self, first_block: int, num_blocks: int, num_copies: int | None = None) -> bool:
        """Compare loading so many blocks of a request with computing the tokens in them.

        `num_copies` says how many blocks of all groups are to be copied, where there are several.
        """
        load_seconds = self.copies.seconds(num_blocks if num_copies is None else num_copies)
        size = self._block_size
        compute_seconds = self._model.prompt_seconds(first_block * size, num_blocks * size, self._window)
        return load_seconds is None or compute_seconds is None or load_seconds <= compute_seconds
