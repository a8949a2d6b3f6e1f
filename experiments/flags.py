"""The command line of a script: flags from frozen dataclasses, and messages instead of tracebacks.

A field's type, default and comment become a flag and its help. A field that is a dataclass itself becomes one flag for
each of its own fields, ``--agent.network.activation=gelu``; as the key of a mapping it is ``network.activation``.

``--agent=cql`` chooses which agent's hyper-parameters exist as ``--agent.NAME`` flags, so ``--agent=cql --help``
lists those of CQL, and a flag that another agent has is an unknown flag here.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import os
import re
import sys
import textwrap
import tokenize
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from absl import flags, logging

from rl import checkpoint, log, shard, train
from rl.programs.pool import IsolationError
from rl.shard import hosts

T = TypeVar("T")


class _Whole(flags.IntegerParser):
    """Whole numbers, which may be written as ``1e6``."""

    def convert(self, argument: Any) -> int:
        try:
            return super().convert(argument)
        except ValueError:
            with contextlib.suppress(ValueError):
                if (number := float(argument)).is_integer():
                    return int(number)
            raise


class _Words(flags.ListParser):
    """64,64, or as wandb's agents write a list: [64, 64], and ['a', 'b']."""

    def parse(self, argument: Any) -> list[str]:
        return _split(argument) if isinstance(argument, str) else super().parse(argument)


class _OrNone(flags.ArgumentParser):
    """What another parser takes, or ``none``."""

    def __init__(self, parser: flags.ArgumentParser):
        self._parser, self.syntactic_help = parser, f"{parser.syntactic_help or 'text'}, or none"

    def parse(self, argument: Any) -> Any:
        return None if _is_none(argument) else self._parser.parse(argument)

    def flag_type(self) -> str:
        return self._parser.flag_type()


class _Kind(NamedTuple):
    """What a field takes."""

    type: type  # bool, int, float or str
    several: bool = False  # a tuple of them
    optional: bool = False  # or None

    def __str__(self) -> str:
        if self.several:
            return f"a list of {_PLURALS[self.type]}"
        return f"of type {self.type.__name__}{' or none' if self.optional else ''}"


_PLURALS = {int: "whole numbers", float: "numbers", str: "words"}
_EXAMPLES = {int: "256,256", float: "0.5,0.9", str: "a,b"}

# Raised with a message that names the remedy. Others are mistakes in the code: their traceback is wanted.
MEMORY = "Smaller batches (--batch_size) need less; docs/troubleshooting.md has more, under Memory"
EXPLAINED = (
    ValueError,
    ImportError,
    OSError,
    FloatingPointError,
    IsolationError,
    train.Diverged,
    checkpoint.CheckpointError,
)

# What absl passes on of Python's own messages, which name a function and no remedy.
_KINDS = {
    "invalid literal for int": "is not a whole number",
    "could not convert string to float": "is not a number",
    "('Non-boolean argument to boolean flag": "is neither true nor false",
}
_WRONG_VALUE = re.compile(rf"^flag (--.*?): ({'|'.join(map(re.escape, _KINDS))}).*", re.DOTALL)


