"""From logged steps to transitions: the one place that pairs a step with the next, and refuses bad logs.

Every reader ends here, so that the conventions of `rl.types.Transition` hold for all of them. Nothing here
knows a file format.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from rl import nest
from rl.files import DataError
from rl.replay.dataset import Dataset
from rl.types import Spec, Transition

_WIDEST = 1e10  # half of a box: beyond it float32 maps ordinary actions to one number
_ROUNDING = 1e-6  # of the box's width: how far float arithmetic may carry an action outside unnoticed
MAX_ACTIONS = 2**16  # discrete actions, as an agent has at least one output for each
# Ends of episodes that only next observations show, in steps and in per cent of them: with more, a log is not in order.
_UNMARKED = 10
# What other libraries call an array. Without the last two, which may be absent, steps would be paired across resets.
_OTHER_NAMES = {
    "terminals": ("terminated", "terminations", "terminal"),
    "timeouts": ("truncations", "truncation", "truncated", "truncateds", "dones", "done"),
    "next_observations": ("next_obs",),
}
_LIMITS = 3  # time limits from which on it is no accident that something holds for all of them
_LOOKED_AT = 200  # rows among which, and most environments for which, those side by side are looked for
_SAMPLED = 100_000  # rows, at the most, that deviations are taken from
_NEAR = 0.85  # of two names' likeness: "action" is "actions", and "next_observations" are no "observations"


class Loaded(NamedTuple):
    """A dataset and what is known about where it came from."""

    dataset: Dataset  # NumPy arrays
    spec: Spec
    environment: str | None  # name for `rl.envs.make` to evaluate in
    reference: tuple[float, float] | None  # (random, expert) return: normalised return 0 and 100
    digest: str  # `digest` of the dataset
    source: str  # who made the data
    note: str = ""  # what to know before using it: why there is no environment, that there are no rewards
    validation: Dataset | None = None  # held out by whoever published the data, where asked for


def from_steps(
    observations: Any,
    actions: np.ndarray,
    rewards: np.ndarray,
    terminals: np.ndarray,
    timeouts: np.ndarray | None = None,
    next_observations: Any = None,
    *,
    source: str,
    discounts: np.ndarray | None = None,
    discrete: bool | range = False,
    actions_outside: Literal["error", "clip"] = "error",
    low: Any = -1.0,
    high: Any = 1.0,
    shuffled: bool = False,
    continuing: bool = False,
) -> Dataset:
    """Transitions from ``N`` steps in the order they were logged, episodes one after another.

    An episode ends at a terminal step, at a timeout (a time limit: the discount stays 1) and, where
    ``next_observations`` are given, at a step whose next observation is not what the log shows next: some
    published logs leave resets unmarked (D4RL's medium-replay files do). Where more than a tenth of the steps are such
    (and more than ten), ``next_observations`` are wrong, or the log holds single transitions in no order, which
    ``shuffled`` says is meant: most transitions then are episodes of their own. A log that stops inside an episode
    was cut by a size limit, and its end counts as a timeout, but only if some episode does end: a log without
    any end was written without its flags.

    Without ``next_observations`` a step is paired with the one after it in its episode. The last step of an
    episode that did not terminate has no such successor and is dropped, as d4rl's ``qlearning_dataset`` does;
    its action is still the ``next_action`` of the step before it. A terminal step needs no successor: it is
    kept, with its own observation as a next observation that no backup looks at.

    Args:
        observations: images [N, H, W, C] of uint8, kept as they are, or floats, which become float32: histories
            [N, T, D] where they have three axes, else vectors (with a warning if they have more axes: they may be
            images); or a nested dict of such arrays.
        actions: [N, ...] floats, or [N] integers if ``discrete``.
        rewards: [N].
        terminals: [N] bool, or numbers 0 and 1: the episode ended and nothing of value follows.
        timeouts: [N] likewise: the episode was cut. A step that is both is terminal. Where neither they nor
            ``next_observations`` are given, a warning says that cut episodes would run into one another: give zeros if
            none was cut.
        next_observations: like ``observations``.
        source: names the log in error messages.
        discounts: [N] of 0 and 1, where it is not ``1 - terminals``: logs that go on after a success.
        discrete: actions are integers from 0, below `MAX_ACTIONS`; or those of a range, of which the first becomes 0.
        actions_outside: whether an action outside the box is an error or clipped to it.
        low: the action box's lower bounds, a number or one per dimension; mapped to -1.
        high: its upper bounds; mapped to 1.
        shuffled: steps are transitions in no order, with their ``next_observations``.
        continuing: the environment may have gone on after a time limit, without a reset. Without it, next observations
            that are the observation of the step after at every time limit are an error where they lead further than
            other steps do, and elsewhere warned of: they may be the log's observations, shifted by one step.

    Raises:
        DataError: wrong type or length, no steps, NaN or infinity, an action outside the box or the range, a flag that
            is not 0 or 1, no end of an episode anywhere, next observations that do not follow or lead across resets,
            shuffled steps without them.
    """
    observations = _observations("observations", observations, source)
    if not (arrays := nest.leaves(observations)):
        raise DataError(f"{source}: observations hold no array")
    rows = len(arrays[0])
    for name, array in nest.named("observations", observations).items():
        check_length(name, array.shape, rows, source)
    if discrete:
        actions = _choices(actions, rows, discrete if isinstance(discrete, range) else None, source)
    else:
        actions = _boxed(actions, rows, low, high, actions_outside == "clip", source)
    rewards = _vector("rewards", rewards, rows, source)
    terminal = flags("terminals", terminals, rows, source)
    cut = np.zeros(rows, bool) if timeouts is None else flags("timeouts", timeouts, rows, source)
    last = terminal | cut
    if discounts is None:
        _warn_of_terminal_limits(cut, terminal, source)
    discount = ~terminal if discounts is None else flags("discounts", discounts, rows, source)
    if next_observations is not None:
        next_observations = _observations("next_observations", next_observations, source)
        _check_like(next_observations, observations, source)
        if shuffled:
            last[:-1] = True
        else:
            pairs = zip(nest.leaves(observations), nest.leaves(next_observations), strict=True)
            jumps = np.any([_jumps(*pair) for pair in pairs], axis=0)
            unmarked = jumps & ~last[:-1]
            _check_order(unmarked, observations, next_observations, source)
            _warn_of_unmarked(unmarked, last, source)
            if not continuing:
                _check_resets(observations, jumps, np.flatnonzero((cut & ~terminal)[:-1]), source)
            last[:-1] |= jumps
    elif shuffled:
        raise DataError(
            f"{source}: without next_observations, single transitions in no order have no successors: write them into "
            "the log, or leave out --shuffled (shuffled=True) if its steps are in order"
        )
    if not shuffled:
        _warn_of_reset_rows(rewards, last, source)
    if not last.any():
        raise DataError(
            f"{source}: no episode ends in {rows} steps (no terminal, no timeout); write 'timeouts' into the "
            "log, True at the last step of every episode that was cut by a time limit"
        )
    if timeouts is None and next_observations is None:
        warnings.warn(
            f"{source}: no time limits are marked ('timeouts'): if an episode was cut, steps on both sides are paired: "
            "mark its last step, or give zeros if none was cut",
            stacklevel=2,
        )
    last[-1] = True
    return _pair(observations, actions, rewards, terminal, discount, last, next_observations, source)


def loaded(
    dataset: Dataset,
    *,
    environment: str | None,
    source: str,
    reference: tuple[float, float] | None = None,
    choices: int | None = None,
    note: str = "",
) -> Loaded:
    """``dataset`` with its digest and spec.

    Args:
        dataset: NumPy arrays.
        environment: to evaluate in, if there is one.
        source: who made the data.
        reference: (random, expert) return.
        choices: the number of discrete actions. Give it whenever it is known: without it the largest action in the log
            is taken to be the last one, and an agent has no output for any above.
        note: what to know before using it.

    Raises:
        DataError: the log holds an action beyond ``choices``.
    """
    action = dataset.transitions.action
    discrete = action.dtype.kind == "i"
    size = _count(action, choices, source) if discrete else action.shape[-1]
    if discrete and choices is None and environment is None:
        guess = (
            f"{size} actions, as the largest in the log is {size - 1}: if there are more, name the environment "
            "(from Python: give choices)"
        )
        note = "; ".join(filter(None, (note, guess)))
    shape = nest.map_structure(lambda x: x.shape[1:], dataset.transitions.observation)
    spec = Spec(shape, size, discrete)
    return Loaded(dataset, spec, environment, reference, digest(dataset), source, note)


def _count(actions: np.ndarray, choices: int | None, source: str) -> int:
    """The number of discrete actions: ``choices``, if that is known."""
    largest = int(actions.max())
    if choices is not None and choices <= largest:
        raise DataError(
            f"{source}: choices={choices}, but the log holds action {largest}: give at least {largest + 1}"
        )
    return largest + 1 if choices is None else choices


def digest(dataset: Any) -> str:
    """SHA-256 over the names, types, shapes and bytes of all arrays of a pytree: equal only for the same data."""
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(dataset):
        array = np.asarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)} {array.dtype.str} {array.shape}\n".encode())
        result.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return result.hexdigest()


def reference(random: Any, expert: Any, source: str) -> tuple[float, float]:
    """The recorded returns of a random policy and an expert, as numbers by which others are normalised.

    Raises:
        DataError: they are not.
    """
    if not all(isinstance(x, int | float) and np.isfinite(x) for x in (random, expert)) or random >= expert:
        raise DataError(
            f"{source}: its reference returns are {random!r} and {expert!r}, but must be numbers, that of a random "
            "policy below that of an expert: mend them where they are recorded, or remove both"
        )
    return float(random), float(expert)


def same_task(environment: str, other: str) -> bool:
    """Whether two environments are one but for the version in their names."""
    return re.sub(r"-v\d+$", "", environment) == re.sub(r"-v\d+$", "", other)


def reference_in(
    environment: str | None, own: str | None, returns: tuple[float, float] | None
) -> tuple[tuple[float, float] | None, str]:
    """The reference returns of data of their ``own`` environment for scores in another one, and a note if it has none.

    Where either is not named they are kept: nothing says that they are of something else.
    """
    if returns is None or not environment or not own or same_task(environment, own):
        return returns, ""
    return None, (
        f"returns are not normalised: the reference of these data is of {own}, and they are evaluated in {environment}"
    )


def require(
    arrays: Mapping[str, Any], names: Iterable[str], source: str, remedies: Mapping[str, str] | None = None
) -> None:
    """Raises a `DataError` that lists what is there, and what might be meant, if one of ``names`` is not.

    Where nothing might be meant by a name, its remedy is told, if there is one.
    """
    missing = [name for name in names if name not in arrays]
    if not missing:
        return
    meant = {name: _likely(name, arrays) for name in missing}
    hints = [f"{similar[0]!r} should be called {name!r}" for name, similar in meant.items() if similar]
    if "rewards" in missing and not meant["rewards"]:
        hints.append("a log without rewards is for experiments.goals, as .npz: see docs/own_data.md")
    hints += [text for name, text in (remedies or {}).items() if name in missing and not meant[name]]
    raise DataError(
        f"{source}: no {', '.join(map(repr, missing))}; the file holds {', '.join(sorted(arrays))}"
        + "".join(f"; {hint}" for hint in hints)
    )


def check_optional(arrays: Iterable[str], names: Iterable[str], source: str) -> None:
    """Raises a `DataError` if an array that may be absent is there by another name, by which it would be ignored.

    Args:
        arrays: what is there.
        names: of optional arrays, each one of `_OTHER_NAMES`.
        source: where they are.
    """
    there = set(arrays)  # of a file, also links that lead nowhere, which `in` denies
    for name in (name for name in names if name not in there):
        if likely := _likely(name, there):
            raise DataError(
                f"{source}: {likely[0]!r} should be called {name!r}: as it is, it would be ignored"
            )


def _likely(name: str, arrays: Iterable[str]) -> list[str]:
    """Arrays that might be the one called ``name``, the likeliest first."""
    there = set(arrays)
    return [other for other in _OTHER_NAMES.get(name, ()) if other in there] or near(name, there)


def near(name: str, arrays: Iterable[str]) -> list[str]:
    """The array whose name is nearest, if it is as good as the same."""
    return difflib.get_close_matches(name, arrays, n=1, cutoff=_NEAR)


def finite(name: str, array: np.ndarray, source: str) -> None:
    """Raises a `DataError` that counts and locates NaN and infinities in ``array`` [N, ...]."""
    if np.isfinite(array).all():
        return
    bad = ~np.isfinite(array)
    first = int(bad.reshape(len(array), -1).any(axis=1).argmax())
    raise DataError(
        f"{source}: {np.count_nonzero(bad)} values of {name} are NaN or infinite (as float32), the first in "
        f"step {first}; drop the episodes that hold them and log again"
        + "; where episodes terminated any numbers do"
        * name.startswith("next_observations")
    )


def _pair(
    observations: Any,
    actions: np.ndarray,
    rewards: np.ndarray,
    terminal: np.ndarray,
    discount: np.ndarray,
    last: np.ndarray,
    next_observations: Any,
    source: str,
) -> Dataset:
    """The transitions of checked arrays; ``last`` [N] marks the ends of episodes, of whatever kind."""
    following = np.arange(len(last)) + ~last  # the next step of the episode; its last step follows itself
    if next_observations is None:
        cut = last & ~terminal
        keep = np.flatnonzero(~cut)
        if len(keep) == 0:
            raise DataError(
                f"{source}: every episode is a single step that nothing follows: no transition is left"
            )
        _warn_of_lost_rewards(rewards, cut, source)
        next_observations = jax.tree.map(lambda x: x[following[keep]], observations)
        last_kept = (last | cut[following])[keep]
    else:
        keep, last_kept = np.arange(len(last)), last
    transitions = Transition(
        observation=jax.tree.map(lambda x: x[keep], observations),
        action=actions[keep],
        reward=rewards[keep],
        discount=discount[keep].astype(np.float32),
        next_observation=next_observations,
        next_action=actions[following[keep]],
        has_next_action=(~last[keep]).astype(np.float32),
    )
    return Dataset(transitions, last_kept)


def _warn_of_lost_rewards(rewards: np.ndarray, cut: np.ndarray, source: str) -> None:
    """Warns if the last steps of episodes that were cut, which are left out, hold more reward than others do."""
    total = np.abs(rewards, dtype=np.float64).sum()
    lost = np.abs(rewards[cut], dtype=np.float64).sum()
    if cut.sum() >= _LIMITS and lost > max(0.1, 3 * cut.mean()) * total:
        warnings.warn(
            f"{source}: the last steps of {np.count_nonzero(cut)} episodes that were cut are left out, as nothing "
            f"follows them, and with them {lost / total:.0%} of all rewards (by size): give next_observations, or "
            "mark these steps as terminals if nothing of value follows",
            stacklevel=4,
        )


def _observations(name: str, array: Any, source: str) -> Any:
    """One array of checked observations, or a nested dict of them."""
    if isinstance(array, Mapping):
        return {key: _observations(f"{name}[{key!r}]", array[key], source) for key in sorted(array)}
    array = np.asarray(array)
    if array.ndim < 2:
        raise DataError(f"{source}: {name} have shape {array.shape}, but one row per step [N, ...] is needed")
    if array.size == 0:
        raise DataError(f"{source}: {name} are empty, shape {array.shape}; the log has no steps")
    try:
        shape = nest.agent_shape(array.shape[1:], array.dtype)
    except ValueError as error:
        raise DataError(f"{source}: {name}: {error}") from None
    if array.dtype == np.uint8 and array.ndim == 2:
        raise DataError(
            f"{source}: {name} are uint8 vectors, and networks scale only images: save them as float32, as rl.envs "
            "shows such an environment's: divided by 255 where its space is from 0 to 255, as they are elsewhere"
        )
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise DataError(f"{source}: {name} are {array.dtype}; save them as float32 (or uint8 images)")
    if array.ndim >= 4:
        warnings.warn(
            f"{source}: {name} are floats of shape {array.shape}, and become vectors of {shape[0]} numbers: if they "
            "are images, save them as uint8 [N, H, W, C], from 0 to 255 (networks divide by 255)",
            stacklevel=3,
        )
    _warn_of_rounding(name, array, source)
    return _float32(name, array.reshape(len(array), *shape), source)


def _warn_of_rounding(name: str, array: np.ndarray, source: str) -> None:
    """Warns of numbers that float32 rounds by more than a hundredth of their deviation."""
    if array.dtype.itemsize <= 4:
        return
    columns = array[:: -(-len(array) // _SAMPLED)]
    columns = columns.reshape(len(columns), -1)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused later
        largest, deviation = np.abs(columns).max(0), columns.std(0)
        lost = np.spacing(largest.astype(np.float32)) > 0.01 * deviation
    lost &= deviation > 1e-12 * largest  # a constant has nothing to lose
    if lost.any():
        column = int(lost.argmax())
        warnings.warn(
            f"{source}: {name} become float32, which rounds {np.count_nonzero(lost)} of their {len(lost)} numbers by "
            f"more than a hundredth of their deviation: number {column} has {largest[column]:.6g} at the most and a "
            f"deviation of {deviation[column]:.3g}. Subtract an offset before they are logged",
            stacklevel=4,
        )


def _float32(name: str, array: np.ndarray, source: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # float64 beyond float32's range becomes infinite: reported next
        array = array.astype(np.float32, copy=False)
    finite(name, array, source)
    return array


def _vector(name: str, array: np.ndarray, rows: int, source: str) -> np.ndarray:
    """[N] or [N, 1] numbers as [N] float32."""
    array = np.asarray(array)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{source}: {name} are {array.dtype}; save them as numbers")
    check_length(name, array.shape, rows, source)
    if array.size != rows:
        raise DataError(f"{source}: {name} have shape {array.shape}, but one number per step is needed")
    return _float32(name, array.reshape(rows), source)


def flags(name: str, array: np.ndarray, rows: int, source: str) -> np.ndarray:
    """[N] or [N, 1] of 0 and 1 as [N] bool.

    Raises:
        DataError: another length, or a value that is neither.
    """
    values = _vector(name, array, rows, source)
    odd = (values != 0) & (values != 1)
    if odd.any():
        row = int(odd.argmax())
        raise DataError(
            f"{source}: {name} must be 0 or 1, but {np.count_nonzero(odd)} are not; the first is "
            f"{values[row]:g} in step {row}"
        )
    return values.astype(bool)


def _choices(actions: np.ndarray, rows: int, choices: range | None, source: str) -> np.ndarray:
    """Discrete actions as [N] int32 from 0; ``choices`` are those of the environment, if known."""
    actions = np.asarray(actions)
    if actions.dtype.kind not in "iu":
        remedy = "; save choices as integers" * (actions.dtype == bool)
        raise DataError(f"{source}: discrete actions must be integers, but they are {actions.dtype}{remedy}")
    check_length("actions", actions.shape, rows, source)
    if actions.size != rows:
        raise DataError(f"{source}: discrete actions have shape {actions.shape}, but one per step is needed")
    smallest, largest = int(actions.min()), int(actions.max())  # before int32, where they may wrap
    if choices is None:
        if smallest < 0:
            raise DataError(f"{source}: discrete actions count from 0, but the smallest is {smallest}")
        choices = range(largest + 1)
    if smallest < choices.start or largest >= choices.stop:
        raise DataError(
            f"{source}: discrete actions lie between {smallest} and {largest}, but the environment's between "
            f"{choices.start} and {choices.stop - 1}: the log is of another environment, or damaged"
        )
    if choices.stop - choices.start > MAX_ACTIONS:
        raise DataError(
            f"{source}: actions are integers up to {largest}, of {choices.stop - choices.start} choices, but agents "
            f"have an output for each, and at most {MAX_ACTIONS} can be learned. If they are names rather than "
            "numbers, number those that occur from 0, as numpy.unique(actions, return_inverse=True) does; if they are "
            "quantities, save them as float32 in [-1, 1]"
        )
    return (actions.reshape(rows).astype(np.int64) - choices.start).astype(np.int32)


def _boxed(actions: np.ndarray, rows: int, low: Any, high: Any, clip: bool, source: str) -> np.ndarray:
    """Continuous actions as [N, D] float32 in [-1, 1]."""
    actions = np.asarray(actions)
    if actions.dtype == bool:
        raise DataError(f"{source}: actions are bool; save choices as integers")
    if actions.dtype.kind != "f":
        raise DataError(
            f"{source}: continuous actions must be floats, but they are {actions.dtype}; save them as float32. Integer "
            "actions need discrete=True"
        )
    check_length("actions", actions.shape, rows, source)
    if actions.size == 0:
        raise DataError(
            f"{source}: actions have shape {actions.shape}: not one number per step; log them again"
        )
    actions = _float32("actions", actions.reshape(rows, -1), source)
    size = actions.shape[1]
    if any(np.size(bound) not in (1, size) for bound in (low, high)):
        raise DataError(
            f"{source}: actions have {size} numbers per step, but their box has {max(np.size(low), np.size(high))}: "
            "the log is of another environment, or damaged"
        )
    low, high = (np.broadcast_to(np.ravel(bound).astype(np.float32), size) for bound in (low, high))
    if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
        raise DataError(
            f"{source}: the action box {low} to {high} must have finite bounds, the lower ones below"
        )
    if (high / 2 - low / 2).max() > _WIDEST:  # halves, whose difference is finite
        raise DataError(
            f"{source}: the action box {low} to {high} is so wide that actions in it, mapped to [-1, 1], would all be "
            "the same number: give low and high as the environment really has them"
        )
    if (low == -1).all() and (high == 1).all() and _are_whole(actions):
        warnings.warn(
            f"{source}: all actions are whole numbers: if they are choices, save them as integers",
            stacklevel=3,
        )
    excess = np.maximum(low - actions, actions - high)
    far = excess > _ROUNDING * (high - low)
    if far.any() and not clip:
        row, column = np.unravel_index(excess.argmax(), excess.shape)
        count, steps = np.count_nonzero(far), np.count_nonzero(far.any(axis=1))
        raise DataError(
            f"{source}: {count} action values in {steps} of {rows} steps lie outside the action box; the worst "
            f"is {actions[row, column]:.6g} in step {row}, dimension {column}, where the box is "
            f"[{low[column]:g}, {high[column]:g}]. If they are in the environment's own units, divide them by its "
            "range (by 3 for [-3, 3]); if the simulator clips actions itself, load with --clip_actions "
            '(clip_actions=True, or actions_outside="clip" of data.from_steps)'
        )
    if far.any():
        warnings.warn(
            f"{source}: {np.count_nonzero(far):,} of {far.size:,} action values lie outside the action box and are "
            f"clipped to it, by at most {excess.max():.3g}: right if the simulator did so, too; if they are in the "
            "environment's own units, divide them by its range and do not let them be clipped",
            stacklevel=3,
        )
    actions = np.clip(actions, low, high)
    if (low == -1).all() and (high == 1).all():
        return actions
    return np.clip(2 * (actions - low) / (high - low) - 1, -1, 1)


def _are_whole(actions: np.ndarray) -> bool:
    """Whether actions [N, D] look like numbers of choices: single, whole, from 0, and not all the same."""
    if actions.shape[1] != 1 or actions.min() < 0 or actions.min() == actions.max():
        return False
    return bool((actions == np.round(actions)).all())


def _jumps(observations: np.ndarray, next_observations: np.ndarray) -> np.ndarray:
    """[N - 1] bool: the next observation of a step is not the observation of the step after it."""
    successors = next_observations.reshape(len(next_observations), -1)[:-1]
    following = observations.reshape(len(observations), -1)[1:]
    jumps = (successors != following).any(axis=1)
    if observations.dtype == np.uint8:  # which no rounding changes
        return jumps
    rows = np.flatnonzero(jumps)  # few: only these are worth a comparison up to rounding
    jumps[rows] = ~np.isclose(successors[rows], following[rows], rtol=1e-5, atol=1e-6).all(axis=1)
    return jumps


def _check_order(unmarked: np.ndarray, observations: Any, next_observations: Any, source: str) -> None:
    """``unmarked`` [N - 1]: the next observation does not follow, and no flag says that an episode ends."""
    count, steps = np.count_nonzero(unmarked), len(unmarked)
    if count <= max(_UNMARKED, _UNMARKED * steps / 100):
        return
    where = (
        f"{source}: for {count} of {steps} steps next_observations are not the observations of the step after, and no "
        f"terminal or timeout marks an end there; the first is step {unmarked.argmax()}. "
    )
    if side_by_side := _environments(observations, next_observations):
        raise DataError(
            f"{where}They are those of {side_by_side} steps later: the rows of {side_by_side} environments stand side "
            "by side. Write the episodes of one environment after those of another"
        )
    raise DataError(
        f"{where}If the steps are in order, next_observations are wrong, or the ends of episodes are not marked in "
        "'timeouts': mend them. If the log holds single transitions in no order, load it with --shuffled "
        "(shuffled=True)"
    )


def _environments(observations: Any, next_observations: Any) -> int:
    """How many environments' rows stand side by side, as a vector of them is logged step by step; 0 if none do."""
    columns = list(zip(nest.leaves(observations), nest.leaves(next_observations), strict=True))
    rows = min(len(columns[0][0]) // 2, _LOOKED_AT)
    for count in range(2, rows + 1):
        same = np.ones(rows, bool)
        for first, after in columns:
            same &= np.equal(after[:rows], first[count : count + rows]).reshape(rows, -1).all(1)
        if same.mean() > 0.5:
            return count
    return 0


def _warn_of_unmarked(unmarked: np.ndarray, marked: np.ndarray, source: str) -> None:
    """Warns if more ends of episodes are ``unmarked`` [N - 1] than ``marked`` [N], as where rows are missing."""
    count, ends = int(unmarked.sum()), int(marked.sum())
    if count > max(ends, _LIMITS):
        warnings.warn(
            f"{source}: at {count} steps next_observations are not what the log shows next, though no end of an "
            f"episode is marked there ({ends} are). They count as ends, so that episodes are short, and their returns "
            "small: if rows are missing, log them, or the returns by which rewards are scaled are wrong",
            stacklevel=3,
        )


def _check_resets(observations: Any, jumps: np.ndarray, limits: np.ndarray, source: str) -> None:
    """Refuses next observations that lead across the resets after the steps ``limits``, at time limits.

    Where these lead no further than other steps do, or all to one state, a warning: the environment may have gone on.
    """
    count = len(limits)
    limits = limits[~jumps[limits]]
    if len(limits) < max(_LIMITS, count / 10):  # a few may be accidents
        return
    which = f"all {count}" if len(limits) == count else f"{len(limits)} of {count}"
    shown = nest.leaves(observations)
    change = lambda rows: sum(np.abs(x[rows + 1] - x[rows].astype(np.float64)).mean() for x in shown)
    same = all((x[limits + 1] == x[limits[0] + 1]).all() for x in shown)
    if not same and change(limits) > 2 * change(np.maximum(limits - 1, 0)):
        raise DataError(
            f"{source}: next observations at time limits are the first of the next episode, at {which} of "
            "them, so that values would be those after a reset: leave next_observations out, or write what was "
            "observed before the reset. If the environment went on, leave them out, too (from Python: continuing=True)"
        )
    warnings.warn(
        f"{source}: at {which} time limits the next observation is the observation of the step after: if an "
        "episode begins there, leave next_observations out",
        stacklevel=3,
    )


def _warn_of_terminal_limits(cut: np.ndarray, terminal: np.ndarray, source: str) -> None:
    """Warns if each of several time limits is marked as a terminal step, too."""
    if (count := np.count_nonzero(cut)) > 1 and terminal[cut].all():
        warnings.warn(
            f"{source}: all {count} time limits are marked as terminals, too: their values are 0; if episodes were "
            "only cut, leave terminals 0 there",
            stacklevel=3,
        )


def _warn_of_reset_rows(rewards: np.ndarray, last: np.ndarray, source: str) -> None:
    """Warns of rows after the ends of episodes in which an environment only reset, as gymnasium's vectors do.

    Their rewards are 0. Where those of many other steps are 0, too, nothing can be said.
    """
    after = np.flatnonzero(last[:-1]) + 1
    if (
        len(after) >= _LIMITS
        and not rewards[after].any()
        and np.delete(rewards, after).astype(bool).mean() > 0.9
    ):
        warnings.warn(
            f"{source}: the first reward after each of {len(after)} ends of episodes is 0, and few others are. A "
            "vector environment that resets in a step of its own (gymnasium's default, AutoresetMode.NEXT_STEP) adds "
            "such a row, which leads from one episode into the next: leave these rows out, or record with SAME_STEP",
            stacklevel=3,
        )


def check_length(name: str, shape: tuple[int, ...] | None, rows: int, source: str) -> None:
    """Raises a `DataError` unless an array of this shape has ``rows`` rows."""
    if not shape or shape[0] != rows:
        raise DataError(
            f"{source}: {name} have shape {shape}, but there are {rows} observations; every array needs one row per "
            "step"
        )


def _check_like(next_observations: Any, observations: Any, source: str) -> None:
    successors, observed = (
        nest.map_structure(lambda x: f"{x.dtype} {x.shape}", tree)
        for tree in (next_observations, observations)
    )
    if successors != observed:
        raise DataError(f"{source}: next_observations are {successors}, but observations are {observed}")
