"""How many prompt tokens may run beside the answers of a step?

As many as let the step end within the ITL target, whole blocks of them; but one block in any case, so that prompts go
on whatever the answers cost, and no limit where nothing answers. How a prompt is cut changes no token (law 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem_engine.scheduling.batch import Batch, ScheduledRun
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.step_time import StepTimeModel, StepWork, work_of

_LEAST_MARGIN = 0.02


class Pacer:
    """Times steps, from `begin` to `end`, and knows from that what the next may hold."""

    def __init__(self, config: SchedulerConfig, timer: Callable[[], float]) -> None:
        self.model = StepTimeModel()
        self._target_seconds = config.itl_target_ms / 1000
        self._block_size = config.block_size
        self._window = config.window
        self.timer = timer
        self._started = 0.0
        self._copying_seconds = 0.0

    @property
    def has_target(self) -> bool:
        """Whether steps with answers in them are to end within some time."""
        return self._target_seconds > 0

    def begin(self) -> None:
        self._started = self.timer()
        self._copying_seconds = 0.0

    def copied(self, seconds: float) -> None:
        """So much of this step went into copying blocks, or guesses: not the model's, but answers wait for it."""
        self._copying_seconds += seconds

    def end(self, runs: Sequence[ScheduledRun]) -> None:
        """The step that began last has computed `runs`; a step that broke is never ended."""
        if runs:
            seconds = self.timer() - self._started - self._copying_seconds
            self.model.observe(work_of(runs, self._window), seconds)

    def prompt_limit(self, batch: Batch, first_position: int, num_wanted: int) -> int:
        """Return how many of a prompt's tokens from `first_position` on may join a batch; 0: none in this step."""
        if not self.has_target:
            return num_wanted
        work = work_of(batch.runs.values(), self._window)
        if not work.num_decodes:
            return num_wanted
        fitting = self._num_fitting(work, first_position)
        if fitting >= num_wanted:
            return num_wanted
        size = self._block_size
        whole = (first_position + fitting) // size * size - first_position
        if whole > 0:
            return whole
        return 0 if work.num_prompt_tokens else min(num_wanted, size - first_position % size)

    def _num_fitting(self, work: StepWork, first_position: int) -> int:
        """Count those that end in time even if the prediction is off by twice what predictions usually are."""
        predicted = self.model.predict(work)
        if predicted is None:
            return 0
        room_seconds = (
            self._target_seconds * (1 - max(_LEAST_MARGIN, 2 * self.model.spread)) - self._copying_seconds - predicted
        )
        return self.model.prompt_tokens_within(room_seconds, first_position, self._window)