# What other scripts, here and in other libraries, call a flag; of several names a script has one.
_SYNONYMS = {
    "actor_bc_coef": ("agent.policy_cloning",),
    "actor_beta": ("agent.policy_cloning",),
    "alpha": ("agent.weight", "agent.bc_weight"),
    "beta": ("agent.temperature",),
    "buffer_size": ("replay",),
    "checkpoints_path": ("workdir",),
    "cql_alpha": ("agent.weight",),
    "cql_n_actions": ("agent.samples",),
    "critic_bc_coef": ("agent.critic_cloning",),
    "critic_beta": ("agent.critic_cloning",),
    "conservative_weight": ("agent.weight",),
    "dataset": ("offline_data", "log"),
    "discount_factor": ("agent.discount",),
    "env": ("environment",),
    "env_id": ("env", "environment"),
    "env_name": ("env", "dataset"),
    "environment": ("env",),
    "eval_freq": ("eval_every",),
    "eval_interval": ("eval_every",),
    "gamma": ("agent.discount",),
    "iql_tau": ("agent.expectile",),
    "load_model": ("init_from",),
    "lr": ("agent.learning_rate",),
    "max_steps": ("steps", "updates", "epochs"),
    "max_timesteps": ("steps", "updates", "epochs"),
    "n_episodes": ("eval_episodes",),
    "n_steps": ("updates", "steps"),
    "n_steps_per_epoch": ("eval_every",),
    "n_trials": ("eval_episodes",),
    "normalize": ("normalize_observations",),
    "normalize_reward": ("reward_scale",),
    "num_seeds": ("seeds",),
    "offline_steps": ("updates", "epochs"),
    "policy_freq": ("agent.policy_delay",),
    "polyak": ("agent.target_rate",),
    "q_agg": ("agent.aggregation",),
    "save_dir": ("workdir",),
    "steps": ("updates", "epochs"),
    "tau": ("agent.target_rate", "agent.expectile"),
    "total_timesteps": ("steps", "updates", "epochs"),
    "train_steps": ("updates", "steps", "epochs"),
    "updates": ("steps", "epochs"),
    "utd_ratio": ("utd",),
    "weight_temp": ("agent.temperature",),
}


@functools.cache
def comments(config_type: type) -> Mapping[str, str]:
    """{field: the first comment on its lines} of a dataclass or named tuple, own and inherited."""
    helps: dict[str, str] = {}
    for owner in reversed(config_type.__mro__):
        if owner.__module__ != "builtins":
            helps.update(_comments(textwrap.dedent(inspect.getsource(owner))))
    return helps


def _comments(source: str) -> Iterator[tuple[str, str]]:
    """(field, comment) of a class; the formatter may have spread a field over several lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (owner,) = ast.parse(source).body
    assert isinstance(owner, ast.ClassDef)
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            comment = next((lines[number] for number in numbers if number in lines), None)
            if comment:
                yield node.target.id, comment


def define(
    config: Any, prefix: str = "", values: flags.FlagValues = flags.FLAGS, heading: str | None = None
) -> None:
    """Defines one flag ``--prefix+field`` for every field of the dataclass instance ``config``.

    They stand in the main list of --help, or in one of their own with a ``heading``, by which absl takes it for the
    name of a module (`flags.FlagValues.module_help`).

    Raises:
      ValueError: on a field of which no flag can be made.
    """
    helps = comments(config.__class__)
    for field in dataclasses.fields(config):
        default, name = getattr(config, field.name), prefix + field.name
        text = helps.get(field.name, "")
        if dataclasses.is_dataclass(default):
            define(default, name + ".", values, heading)
            continue
        kind = _kind(config, field.name)
        if kind.type is bool:
            flags.DEFINE_bool(name, default, text, values)
        elif kind.several:
            words, text = [str(x) for x in default], text + " (comma-separated)"
            flags.DEFINE(_Words(), name, words, text, values, flags.CsvListSerializer(","))
            message = f"must be {_PLURALS[kind.type]}, such as {_EXAMPLES[kind.type]}"
            flags.register_validator(name, functools.partial(_are, kind.type), message, values)
        else:
            # Generators take no other seed; programs count by 32 bits.
            bounds = (0, None) if field.name == "seed" else (None, 2**31 - 1)
            parsers: dict[type, flags.ArgumentParser] = {
                int: _Whole(*bounds),
                float: flags.FloatParser(),
                str: flags.ArgumentParser(),
            }
            parser = _OrNone(parsers[kind.type]) if kind.optional else parsers[kind.type]
            flags.DEFINE(parser, name, default, text, values, flags.ArgumentSerializer())
        # absl's --help lists the flags of the main module, which it knows by this name.
        values.register_key_flag_for_module(heading or sys.argv[0], values[name])


def read(config: T, prefix: str = "", values: flags.FlagValues = flags.FLAGS) -> T:
    """``config`` with every field set from its parsed flag."""
    return with_fields(config, {name: values[prefix + name].value for name in names(config)}, prefix)


def present(config: Any, prefix: str = "", values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """{field: value} of the flags that were on the command line."""
    return {name: values[prefix + name].value for name in names(config) if values[prefix + name].present}


def written(config: T, default: T, prefix: str = "") -> list[str]:
    """The flags by which a command line turns ``default`` into ``config``, another instance of its type."""
    listed = []
    for name in names(config):
        value, usual = _text(_field(config, name)), _text(_field(default, name))
        if value != usual:
            listed.append(f"--{prefix}{name}={value}")
    return listed


def names(config: Any) -> list[str]:
    """The names of all fields, those of a nested dataclass with a dot: ``network.activation``."""
    listed = []
    for field in dataclasses.fields(config):
        default = getattr(config, field.name)
        nested = names(default) if dataclasses.is_dataclass(default) else []
        listed += [f"{field.name}.{name}" for name in nested] or [field.name]
    return listed


def check(config: Any) -> None:
    """Raises ValueError, naming the field, if ``config`` could not be read from flags, nor from a run's card."""
    for name in names(config):
        _kind(config, name)


