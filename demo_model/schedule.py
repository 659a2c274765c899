"""The learning rate as a pure function of the step: warm-up, constant, and a cool-down on request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable, decay (arXiv:2404.06395, section 4): a run can stop at any step and continue later."""

    peak: float = 4e-3
    warmup_steps: int = 100
    cool_down_start: int | None = None
    cool_down_steps: int = 0

    def learning_rate(self, step: int) -> float:
        """Return the rate for the step with this number, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        if self.cool_down_start is None or step < self.cool_down_start:
            return self.peak * warm
        done = (step - self.cool_down_start) / max(1, self.cool_down_steps)
        return self.peak * warm * max(0.02, 1.0 - done)

    @property
    def end(self) -> int | None:
        """Return the step after the last one of the cool-down, if there is one."""
        return None if self.cool_down_start is None else self.cool_down_start + self.cool_down_steps
