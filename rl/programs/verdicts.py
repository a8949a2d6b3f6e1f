"""What a program may use, and what can come of it; standard library only."""

from __future__ import annotations

import enum
from typing import NamedTuple

from rl.programs import kernel


class Verdict(enum.IntEnum):
    """What came of a program; a greater one came further."""

    COMPILE_ERROR = 0
    RUNTIME_ERROR = 1  # it raised, exited or crashed, or lacks what the tests ask for
    TIMEOUT = 2  # it, or its tests with its answers, took too long
    FAILED = 3  # it answered, and a test did not hold
    PASSED = 4


UNTESTABLE = len(Verdict)  # in place of a verdict: the tests hand over what cannot reach the program


class Limits(NamedTuple):
    """What a program may use, and its tests again.

    Processor time is what counts, because a busy machine takes more real time for the same. The deadline is for
    programs that wait: each time it has passed, program and tests together must have used a fifth of ``seconds`` since
    the last time. By default, load decides no verdict unless it leaves a program less than a 25th of a core.
    """

    seconds: int = 3  # of processor time
    deadline: float = 15.0  # seconds of real time
    memory: int = 512 * kernel.MIB  # bytes of address space
    output: int = (
        16 * kernel.MIB
    )  # bytes of each answer, of what is printed, of each file and of the temporary folder

    @property
    def longest(self) -> float:
        """Seconds of real time after which a judge is done, as it and the program end a second beyond their own."""
        return self.deadline * (1 + 2 * SHARES * (1 + 1 / self.seconds))


SHARES = 5  # parts of the processor time, one of which is used before each deadline


def check(limits: Limits) -> None:
    """Raises ValueError, naming the limit, on one that every program would exceed."""
    for name in ("seconds", "memory", "output"):
        value = getattr(limits, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{name}={value!r} must be a whole number of at least 1: the system takes no other limit"
            )
    if not 2 * limits.deadline >= limits.seconds:
        raise ValueError(
            f"deadline={limits.deadline} must be at least half of seconds={limits.seconds}: a program that computes "
            "would be ended for waiting where it has 2 / 5 of a core (5 times the seconds is usual)"
        )
