"""What a run had spent at a step: tokens and seconds of training."""

from dataclasses import dataclass

import numpy as np

from lingua.run.records import Columns


@dataclass(frozen=True)
class Axes:
    """The steps at which a run wrote metrics, with the tokens and the seconds of training then."""

    step: np.ndarray
    tokens: np.ndarray
    time: np.ndarray

    @staticmethod
    def of(metrics: Columns) -> "Axes":
        """Both are 0 at step 0, and NaN in a run that has not written them."""
        step = metrics.step.astype(np.float64)
        tokens, seconds = metrics.numbers("tokens"), metrics.numbers("step_time_s")
        time = np.cumsum(np.nan_to_num(seconds) * np.diff(step, prepend=0.0))
        time = np.round(time, 3) if np.isfinite(seconds).any() else np.full(len(step), np.nan)
        return Axes(np.append(0.0, step), np.append(0.0, tokens), np.append(0.0, time))

    def at(self, step: np.ndarray) -> list[np.ndarray]:
        """Steps, tokens and seconds; between two lines and after the last, in proportion."""
        known = len(self.step) > 1
        axes = [step.astype(np.float64)]
        for values in (self.tokens, self.time):
            inside = np.interp(step, self.step, values)
            rate = values[-1] / self.step[-1] if known and self.step[-1] else np.nan
            axes.append(np.where(step > self.step[-1], values[-1] + rate * (step - self.step[-1]),
                                  inside))  # fmt: skip
        return axes
