"""Published settings as data: ``--preset=paper`` gives an agent those of its paper for the family of its task.

``--preset=ogbench-fql`` or ``ogbench-qc`` gives it those of one comparison, a protocol, and refuses what was not in it.

``presets.yaml`` holds the numbers and where they are from. They stand where no flag says otherwise; a run prints them
at its start and stores them with its card, and what stood in their place. Functions (``offline.run`` and so on) take
settings as they are: `resolve` makes those that a command has.
"""

from __future__ import annotations

import fnmatch
import functools
import operator
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from absl import flags as absl_flags

from experiments import flags
from rl import shard

PAPER, NONE = "paper", "none"
_FILE = Path(__file__).with_name("presets.yaml")
# A run that continues another one has them from there (`experiments.init_from`), whatever is published for its task.
_OF_EARLIER_RUN = ("reward_scale", "reward_shift", "clip_rewards", "head_low", "head_high")

S = TypeVar("S")
T = TypeVar("T")


class Preset(NamedTuple):
    """What was published for an agent on a task."""

    flags: dict[str, Any]  # {flag: value}; the agent's own are called agent.NAME
    sources: list[str]
    missing: list[str]  # what the sources do that these flags do not


@functools.cache
def table() -> dict[str, Any]:
    """presets.yaml."""
    return yaml.safe_load(_FILE.read_text())


def task_name(task: str) -> str:
    """A dataset's or an environment's name without what does not change the task.

    ``hopper-medium-regen-v5`` and ``minari:D4RL/hopper/medium-v2`` are ``hopper-medium``, and
    ``Hopper-v5+distractors10`` is ``Hopper+distractors10``.
    """
    if task.startswith("minari:"):  # a name, or the path of its folder
        task = "-".join(task.split("/")[-3:][1:])
    task = task.removeprefix("jax/")  # tasks of their names, stepped elsewhere
    if file := re.fullmatch(r"(.*)\.(?:hdf5|h5|npz)(\+[^/]*)?", task):
        task = Path(file[1]).name + (file[2] or "")
    return re.sub(r"(-regen)?-v\d+(?=$|\+)", "", task)


def protocols() -> list[str]:
    """Comparisons whose settings ``--preset=NAME`` chooses."""
    return sorted({block["protocol"] for block in table()["presets"] if "protocol" in block})


