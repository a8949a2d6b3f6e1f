"""The programs of a sweep and their folders: which runs are trained together, and where.

Runs of one program differ in nothing but float hyper-parameters of the agent. The folder of a program is named by its
parameters, so that a file to which more was added since finds again what it has trained.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from experiments import common, presets
from experiments import flags as config_flags
from rl import agents, checkpoint, data, locks, log, run_folder, train
from rl.files import expanded
from rl.types import Spec
from rl.values import heads
from sweeps import files, scripts
from sweeps.scripts import SCRIPTS

CLAIM = ".claim"  # locked by the process that prepares or trains the program of the folder
# Settings of a run that decide nothing that it learns, nor what it writes when it ends (but see `_indifferent`).
INDIFFERENT = (
    *("overwrite", "tensorboard", "wandb", "eval_processes", "env_processes"),
    *("mesh_seed", "mesh_data", "mesh_model", "read_once"),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """Runs that one compiled program trains: they share ``fixed`` and differ in ``swept``."""

    fixed: dict[str, Any]
    swept: dict[str, list[float]]  # {flag: one value per run}; empty for a single run
    script: str = "offline"  # one of SCRIPTS

    @property
    def runs(self) -> int:
        return len(next(iter(self.swept.values()), [None]))

    def single_runs(self) -> list[Program]:
        """Its runs, each as a program of its own."""
        return [
            Program(self.fixed, {name: [values[i]] for name, values in self.swept.items()}, self.script)
            for i in range(self.runs)
        ]


class Sweep(NamedTuple):
    """A sweep file with what was asked for beside it."""

    file: str
    script: str  # one of SCRIPTS
    metric: str
    goal: str  # maximize or minimize
    root: Path  # the folder of all its programs
    runs: int
    programs: dict[Path, Program]  # by their folders
    # When the command did that trains it, by `time.time`: what failed since then it does not try again.
    began: float = math.inf


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """The flags that decide which programs a sweep has, and where they lie."""
    flags.DEFINE_integer("count", 10, "draws of a random sweep", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "decides what a random sweep draws", 0, flag_values=values)
    flags.DEFINE_integer("together", 16, "runs trained as one program, at most", 1, flag_values=values)
    flags.DEFINE_string("workdir", "", "where results go; by default runs/sweeps/FILE", values)
    flags.DEFINE_multi_string(
        "set", [], "flag=value in place of what the file says of that flag; may be repeated", values
    )
    flags.DEFINE_multi_string(
        "finished", [], "a further folder of finished runs, of another machine say; may be repeated", values
    )


def from_flags(file: str, overrides: Mapping[str, Any], values: flags.FlagValues) -> Sweep:
    """`load` with the flags of `define`, over which ``overrides`` win; `with_finished` with --finished."""
    sweep = load(
        file,
        {**files.overrides(values.set), **overrides},
        values.workdir,
        count=values.count,
        seed=values.seed,
        together=values.together,
    )
    return with_finished(sweep, values.finished)


def check_draws(sweeps: Sequence[str], values: flags.FlagValues) -> None:
    """Raises ValueError on flags of a random sweep where the files are grids, which would ignore them."""
    given = [f"--{name}" for name in ("count", "seed") if values[name].present]
    if given and all(files.read(file)["method"] == "grid" for file in sweeps):
        raise ValueError(
            f"{', '.join(sweeps)}: {', '.join(given)}: only a random sweep draws its runs, and a grid has them all: "
            "leave it out; run_cap in the file is the most runs, --set=seed=NUMBER the seed of each run"
        )


def load(
    file: str,
    overrides: Mapping[str, Any],
    workdir: str = "",
    *,
    count: int = 10,
    seed: int = 0,
    together: int = 16,
) -> Sweep:
    """The sweep in a file, laid out; what its folders hold is not looked at.

    Args:
      file: of the sweep.
      overrides: {flag: value} in place of what the file says of that flag.
      workdir: the folder of all its programs; by default runs/sweeps/FILE.
      count, seed: of a random sweep, how many draws, and of which they are.
      together: runs trained as one program, at most.

    Raises:
      ValueError: a file or a flag that cannot be used; the message names the file.
    """
    sweep = files.overridden(files.read(file), overrides)
    root = expanded(workdir or f"runs/sweeps/{Path(file).stem}")
    try:
        runs = list(files.combinations(sweep, count, seed))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if not runs:
        raise ValueError(f"{file} asks for no runs: one of its parameters has no values")
    script, metric = scripts.PROGRAMS[sweep["program"]], sweep["metric"]
    try:
        planned = plan(runs, together, script, root)
    except ValueError as error:
        lacking = "has no setting" in str(error) and len({str(run.get("agent")) for run in runs}) > 1
        apart = "; an agent without it needs a file of its own, and one report takes both files" * lacking
        raise ValueError(f"{file}: {error}{apart}") from None
    return Sweep(file, script, metric["name"], metric["goal"], root, len(runs), planned)


def plan(runs: list[dict[str, Any]], most: int, script: str, root: Path) -> dict[Path, Program]:
    """The programs of a sweep by their folders, of which nothing is read.

    Raises:
      ValueError: parameters that cannot be run, an unknown dataset or head, two equal runs, or programs of one folder.
    """
    planned: dict[Path, Program] = {}
    for program in programs(runs, most, script):
        place = folder(program, root)
        settings, *_ = arguments(program, place)
        swept = [
            dict(zip(program.swept, values, strict=True))
            for values in zip(*program.swept.values(), strict=True)
        ]
        if twice := next((run for i, run in enumerate(swept) if run in swept[:i]), None):
            raise ValueError(
                f"two runs of the sweep are the same, {twice} with {program.fixed}: give each value once"
            )
        if hasattr(settings, "dataset"):
            data.check_name(settings.dataset)
        heads.check_name(getattr(settings, "head", "scalar"))
        if place in planned:
            length = SCRIPTS[script].length
            equal = ", ".join(f"--{name}" for name in (length, *_indifferent(program)))
            raise ValueError(
                f"two runs of the sweep would share {place}: they differ in nothing but {equal}, if at all "
                f"({planned[place].fixed} and {program.fixed}). Give each value once, and another --workdir for "
                f"each --{length}"
            )
        planned[place] = program
    return planned


def programs(runs: list[dict[str, Any]], most: int, script: str = "offline") -> list[Program]:
    """Groups runs that one program can train, at most ``most``: equal but for float hyper-parameters.

    A value of 0 stays out of a group, because it may switch a term off; so do the discounts, by which the support of
    categorical heads and the returns of chunks are made. Runs whose support the data give are grouped where their
    targets reach equally far beyond the rewards: the support of a run depends on no other.
    """
    groups: dict[str, list[Program]] = {}
    names = {name for run in runs for name in run}
    differ = {name for name in names if any(run.get(name) != runs[0].get(name) for run in runs)}
    for run in runs:
        varying = sorted(name for name in differ & run.keys() if _can_be_swept(run, name, run[name], script))
        fixed = {name: value for name, value in run.items() if name not in varying}
        reach = _reach(run, script) if varying else []
        group = groups.setdefault(json.dumps([fixed, varying, reach], sort_keys=True), [])
        if not group or not varying or group[-1].runs >= most:
            group.append(Program(fixed, {name: [] for name in varying}, script))
        for name in varying:
            group[-1].swept[name].append(float(run[name]))
    return [program for group in groups.values() for program in group]


def _can_be_swept(run: Mapping[str, Any], name: str, value: Any, script: str) -> bool:
    field = name.removeprefix("agent.")
    if not SCRIPTS[script].together or field == name or field in ("discount", "chunk_discount"):
        return False
    if type(value) not in (int, float) or value == 0:
        return False
    config = scripts.config_of(script)(run.get("agent", scripts.defaults(script).agent))
    return train.can_be_swept(config, field)


def _reach(run: dict[str, Any], script: str) -> list[float]:
    """Where the targets of a run end if rewards give values in [0, 1], at those ends of a support that no flag gives.

    Of one and of two actions, since targets may reach further with their number; nothing for a head without a support.
    """
    settings, config, _ = arguments(Program(run, {}, script), Path())
    if not heads.has_support(settings.head):
        return []
    ranges = [agents.target_range(settings.agent, config, Spec((1,), size), 0.0, 1.0) for size in (1, 2)]
    flags_of_ends = (settings.head_low, settings.head_high)
    return [end for ends in ranges for end, flag in zip(ends, flags_of_ends, strict=True) if math.isnan(flag)]


def arguments(program: Program, workdir: Path) -> tuple[Any, Any, dict[str, list[float]]]:
    """What the script's ``run`` takes. Raises ValueError on a parameter that does not exist or has another type."""
    script, module = SCRIPTS[program.script], scripts.module(program.script)
    fixed = program.fixed | {"workdir": str(workdir)}
    if "workdir" in program.fixed:
        raise ValueError(
            "the sweep sets workdir, which decides where runs are stored: give --workdir to the runner"
        )
    defaults, config_of = scripts.defaults(program.script), scripts.config_of(program.script)
    config = config_of(str(fixed.get("agent", defaults.agent)))
    settings_known = config_flags.names(defaults)
    known = [*settings_known, *(f"agent.{name}" for name in config_flags.names(config))]
    for name in fixed:
        if name in settings_known or hasattr(defaults, name) or name.startswith("agent."):
            continue
        near = difflib.get_close_matches(f"agent.{name}" if f"agent.{name}" in known else name, known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f"; it has {', '.join(settings_known)}"
        raise ValueError(f"experiments.{program.script} has no setting {name!r}{hint}")
    if script.presets:
        settings, config = presets.resolve(program.script, defaults, config_of, script.task, fixed)
    else:
        fields = {name.removeprefix("agent."): x for name, x in fixed.items() if name.startswith("agent.")}
        plain = {name: x for name, x in fixed.items() if not name.startswith("agent.")}
        settings = config_flags.with_fields(defaults, plain)
        config = config_flags.with_fields(config, fields, "agent.")
    module.check(settings, *([config] if program.script == "model_based" else []))
    return settings, config, {name.removeprefix("agent."): v for name, v in program.swept.items()}


def folder(program: Program, root: Path) -> Path:
    """Where the program is trained: a folder that its parameters name, but not how long it is trained, nor how.

    One that is there, of a program that says the same with fewer words, is its own: a parameter was written out since,
    such as ``seed``, to be given other values beside its default.
    """
    place = _folder(program, root)
    if place.exists():
        return place
    for name in program.fixed:
        shorter = dataclasses.replace(program, fixed={k: x for k, x in program.fixed.items() if k != name})
        earlier = _folder(shorter, root)
        if earlier.exists() and _same(arguments(shorter, place), arguments(program, place)):
            return earlier
    return place


def _same(one: Any, other: Any) -> bool:
    """Whether settings are equal, of which a NaN, as in ``head_low``, is no value that differs from itself."""
    return repr(one) == repr(other)


def _folder(program: Program, root: Path) -> Path:
    script = SCRIPTS[program.script]
    fixed = {
        name: _canonical(program, name)
        for name in program.fixed
        if name not in (script.length, *_indifferent(program))
    }
    text = json.dumps([program.script, fixed, program.swept], sort_keys=True, default=str)
    words = [
        Path(str(program.fixed[name])).name
        for name in ("agent", script.task, "head")
        if name in program.fixed
    ]
    return root / "-".join([*words, hashlib.sha256(text.encode()).hexdigest()[:8]])


def _indifferent(program: Program) -> tuple[str, ...]:
    """`INDIFFERENT`, but for how many devices share the batches where each draws from a part of the log of its own."""
    parts = program.fixed.get("split_data") and _canonical(program, "split_data") is True
    return tuple(name for name in INDIFFERENT if not (parts and name == "mesh_data"))


def _canonical(program: Program, name: str) -> Any:
    """A fixed value however the file writes it, so that one run has one folder; of an unknown flag, as it is."""
    defaults, config_of = scripts.defaults(program.script), scripts.config_of(program.script)
    owner, field = defaults, name
    if name.startswith("agent."):
        owner, field = config_of(str(program.fixed.get("agent", defaults.agent))), name.removeprefix("agent.")
    known = field in config_flags.names(owner)
    return config_flags.canonical(owner, field, program.fixed[name]) if known else program.fixed[name]


def single_run_folders(program: Program, place: Path) -> dict[Path, Program]:
    """The runs of a program by the folders in which each is trained alone if they diverge together.

    Seeds of one run are fewer than those of all, and are spread over so many devices as divide them; the others share
    its batches.
    """
    spread = {}
    if "mesh_seed" in program.fixed:
        seeds = program.fixed.get("seeds", getattr(scripts.defaults(program.script), "seeds", 1))
        groups = int(program.fixed["mesh_seed"])
        spread["mesh_seed"] = math.gcd(groups, int(seeds))
        if (rows := int(program.fixed.get("mesh_data", -1))) > 0:  # as many devices as before
            spread["mesh_data"] = rows * groups // spread["mesh_seed"]
    return {
        place / f"{i:03d}": dataclasses.replace(part, fixed={**part.fixed, **spread})
        for i, part in enumerate(program.single_runs())
    }


def finished(program: Program, place: Path) -> bool:
    """`has_result`, and all else that the program was asked for, pictures or a ranking say."""
    return has_result(program, place) and not (place / run_folder.UNFINISHED).exists()


def has_result(program: Program, place: Path) -> bool:
    """Whether the program's result is there, as long as the sweep asks for, and not to be overwritten."""
    if not (place / log.RESULT).exists() or (place / run_folder.OVERWRITE).exists():
        return False
    length = SCRIPTS[program.script].length
    return log.read_json(place / log.RESULT).get(length) == getattr(arguments(program, place)[0], length)


def overwrites(program: Program) -> bool:
    """Whether the program is to be trained again where it is finished."""
    return "overwrite" in program.fixed and arguments(program, Path())[0].overwrite


def mark(sweep: Sweep) -> None:
    """Marks what is there of the programs that a command is to `overwrites`, so that commands after it go on with that.

    A run removes the mark when it starts. What a process has open is being trained already, and is not marked.
    """
    for place, program in sweep.programs.items():
        folders = [place, *single_run_folders(program, place)]
        if overwrites(program) and not (locks.holder(place, CLAIM) or any(map(locks.holder, folders))):
            for folder in filter(Path.is_dir, folders):
                (folder / run_folder.OVERWRITE).touch()


def with_finished(sweep: Sweep, folders: Sequence[str]) -> Sweep:
    """The sweep, whose programs that are finished in one of ``folders``, and not in its own, lie there.

    Those that are to be trained again do not.

    Args:
      sweep: as laid out by `load`.
      folders: of finished runs, such as `experiments.report` stores with ``--store``, from any machine.

    Raises:
      ValueError: one of them is no folder.
    """
    others = [expanded(folder) for folder in folders]
    for other in others:
        if not other.is_dir():
            raise ValueError(f"--finished={other} is no folder: experiments.report --store makes one")

    def where(place: Path, program: Program) -> Path:
        if overwrites(program) or (place / run_folder.OVERWRITE).exists():
            return place
        stored = (folder(program, other) for other in others)
        return next((x for x in (place, *stored) if finished(program, x)), place)

    return sweep._replace(programs={where(*item): item[1] for item in sweep.programs.items()})


def check_folder(program: Program, place: Path, root: Path) -> None:
    """Raises CheckpointError or ValueError if the folder holds a run that is not this program, or a longer one.

    A folder that is not in the sweep's, ``root``, is one of --finished.
    """
    settings, config, sweep = arguments(program, place)
    if (place / log.CONFIG).exists() and not (settings.overwrite or (place / run_folder.OVERWRITE).exists()):
        _check_same(place, root, program.script, settings, config, sweep)
        _check_length(place, SCRIPTS[program.script].length, settings)


def _check_same(
    place: Path, root: Path, script: str, settings: Any, config: Any, sweep: Mapping[str, Any]
) -> None:
    """Raises CheckpointError if the run in the folder, finished or not, is of other settings than are now meant.

    Their flags are the same, so that what differs are defaults, presets or the code of this version. A setting or a
    hyper-parameter that the run did not know yet had the effect of its default. What a script decides itself where no
    flag does (its ``LEFT_OPEN``) it has written down as it decided.
    """
    stored = log.read_json(place / log.CONFIG).get("config", {})
    module, usual = scripts.module(script), type(settings)()
    left_open = {
        name
        for name in getattr(module, "LEFT_OPEN", ())
        if _same(getattr(settings, name), getattr(usual, name))
    }
    without = left_open.union(common.FORMER)
    before = {name: x for name, x in stored.get("settings", {}).items() if name not in without}
    stored = stored | {"settings": before}
    new = [
        name
        for name in (module.IDENTITY if SCRIPTS[script].task in before else ())
        if name not in before and str(getattr(settings, name)) != str(getattr(usual, name))
    ]
    identity = [name for name in (*before, *new) if hasattr(settings, name)]
    usual_config = dataclasses.asdict(type(config)())
    of_agent = common.known(dataclasses.asdict(config), usual_config, stored.get("config", {}))
    now = {
        "agent": settings.agent,
        "settings": {name: getattr(settings, name) for name in identity},
        "config": of_agent,
        **({"sweep": sweep} if "sweep" in stored else {}),
    }
    differences = checkpoint.differences(
        {name: stored.get(name) for name in now}, json.loads(json.dumps(now, default=str))
    )
    if changed := common.changed_code(place, common.user_code(settings)):
        differences.append(changed)
    if differences:
        listed = "\n  ".join(differences)
        remedy = (
            "Choose another --workdir, or move that folder away to train it again"
            if place.parent == root
            else f"Leave {place.parent} out of --finished, give another folder there, or move that run away to train "
            "it again"
        )
        raise checkpoint.CheckpointError(
            f"{place} holds a run of other code or defaults:\n  {listed}\nNothing was trained. {remedy}"
        )


def _check_length(place: Path, length: str, settings: Any) -> None:
    """Raises ValueError if the run in the folder is longer than the sweep asks for."""
    count = log.read_json(place / log.RESULT).get(length, 0) if (place / log.RESULT).exists() else 0
    if count > getattr(settings, length):
        raise ValueError(
            f"{place} holds a run of {count} {length}, more than the sweep's {length}={getattr(settings, length)}: "
            "choose another --workdir"
        )
