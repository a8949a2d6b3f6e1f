"""Value heads: five ways in which ``K`` network outputs can represent one value.

| head | outputs | target | loss |
|---|---|---|---|
| `scalar` | the value | ``r + d v'`` | squared error |
| `two_hot` | logits over atoms | ``r + d v'``, split between its two atoms | cross-entropy |
| `hl_gauss` | logits over bins | ``r + d v'``, smeared by a Gaussian | cross-entropy |
| `c51` | logits over atoms | the whole distribution of ``r + d Z'``, projected | cross-entropy |
| `quantile` | quantiles | the whole distribution of ``r + d Z'`` | quantile Huber |

Every head offers the same members, so that any backup and any agent works with any of them, one of your own
included (`check`). All arithmetic is float32 whatever comes in, and shapes must match exactly: ``[B]`` never meets
``[B, 1]``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rl.types import Array

NAMES = ("scalar", "two_hot", "hl_gauss", "c51", "quantile")
UNBOUNDED = ("scalar", "quantile")  # those whose outputs are values, which have no support
SIGMA_RATIO = 0.75  # of `hl_gauss`, standard deviation to bin width, as in its paper

_BLOCK = 8  # atoms of one step of a loop over them
# (reward [...], discount [...], next outputs [..., K]) -> [...] or a target
_Backup = Callable[[Array, Array, Array], Array]


class ValueHead(NamedTuple):
    """How a value is represented. ``...`` are any leading axes, equal in all arguments.

    Targets carry no gradient. What a target looks like depends on the head: [...] for `scalar`, probabilities
    [..., K] for the categorical heads, samples [..., K] for `quantile`.
    """

    size: int  # K
    value: Callable[[Array], Array]  # outputs [..., K] -> expected value [...]
    # reward [...], discount [...], next outputs [..., K] -> target
    target: Callable[[Array, Array, Array], Array]
    loss: Callable[[Array, Array], Array]  # outputs [..., K], target -> [...]
    mix: Callable[[Array, Array], Array]  # outputs [..., N, K], weights [..., N] -> outputs [..., K]
    # the arguments of `target` -> [...]: share of the target's mass beyond the support, 0 for heads without one
    clipped: Callable[[Array, Array, Array], Array]
    are_values: bool = False  # whether every output is a value, without a support
    # of logits [..., K] -> the probabilities of the support's K values; None if outputs are no logits
    probabilities: Callable[[Array], Array] | None = None
    # Where outputs are neither values nor logits (a mean and a deviation, say), what agents that need it ask for:
    divergence: Callable[[Array, Array], Array] | None = None  # see `divergence`
    dominance: Callable[[Array, Array], Array] | None = None  # see `dominance`
    about: str = ""  # its name, size and support in words, for a checkpoint's card


class HeadSettings(NamedTuple):
    """The arguments of `make`."""

    name: str
    low: float | None = None
    high: float | None = None
    size: int = 101
    start: float | None = None
    kappa: float = 1.0
    sigma_ratio: float = SIGMA_RATIO


def make(
    name: str,
    low: float | None = None,
    high: float | None = None,
    size: int = 101,
    start: float | None = None,
    kappa: float = 1.0,
    sigma_ratio: float = SIGMA_RATIO,
) -> ValueHead:
    """The head called ``name``: one of `NAMES`, or ``module.function`` for one of your own.

    Args:
      name: which representation. A function of your own is called with ``(low, high, size)`` and its head is checked
        (`check`); with an attribute ``UNBOUNDED = True`` it says that its head has no support, and may ignore both.
      low: the smallest value the categorical heads must represent without bias.
      high: the largest one. `scalar` and `quantile` have no support and ignore both.
      size: outputs ``K`` of every head but `scalar`.
      start: about what outputs of 0 stand for in a categorical head (`starting_at`); None: the support's middle.
      kappa: of `quantile`, the error from which its loss is linear; other heads have none and ignore it.
      sigma_ratio: of `hl_gauss`, the Gaussian's standard deviation in bin widths, at least 0.5; other heads ignore it.

    Raises:
      ValueError: on an unknown name, a size too small, a support that is missing, empty, not finite or too
        narrow for float32, a start outside it or of a head without one, or a kappa or sigma_ratio out of range.
      ImportError: there is no module of your own by that name.
    """
    if has_support(name) and (low is None or high is None):
        unbounded = (
            f". If it has no support, say so in its module: {name.rpartition('.')[2]}.UNBOUNDED = True"
        )
        raise ValueError(
            f"{name} needs low and high, the smallest and the largest value that it must represent: "
            f"rl.replay.dataset.value_bounds gives them for logged data{'' if name in NAMES else unbounded}"
        )
    ends: tuple[Any, Any] = (low, high)
    makers = {
        "scalar": scalar,
        "two_hot": lambda: two_hot(*ends, size),
        "hl_gauss": lambda: hl_gauss(*ends, size, sigma_ratio),
        "c51": lambda: c51(*ends, size),
        "quantile": lambda: quantile(size, kappa),
    }
    head = makers[name]() if name in makers else _of_ones_own(name, *ends, size)
    settings = HeadSettings(name, low, high, head.size, start, kappa, sigma_ratio)
    head = head._replace(about=_in_words(settings))
    return head if start is None else starting_at(head, start)


def _in_words(settings: HeadSettings) -> str:
    """`ValueHead.about`."""
    details = [settings.name, f"{settings.size} outputs"]
    if has_support(settings.name):
        details.append(f"{settings.low:g} to {settings.high:g}")
    if settings.name == "quantile":
        details.append(f"kappa {settings.kappa:g}")
    if settings.name == "hl_gauss" and settings.sigma_ratio != SIGMA_RATIO:
        details.append(f"sigma {settings.sigma_ratio:g} bins")
    if settings.start is not None:
        details.append(f"starting at {settings.start:g}")
    return ", ".join(details)


def check_name(name: str) -> None:
    """Raises ValueError if no head is called so: `NAMES`, or ``module.function``."""
    if name not in NAMES:
        _user_maker(name)


def has_support(name: str) -> bool:
    """Whether the head called ``name`` needs to be told the range of values. Raises as `check_name` does."""
    return name not in UNBOUNDED if name in NAMES else not getattr(_user_maker(name), "UNBOUNDED", False)


def _user_maker(name: str) -> Callable[..., ValueHead]:
    """The user's ``module.function``, which makes a head. Raises ValueError or ImportError where there is none."""
    module, _, function = name.rpartition(".")
    if not module:
        raise ValueError(
            f"unknown value head {name!r}: choose one of {', '.join(NAMES)}, or module.function of your own"
        )
    try:
        maker = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ImportError(f"value head {name!r}: its module cannot be imported: {error}") from error
    if callable(maker):
        return maker
    with contextlib.suppress(ImportError):  # what is no package has no modules
        if importlib.util.find_spec(name):
            raise ValueError(f"value head {name!r} is a module: name its function, {name}.FUNCTION")
    raise ValueError(f"unknown value head {name!r}: {module} has no function {function!r}")


