"""Whether a precision learns what float32 does: the distance of their loss curves, and the band it is to stay in.

    drift = the largest |mean of a window - float32's mean of it| / how far float32's windows fall

over ten windows of equally many steps, from the same weights on the same samples. So a precision that learns nothing
has a drift of 1, whatever the loss is measured in. The band is the largest of three: ten of the precision's roundings
(3.9 % for bfloat16, 0.5 % for float16, TF32 and what rounds no more); one rounding of the loss itself, if that is more
than what is learned of it; twice what float32 drifts from itself when each of its weights begins one last place aside
and other random numbers are drawn: training enlarges what no precision is to blame for.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from dist_amp.bench.amp.recipes import RECIPES

WINDOWS = 10
BAND = 10  # roundings
NOISE = 2  # times what float32 drifts from itself
WIDE = 0.25  # a band that tells nothing: assumed
Verdict = Literal["within", "drifts", "diverges", "too noisy", "nothing to compare"]


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
    """Distance to float32's curve, as a share of what that learns; nan where it learns nothing or one has a nan.

    A curve that there was no time to finish is compared as far as it goes.
    """
    reference = reference[: len(curve)]
    curve = curve[: len(reference)]
    learned = fall(reference)
    if not learned > 0:
        return math.nan
    apart = [abs(own - other) for own, other in zip(windows(curve), windows(reference), strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart) / learned


def band(name: str, reference: Sequence[float] = (), again: Sequence[float] = ()) -> float:
    """The largest drift that is within; of the precision alone where no curves are given.

    reference: float32's; again: the same from nudged weights.
    """
    roundoff = max(RECIPES[name].roundoff, RECIPES["tf32"].roundoff)
    limits = [BAND * roundoff]
    if fall(reference) > 0:
        limits.append(RECIPES[name].roundoff * max(map(abs, windows(reference))) / fall(reference))
        limits.append(NOISE * drift(again, reference) if again else 0.0)
    return max(limit for limit in limits if math.isfinite(limit))


def judged(name: str, curve: Sequence[float], reference: Sequence[float], again: Sequence[float] = ()) -> Verdict:
    if not all(map(math.isfinite, curve)):
        return "diverges"
    apart = drift(curve, reference)
    if math.isnan(apart):
        return "nothing to compare"
    if apart > band(name, reference, again):
        return "drifts"
    return "within" if apart <= band(name) or band(name, reference, again) <= WIDE else "too noisy"
