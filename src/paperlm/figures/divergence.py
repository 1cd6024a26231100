"""When a training curve whose losses stayed finite counts as diverged: a rule of the figure that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

import numpy as np
from pydantic import Field

from paperlm.figures.paired import smoothed
from paperlm.frozen import Frozen

Share = Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")]
"A part of a run, e.g. 1/125."


class Rise(Frozen):
    """The mean over `window` lies more than `rise` above its smallest value so far, for `lasting` without a break."""

    rise: float = Field(gt=0)
    "in the unit of the loss"
    window: Share
    "share of the run's updates"
    lasting: Share
    "share of the run's updates"

    def holds(self, updates: Sequence[int], losses: Sequence[float], whole: int) -> bool:
        """Of a curve's points, which are losses of one update or means over bins of equal width; `whole`: updates of
        the run. A run that ends before `lasting` is over has not diverged by this rule."""
        if not updates:
            return False
        width = updates[1] - updates[0] if len(updates) > 1 else 1
        means = smoothed(losses, max(1, round(Fraction(self.window) * whole / width)))
        above = means > np.minimum.accumulate(means) + self.rise
        longest = at_present = 0
        for one in above:
            at_present = at_present + 1 if one else 0
            longest = max(longest, at_present)
        return longest > 0 and longest * width >= Fraction(self.lasting) * whole