def _of_ones_own(name: str, low: Any, high: Any, size: int) -> ValueHead:
    """The checked head of the user's ``module.function``, whose errors begin with its name."""
    maker = _user_maker(name)
    try:
        inspect.signature(maker).bind(low, high, size)
    except TypeError as error:
        raise ValueError(f"head {name!r} must be a function (low, high, size): {error}") from None
    head = maker(low, high, size)
    try:
        return check(head)
    except Exception as error:  # of the user's code
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"head {name!r}: {kind}{error}") from error


def check(head: ValueHead) -> ValueHead:
    """``head``, if its members fit one another; for heads of your own.

    Of [2, 3] values it looks at shapes and types, at targets of logits, which are probabilities [..., K], at finite
    losses of at least 0 (priorities are made of them), at shares from 0 to 1 that are clipped, at mixtures of more axes
    and of outputs of some hundreds, at targets without a gradient, at ``value(mix(o, w)) = sum_n w_n value(o_n)``, by
    which agents average over actions and critics, and at ``divergence`` and ``dominance``, where there are any. It
    cannot see whether the best fit to random targets has their mean, without which expectiles and averages over next
    states are biased.

    Raises:
      ValueError: one does not; the message names the member. Or it is no `ValueHead`.
    """
    if not isinstance(head, ValueHead):
        raise ValueError(f"a head must be a rl.values.heads.ValueHead, not {head!r}: return one")
    if not isinstance(head.size, int | np.integer) or head.size < 1:
        raise ValueError(f"a head's size must be a whole number of outputs, not {head.size!r}")
    key = jax.random.key(0)
    outputs, other = jax.random.normal(key, (2, 2, 3, head.size), jnp.float32)
    reward, discount, weights = (jnp.full((2, 3), x, jnp.float32) for x in (0.1, 0.9, 1 / 3))

    def expect(name: str, array: Any, shape: tuple[int, ...], least: float = -math.inf) -> None:
        if jnp.shape(array) != shape or jnp.asarray(array).dtype != jnp.float32:
            actual = f"{jnp.asarray(array).dtype}{list(jnp.shape(array))}"
            raise ValueError(f"a head's {name} must return float32{list(shape)}, not {actual}")
        if not (jnp.isfinite(array).all() and (array >= least).all()):
            lowest = "" if math.isinf(least) else f" and at least {least:g}"
            raise ValueError(f"a head's {name} must be finite{lowest}")

    def sums_to_one(name: str, array: Array) -> None:
        if not jnp.allclose(array.sum(-1), 1, atol=1e-3):
            raise ValueError(f"a head's {name} must sum to 1")

    values, target = head.value(outputs), head.target(reward, discount, other)
    expect("value", values, (2, 3))
    if head.probabilities is not None:  # what `divergence` and `same_target` take targets of logits for
        expect("target, as its outputs are logits,", target, (2, 3, head.size), 0.0)
        sums_to_one("target, as its outputs are logits,", target)
    expect("loss", head.loss(outputs, target), (2, 3), 0.0)
    clipped = head.clipped(reward, discount, other)
    expect("clipped", clipped, (2, 3), 0.0)
    if (clipped > 1).any():
        raise ValueError("a head's clipped must be a share, at most 1")
    mixed = head.mix(outputs, weights)
    expect("mix", mixed, (2, head.size))
    more = jnp.broadcast_to(outputs[:, :, None], (2, 3, 4, head.size))
    expect("mix of more axes", head.mix(more, jnp.full((2, 3, 4), 0.25)), (2, 3, head.size))
    expect("mix of outputs of several hundreds", head.mix(300 * outputs, weights), (2, head.size))
    if not jnp.allclose(head.value(mixed), (weights * values).sum(-1), atol=1e-4):
        raise ValueError("a head's value(mix(outputs, weights)) must be the weighted mean of the values")
    slope = jax.grad(lambda other: head.loss(outputs, head.target(reward, discount, other)).sum())(other)
    if jnp.any(slope):
        raise ValueError("a head's target must carry no gradient: jax.lax.stop_gradient")
    if head.probabilities is not None:
        expect("probabilities", head.probabilities(outputs), (2, 3, head.size), 0.0)
        sums_to_one("probabilities", head.probabilities(outputs))
    for name, compare, second in (("divergence", divergence, target), ("dominance", dominance, other)):
        if getattr(head, name) or head.are_values or head.probabilities is not None:
            expect(name, compare(head, outputs, second), (2, 3), 0.0)
    return head


