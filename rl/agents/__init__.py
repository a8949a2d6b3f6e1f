"""One algorithm per file, each as close to its paper's algorithm box as code can be.

Every file holds a frozen ``Config`` and a ``make(config, spec, head, optimiser)`` that returns a
`rl.types.Learner`. What two agents share is imported from ``rl.values`` and ``rl.networks``. No file,
device, logger or loop is known here.
"""

from __future__ import annotations

import difflib
from types import ModuleType

from rl.agents import bc, cql, dqn, edac, iql, rebrac, sac_n, td3_bc

AGENTS: dict[str, ModuleType] = {
    "bc": bc,
    "cql": cql,
    "dqn": dqn,
    "edac": edac,
    "iql": iql,
    "rebrac": rebrac,
    "sac_n": sac_n,
    "td3_bc": td3_bc,
}


def get(name: str) -> ModuleType:
    """The agent's module. Raises ValueError on an unknown name, with the nearest known one."""
    if name in AGENTS:
        return AGENTS[name]
    near = difflib.get_close_matches(name, AGENTS, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown agent {name!r}{hint} Known: {', '.join(AGENTS)}")
