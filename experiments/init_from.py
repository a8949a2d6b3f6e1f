"""What ``--init_from`` of `experiments.online` takes over from an earlier run, and what it refuses.

A continued run sees rewards and observations as the earlier one did, has its value head, and starts from its learners.
Where a flag is left alone the earlier run decides; a flag that says otherwise is an error.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import checks, common, notes
from rl import checkpoint, data, online, run_folder
from rl.dynamics import termination
from rl.files import expanded
from rl.replay import chunks, transform
from rl.replay.transform import Transform
from rl.types import Learner, Spec, State
from rl.values import heads

# Hyper-parameters that change what networks compute, and not the shapes of their parameters.
_FUNCTION = (
    *(f"network.{name}" for name in ("activation", "norm_after", "residual", "policy_layer_norm", "encoder")),
    *("layer_norm", "levels", "bins", "order", "see_levels", "see_dimensions"),
)
# Those of one agent, whose name means something else in others: ARSQ's advantages are multiples of its temperature.
_FUNCTION_OF = {"arsq": ("temperature",)}
# Settings of the head alone, and why networks that were trained with one of them cannot go on with another.
_OF_HEAD = {
    "head_start": "and its networks add to that",
    "head_kappa": "by which the values of its quantiles are off",
    "head_sigma": "which decides the values that its outputs stand for",
}
_MEMORY = ("schedule", "warm_up", "clip", "weight_decay")  # of an optimiser, that change what it remembers


def transformation(settings: Any, loaded: data.Loaded | None) -> Transform:
    """How the agent sees rewards and observations: as the flags say or, where they do not, as ``--init_from`` did.

    Raises:
      ValueError: the flags say otherwise than the run that is continued, whose values then mean something else.
    """
    chosen: dict[str, Any] = {}
    if settings.reward_scale:
        scale = common.reward_scale(settings.reward_scale)
        if scale == transform.RETURN_RANGE:
            if loaded is None:
                raise ValueError(
                    f"--reward_scale={transform.RETURN_RANGE} is that of returns in the data: give --offline_data"
                )
            scale = transform.fit(loaded.dataset, transform.RETURN_RANGE).reward_scale
        chosen["reward_scale"] = scale
    if not math.isnan(settings.reward_shift):
        chosen["reward_shift"] = checks.number("reward_shift", str(settings.reward_shift))
    if settings.clip_rewards:
        chosen["clip_rewards"] = True
    if not settings.init_from:
        return Transform(**chosen)
    source = transform.from_json(_card(settings)["transform"])
    wrong = [name for name, value in chosen.items() if not math.isclose(value, getattr(source, name))]
    if wrong:
        there = [f"--{name}={getattr(source, name)}" for name in wrong]
        here = [f"--{name}={getattr(settings, name)}" for name in wrong]
        raise _contradiction(settings, there, "and its values are of such rewards", here)
    return source


def with_head(settings: Any) -> Any:
    """``settings`` whose head is that of the continued run: its start, kappa and sigma, where flags leave them alone.

    A start that is NaN says that untrained networks are near the middle of the support, or near 0 without one.

    Raises:
      ValueError: a flag says otherwise than that run, or the head takes no start.
    """
    usual = {"head_start": None, "head_kappa": common.Head.head_kappa, "head_sigma": common.Head.head_sigma}
    chosen = {name: getattr(settings, name) for name in usual} | {"head_start": common.head_start(settings)}
    card = _card_of_head(settings)
    there = {name: card["settings"].get(name, usual[name]) for name in usual} if card else chosen
    for name, value in chosen.items():
        if value not in (usual[name], there[name]):
            was = f"no --{name}" if there[name] is None else f"--{name}={there[name]:g}"
            raise _contradiction(settings, [was], _OF_HEAD[name], [f"--{name}={value:g}"])
    start = there["head_start"]
    return dataclasses.replace(settings, **there | {"head_start": math.nan if start is None else start})


def support(settings: Any) -> tuple[float, float] | None:
    """The values that a categorical head must represent: as the flags say, or as the run that is continued had.

    None for other heads, which have no support.

    Raises:
      ValueError: the flags say otherwise than that run, whose networks are over its support, or it says nothing.
    """
    if not heads.has_support(settings.head):
        return None
    chosen = settings.head_low, settings.head_high
    card = _card_of_head(settings)
    if card is None:
        return (0.0, 1.0) if any(map(math.isnan, chosen)) else chosen
    low, high = card.get("support") or (card["settings"]["head_low"], card["settings"]["head_high"])
    if math.isnan(low) or math.isnan(high):
        # It went on with another run, before runs wrote their support down.
        if any(map(math.isnan, chosen)):
            raise ValueError(
                f"--init_from={settings.init_from} does not say which support its head has: give --head_low and "
                "--head_high, those of the run that it went on with itself"
            )
        return chosen
    flags = zip(("head_low", "head_high"), chosen, (low, high), strict=True)
    wrong = [
        (n, here, there) for n, here, there in flags if not (math.isnan(here) or math.isclose(here, there))
    ]
    if wrong:
        there = [f"--{name}={x:g}" for name, _, x in wrong]
        here = [f"--{name}={x:g}" for name, x, _ in wrong]
        raise _contradiction(settings, there, "over which its networks say their values", here)
    return low, high


def check_spec(settings: Any, spec: Spec) -> None:
    """Raises ValueError if the run ``--init_from`` was of other observations or actions than the environment's."""
    try:
        checks.spec(_card(settings), spec)
    except ValueError as error:
        raise ValueError(
            f"--init_from={settings.init_from} does not fit --env={settings.env}: {error}"
        ) from None


