"""Which rows of a batch are demonstrations, for agents that learn more from them than from others."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from rl.replay.source import LOGGED, is_logged
from rl.types import Array, Transition


def demonstrated(batch: Transition, origin: int, off: str) -> Array:
    """[B], 1 in the rows of that ``origin``, which are demonstrations, else 0.

    Rows without an origin are a fixed dataset's, and logged (`rl.replay.source.is_logged`): all of origin 0.

    Args:
      batch: [B].
      origin: of demonstrations.
      off: as for `require_demonstrations`.

    Raises:
      ValueError: rows of another origin than 0 are asked for, and none has any.
    """
    if origin == LOGGED:
        return is_logged(batch).astype(jnp.float32)
    if batch.origin is None:
        require_demonstrations(batch, origin, off)
    return (batch.origin == origin).astype(jnp.float32)


def require_demonstrations(logged: Transition | None, origin: int, off: str) -> None:
    """Raises ValueError if no row of the ``logged`` data (None: there are none) is of the ``origin`` asked for.

    Args:
      logged: data [N], NumPy arrays.
      origin: of demonstrations; 0 where no row has an origin is all rows, or none where there are no data.
      off: settings that turn off what demonstrations are for, as a remedy to name.
    """
    if origin < LOGGED:
        raise ValueError(
            f"demonstrations={origin} must be at least 0: origins below that are of the agent's own experience "
            f"(rl.replay.source); give 0 for all logged rows, or {off} for none"
        )
    flags = None if logged is None else logged.origin
    if (origin == LOGGED and flags is None) or (flags is not None and (np.asarray(flags) == origin).any()):
        return
    if logged is None:
        have = "there are no logged data"
    elif flags is None:
        have = "the data do not say where their rows are from"
    else:
        have = f"their rows are of {', '.join(map(str, np.unique(flags)))}"
    raise ValueError(
        f"demonstrations={origin} asks for rows of that origin (Transition.origin), and {have}: give 0 for all "
        f"logged rows, or {off} for none"
    )
