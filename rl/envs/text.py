"""What an episode in words is: turns of an agent and of its environment, as `rl.replay.tokens` has them in tokens."""

from __future__ import annotations

from typing import NamedTuple


class Turn(NamedTuple):
    """Something said, by the environment or, as an action, by the agent."""

    text: str
    is_action: bool = False
    reward: float = 0.0  # of the action; 0 for the environment's turns


class Dialogue(NamedTuple):
    """A whole episode. The environment says the first turn, and the last one too if it answers the last action."""

    turns: tuple[Turn, ...]
    terminated: bool = True  # False: it was cut off, and might have gone on