def find(script: str, agent: str, task: str, head: str, preset: str = PAPER) -> Preset | None:
    """The published settings of an agent for a task; None where there are none.

    Args:
      script: offline, goals, online, mbpo or model_based.
      agent: its name.
      task: a dataset, or an environment's name.
      head: the value head.
      preset: paper, or one of `protocols`, whose blocks alone are taken then. What is explicit is not taken for paper.
    """
    name = task_name(task)
    families = {
        family
        for family, patterns in table()["families"].items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    chosen: dict[str, Any] = {}
    sources: list[str] = []
    missing: list[str] = []
    of_others: list[str] = []  # flags that are published for some heads
    has_own = False  # something is published for this head alone, or for it and some others
    for block in _blocks(script):
        if (
            agent not in _several(block["agent"])
            or not families.intersection(_several(block["family"]))
            or preset not in (NONE if block.get("explicit") else PAPER, block.get("protocol"))
        ):
            continue
        if head not in block.get("heads", [head]):
            of_others += block["flags"]
            continue
        has_own |= "heads" in block
        chosen |= block["flags"]
        matches = [x for pattern, x in block.get("each", {}).items() if fnmatch.fnmatchcase(name, pattern)]
        for values in matches:
            chosen |= values
        sources.append(block["source"])
        missing += [block["missing"]] if "missing" in block else []
        missing += [f"what was tuned for {name} alone"] if "each" in block and not matches else []
    if of_others and not has_own:
        missing.append(f"what is published for other heads alone: {', '.join(dict.fromkeys(of_others))}")
    return Preset(chosen, sources, missing) if chosen else None


def resolve(
    script: str,
    settings: S,
    config_of: Callable[[str], Any],
    task: str,
    overrides: Mapping[str, Any],
) -> tuple[S, Any]:
    """Settings and the agent's hyper-parameters: ``overrides`` over the preset over the defaults.

    Args:
      script: as `find` takes it.
      settings: the script's defaults; their ``preset`` is what is asked for where ``overrides`` has none.
      config_of: an agent's name -> its defaults.
      task: the field of ``settings`` that names the task.
      overrides: {flag: value}; the agent's own are called agent.NAME.

    Raises:
      ValueError: an unknown preset, a protocol without this agent and task, a field that does not exist, or a value of
        another type.
    """
    request: Any = flags.with_fields(settings, _plain(overrides))
    preset = of_settings(script, request, task)
    if preset is None and request.preset in protocols():
        raise ValueError(_outside(script, request, task))
    chosen = {**(preset.flags if preset else {}), **overrides, "preset": request.preset if preset else NONE}
    settings = flags.with_fields(settings, _plain(chosen))
    agent_flags = {name: _value(x, settings) for name, x in _agent_flags(chosen).items()}
    return settings, flags.with_fields(config_of(request.agent), agent_flags, "agent.")


def from_flags(
    script: str,
    settings: S,
    config_of: Callable[[str], Any],
    task: str,
    values: absl_flags.FlagValues = absl_flags.FLAGS,
) -> tuple[S, Any]:
    """`resolve` with the flags of the command line; prints the preset."""
    config = config_of(flags.read(settings, values=values).agent)  # type: ignore[attr-defined]
    agent_flags = {f"agent.{name}": value for name, value in flags.present(config, "agent.", values).items()}
    overrides = {**flags.present(settings, values=values), **agent_flags}
    settings, config = resolve(script, settings, config_of, task, overrides)
    preset = stored(script, settings, config, task)
    if preset and shard.is_main():
        published = {name: _text(_value(value, settings)) for name, value in preset["flags"].items()}
        chosen = " ".join(f"--{name}={text}" for name, text in published.items())
        print(f"published settings ({'; '.join(preset['sources'])}): {chosen}", file=sys.stderr)
        if preset["replaced"]:
            print(f"replaced by flags: {', '.join(preset['replaced'])}", file=sys.stderr)
        if preset["missing"]:
            print(f"published otherwise: {'; '.join(preset['missing'])}", file=sys.stderr)
    return settings, config


def stored(script: str, settings: Any, config: Any, task: str) -> dict[str, Any] | None:
    """What a run's card says of the preset that its settings name, and what stands in its place; None for none.

    Settings that were not made by `resolve` may have the name alone: then all is ``replaced``.

    Raises:
      ValueError: an unknown preset.
    """
    preset = of_settings(script, settings, task)
    if preset is None:
        return None
    published, chosen = _values(*usual(script, settings, type(config)(), task)), _values(settings, config)
    replaced = {name: chosen[name] for name in preset.flags if _text(chosen[name]) != _text(published[name])}
    return {"name": settings.preset, **preset._asdict(), "replaced": replaced}


def usual(script: str, settings: S, config: T, task: str) -> tuple[S, T]:
    """What settings and hyper-parameters are where no flag is given but those that choose agent, task and preset.

    Without a preset hyper-parameters are those of ``config``, the agent's defaults.
    """
    preset = of_settings(script, settings, task)
    chosen = preset.flags if preset else {}
    agent_flags = {name: _value(x, settings) for name, x in _agent_flags(chosen).items()}
    return (
        flags.with_fields(type(settings)(), _plain(chosen)),
        flags.with_fields(config, agent_flags, "agent."),
    )


def _values(settings: Any, config: Any) -> dict[str, Any]:
    """{flag: value}."""
    of_agent = {f"agent.{name}": operator.attrgetter(name)(config) for name in flags.names(config)}
    return {name: operator.attrgetter(name)(settings) for name in flags.names(settings)} | of_agent


def of_settings(script: str, settings: Any, task: str) -> Preset | None:
    """The preset that ``settings`` name, less what ``--init_from`` decides; None for none.

    Raises:
      ValueError: it is unknown.
    """
    known = (PAPER, *protocols(), NONE)
    if settings.preset not in known:
        raise ValueError(f"--preset={settings.preset} is none of {', '.join(known)}")
    if settings.preset == NONE:
        return None
    preset = find(script, settings.agent, getattr(settings, task), settings.head, settings.preset)
    continues = bool(getattr(settings, "init_from", ""))
    if preset is None or not continues:
        return preset
    return preset._replace(flags={k: x for k, x in preset.flags.items() if k not in _OF_EARLIER_RUN})


def _outside(script: str, settings: Any, task: str) -> str:
    """What a protocol has instead of an agent and a task that are not in it."""
    blocks = [block for block in _blocks(script) if block.get("protocol") == settings.preset]
    if not blocks:
        return f"--preset={settings.preset} is not for experiments.{script}: leave it out"
    blocks = [block for block in blocks if settings.agent in _several(block["agent"])] or blocks
    agents = sorted({agent for block in blocks for agent in _several(block["agent"])})
    families = {family for block in blocks for family in _several(block["family"])}
    patterns = [
        pattern
        for family, several in table()["families"].items()
        if family in families
        for pattern in several
    ]
    other = PAPER if find(script, settings.agent, getattr(settings, task), settings.head) else NONE
    return (
        f"--preset={settings.preset} has no settings of {settings.agent} for --{task}={getattr(settings, task)}: it "
        f"has {', '.join(agents)} on {', '.join(patterns)}. Choose one of them, or --preset={other}"
    )


def _blocks(script: str) -> list[dict[str, Any]]:
    """Those of the table that are for this script."""
    return [block for block in table()["presets"] if block.get("script", "offline") == script]


def _several(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def _plain(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in overrides.items() if not name.startswith("agent.")}


def _agent_flags(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("agent."): x for name, x in overrides.items() if name.startswith("agent.")}


def _value(value: Any, settings: Any) -> Any:
    """That of the flag which a value of the table names, or else itself."""
    if isinstance(value, str) and value.startswith("--"):
        return getattr(settings, value.removeprefix("--"))
    return value


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