def updates(settings: Any) -> int:
    """How many updates the run that is continued has made."""
    _, arrays = _source(settings, "state/step")
    return arrays["state/step"].item()


def state(settings: Any, config: Any, learner: Learner, spec: Spec) -> State:
    """The learners' state [S, ...] as the run ``--init_from`` left it: its first seeds.

    Raises:
      ValueError: there is no such run, or it trained something else.
    """
    card, arrays = _source(settings)
    was, now = _hyper_parameters(card), checkpoint.flat(dataclasses.asdict(config))
    _check_agent(settings, card)
    _check_discounts(settings, was, now)
    _check_networks(settings, was, now)
    like = jax.eval_shape(learner.init, jax.random.key(0), online.example(chunks.spec(spec, settings.chunk)))
    several = lambda x: jax.ShapeDtypeStruct((settings.seeds, *x.shape), x.dtype)
    try:
        placed = common.placed_state(arrays, jax.tree.map(several, like)._replace(step=like.step))
    except ValueError as error:
        raise ValueError(
            f"--init_from={settings.init_from}: {error}; {_remedy(was, now, str(error))}"
        ) from None
    print(
        f"starts after update {placed.step.item():,} of {settings.init_from}, with {settings.seeds} of its "
        f"{card['settings']['seeds']} seeds; no action is drawn at random",
        file=sys.stderr,
    )
    notes.note_changed_code(f"--init_from={settings.init_from}", _folder(settings).parent, card)
    if warning := unknown_ends(settings, card):
        print(warning, file=sys.stderr)
    return placed


def unknown_ends(settings: Any, card: Mapping[str, Any]) -> str:
    """A note where episodes may end online and the support is of a log in which none did; empty elsewhere."""
    of_log = math.isnan(card["settings"].get("head_low", 0.0)) and not card.get("terminates", True)
    if (
        not heads.has_support(settings.head)
        or not of_log
        or termination.known(settings.env) is termination.never
    ):
        return ""
    low, high = card["support"]
    return (
        f"note: --init_from={settings.init_from} learned from a log in which no episode terminates, and its head has "
        f"values from {low:g} to {high:g}. A step that ends an episode is worth its reward alone, and if that lies "
        "outside, it counts as the nearest of them (train/clipped): train that run again with --head_low and "
        "--head_high that hold such rewards"
    )


def _contradiction(settings: Any, there: Sequence[str], why: str, here: Sequence[str]) -> ValueError:
    """What to raise where the flags ``here`` contradict those ``there``, that the run was trained with."""
    return ValueError(
        f"--init_from={settings.init_from} was trained with {' '.join(there)}, {why}: leave out {' '.join(here)}"
    )


def _card_of_head(settings: Any) -> dict[str, Any] | None:
    """The card of the run that is continued; None without one, and for one of another head, which `state` refuses."""
    card = _card(settings) if settings.init_from else None
    return card if card and card["settings"]["head"] == settings.head else None


