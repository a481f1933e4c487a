"""What a number in the config may be, written into its type."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """What a number may be, as in `Annotated[float, Range(above=0)]`; neither nan nor infinity ever."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high and self.above < number < self.below

    def __str__(self) -> str:
        rules = (("at least", self.low), ("above", self.above), ("at most", self.high), ("below", self.below))
        return " and ".join(f"{words} {bound:g}" for words, bound in rules if not math.isinf(bound))
