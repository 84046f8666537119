"""This module computes the smoothed loss of a run: one rule for the panel, for printed lines and for the summary. No torch here."""

from __future__ import annotations

MEAN_STEPS, MOST_STEPS = 10.0, 1000.0
MEAN_SHARE, EARLY_SHARE = 1 / 40, 1 / 5


class LossMean:
    """A LossMean is an exponential moving average (EMA) over about a fortieth of the losses so far, at least ten and at most a
    thousand, but never over more than a fifth of them, which would lag behind a loss that falls fast.

    m <- m + a (loss - m) with a = 1 / that number, so that it begins with the first loss (a = 1). Losses that are not finite are
    left out. value: NaN before the first. losses: how many there were.
    """

    __slots__ = ("_mean", "losses")

    def __init__(self) -> None:
        self.losses = 0
        self._mean = 0.0

    def add(self, loss: float, steps: int = 1) -> None:
        """Add a loss, or the mean loss of so many steps."""
        if loss - loss != 0.0:  # NaN or infinite; faster than a call of math
            return
        self.losses += steps
        self._mean += min(1.0, steps / self._over) * (loss - self._mean)

    @property
    def value(self) -> float:
        return self._mean if self.losses else float("nan")

    @property
    def over_steps(self) -> int:
        """Return the number of steps that the mean is over, rounded."""
        return max(1, round(self._over))

    @property
    def _over(self) -> float:
        return min(max(MEAN_STEPS, MEAN_SHARE * self.losses), EARLY_SHARE * self.losses, MOST_STEPS)


def ema_words(over_steps: int) -> str:
    """Return the words that stand beside a smoothed loss."""
    return f"EMA over {over_steps:,} step{'s' * (over_steps != 1)}"