def starting_at(head: ValueHead, value: float) -> ValueHead:
    """A categorical head whose outputs of 0, a network's before it has learned anything, stand for about ``value``.

    Otherwise they stand for the middle of the support. Values of steps to a goal lie in [-100, 0]: a scalar begins at
    0 and HL-Gauss at -50, and while the values of all states move up from there together, a network may learn little
    else (docs/heads.md).

    A constant is added to the outputs: the logits of the label of ``value``, mixed with the uniform distribution, which
    has a tenth of the mass, so that every probability can be raised soon. Call this outside of compiled functions.

    Raises:
      ValueError: a head whose outputs are values, which begin near 0, or a value outside the support.
    """
    if head.probabilities is None:
        raise ValueError(
            "start is of heads with a support: outputs that are values begin near 0 by themselves"
        )
    at_value = (jnp.float32(value), jnp.float32(0), jnp.zeros(head.size, jnp.float32))
    if not math.isfinite(value) or head.clipped(*at_value) > 0:
        raise ValueError(f"start={value:g} must lie in the head's support")
    # Of NumPy, so that it is a constant of whichever program the head becomes a part of.
    first = np.asarray(jnp.log(0.9 * head.target(*at_value) + 0.1 / head.size))
    probabilities, of_divergence, of_dominance = head.probabilities, head.divergence, head.dominance
    return head._replace(
        value=lambda outputs: head.value(outputs + first),
        target=lambda reward, discount, outputs: head.target(reward, discount, outputs + first),
        loss=lambda outputs, target: head.loss(outputs + first, target),
        mix=lambda outputs, weights: head.mix(outputs + first, weights) - first,
        clipped=lambda reward, discount, outputs: head.clipped(reward, discount, outputs + first),
        probabilities=lambda outputs: probabilities(outputs + first),
        divergence=of_divergence and (lambda outputs, target: of_divergence(outputs + first, target)),
        dominance=of_dominance and (lambda better, worse: of_dominance(better + first, worse + first)),
    )


