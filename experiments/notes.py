"""What the scripts print of a run: notes before it begins, on flags and data, and what came out at its end."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import common, flags, presets
from experiments.common import Head
from rl import agents, data, log, nest, outcomes, run_folder
from rl.replay import traces
from rl.types import Spec
from rl.values import heads

_OF_IMAGES = ("network.encoder", "network.shift")


def note_unused(settings: Any, needed: str, *names: str) -> None:
    """Prints which flags do nothing, because the one that they are of was not given."""
    default = type(settings)()
    unused = [f"--{name}" for name in names if getattr(settings, name) != getattr(default, name)]
    if unused and not getattr(settings, needed):
        print(
            f"note: {', '.join(unused)} change{'s' * (len(unused) == 1)} nothing without --{needed}",
            file=sys.stderr,
        )


def note_unread(chosen: Any, usual: Any, unread: Mapping[str, str], prefix: str = "") -> None:
    """Prints which flags were chosen and do nothing.

    Args:
      chosen: a dataclass whose fields are flags.
      usual: another one of its type, what it would be if no flag were given.
      unread: {field: why} of those that nothing reads; a field that is a dataclass stands for all of its own.
      prefix: of the flags.
    """
    for flag in flags.written(chosen, usual):
        name = flag.removeprefix("--").partition("=")[0]
        for field, why in unread.items():
            if f"{name}.".startswith(f"{field}."):
                print(f"note: --{prefix}{name} changes nothing: {why}", file=sys.stderr)


def note_unused_by_agent(script: str, settings: Any, config: Any, task: str, spec: Spec) -> None:
    """Prints which flags of the head, and of the agent if its module tells (`rl.agents.unused`), do nothing.

    Args:
      script: as `presets.find` takes it.
      settings: of the run.
      config: the agent's hyper-parameters.
      task: the field of ``settings`` that names the task.
      spec: of observations and actions.
    """
    usual_settings, usual = presets.usual(script, settings, type(config)(), task)
    note_unused_head(settings, usual_settings)
    note_unread(config, usual, unread(settings, config, spec), "agent.")


def unread(settings: Any, config: Any, spec: Spec) -> dict[str, str]:
    """`common.unread`, with what is of images alone where there are none."""
    of_images = {} if _has_images(spec) else dict.fromkeys(_OF_IMAGES, "no observation is an image")
    return {**common.unread(settings, config), **of_images}


def _has_images(spec: Spec) -> bool:
    return any(len(shape) == 3 for shape in nest.leaves(spec.observation_shape))


def note_unused_head(settings: Any, usual: Any = Head) -> None:
    """Prints which flags of `Head` were chosen, and differ from ``usual`` ones, and do nothing with ``--head``."""
    sized = [name for name in heads.NAMES if name != "scalar"]
    bounded = [name for name in sized if name not in heads.UNBOUNDED]
    of_heads = {
        "head_size": sized,
        "head_low": bounded,
        "head_high": bounded,
        "head_kappa": ["quantile"],
        "head_sigma": ["hl_gauss"],
    }
    for name, users in of_heads.items() if settings.head in heads.NAMES else ():
        # As text, since nan is not equal to itself
        if settings.head not in users and str(getattr(settings, name)) != str(getattr(usual, name)):
            print(
                f"note: --{name} changes nothing with --head={settings.head}: it is of {', '.join(users)}",
                file=sys.stderr,
            )


def note_changed_code(flag: str, folder: Path, card: Mapping[str, Any]) -> None:
    """Prints which files of the user's own code have changed since the run in a folder began.

    Args:
      flag: which names the run.
      folder: of the run.
      card: of its checkpoint.
    """
    named = types.SimpleNamespace(**{"head": "", **card["settings"], "agent": card["agent"]})
    if changed := common.changed_code(folder, common.user_code(named)):
        print(f"note: {flag}: {changed}: what that code trained is now used by other code", file=sys.stderr)


def note_negated_rewards(settings: Any) -> None:
    """Prints that ``--reward_scale`` turns rewards into costs."""
    if str(settings.reward_scale).lstrip().startswith("-"):
        print(f"note: --reward_scale={settings.reward_scale}: rewards are negated", file=sys.stderr)


def note_n_step(settings: Any, config: Any, spec: Spec) -> None:
    """Prints that values hold less entropy, or less of a penalty, where one row stands for several steps.

    Targets add it where the value takes over. For the steps between, the policy would have to be asked in states that
    such rows do not hold; other libraries' n-step SAC leaves it out, too.
    """
    weights = traces.weights(settings.n_step, settings.td_lambda)
    if weights[0] == 1 or not hasattr(config, "discount"):
        return
    # Whether targets add anything does not depend on gamma, and with 1 nothing would bound it.
    bounded = dataclasses.replace(config, discount=0.5)
    if agents.target_range(settings.agent, bounded, spec, 0.0, 0.0) != (0.0, 0.0):
        share = 1 / (weights @ np.cumsum(np.power(float(config.discount), np.arange(len(weights)))))
        drawn = f" --td_lambda={settings.td_lambda}" if settings.td_lambda < 1 else ""
        steps = "the steps of each return" if drawn else f"{settings.n_step} steps"
        print(
            f"note: --n_step={settings.n_step}{drawn} sums rewards alone. What --agent={settings.agent} adds to them, "
            f"entropy, a log-policy or a penalty, is added once for {steps}, so that values of states hold "
            f"{share:.2f} of what they hold of it with --n_step=1",
            file=sys.stderr,
        )


def show_note(settings: Any, loaded: data.Loaded) -> None:
    """Prints what there is to know of the data; where to evaluate only if anything is evaluated."""
    for note in filter(None, loaded.note.split("; ")):
        if settings.eval_episodes or "--environment" not in note:
            print(f"note: {note}", file=sys.stderr)


def parts(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What a result has ``scores`` of: itself without a label or, of a sweep, the variants with theirs."""
    variants = result.get("variants", [])
    labels = outcomes.labels([variant["parameters"] for variant in variants])
    return list(zip(labels, variants, strict=True)) or [("", result)]


