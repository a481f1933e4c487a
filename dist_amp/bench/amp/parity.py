"""Whether a precision learns what float32 learns: the distance between their loss curves, and its tolerance.

    drift = largest |window mean - float32's window mean| / how far float32's windows fall

over ten windows of equally many steps, from the same weights on the same samples. So a precision that learns nothing
has a drift of 1, in any unit of the loss. The tolerance is the largest of three: ten roundings of the precision (3.9 %
for bfloat16, 0.5 % for float16, TF32 and anything more precise); one rounding of the loss itself, if that is more than
what is learned; twice the drift between two float32 runs, the second with each weight moved by one unit in the last
place and with other random numbers, since training amplifies differences that no precision is to blame for.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dist_amp.bench.amp.measure import RECIPES

Curve = Sequence[float]  # the loss of each step
WINDOWS = 10
ROUNDINGS = 10
NOISE = 2  # times float32's own drift
TOO_WIDE = 0.25  # a tolerance beyond which nothing can be concluded: assumed


def windows(curve: Curve) -> np.ndarray:
    """Means of the curve over up to ten windows."""
    count = min(WINDOWS, len(curve))
    edges = np.round(np.arange(1, count) * len(curve) / count).astype(int)
    return np.array([part.mean() for part in np.split(np.asarray(curve), edges)])


def fall(curve: Curve) -> float:
    """How far the loss falls; 0 for a curve without steps."""
    return float(windows(curve)[0] - windows(curve).min()) if len(curve) else 0.0


def drift(curve: Curve, reference: Curve) -> float:
    """Distance to float32's curve, as a share of its fall; nan if that does not fall or one has a nan.

    A curve that is incomplete for lack of time is compared as far as it goes.
    """
    common = min(len(curve), len(reference))
    learned = fall(reference[:common])
    if not learned > 0:
        return math.nan
    return float(np.abs(windows(curve[:common]) - windows(reference[:common])).max() / learned)


def tolerance(name: str, reference: Curve = (), again: Curve = ()) -> float:
    """The largest drift that is accepted: from float32's curve, known from two runs; without them, the precision's."""
    limits = [ROUNDINGS * max(RECIPES[name].roundoff, RECIPES["tf32"].roundoff)]
    if fall(reference) > 0:
        limits.append(RECIPES[name].roundoff * float(np.abs(windows(reference)).max()) / fall(reference))
        limits.append(NOISE * drift(again, reference))
    return max(filter(math.isfinite, limits))


def parity(name: str, curve: Curve, reference: Curve, again: Curve = ()) -> dict[str, Any]:
    """The drift, its tolerance, and the verdict: within, drifts, diverges, too noisy, or nothing to compare."""
    apart, limit = drift(curve, reference), tolerance(name, reference, again)
    if not np.isfinite(curve).all():
        verdict = "diverges"
    elif math.isnan(apart):
        verdict = "nothing to compare"
    elif apart > limit:
        verdict = "drifts"
    else:
        verdict = "within" if apart <= tolerance(name) or limit <= TOO_WIDE else "too noisy"
    return {"drift": apart, "tolerance": limit, "verdict": verdict}