def scalar_target(head: ValueHead, value: Array) -> Array:
    """The target that says "exactly ``value``" [...] (a return, say), for any head."""
    nothing = jnp.zeros((*value.shape, head.size), jnp.float32)
    return head.target(value, jnp.zeros_like(value), nothing)


def same_target(head: ValueHead, outputs: Array) -> Array:
    """The target that says "whatever ``outputs`` [..., K] represent", for any head."""
    nothing = jnp.zeros(outputs.shape[:-1], jnp.float32)
    return head.target(nothing, jnp.ones_like(nothing), outputs)


def same_distribution(head: ValueHead, outputs: Array) -> Array:
    """The target that says "distributed as ``outputs`` [..., K]".

    It has the expectation of `same_target`, which heads that keep the expectation alone would encode anew.
    """
    if head.probabilities is None:
        return same_target(head, outputs)
    return jax.lax.stop_gradient(head.probabilities(outputs))


def divergence(head: ValueHead, outputs: Array, target: Array) -> Array:
    """How far ``outputs`` [..., K] are from their target [...]: the priority for prioritised replay.

    For categorical heads the Kullback-Leibler divergence ``KL(target || outputs)``, at least 0 and 0 for a perfect
    fit: their loss, a cross-entropy, without the entropy of the target, which no update takes away. (Rainbow, Hessel
    et al. 2018, draws rows in proportion to it.) For heads whose outputs are values the loss itself.

    Raises:
      ValueError: a head whose outputs are neither, and that has no ``divergence`` of its own.
    """
    if head.divergence is not None:
        return head.divergence(outputs, target)
    loss = head.loss(outputs, target)
    if head.are_values:
        return loss
    _check_logits(head, "divergence")
    entropy = -jax.scipy.special.xlogy(target, target).sum(-1)
    return jnp.maximum(loss - entropy, 0.0)  # rounding