def _check_agent(settings: Any, card: Mapping[str, Any]) -> None:
    """Raises ValueError unless the run was of the same agent and head, for as many seeds, on chunks as long."""
    length = card["settings"].get("chunk", 1)
    if length != settings.chunk:
        raise ValueError(
            f"--init_from={settings.init_from} decides on {length} actions at once: give --chunk={length}, not "
            f"{settings.chunk}"
        )
    there = {"agent": card["agent"], "head": card["settings"]["head"], "seeds": card["settings"]["seeds"]}
    if (there["agent"], there["head"]) != (settings.agent, settings.head) or there["seeds"] < settings.seeds:
        raise ValueError(
            f"--init_from={settings.init_from} holds {there}: give --agent={there['agent']} --head={there['head']} "
            f"and at most --seeds={there['seeds']}"
        )
    size = card["settings"].get("head_size", settings.head_size)
    if settings.head != "scalar" and size != settings.head_size:
        raise ValueError(
            f"--init_from={settings.init_from} has a head of {size} outputs: give --head_size={size}, not "
            f"{settings.head_size}"
        )


def _check_discounts(settings: Any, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError if the run's values are of returns that were discounted otherwise."""
    for name in ("discount", "chunk_discount") if settings.chunk > 1 else ("discount",):
        if was.get(name) != now.get(name):
            raise ValueError(
                f"--init_from={settings.init_from} was trained with --agent.{name}={was.get(name)}, and its values are "
                f"of such returns: give --agent.{name}={was.get(name)}, not {now.get(name)}"
            )


def _check_networks(settings: Any, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError if the run's networks compute something else with parameters of the same shapes."""
    function = _FUNCTION + _FUNCTION_OF.get(settings.agent, ())
    if wrong := [name for name in function if name in was and was[name] != now.get(name)]:
        flags = " ".join(f"--agent.{name}={was[name]}" for name in wrong)
        raise ValueError(
            f"--init_from={settings.init_from} has networks of other functions, whose parameters mean something else "
            f"here: give {flags}"
        )


def _remedy(was: Mapping[str, Any], now: Mapping[str, Any], error: str) -> str:
    """What to do about networks or optimisers that do not fit, from the hyper-parameters there and here."""
    of_optimisers = [name for name in was if re.fullmatch(rf"\w+_optimiser\.({'|'.join(_MEMORY)})", name)]
    wrong = [name for name in of_optimisers if was[name] != now.get(name)]
    if not wrong or "its state/optimiser/" not in error:
        return "give the same --agent.* flags as there"
    there, here = (" ".join(f"--agent.{name}={of.get(name)}" for name in wrong) for of in (was, now))
    return f"give {there}, as there, or train that run again with {here}"


def _hyper_parameters(card: dict[str, Any]) -> dict[str, Any]:
    """{name: value} of the first seeds of a run; those that it swept are its first variant's."""
    return checkpoint.flat(card["config"]) | {name: of[0] for name, of in card.get("sweep", {}).items()}


def _folder(settings: Any) -> Path:
    """Where the checkpoints of the run that is continued are."""
    place = expanded(settings.init_from)
    return place if place.name == run_folder.CHECKPOINTS else place / run_folder.CHECKPOINTS


def _source(settings: Any, part: str = "state/") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The card of the run that is continued, and the arrays of its learners whose names begin with ``part``."""
    record, arrays = checkpoint.read(_folder(settings), (part,)) or (None, {})
    return _checked_card(settings, record), arrays


def _card(settings: Any) -> dict[str, Any]:
    """`_source` without the arrays, whose files are not read."""
    folder = _folder(settings)
    steps = checkpoint.steps(folder)
    return _checked_card(settings, checkpoint.described(folder, steps[0]) if steps else None)


def _checked_card(settings: Any, record: dict[str, Any] | None) -> dict[str, Any]:
    """The card of a checkpoint's record. Raises ValueError where there is none, or it lacks what must be known."""
    if record is None:
        raise ValueError(
            f"--init_from={settings.init_from}: there is no checkpoint (a run that started from one needs it to go on)"
        )
    if "transform" not in record["card"]:
        raise ValueError(
            f"--init_from={settings.init_from} does not say how its agent saw rewards: it is no run of "
            "experiments.offline or experiments.online, or an old one; train it again by one of these"
        )
    return record["card"]
