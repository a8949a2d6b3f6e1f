"""One algorithm per file, each as close to its paper's algorithm box as code can be.

Every agent of `AGENTS` is a file with a frozen ``Config`` and a ``make(config, spec, head, optimiser)`` that returns a
`rl.types.Learner`. Those of language (``ilql``, ``bcoder``, ``lm_bc``) have a language model in place of the spec, and
those with linear values (``pevi``, ``r2pvi``, ``drpvi``, ``robust_vi``) an estimate in place of updates. What two
agents share is imported, from here too (``state``, ``optimisers``, ``extraction``, ``requirements``). No file, device,
logger or loop is known here.

The arguments of every ``make`` are

- ``config``: the agent's hyper-parameters, an instance of its ``Config``;
- ``spec``: shapes of observations and actions, as the agent sees them (`rl.types.Spec`);
- ``head``: how its values are represented (`rl.values.heads.ValueHead`);
- ``optimiser``: learning rate -> optax transformation, Adam by default.

Scripts ask a module for more, all of which it may leave out:

| in the module | what scripts make of it |
|---|---|
| ``target_range(config, spec, low, high)`` | what its targets reach if they hold more than rewards |
| ``check_data(config, logged)`` | raises ValueError for data that it cannot learn from |
| ``unused(config)`` | {field of its ``Config``: why} of those that do nothing beside the others, for a note |
| ``IGNORES_REWARDS = True`` | it only clones: no discount, and no value for a head |
| ``READS_SETS = True`` | observations [N, F] are sets of entities; to all others they are histories [T, F] |
| ``token_values(config, lm, head)`` | of language: a function that says what every token is worth; None: no values |

and by these names for fields of its ``Config``:

| field | what scripts make of it |
|---|---|
| ``discount`` | gamma, for supports, returns over several steps, chunks, estimates, robust targets and goals |
| ``chunk_discount`` | gamma of rewards within a chunk of actions |
| ``goals`` | a `rl.replay.goals.Hindsight`: it learns to reach goals, from batches that are drawn so (`GOALS`) |
| ``policy_delay`` | updates per update of the policy, whose metrics are 0 on the others and times the delay on it |
| ``ignore_terminals`` | it bootstraps beyond terminations, and is not combined with returns over several steps |
| ``slow_policy`` | it acts by the target network: that is what is exported |
| ``candidates`` and ``extraction`` | it acts by the best of several draws, so that its critics are exported, too |

A head of one's own says ``UNBOUNDED = True`` on its function if it has no support (`rl.values.heads.make`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import pkgutil
import re
import sys
from types import ModuleType
from typing import Any

from rl.settings import did_you_mean
from rl.types import Spec, Transition

_NAMES = "arsq bc cql cqn crl deas dqn edac fql gcbc gciql gcivl hecrl hiql ifql iql qrl rebrac sac sac_n td3 td3_bc"
AGENTS: dict[str, ModuleType] = {
    name: importlib.import_module(f"rl.agents.{name}") for name in _NAMES.split()
}

SETTINGS = {
    "qc": "QC is fql on chunks of actions, --agent=fql --chunk=5 --agent.extraction=best_of; --preset=ogbench-qc has "
    "its published settings",
    "rebrac_10": "ReBRAC with ten critics is --agent=rebrac --agent.critics=10 --agent.aggregation=pessimistic "
    "--agent.critic_cloning=0, and on most tasks --agent.policy_noise=0 (rl.agents.rebrac)",
    "redq": "REDQ is --agent=sac --agent.critics=10 --agent.subset=2 --agent.policy_delay=20 --utd=20",
    "mbpo": "MBPO is sac in a model, python -m experiments.mbpo --agent=sac --model_loss=mle",
    "vagram": "VaGraM is sac in a model, python -m experiments.mbpo --agent=sac --model_loss=vagram",
    **dict.fromkeys(("xql", "x_ql"), "X-QL is --agent=iql --agent.gumbel=2 (rl.agents.iql)"),
    **dict.fromkeys(
        ("ddqn", "double_dqn"), "it is dqn, whose estimator is double unless --agent.double=false"
    ),
    **{
        name: f"it is dqn with a head, --agent=dqn --head={head}"
        for name, head in (("c51", "c51"), ("qr_dqn", "quantile"))
    },
}
"""Published names of what is a setting of an agent here, with the flags that choose it."""

SCRIPTS = {
    **dict.fromkeys(("base", "mopo", "mopo_disagreement", "mobile", "ravl"), "model_based"),
    **dict.fromkeys(("bcoder", "ilql", "lm_bc"), "language"),
}
"""Names of what `get` does not know, since the script of experiments/ that runs it makes it in another way."""

GOALS = tuple(name for name, module in AGENTS.items() if hasattr(module.Config, "goals"))
"""Those that learn to reach goals (`rl.replay.goals`), and not from rewards."""


def target_range(agent: str, config: Any, spec: Spec, low: float, high: float) -> tuple[float, float]:
    """What the targets of an agent reach, where rewards alone give values from ``low`` to ``high``.

    An agent whose targets hold more than rewards (an entropy bonus, a penalty) says how far they reach in a function
    ``target_range(config, spec, low, high)`` of its module. Supports of categorical heads are chosen by it. With a
    discount of 1 nothing bounds what is added in all steps to come: there an end is infinite.
    """
    widen = getattr(get(agent), "target_range", None)
    if widen is None:
        return low, high
    try:
        low, high = map(float, widen(config, spec, low, high))  # one's own may compute them with jax.numpy
        return low, high
    except ZeroDivisionError:  # an agent of one's own that divides by 1 - discount
        return -math.inf, math.inf


def check_data(agent: str, config: Any, logged: Transition | None) -> None:
    """Raises ValueError if the logged data [N] of a run (None: it has none) are not what the agent asks for.

    An agent that asks for something, such as rows that are flagged as demonstrations, says so in a function
    ``check_data(config, logged)`` of its module.
    """
    check = getattr(get(agent), "check_data", None)
    if check:
        check(config, logged)


def unused(agent: str, config: Any) -> dict[str, str]:
    """{field: why} of the hyper-parameters that do nothing beside the others in ``config``.

    An agent that has such says so in a function ``unused(config)`` of its module. ``goals.mask`` is a field of the
    field ``goals``, and a field that is a dataclass stands for all of its own.
    """
    tell = getattr(get(agent), "unused", None)
    return tell(config) if tell else {}


def reads_sets(agent: str) -> bool:
    """Whether an agent takes observations [N, F] for sets of entities, of which there may be any number."""
    return agent not in SCRIPTS and getattr(get(agent), "READS_SETS", False)


def get(name: str) -> ModuleType:
    """The agent's module: one of `AGENTS`, or any with a ``Config`` and a ``make``: ``module``, ``package.module``.

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
    if "." not in name and not _is_user_module(name):
        raise ValueError(f"unknown agent {name!r}: {_hint(name)}")
    module = _imported(name)
    if hasattr(module, "Config") and hasattr(module, "make"):
        _check_arguments(name, module.make)
        return module
    if "." not in name and not (hasattr(module, "Config") or hasattr(module, "make")):
        raise ValueError(f"unknown agent {name!r}: {_hint(name)}")  # of a library, say
    raise ValueError(f"module {name!r} is no agent: it needs a Config and a make, as rl.agents.iql has")