def unscored(result: Mapping[str, Any]) -> str:
    """Why a run has no scores, and the flags that give it some."""
    settings = result["settings"]
    if result.get("environment") or not settings["eval_episodes"]:
        return "no episodes were played, so there are no scores: see --eval_episodes"
    estimates = ", or --policy_estimates=2000, say, to estimate values from the data alone"
    return (
        f"no episodes were played, so there are no scores: {settings['dataset']} names no environment: give "
        f"--environment=NAME{estimates if settings.get('policy_estimates') == 0 else ''}"
    )


def show(result: Mapping[str, Any]) -> None:
    """Prints the last scores and estimates of a run, and where everything lies."""
    scored = [(label, part["scores"]) for label, part in parts(result) if part["scores"]]
    for label, scores in scored:
        for name, score in scores.items():
            mean, (low, high) = score["last"]["mean"], score["last"]["ci95"]
            spread = f"95 % interval [{low:.4g}, {high:.4g}] over seeds"
            known = "one seed, so no interval" if math.isnan(low) else spread
            print(f"{label}: {name}: {mean:.4g}, {known}" if label else f"{name}: {mean:.4g}, {known}")
    for label, part in parts(result):
        if estimate := part.get("fitted_q"):
            name = f"{label}: fitted_q" if label else "fitted_q"
            print(
                f"{name}: {estimate['mean']:.4g}, estimated from the data: the discounted return of rewards as the "
                "agent sees them"
            )
    if not scored:
        print(unscored(result))
    show_folder(result)


def show_folder(result: Mapping[str, Any]) -> None:
    """Prints where everything of a run lies, and what to look at first."""
    first = run_folder.CURVE if (Path(result["folder"]) / run_folder.CURVE).exists() else log.METRICS
    print(f"Everything is in {result['folder']}; look at {first} first.")
