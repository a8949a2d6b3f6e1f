"""The scripts that train, as a sweep sees them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from experiments import common
from rl import outcomes

_EVALUATIONS = tuple(f"eval/{name}" for name in (*outcomes.SCORES, "length", "fitted_q"))  # of policies


class Script(NamedTuple):
    """A script that trains, as a sweep sees it."""

    task: str  # the setting that names what is learned from or in
    length: str = "updates"  # the setting that says how long, and the entry in result.json
    per_unit: str = ""  # the agent's setting that says how many steps one unit of the length is; without, one
    together: bool = False  # whether it trains runs together that differ in float hyper-parameters
    presets: bool = True  # whether it has published settings
    evaluations: tuple[str, ...] = _EVALUATIONS  # the metrics that it may log of them; (): others, too

    def steps(self, settings: Any, config: Any, name: str = "") -> int:
        """How long a run is to be, or another setting ``name`` of that unit, in what its metrics count."""
        units: int = getattr(settings, name or self.length)
        return units * (getattr(config, self.per_unit) if self.per_unit else 1)


SCRIPTS = {
    "offline": Script("dataset", together=True),
    "goals": Script("dataset", together=True),
    "online": Script("env", "steps"),
    "mbpo": Script("env", "steps"),
    "model_based": Script("dataset", "epochs", per_unit="updates"),
    "language": Script("log", presets=False, evaluations=()),
}
PROGRAMS = {f"experiments/{name}.py": name for name in SCRIPTS}


def module(script: str) -> ModuleType:
    """Imported where it is needed: nobody should wait for six scripts to run one."""
    return importlib.import_module(f"experiments.{script}")


def defaults(script: str) -> Any:
    """The settings of a run without flags."""
    of_script = module(script)
    return of_script.PUBLISHED if SCRIPTS[script].presets else of_script.Settings()


def config_of(script: str) -> Callable[[str], Any]:
    """An agent's name -> its default hyper-parameters."""
    of_script = module(script)
    configs: dict[str, Callable[[str], Any]] = {
        "model_based": lambda name: of_script.config(name),
        "language": lambda name: of_script.agent(name).Config(),
    }
    return configs.get(script, common.config)