def dominance(head: ValueHead, better: Array, worse: Array) -> Array:
    """How far ``better`` is from first-order stochastic dominance over ``worse``, outputs [..., K] both -> [...].

    Leading axes are broadcast.

    0 where each value is exceeded at least as often under ``better``. For categorical heads the sum over atoms of
    ``max(F_better - F_worse, 0)``, with cumulative probabilities ``F`` (CQN, Seo et al. 2024): the area between them in
    steps of the support. For heads whose outputs are values that area itself, in units of value: the mean over
    sorted quantiles of ``max(q_worse - q_better, 0)``, which is the plain hinge for `scalar`.

    Raises:
      ValueError: a head whose outputs are neither, and that has no ``dominance`` of its own.
    """
    if head.dominance is not None:
        return head.dominance(*jnp.broadcast_arrays(better, worse))
    if head.are_values:
        rise = _ordered(worse, head.size) - _ordered(better, head.size)
        return jnp.maximum(rise, 0.0).mean(-1)
    probabilities = _check_logits(head, "dominance")
    excess = probabilities(better) - probabilities(worse)
    up_to = jnp.triu(jnp.ones((head.size, head.size), jnp.float32))  # a product is faster than `jnp.cumsum`
    cumulative = jnp.matmul(excess, up_to, precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(cumulative, 0.0).sum(-1)


def _ordered(outputs: Array, size: int) -> Array:
    """Quantiles [..., K] in ascending order, which no network promises."""
    return jnp.sort(_float32(outputs, size), -1)


def _check_logits(head: ValueHead, member: str) -> Callable[[Array], Array]:
    """The head's ``probabilities``; raises ValueError if there are none, and so no formula for ``member``."""
    if head.probabilities is None:
        raise ValueError(
            f"this agent asks for the head's {member}, and its outputs are neither values nor logits, for which there "
            f"is a formula: give the ValueHead a member {member}"
        )
    return head.probabilities


def scalar() -> ValueHead:
    """One output, the value itself, with squared error ``(v - y)^2`` (no factor one half)."""

    def value(outputs: Array) -> Array:
        return _float32(outputs, 1)[..., 0]

    def loss(outputs: Array, target: Array) -> Array:
        prediction = value(outputs)
        chex.assert_equal_shape([prediction, target])
        return jnp.square(prediction - jax.lax.stop_gradient(target))

    def mix(outputs: Array, weights: Array) -> Array:
        return _average(_float32(outputs, 1), weights)

    return ValueHead(1, value, _scalar_backup(value), loss, mix, _unbounded, are_values=True)


def two_hot(low: float, high: float, size: int = 101) -> ValueHead:
    """Softmax over ``size`` atoms at equal distances from ``low`` to ``high``, both included.

    A target is clipped to the support and split linearly between the two atoms beside it, which keeps
    its expectation exactly (MuZero, Schrittwieser et al. 2020, appendix F; Farebrother et al. 2024, 3.1).

    Raises:
      ValueError: for a size under 2, or a support that is empty, not finite or too narrow for float32.
    """
    _check_support(low, high, size)
    atoms = jnp.linspace(low, high, size, dtype=jnp.float32)
    step = (high - low) / (size - 1)

    def encode(y: Array) -> Array:
        return _hat(_position(y, low, step, size - 1)[..., None], size)

    def outside(y: Array) -> Array:
        return _outside(y, low, step, size - 1)

    return _categorical(atoms, lambda value: _encoded_backup(value, encode, outside))


def hl_gauss(
    low: float, high: float, size: int = 101, sigma_ratio: float = SIGMA_RATIO, padding: int | None = None
) -> ValueHead:
    """Softmax over ``size`` bins, trained on the histogram of a Gaussian around the target.

    HL-Gauss (Imani & White 2018) as in "Stop Regressing" (Farebrother et al. 2024, equation 3.3): bin
    ``i`` between edges ``e_i`` and ``e_i+1`` gets the mass of N(y, sigma^2) there, renormalised, with
    sigma = ``sigma_ratio`` bin widths; the value is the expectation over bin centres.

    Differences from the paper, both because a truncated Gaussian has another mean than its centre:
    ``padding`` bins (default: enough for 4 sigma) are added beyond ``low`` and ``high``, inside the
    ``size``; and targets are clipped to [low, high], beyond which the paper's formula ends in 0/0.
    ``padding=0`` is the paper's support, biased inward by 0.69 bins at its ends (sigma_ratio 0.75).

    With the default padding, target -> label -> expectation is off by at most 1.2e-4 bins at the default
    ``sigma_ratio``, 1.5e-4 of it above that and 2.4e-3 bins below, plus float32 rounding of the value.

    Raises:
      ValueError: for a support that `two_hot` would refuse, a negative ``padding``, or a ``sigma_ratio`` that is
        infinite, or under one half, where the label no longer keeps its mean (off by 0.09 bins at 0.25).
    """
    if not 0.5 <= sigma_ratio < math.inf:
        raise ValueError(
            f"sigma_ratio {sigma_ratio} must be finite and at least 0.5 bin widths, below which labels are biased; "
            f"use {SIGMA_RATIO}"
        )
    padding = math.ceil(4 * sigma_ratio) if padding is None else padding
    if padding < 0:
        raise ValueError(f"hl_gauss needs padding >= 0, not {padding}")
    interior = size - 2 * padding
    _check_support(low, high, interior)
    width = (high - low) / interior
    edges = np.arange(-padding, size + 1 - padding, dtype=np.float32)  # in bin widths from `low`
    centres = np.asarray(low + width * (edges[:-1] + 0.5), np.float32)

    def encode(y: Array) -> Array:
        distance = edges - _position(y, low, width, interior)[..., None]
        cdf = jax.lax.erf(distance / (math.sqrt(2.0) * sigma_ratio))
        # float32's erf is not quite monotone: unclipped, a far bin may get a mass of -1e-7.
        mass = jnp.maximum(jnp.diff(cdf), 0.0)
        return mass / mass.sum(-1, keepdims=True)

    def outside(y: Array) -> Array:
        return _outside(y, low, width, interior)

    return _categorical(centres, lambda value: _encoded_backup(value, encode, outside))


def c51(low: float, high: float, size: int = 51) -> ValueHead:
    """Categorical distribution over atoms from ``low`` to ``high``; the whole distribution is backed up.

    The distribution of ``r + d Z'`` is projected onto the atoms by splitting each shifted atom's mass
    linearly between its neighbours (Bellemare et al. 2017, algorithm 1). Mass beyond the support
    gathers at its ends.

    Raises:
      ValueError: for a size under 2, or a support that is empty, not finite or too narrow for float32.
    """
    _check_support(low, high, size)
    atoms = jnp.linspace(low, high, size, dtype=jnp.float32)
    step = (high - low) / (size - 1)

    def shift(reward: Array, discount: Array, outputs: Array) -> tuple[Array, Array]:
        """Where every atom moves to, and its probability, [..., K] each."""
        _check_backup(reward, discount, outputs)
        probabilities = _softmax(_float32(outputs, size))
        moved = jnp.float32(reward)[..., None] + jnp.float32(discount)[..., None] * atoms
        return moved, jax.lax.stop_gradient(probabilities)

    def target(reward: Array, discount: Array, outputs: Array) -> Array:
        moved, probabilities = shift(reward, discount, outputs)
        position = _position(moved, low, step, size - 1)
        gain = lambda x, probability: _hat(x[..., None], size) * probability[..., None]
        return jax.lax.stop_gradient(_sum_over_atoms(gain, position, probabilities))

    def clipped(reward: Array, discount: Array, outputs: Array) -> Array:
        moved, probabilities = shift(reward, discount, outputs)
        return jnp.sum(_outside(moved, low, step, size - 1) * probabilities, -1)

    return _categorical(atoms, lambda _: (target, clipped))


def quantile(size: int = 51, kappa: float = 1.0) -> ValueHead:
    """The quantiles at ``(2i + 1) / 2K``; the value is their mean (QR-DQN, Dabney et al. 2018).

    The loss is equation 10 there: quantile Huber of every target sample against every output, summed
    over outputs and averaged over samples; divided by ``kappa``, so that ``kappa`` near 0 is quantile
    regression. ``mix`` averages quantile functions: exact for the expectation, while the shape is that
    of the Wasserstein barycentre and not of the mixture.

    The one head whose fit does not keep the expectation of *random* targets: its value is off by up to
    ``range / 2K + kappa``. Where values vary by less than 1, lower ``kappa``.

    Raises:
      ValueError: for ``size`` under 1, or a ``kappa`` that is infinite or under 1e-6.
    """
    if size < 1 or not 1e-6 <= kappa < math.inf:
        raise ValueError(
            f"a quantile head needs size >= 1 and a finite kappa >= 1e-6, not {size} and {kappa}; with a "
            "large one it is squared error, divided by it"
        )
    levels = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size

    def value(outputs: Array) -> Array:
        return _float32(outputs, size).mean(-1)

    def target(reward: Array, discount: Array, outputs: Array) -> Array:
        _check_backup(reward, discount, outputs)
        moved = jnp.float32(discount)[..., None] * _float32(outputs, size)
        return jax.lax.stop_gradient(jnp.float32(reward)[..., None] + moved)

    each = _quantile_huber(levels, kappa)

    def loss(outputs: Array, target: Array) -> Array:
        outputs = _float32(outputs, size)
        chex.assert_equal_shape([outputs, target])
        return each(outputs, jax.lax.stop_gradient(target)).sum(-1)

    def mix(outputs: Array, weights: Array) -> Array:
        return _average(_float32(outputs, size), weights)

    return ValueHead(size, value, target, loss, mix, _unbounded, are_values=True)


def huber(error: Array, delta: float = 1.0) -> Array:
    """``e^2 / 2`` up to ``delta``, linear beyond it with slope ``delta`` (Huber 1964), elementwise."""
    size = jnp.abs(error)
    # A product, not a choice of two branches: the square of a large error would overflow into the gradient.
    inner = jnp.minimum(size, delta)
    return inner * (size - 0.5 * inner)


def _quantile_huber(levels: Array, kappa: float) -> Callable[[Array, Array], Array]:
    """The quantile Huber loss of each output [..., K], the mean over all target samples [..., K]."""

    def both(outputs: Array, target: Array) -> tuple[Array, Array]:
        """The loss, and its derivative in the outputs."""

        def terms(sample: Array) -> tuple[Array, Array]:
            error = sample[..., None] - outputs
            weight = jnp.where(error < 0, 1.0 - levels, levels) / len(levels)
            return weight * huber(error, kappa) / kappa, -weight * jnp.clip(error / kappa, -1.0, 1.0)

        return _sum_over_atoms(terms, target)

    @jax.custom_jvp
    def loss(outputs: Array, target: Array) -> Array:
        return both(outputs, target)[0]

    @loss.defjvp
    def differentiate(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
        value, slope = both(*primals)
        return value, slope * tangents[0]

    return loss


def _sum_over_atoms(terms: Callable[..., Any], *atoms: Array) -> Any:
    """The sum of ``terms`` of the last axis of ``atoms`` [..., K], whose entries it takes as [...].

    One after another on CPUs: all at once, the quantile loss with its derivative took 7 times as long for 51 outputs
    and 30 times for 101 (512 rows, one core). Elsewhere at once, which XLA fuses, so that not all are in memory.
    """

    def total(*atoms: Array) -> Any:
        each = (terms(*one) for one in zip(*atoms, strict=True))
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), each)

    def in_turn(*atoms: Array) -> Any:
        first = len(atoms[0]) % _BLOCK or _BLOCK
        count = (len(atoms[0]) - first) // _BLOCK
        blocks = [x[first:].reshape(count, _BLOCK, *x.shape[1:]) for x in atoms]
        # Sums of sums round less than one long sum.
        add = lambda sums, block: (jax.tree.map(jnp.add, sums, total(*block)), None)
        return jax.lax.scan(add, total(*(x[:first] for x in atoms)), blocks)[0]

    def at_once(*atoms: Array) -> Any:
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(terms)(*atoms))

    first = (jnp.moveaxis(x, -1, 0) for x in atoms)
    return jax.lax.platform_dependent(*first, cpu=in_turn, default=at_once)


