"""The settings of `experiments.language`, what no run can have of them, and what is worth a note on the screen."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from experiments import checks, common, flags, notes
from rl import exported
from rl.envs.text import Chat, Dialogue
from rl.exported import AGENTS, Exported
from rl.language import pretrained
from rl.language.pretrained import Pretrained
from rl.programs import problems
from rl.programs.problems import Samples
from rl.settings import require_at_least_one
from rl.types import TokenBatch
from rl.values import heads
from rl.values.heads import ValueHead

PROBLEMS = {
    "humaneval": problems.read_humaneval,
    "mbpp": problems.read_mbpp,
    "apps": problems.read_apps,
    "code_contests": problems.read_code_contests,
}
ENVIRONMENTS = ("wordle", "maze", *PROBLEMS)  # of which the first two have data policies
OVERLONG = ("refuse", "truncate", "skip")

# Settings that a model goes by which learns nothing.
OF_ANSWERS = (
    *("model", "bfloat16", "stop", "seed", "batch_size", "overlong", "date", "generate"),
    *("answers", "answer_tokens", "answer_temperature", "answer_top_p"),
    *(field.name for field in dataclasses.fields(common.Folder)),
)


@dataclasses.dataclass(frozen=True)
class Settings(common.Head, common.Folder):
    """Everything about a run that is not the agent's own."""

    agent: str = "ilql"  # bcoder, ilql or lm_bc
    log: str = ""  # file of JSON lines, one episode in each, as above
    model: str = pretrained.SMOLLM2  # what to start from: a model's folder, a .gguf, or this one
    bfloat16: bool = False  # compute in bfloat16; parameters, heads and losses stay in float32
    lora_rank: int = 0  # rank of adapters on one frozen bfloat16 model that all models share; 0: no adapters
    remat: bool = False  # compute activations again in the backward pass: less memory, a third more time
    stop: str = ""  # the token that ends an action; by default the environment's, or the model's end of text
    length: int = 0  # tokens of a row, which holds as many episodes as fit; 0: those of the longest
    seed: int = 0  # seed of heads, batches, the split and games
    updates: int = 20_000  # gradient steps; of bcoder, the first --agent.value_updates learn V alone
    eval_every: int = 500  # updates per compiled epoch; evaluation, log and checkpoint follow each
    batch_size: int = 32  # rows per update
    read_once: bool = True  # bcoder: frozen models read each row once in a stage, and what they say is kept
    accumulate: int = 0  # rows of a batch at a time, for the same update in less memory; 0: all
    best: float = 1.0  # share of the episodes, the best by return, that is imitated; 1: all
    held_out: float = (
        0.1  # share of the episodes, whole problems, on which values are compared with what came
    )
    environment: str = ""  # played: wordle, maze (both make a log), humaneval, mbpp, apps, code_contests
    environment_file: str = ""  # file of wordle's words, one in a line, or of the others' problems
    program_seconds: int = 3  # seconds of processor time that a played program has for the tests of a problem
    program_memory: int = 512  # MiB of memory that a played program has
    episodes: int = 10_000  # episodes made by the environment's data policy, where there is no --log
    eval_episodes: int = 64  # episodes played after each epoch, at least 2; 0: none
    action_tokens: int = (
        0  # most tokens of an action that is played; 0: 256 of a program, 16 of a move in a game
    )
    temperature: float = 1.0  # temperature of the tokens that are played; 0: the likeliest
    overlong: str = "refuse"  # lines of more tokens than have room: refuse, truncate (at the front) or skip
    date: str = ""  # what chat templates are told is the day, such as 2026-01-31; by default today
    rank: str = ""  # file of JSON lines, each a prompt and candidates, to score at the end: ranked.jsonl
    control: str = ""  # a second model that scores --rank: rft, fine-tuned on what is to be imitated
    generate: str = ""  # file of JSON lines, each a prompt, to go on with at the end: generated.jsonl
    answers: int = 1  # answers to each prompt of --generate
    answer_tokens: int = 256  # most tokens of each answer to --generate
    answer_temperature: float = 1.0  # temperature of answers to --generate; 0: the likeliest token
    answer_top_p: float = 1.0  # draw from the likeliest tokens of this much probability (ilql: in pi_beta)
    export: bool = False  # write model, values and a card to the folder policy, for transformers, too
    mesh_data: int = -1  # devices over which each batch is split; -1: all that are left
    mesh_model: int = 1  # devices over which the model is split