def _check_arguments(name: str, make: Any) -> None:
    """Raises ValueError if the ``make`` of an agent cannot be called with a config, a spec and a head."""
    try:
        inspect.signature(make).bind("config", "spec", "head")
    except TypeError as error:
        raise ValueError(
            f"agent {name!r}: its make is called as make(config, spec, head), and cannot be: {error}"
        ) from None


def _is_user_module(name: str) -> bool:
    """Whether a name without dots is that of a module outside Python's own, some of which do things on import."""
    return (
        name.isidentifier() and name not in sys.stdlib_module_names and bool(importlib.util.find_spec(name))
    )


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(
            f"{error.name}."
        ):  # something that the agent imports
            raise
        hint = did_you_mean(name, _beside(name))
        raise ModuleNotFoundError(
            f"{error}: {hint}--agent={name} is looked for from the current folder and in the Python path",
            name=error.name,
        ) from None


def _beside(name: str) -> list[str]:
    """The modules of the package that ``package.module`` names."""
    package = name.rpartition(".")[0]
    paths = getattr(sys.modules.get(package), "__path__", ())
    return [module.name for module in pkgutil.iter_modules(paths, f"{package}.")]


def _hint(name: str) -> str:
    """What to give in place of a name that is no agent's."""
    usual = name.lower().replace("-", "_")
    if usual in SETTINGS:
        return SETTINGS[usual]
    if script := SCRIPTS.get(usual):
        settings = f"; from Python, rl.model_based.METHODS[{usual!r}] are its settings" * (
            script == "model_based"
        )
        return f"it is run by python -m experiments.{script} --agent={usual}{settings}"
    hint = did_you_mean(usual, AGENTS)
    reward_agents = ", ".join(known for known in AGENTS if known not in GOALS)
    return (
        f"{hint}known are {reward_agents}, to reach goals (experiments.goals) {', '.join(GOALS)}, and your own module "
        "or package.module, found from the current folder"
    )
