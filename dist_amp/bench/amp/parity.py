"""Whether a precision learns what float32 does: the distance of their loss curves, and the band it is to stay in.

    drift = the largest |mean of a window - float32's mean of it| / how far float32's windows fall

over ten windows of equally many steps, from the same weights on the same samples. So a precision that learns nothing
has a drift of 1, whatever the loss is measured in. The band is BAND times the precision's unit roundoff: 3.9 % for
bfloat16, 0.5 % for float16 and TF32; what rounds no more than float32 gets the band of TF32, since training enlarges a
difference in the last place as well.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from dist_amp.bench.amp.ways import WAYS

WINDOWS = 10
BAND = 10
Verdict = Literal["within", "drifts", "diverges", "nothing to learn"]


def windows(curve: Sequence[float]) -> list[float]:
    """The curve's means over up to ten windows."""
    count = min(WINDOWS, len(curve))
    edges = [round(number * len(curve) / count) for number in range(count + 1)]
    return [sum(curve[begin:end]) / (end - begin) for begin, end in pairwise(edges)]


def fall(curve: Sequence[float]) -> float:
    """How far the loss comes down; 0 of a curve without steps."""
    if not curve:
        return 0.0
    means = windows(curve)
    return means[0] - min(means)


def drift(curve: Sequence[float], reference: Sequence[float]) -> float:
    """Distance to float32's curve, as a share of what that learns; nan where it learns nothing or one has a nan."""
    learned = fall(reference)
    if not learned > 0:
        return math.nan
    apart = [abs(own - other) for own, other in zip(windows(curve), windows(reference), strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart) / learned


def band(way: str) -> float:
    """The largest drift that is within."""
    return BAND * max(WAYS[way].roundoff, WAYS["tf32"].roundoff)


def judged(way: str, curve: Sequence[float], reference: Sequence[float]) -> Verdict:
    if not all(map(math.isfinite, curve)):
        return "diverges"
    apart = drift(curve, reference)
    if math.isnan(apart):
        return "nothing to learn"
    return "within" if apart <= band(way) else "drifts"