def unread(settings: Settings) -> dict[str, str]:
    """{flag: why} of those that do nothing with this ``--environment`` and agent."""
    where = settings.environment
    reasons: dict[str, str] = {}
    if where and not settings.eval_episodes:
        reasons = dict.fromkeys(("temperature", "action_tokens"), "with --eval_episodes=0 nothing is played")
    if where and where not in PROBLEMS:
        reasons |= dict.fromkeys(("program_seconds", "program_memory"), f"{where} runs no programs")
    if settings.agent != "bcoder":
        reasons["read_once"] = "B-Coder alone has models that do not learn, and reads rows once"
    return reasons | ({"environment_file": "the maze needs none"} if where == "maze" else {})


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on settings that no run can have."""
    module = agent(settings.agent)
    checks.head(settings)
    heads.check_name(settings.head)
    checks.head_of_values(settings, module)
    require_at_least_one(settings, "updates", "eval_every", "batch_size", "episodes", prefix="--")
    require_at_least_one(settings, "program_seconds", "program_memory", prefix="--")
    checks.several_episodes(settings, none=True)
    checks.multiple(settings, "updates", "eval_every")
    checks.not_negative(settings, "seed", "length")
    if settings.lora_rank < 0:
        raise ValueError(f"--lora_rank={settings.lora_rank} must be at least 0, which trains models whole")
    rows, batch = settings.accumulate, settings.batch_size
    if rows < 0 or (rows and batch % rows):
        raise ValueError(f"--accumulate={rows} must be 0 or divide --batch_size={batch}")
    if settings.action_tokens < 0:
        raise ValueError(
            f"--action_tokens={settings.action_tokens} must be at least 0, which is the environment's own"
        )
    if not 0 < settings.best <= 1:
        raise ValueError(f"--best={settings.best} must be a share above 0 and of at most 1")
    if not 0 <= settings.temperature < math.inf:
        raise ValueError(f"--temperature={settings.temperature} must be at least 0 and finite")
    if not 0 <= settings.held_out < 1:
        raise ValueError(f"--held_out={settings.held_out} must be a share of at least 0 and below 1")
    where = settings.environment
    if where not in ("", *ENVIRONMENTS):
        raise ValueError(f"--environment={where} is none of {', '.join(ENVIRONMENTS)}")
    if where not in ("", "maze") and not settings.environment_file:
        raise ValueError(f"--environment={where} needs its words or problems: give --environment_file")
    if not learns(settings) and not settings.generate:
        raise ValueError("there is nothing to learn from: give --log, or --environment=wordle or maze")
    if settings.log and settings.episodes != Settings.episodes:
        raise ValueError(
            f"--episodes={settings.episodes} are made where there is no --log, and there is one: leave one of them out"
        )
    for name in ("log", "rank", "generate", "environment_file"):
        if (path := getattr(settings, name)) and not Path(path).is_file():
            raise ValueError(f"--{name}={path}: there is no such file")
    if jax.process_count() > 1 and ((where and settings.eval_episodes) or settings.generate):
        raise ValueError(
            "several processes play no games and write no text: give --eval_episodes=0, and --generate to one process "
            "when they are done"
        )
    if not learns(settings) and (settings.rank or settings.export):
        raise ValueError(
            "--rank and --export are of what is learned: give --log, or only --generate (an exported agent's values: "
            "rl.exported.load)"
        )
    _check_use(settings)


def _check_use(settings: Settings) -> None:
    """What concerns the time after the training."""
    if settings.overlong not in OVERLONG:
        raise ValueError(f"--overlong={settings.overlong} is none of {', '.join(OVERLONG)}")
    if settings.date:
        try:
            datetime.fromisoformat(settings.date)
        except ValueError:
            raise ValueError(f"--date={settings.date} is no day such as 2026-01-31") from None
    if settings.control not in ("", "rft"):
        raise ValueError(f"--control={settings.control} is unknown: the only choice is rft")
    if settings.control and not settings.rank:
        raise ValueError(
            f"--control={settings.control} is a ranking, and nothing is to be ranked: give --rank"
        )
    if settings.control and settings.agent == "lm_bc":
        raise ValueError("--agent=lm_bc is what --control=rft trains: leave the control out")
    require_at_least_one(settings, "answers", "answer_tokens", prefix="--")
    if not 0 <= settings.answer_temperature < math.inf:
        raise ValueError(f"--answer_temperature={settings.answer_temperature} must be at least 0 and finite")
    if not 0 < settings.answer_top_p <= 1:
        raise ValueError(f"--answer_top_p={settings.answer_top_p} must be above 0 and at most 1")


def check_unused(settings: Settings, config: Any, agent: Exported | None = None) -> None:
    """Raises ValueError on flags that were chosen and that a model which learns nothing would ignore."""
    used = {name: getattr(settings, name) for name in OF_ANSWERS}
    unused = flags.written(settings, Settings(**used)) + flags.written(config, type(config)(), "agent.")
    reason = "nothing is learned"
    if agent is not None:
        stored = [f"--agent={agent.agent}", *flags.written(agent.config, type(agent.config)(), "agent.")]
        unused = [flag for flag in unused if flag not in stored]
        reason = f"those of {settings.model} are in its {exported.CARD}"
    if unused:
        are, them = ("is", "it") if len(unused) == 1 else ("are", "them")
        raise ValueError(
            f"{', '.join(unused)} {are} of what is to be learned, and there is no --log: leave {them} out; {reason}"
        )


def note_best(settings: Settings, read: Mapping[int, Dialogue | Chat | Samples]) -> None:
    """Says so where --best decides what is imitated, and rows of the log say it, too."""
    weighted = [line for line, one in read.items() if getattr(one, "imitate", 1) != 1]
    if settings.best < 1 and weighted:
        print(
            f"note: --best={settings.best} chooses what is imitated, in place of imitate in {len(weighted)} rows of "
            f"{settings.log}, the first in line {weighted[0]}",
            file=sys.stderr,
        )


def note_ties(settings: Settings, config: Any, imitated: Sequence[bool]) -> None:
    """Says so where equal returns make what --best imitates more or less than was asked for, or nothing imitates."""
    if not (settings.agent == "lm_bc" or settings.control or _imitates(settings, config)):
        notes.note_unread(settings, Settings(), {"best": "no term of the agent's loss imitates"})
        return
    count, asked = sum(imitated), max(round(settings.best * len(imitated)), 1)
    if count != asked:
        why = "the last of them have equal returns" if count > asked else "all others have the lowest return"
        print(
            f"note: --best={settings.best} imitates {count:,} of {len(imitated):,} episodes: {why}",
            file=sys.stderr,
        )


def check_imitated(settings: Settings, rows: TokenBatch) -> None:
    """Raises ValueError if an agent that only imitates is given nothing to imitate."""
    if settings.agent == "lm_bc" and not rows.imitate.any():
        raise ValueError(
            "--agent=lm_bc learns by imitation alone, and no row is to be imitated: give imitate in each row, or "
            "--best=0.1"
        )


def learns(settings: Settings) -> bool:
    """Whether there is a log, or an environment that makes one."""
    return bool(settings.log) or settings.environment in ENVIRONMENTS[:2]


def updates_of_stages(settings: Settings, config: Any) -> dict[str, int]:
    """{optimiser: updates} of B-Coder's two stages; {} of the other agents, which have none."""
    if settings.agent != "bcoder":
        return {}
    first = settings.updates if config.value_updates < 0 else min(config.value_updates, settings.updates)
    return {"value_optimiser": first, "policy_optimiser": settings.updates - first}


