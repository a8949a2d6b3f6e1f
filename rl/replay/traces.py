"""TD(lambda) from replayed rows, for any agent and any value head: the number of steps of each return is drawn.

The lambda-return of a row is a mean of its returns over k steps (Sutton & Barto 2018, equation 12.3), here over at most
n of them:

    G = sum_{k=1}^{n-1} (1 - lambda) lambda^(k-1) G_k + lambda^(n-1) G_n

Each time that a row is drawn, k is drawn with these weights, and the row becomes a transition over k steps. The losses
of value heads are linear in the target's distribution, up to what depends on the target alone. The expected gradient is
therefore that of the mixture of all G_k: for a scalar that of the lambda-return, and for ``c51`` and ``quantile`` that
of the whole mixture, of which a target of one number would keep the mean alone. No network is asked about the states
between. The price is the variance of the draw.

Nothing corrects for logged actions that the policy would not take: this is Peng's Q(lambda) (Peng & Williams 1996;
studied with deep networks by Kozuno et al. 2021), as returns over n steps are uncorrected here, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rl.types import Array, Key


def lengths(key: Key, size: int, n: int, td_lambda: float) -> Array:
    """How many steps [size] int32 each of the returns spans, 1 to ``n``: geometric, what is beyond ``n`` put at ``n``.

    Args:
      key: of the draw.
      size: returns.
      n: the most steps, at least 1.
      td_lambda: lambda; 0 is one step always, 1 is ``n``.

    Raises:
      ValueError: lambda outside of [0, 1].
    """
    check(td_lambda)
    if td_lambda == 1:
        return jnp.full(size, n, jnp.int32)
    return jnp.minimum(jax.random.geometric(key, 1 - td_lambda, (size,), jnp.int32), n)


def within(lengths: Array | None, n: int) -> Array:
    """Which of ``n`` steps belong to transitions of these ``lengths`` [B], bool [B, n]; all where there are none."""
    return jnp.bool_(True) if lengths is None else jnp.arange(n) < lengths[:, None]


def weights(n: int, td_lambda: float) -> np.ndarray:
    """How often each of the lengths 1 to ``n`` is drawn, [n]. Raises as `lengths`."""
    check(td_lambda)
    powers = np.power(td_lambda, np.arange(n), dtype=np.float64)
    return np.append(powers[:-1] * (1 - td_lambda), powers[-1])


def check(td_lambda: float) -> None:
    """Raises ValueError for a lambda outside of [0, 1]."""
    if not 0 <= td_lambda <= 1:
        raise ValueError(f"td_lambda={td_lambda} must be between 0 (one step) and 1 (all n steps)")


def check_steps(n: int) -> None:
    """Raises ValueError for fewer than one step: a return over none has no reward, and a discount above 1."""
    if n < 1:
        raise ValueError(f"returns over {n} steps: give at least 1")