def _categorical(
    atoms: Array | np.ndarray, backup: Callable[[Callable[[Array], Array]], tuple[_Backup, _Backup]]
) -> ValueHead:
    """What the three softmax heads share; ``backup`` makes `target` and `clipped` from the value function."""
    size = atoms.shape[0]

    def probabilities(outputs: Array) -> Array:
        return _softmax(_float32(outputs, size))

    def value(outputs: Array) -> Array:
        # By default a matrix product of float32 runs in bfloat16 on a TPU and TF32 on a GPU.
        return jnp.matmul(probabilities(outputs), atoms[:, None], precision=jax.lax.Precision.HIGHEST)[..., 0]

    def loss(outputs: Array, target: Array) -> Array:
        outputs = _float32(outputs, size)
        chex.assert_equal_shape([outputs, target])
        return -jnp.sum(jax.lax.stop_gradient(target) * jax.nn.log_softmax(outputs), -1)

    def mix(outputs: Array, weights: Array) -> Array:
        chex.assert_shape(weights, outputs.shape[:-1])
        return jax.nn.logsumexp(jax.nn.log_softmax(_float32(outputs, size)), axis=-2, b=weights[..., None])

    target, clipped = backup(value)
    return ValueHead(size, value, target, loss, mix, clipped, probabilities=probabilities)