def dtype(settings: Settings) -> Any:
    """What models compute in."""
    return jnp.bfloat16 if settings.bfloat16 else jnp.float32


def agent(name: str) -> ModuleType:
    """The agent's module.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in AGENTS:
        raise ValueError(f"unknown agent {name!r}: of language models there are {', '.join(AGENTS)}")
    return AGENTS[name]


def warn_of_size(language_model: Pretrained, head: ValueHead, inner: int) -> None:
    """Says so where Q's outputs for every token of the vocabulary are more than the model itself."""
    rows = 2 * language_model.config.vocabulary * head.size * inner
    size = sum(x.size for x in jax.tree.leaves(language_model.params))
    if rows > size:
        print(
            f"note: Q of all tokens has {rows / 1e6:.0f}M weights, the model {size / 1e6:.0f}M. Less memory is needed "
            "with --head=scalar, a smaller --head_size, --agent.inner or --agent.chunk, or a model of fewer tokens",
            file=sys.stderr,
        )


def warn_of_stages(settings: Settings, config: Any) -> None:
    """Says so where B-Coder's second stage never begins; -1 asks for that."""
    if config.value_updates >= settings.updates:
        print(
            f"note: --agent.value_updates={config.value_updates} leaves no updates of --updates={settings.updates} to "
            "the policy, which stays as it came: give fewer, or -1 if V is all that is wanted",
            file=sys.stderr,
        )


def warn_of_maximum(config: Any, head: str) -> None:
    """Says so where B-Coder's bound was chosen, and the head's outputs are logits over a support, which bounds them."""
    why = f"values of --head={head} lie in its support, which --head_low and --head_high give"
    notes.note_unread(config, type(config)(), {"maximum": why}, "agent.")


def warn_of_imitation(settings: Settings, config: Any, rows: TokenBatch) -> None:
    """Says so where a term of an agent's loss is of what is to be imitated, and that is nothing."""
    lost = {
        "ilql": "--agent.bc_weight has nothing to clone, and values steer the model as it came",
        "bcoder": "B-Coder's policy is anchored to nothing and follows its values wherever they err",
    }
    if _imitates(settings, config) and not rows.imitate.any():
        print(
            f"note: no row is to be imitated, so that {lost[settings.agent]}: give imitate in each row, or --best=0.1",
            file=sys.stderr,
        )


def _imitates(settings: Settings, config: Any) -> bool:
    """Whether the agent's loss has a term of what is to be imitated, beside that of its values."""
    if settings.agent == "bcoder":
        has_policy_stage = 0 <= config.value_updates < settings.updates
        return has_policy_stage and bool(config.imitation_weight or config.advantage_weight)
    return settings.agent == "ilql" and bool(config.bc_weight)