def with_fields(config: T, overrides: dict[str, Any], prefix: str = "") -> T:
    """``config`` with the fields in ``overrides`` replaced, each converted to the type it has.

    A field of a nested dataclass is given as ``{"network.activation": "gelu"}`` or
    ``{"network": {"activation": "gelu"}}``. With the ``prefix`` of its flags, what it refuses by the name of a field is
    refused by that of the flag.

    Raises:
      ValueError: on a field that does not exist (the nearest one is suggested), a value of another type, or one that it
        refuses.
    """
    known = names(config)
    converted: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}  # of nested dataclasses
    for name, value in overrides.items():
        outer, _, inner = name.partition(".")
        nested = dataclasses.is_dataclass(getattr(config, outer, None))
        if nested and not inner and isinstance(value, Mapping):
            parts.setdefault(outer, {}).update(value)
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
            raise ValueError(f"{type(config).__module__} has no setting {name!r}{hint}")
        elif nested:
            parts.setdefault(outer, {})[inner] = _convert(name, value, _kind(config, name))
        else:
            converted[name] = _convert(name, value, _kind(config, name))
    try:
        for outer, part in parts.items():
            converted[outer] = with_fields(getattr(config, outer), part, prefix and f"{prefix}{outer}.")
        return dataclasses.replace(config, **converted)  # type: ignore[type-var]
    except ValueError as error:
        if not prefix or str(error).partition("=")[0] not in known:
            raise
        raise ValueError(f"--{prefix}{error}") from None


def canonical(config: Any, name: str, value: Any) -> Any:
    """A field's value however it was written: 2000 for 2e3, ``"256,256"`` for ``[256, 256]``, as JSON has it.

    Raises:
      ValueError: it is of another type.
    """
    converted = _convert(name, value, _kind(config, name))
    return _text(converted) if isinstance(converted, tuple) else converted


