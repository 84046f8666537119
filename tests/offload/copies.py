"""What the tests of links give them to do: fills of a staging buffer, and takers of one."""

from collections.abc import Callable

from torch import Tensor


def filled(value: float) -> Callable[[Tensor], None]:
    def fill(staging: Tensor) -> None:
        staging.fill_(value)

    return fill


def copied_from(source: Tensor) -> Callable[[Tensor], None]:
    def fill(staging: Tensor) -> None:
        staging.copy_(source)

    return fill


def taking(weight: Tensor) -> Callable[[Tensor], None]:
    def take(staging: Tensor) -> None:
        weight.copy_(staging)

    return take