def _scalar_backup(value: Callable[[Array], Array]) -> _Backup:
    """``r + d v'`` for heads that back up the expectation alone."""

    def target(reward: Array, discount: Array, outputs: Array) -> Array:
        _check_backup(reward, discount, outputs)
        return jax.lax.stop_gradient(jnp.float32(reward) + jnp.float32(discount) * value(outputs))

    return target


def _encoded_backup(
    value: Callable[[Array], Array], encode: Callable[[Array], Array], outside: Callable[[Array], Array]
) -> tuple[_Backup, _Backup]:
    """`target` and `clipped` of heads that back up the expectation and then encode it."""
    plain = _scalar_backup(value)
    return (
        lambda reward, discount, outputs: encode(plain(reward, discount, outputs)),
        lambda reward, discount, outputs: outside(plain(reward, discount, outputs)),
    )


def _unbounded(reward: Array, discount: Array, outputs: Array) -> Array:
    """`clipped` of heads without a support."""
    _check_backup(reward, discount, outputs)
    return jnp.zeros(reward.shape, jnp.float32)


def _position(y: Array, low: float, step: float, steps: int) -> Array:
    """Where ``y`` lies, in steps from ``low`` (so that float32 keeps its digits on any support), clipped to it."""
    return jnp.clip((y - low) / step, 0.0, steps)