def parser(
    settings: Any = None,
    config_of: Callable[[str], Any] | None = None,
    values: flags.FlagValues = flags.FLAGS,
    *,
    words: int = 0,
) -> Callable[[Sequence[str]], list[str]]:
    """A ``flags_parser`` for `absl.app.run` with the flags of ``settings`` and, if asked for, of the chosen agent.

    Args:
      settings: dataclass instance whose fields become plain flags; None where all flags are defined elsewhere.
      config_of: agent name -> its default config, if ``settings`` has a field ``agent``; raises ValueError on an
        unknown one.
      values: where the flags are defined.
      words: the most words beside flags, a file's name say.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        log.loaded_commit()
        if settings is not None:
            define(settings, values=values)
        heading = ""
        try:
            if config_of:
                agent = _agent(values.read_flags_from_files(list(argv), force_gnu=False), settings.agent)
                heading = f"hyper-parameters of --agent={agent}"
                define(config_of(agent), "agent.", values, heading)
            rest = _parsed(argv, values, heading)
            if len(rest) > 1 + words:
                raise ValueError(
                    f"not a flag: {' '.join(rest[1 + words :])}. Flags are written --name=value."
                )
        except (flags.Error, ValueError, ImportError) as error:
            print(
                f"error: {_explain(error, values)}\nTry --help for all flags and what they mean.",
                file=sys.stderr,
            )
            raise SystemExit(2) from None
        return rest

    return parse


def _parsed(argv: Sequence[str], values: flags.FlagValues, heading: str) -> list[str]:
    """Parses; after --help the flags under ``heading`` follow, and the process ends with status 0."""
    try:
        try:
            return values(argv)
        except SystemExit:  # absl's, after --help; it ends as if that were wrong
            if heading and any(word.lstrip("-") in ("help", "helpshort", "?") for word in argv[1:]):
                print(values.module_help(heading))
    except BrokenPipeError:
        pass
    _flush()
    raise SystemExit(0)


def reporting(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """``main`` for `absl.app.run`, which ends with a message: status 130 if asked to stop, 1 on an error.

    With ``--verbosity=0`` or more, errors keep their traceback and every library may log what it likes. Of several
    processes, all wait for one another at the end, and none after an error.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # orbax reports every file it writes
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                try:
                    main(argv)
                except SystemExit:  # a status, and no error
                    hosts.wait()
                    raise
                hosts.wait()
        except train.Interrupted as stop:
            print(stop, file=sys.stderr)
            raise SystemExit(130) from None
        except KeyboardInterrupt:
            print(
                "stopped; the same command, without --overwrite, starts from the last checkpoint, if there is one",
                file=sys.stderr,
            )
            _flush()
            os._exit(130)  # a program may still run on the device, and Python's exit take its memory away
        except Exception as error:
            several = hosts.several()
            if shard.is_loss(error):
                message = f"lost a process of this run ({_first_line(error)}). {hosts.REMEDY}"
            elif "RESOURCE_EXHAUSTED" in str(error):
                message = f"out of memory: {_first_line(error)}. {MEMORY}"
            elif isinstance(error, EXPLAINED) and (flags.FLAGS["verbosity"].value or 0) < logging.INFO:
                message = f"{type(error).__name__}: {error}"
            elif several:
                message = traceback.format_exc()
            else:
                raise
            print(message, file=sys.stderr, flush=True)
            if several:
                # To leave in order takes the others, which are lost, or wait in a step for this one: JAX would wait for
                # minutes, and then dump its stack.
                os._exit(1)
            raise SystemExit(1) from None

    return run


def _flush() -> None:
    """Writes out what was printed; the rest goes nowhere if its reader has closed the pipe, as in ``--help | head``."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # Python would meet it again when it flushes stdout at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Without the line of code that it comes from, which says nothing to who typed a command."""
    print(f"{category.__name__}: {message}", file=sys.stderr)


def _explain(error: Exception, values: flags.FlagValues) -> str:
    """The message; for an unknown flag with the nearest one, or else with those that there are."""
    if isinstance(error, flags.IllegalFlagValueError):
        return _WRONG_VALUE.sub(lambda match: f"{match[1]} {_KINDS[match[2]]}", str(error))
    if not isinstance(error, flags.UnrecognizedFlagError):
        return str(error)
    if meant := _meant(error.flagname, values):
        return f"unknown flag --{error.flagname}: did you mean --{meant}?"
    group = error.flagname.rpartition(".")[0]  # "agent", "agent.network", or nothing
    known = [name for name in values if name.rpartition(".")[0] == group]
    if not known:  # no such group: what is nearest among all that the first word has
        group = group.partition(".")[0]
        known = [name for name in values if name.startswith(group + ".")]
    # Without the group, which all have in common and which would make any two of them alike.
    last = {name.removeprefix(group + "."): name for name in known}
    if not group:  # or it is a setting of the agent, whose name needs its prefix
        last = {name.removeprefix("agent."): name for name in values if name.startswith("agent.")} | last
    near = difflib.get_close_matches(error.flagname.removeprefix(group + "."), last, n=1)
    if near:
        return f"unknown flag --{error.flagname}: did you mean --{last[near[0]]}?"
    if "set" in values:  # a sweep's or a report's
        return f"unknown flag --{error.flagname}: to change a setting of the runs, give --set={error.flagname}=VALUE"
    listed = f": there are {', '.join('--' + name for name in known)}" if group and known else ""
    return f"unknown flag --{error.flagname}{listed}"


