"""One algorithm per file, each as close to its paper's algorithm box as code can be.

Every agent of `AGENTS` is a file with a frozen ``Config`` and a ``make(config, spec, head, optimiser)`` that returns a
`rl.types.Learner`. Those of language (``ilql``, ``bcoder``, ``lm_bc``) have a language model in place of the spec, and
those with linear values (``pevi``, ``r2pvi``, ``drpvi``, ``robust_vi``) an estimate in place of updates. What two
agents share is imported, from here too (``state``, ``optimisers``, ``extraction``). No file, device, logger or loop is
known here.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
from types import ModuleType
from typing import Any

from rl.agents import (
    arsq,
    bc,
    cql,
    cqn,
    crl,
    deas,
    dqn,
    edac,
    fql,
    gcbc,
    gciql,
    gcivl,
    hecrl,
    hiql,
    ifql,
    iql,
    qrl,
    rebrac,
    sac,
    sac_n,
    td3,
    td3_bc,
)
from rl.types import Spec, Transition

AGENTS: dict[str, ModuleType] = {
    "arsq": arsq,
    "bc": bc,
    "cql": cql,
    "cqn": cqn,
    "crl": crl,
    "deas": deas,
    "dqn": dqn,
    "edac": edac,
    "fql": fql,
    "gcbc": gcbc,
    "gciql": gciql,
    "gcivl": gcivl,
    "hecrl": hecrl,
    "hiql": hiql,
    "ifql": ifql,
    "iql": iql,
    "qrl": qrl,
    "rebrac": rebrac,
    "sac": sac,
    "sac_n": sac_n,
    "td3": td3,
    "td3_bc": td3_bc,
}

SETTINGS = {
    "qc": "QC is fql on chunks of actions, --agent=fql --chunk=5 --agent.extraction=best_of; --preset=ogbench-qc has "
    "its published settings"
}
"""Published names of what is a setting of an agent here, with the flags that choose it."""

GOALS = tuple(name for name, module in AGENTS.items() if hasattr(module.Config, "goals"))
"""Those that learn to reach goals (`rl.replay.goals`), and not from rewards."""


def target_range(agent: str, config: Any, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """What the targets of an agent reach, where rewards alone give values from ``low`` to ``high``.

    An agent whose targets hold more than rewards (an entropy bonus, a penalty) says how far they reach in a function
    ``target_range(config, spec, low, high)`` of its module. Supports of categorical heads are chosen by it. With a
    discount of 1 nothing bounds what all steps to come add up to.
    """
    widen = getattr(get(agent), "target_range", None)
    if widen is None:
        return low, high
    return (-math.inf, math.inf) if config.discount == 1 else widen(config, spec, low, high)


def check_data(agent: str, config: Any, logged: Transition | None) -> None:
    """Raises ValueError if the logged data [N] of a run (None: it has none) are not what the agent asks for.

    An agent that asks for something, such as rows that are flagged as demonstrations, says so in a function
    ``check_data(config, logged)`` of its module.
    """
    check = getattr(get(agent), "check_data", None)
    if check:
        check(config, logged)


def get(name: str) -> ModuleType:
    """The agent's module: one of `AGENTS`, or any module with a ``Config`` and a ``make``, as ``package.module``.

    Raises:
      ValueError: on an unknown name, with the nearest known one, or a module that is no agent.
      ImportError: there is no such module.
    """
    if name in AGENTS:
        return AGENTS[name]
    if name.endswith(".py") or "/" in name or "\\" in name:
        dots = ".".join(
            word for word in re.split(r"[/\\]", name.removesuffix(".py")) if word not in ("", ".")
        )
        raise ValueError(
            f"agent {name!r}: give a module by its name and not by its file, --agent={dots}, from the folder that its "
            "name starts in"
        )
    if "." in name:
        module = importlib.import_module(name)
        if not (hasattr(module, "Config") and hasattr(module, "make")):
            raise ValueError(
                f"module {name!r} is no agent: it needs a Config and a make, as rl.agents.iql has"
            )
        return module
    if name in SETTINGS:
        raise ValueError(f"unknown agent {name!r}: {SETTINGS[name]}")
    near = difflib.get_close_matches(name, AGENTS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    of_rewards = ", ".join(known for known in AGENTS if known not in GOALS)
    raise ValueError(
        f"unknown agent {name!r}: {hint}known are {of_rewards}, to reach goals (experiments.goals) {', '.join(GOALS)}, "
        "and your own package.module"
    )