def _outside(y: Array, low: float, step: float, steps: int) -> Array:
    """1 where ``y`` lies beyond the support by more than rounding (a thousandth of a step), else 0."""
    position = (y - low) / step
    return ((position < -1e-3) | (position > steps + 1e-3)).astype(jnp.float32)


def _hat(position: Array, size: int) -> Array:
    """Splits a point mass at ``position`` [..., 1] linearly between the two of ``size`` atoms beside it."""
    return jnp.maximum(1.0 - jnp.abs(position - jnp.arange(size, dtype=jnp.float32)), 0.0)


def _average(outputs: Array, weights: Array) -> Array:
    chex.assert_shape(weights, outputs.shape[:-1])
    return jnp.sum(outputs * weights[..., None], -2)


@jax.custom_jvp
def _softmax(logits: Array) -> Array:
    """`jax.nn.softmax` over the last axis, with a gradient made of its result.

    JAX goes through the quotient unless ``jax_softmax_custom_jvp`` is set, which takes two more sums over the axis:
    with this and a product for `value`, CQN with C51 and 41 bins trains 1.25 times as fast on one core.
    """
    return jax.nn.softmax(logits)


@_softmax.defjvp
def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    probabilities = _softmax(*primals)
    weighted = probabilities * tangents[0]
    return probabilities, weighted - probabilities * weighted.sum(-1, keepdims=True)


def _float32(outputs: Array, size: int) -> Array:
    chex.assert_axis_dimension(outputs, -1, size)
    return outputs.astype(jnp.float32)


def _check_backup(reward: Array, discount: Array, outputs: Array) -> None:
    chex.assert_equal_shape([reward, discount])
    chex.assert_shape(reward, outputs.shape[:-1])


def _check_support(low: float, high: float, interior: int) -> None:
    largest = max(abs(low), abs(high))
    if not (low < high and largest < 1e38):
        raise ValueError(f"a categorical head needs finite low < high, not [{low}, {high}]")
    if interior < 2:
        raise ValueError("a categorical head needs at least 2 outputs inside its support: raise its size")
    if (high - low) / interior < max(largest * 2.0**-22, 1e-30):
        raise ValueError(
            f"float32 cannot tell {interior} values on [{low}, {high}] apart: widen the support or shift it"
        )