def _meant(name: str, values: flags.FlagValues) -> str | None:
    """The flag with the meaning, not the spelling, of an unknown one: a synonym, or the agent's own of that name."""
    meant = (*_SYNONYMS.get(name.removeprefix("agent."), ()), f"agent.{name}")
    return next((known for known in meant if known in values), None)


def _agent(argv: Sequence[str], default: str) -> str:
    """The value of the last ``--agent=NAME`` or ``--agent NAME``."""
    name = default
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word in ("--agent", "-agent"):
            name = following
        elif word.startswith(("--agent=", "-agent=")):
            name = word.partition("=")[2]
    return name


def _field(config: Any, name: str) -> Any:
    """The value of ``network.activation``, say."""
    return functools.reduce(getattr, name.split("."), config)


def _kind(config: Any, name: str) -> _Kind:
    """Of a field, by its annotation, or else by its default.

    Raises:
      ValueError: it is of none of the kinds that a flag can have.
    """
    outer, _, inner = name.rpartition(".")
    owner = _field(config, outer) if outer else config
    default = getattr(owner, inner)
    if not next(field.init for field in dataclasses.fields(owner) if field.name == inner):
        raise ValueError(
            f"{type(config).__module__}: the field {name!r} has init=False, so that no run's card could be read again: "
            "make it a property"
        )
    annotation = _annotations(owner.__class__).get(inner, type(default))
    parts = typing.get_args(annotation)
    others = [part for part in parts if part is not types.NoneType]
    optional = default is None or len(others) < len(parts)
    element = others[0] if optional and len(others) == 1 else annotation
    if element in (int, float, str) or (element is bool and not optional):
        return _Kind(element, optional=optional)
    if isinstance(default, tuple):
        kinds = {part for part in parts if part is not Ellipsis} or {type(x) for x in default}
        if len(kinds) == 1 and kinds <= set(_PLURALS):
            return _Kind(kinds.pop(), several=True)
    elif type(default) in (bool, int, float, str):  # of a Literal, say
        return _Kind(type(default))
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    raise ValueError(
        f"{type(config).__module__}: no flag can be made of the field {name!r}, which is {shown}: fields are bool, "
        "int, float, str, tuples such as tuple[float, ...], float | None, or dataclasses of such fields"
    )


@functools.cache
def _annotations(config_type: type) -> dict[str, Any]:
    """{field: type} of a dataclass; nothing where a name in them is not known to its module."""
    try:
        return typing.get_type_hints(config_type)
    except NameError:
        return {}


def _are(kind: type, words: Sequence[str]) -> bool:
    try:
        return all(kind(word) is not None for word in words)
    except ValueError:
        return False


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _text(value: Any) -> str:
    """As a flag has it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _split(text: str) -> list[str]:
    """The words of a list of words in a flag; none of an empty one."""
    inner = re.sub(r"^\s*\[(.*)\]\s*$", r"\1", text)
    return [word.strip().strip("'\"") for word in inner.split(",")] if inner.strip() else []


def _convert(name: str, value: Any, kind: _Kind) -> Any:
    if kind.optional and _is_none(value):
        return None
    try:
        if kind.several:
            return tuple(_one(x, kind.type) for x in (_split(value) if isinstance(value, str) else value))
        return _one(value, kind.type)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {kind}, not {value!r}") from None


def _one(value: Any, kind: type) -> Any:
    if (
        value is None
        or isinstance(value, bool) != (kind is bool)
        or (kind is int and int(value) != float(value))
    ):
        raise ValueError
    return kind(value)
