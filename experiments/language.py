r"""Learn what tokens are worth from a log of dialogues, programs or games; rank, steer and train a model with it.

    python -m experiments.language --agent=bcoder --log=programs.jsonl --head=hl_gauss --rank=candidates.jsonl
    python -m experiments.language --agent=ilql --log=games.jsonl --model=folder --generate=prompts.jsonl

A log has one episode in each line, told in turns of the agent (``is_action``) and of its environment, or in messages,
which the chat template of the model makes a text of and of which the assistant's are the agent's:

    {"turns": [{"text": "2+2="}, {"text": "4", "is_action": true, "reward": 1.0}], "terminated": true, "imitate": true}
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "reward": 1.0}
    {"task_id": "HumanEval/0", "prompt": "def f():", "samples": ["    return 1", "    pass"]}

What a turn of the agent earned is paid on its last token. ``terminated`` is false where the episode was cut off and
might have gone on; ``imitate``, true or a weight, says whether the agent's words are worth copying. Programs earn what
the tests of their problem say, which ``--environment`` and ``--environment_file`` give. Without a log,
``--environment=wordle`` or ``maze`` makes one. ``--agent`` is what to learn from it: ilql (Q and V by expectiles, and a
policy to steer), bcoder (V, then a policy whose logits are Q) or lm_bc (likelihood alone, the control);
``--agent=NAME --help`` lists its hyper-parameters. ``--rank`` scores texts, rows of {"prompt": "...", "candidates":
["...", ...]}, beside the log-probability that they have in the untrained model, and compares these rankings where rows
have "outcomes": [true, ...]. ``--generate`` goes on with prompts, rows of {"prompt": "..."}; both may have "messages"
for the prompt. A finished run does only that. Without a log, a --model does only ``--generate``, one that ``--export``
wrote with what it learnt; its values rank texts by `rl.exported.load`.

The run folder holds config.json, metrics.jsonl, TensorBoard events, result.json, checkpoints and what else was asked
for; the same command continues an interrupted run, to the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax.sharding import Mesh

from experiments import checks, common, flags, language_log
from experiments.language_log import OVERLONG, PROBLEMS
from rl import data, exported, keys, lifecycle, log, shard, statistics, train
from rl.agents import bcoder, lm_bc
from rl.data import dialogues
from rl.envs import text
from rl.envs.text import Game
from rl.exported import AGENTS, Exported, HeadSettings
from rl.language import adapters, generate, model, pretrained, ranking, reading, speak
from rl.language.generate import Decoder
from rl.language.model import LM
from rl.language.pretrained import Pretrained
from rl.language.speak import Words
from rl.programs.kernel import MIB
from rl.programs.pool import Limits, Pool
from rl.replay import tokens as replay
from rl.replay.tokens import Episode
from rl.types import Key, Learner, Params, State, TokenBatch
from rl.values import heads
from rl.values.heads import ValueHead

ENVIRONMENTS = ("wordle", "maze", *PROBLEMS)  # of which the first two have data policies
RANKED, RANKING, POLICY = "ranked.jsonl", "ranking.json", "policy"  # in the run folder
GENERATED, CONTROL = "generated.jsonl", "control"

# Settings that another checkpoint in the same folder must agree on; the digest of the data stands for others.
_IDENTITY = (
    *("model", "bfloat16", "lora_rank", "environment", "environment_file", "head", "head_size", "seed"),
    *("batch_size", "accumulate", "best", "eval_every", "eval_episodes", "action_tokens", "temperature"),
)

# Settings that a model goes by which learns nothing.
_OF_ANSWERS = (
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
    answer_top_p: float = 1.0  # draw from the likeliest tokens that have this much probability together
    export: bool = False  # write model, values and a card to the folder policy, for transformers, too
    mesh_data: int = -1  # devices over which each batch is split; -1: all that are left
    mesh_model: int = 1  # devices over which the model is split


class Task(NamedTuple):
    """The log of a run as its agent sees it, and the model that it starts from."""

    pretrained: Pretrained
    lm: LM
    words: Words
    game: Game | None
    rows: TokenBatch  # [N, T]
    held_out: TokenBatch | None
    support: tuple[float, float]
    head: ValueHead
    about: dict[str, Any]  # what result.json says of the log
    candidate_sets: Mapping[int, dialogues.Candidates]  # to be ranked, by line
    candidates: TokenBatch | None  # all of them, in their order
    prompts: Sequence[dialogues.Prompt]  # to be gone on with
    base: Params | None  # what adapters are on


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is not trained again; what it is asked to rank, generate or export, it does. Without anything
    to learn from, the model of the settings does what is asked, and what is returned says where that lies.

    Raises:
      ValueError: settings or a log that cannot be used; the message names the flag or the line.
      checkpoint.CheckpointError: the run folder holds another run.
      train.Diverged: a metric stopped being finite; the last checkpoint is of the epoch before.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    if not _learns(settings):
        return use(settings, config)
    if shard.is_main():
        common.note_unused(settings, "generate", *(name for name in _OF_ANSWERS if name.startswith("answer")))
        common.note_unused(
            settings, "environment", "environment_file", "program_seconds", "program_memory", "temperature"
        )
    # Here, and not where it is used: checkpoints say how many tokens were played.
    settings = dataclasses.replace(settings, action_tokens=language_log.action_tokens(settings))
    with ExitStack() as stack:
        task = problem(settings, config, stack)
        _check_imitated(settings, task)
        if settings.control:
            _check_control(task)
        mesh = shard.grid(settings.mesh_data, settings.mesh_model)
        checks.mesh(settings.batch_size, mesh)
        folder, state, result = trained(settings, config, task, mesh)
    state = state._replace(optimiser={})  # which makes room
    if task.candidate_sets:
        rivals = (
            {settings.control: _control(settings, config, task, folder, mesh)} if settings.control else {}
        )
        result["ranking"] = rank(settings, config, task, state, folder, rivals, mesh)
    if task.prompts:
        decoder, params = exported.decoder(settings.agent, config, task.lm, task.head)
        answer(
            settings, decoder, params(state), task.words, task.pretrained.config.context, task.prompts, folder
        )
    if settings.export:
        export(settings, config, task, state, folder, mesh)
    return result


def trained(settings: Settings, config: Any, task: Task, mesh: Mesh) -> tuple[Path, State, dict[str, Any]]:
    """The run folder, what was learnt, without adapters (`_whole`), and what result.json says."""
    key = jax.random.key(settings.seed)
    this = common.run(
        settings,
        config,
        settings.updates,
        task=_name(settings),
        identity=_IDENTITY,
        card={"digest": data.digest((_dataset(task), task.held_out)), "support": task.support},
        leaves=(RANKED, RANKING, GENERATED, POLICY, CONTROL),
    )
    if task.base is not None:
        task = task._replace(base=shard.place_language(task.base, mesh))
    start = lifecycle.begin(this, {"state": _init(settings, config, task, mesh, keys.of(key, "init"))})
    state = start.tree["state"]
    if start.result is not None:
        return this.folder, _whole(task, state), start.result
    score = scorer(settings, config, task, keys.of(key, "evaluate"), mesh)
    if settings.agent == "ilql" and shard.is_main():
        _warn_of_size(task, config.inner)
    if settings.agent == "bcoder" and shard.is_main():
        _warn_of_stages(settings, config)
    if shard.is_main():
        _warn_of_imitation(settings, config, task)
    with lifecycle.session(this, start) as session:
        sample = shard.data_parallel(replay.sampler(settings.batch_size), mesh)
        sample = sample if task.base is None else adapters.sampler(sample)
        update = _learner(settings, config, task).update
        epoch = shard.over_grid(train.scan_updates(update, sample, settings.eval_every), mesh)
        first = start.step // settings.eval_every
        epochs = _epochs(settings, config, task, mesh, epoch, state, shard.place(key, mesh), first)
        for number, (state, report) in enumerate(epochs, first + 1):
            step = number * settings.eval_every
            session.write(step, score(_whole(task, state), number), report)
            session.keep(step, {"state": state})
        result = session.finish(**task.about, last=log.read(this.folder)[-1])
    return this.folder, _whole(task, state), result


def export(settings: Settings, config: Any, task: Task, state: State, folder: Path, mesh: Mesh) -> None:
    """Writes the agent without adapters to the folder policy, by `rl.exported`; all hosts must call it."""
    state = shard.fetch_language(state, mesh)
    if not shard.is_main():
        return
    state = state if task.base is None else adapters.merged(state)
    head = HeadSettings(
        settings.head, *task.support, settings.head_size, common.head_start(settings), settings.head_kappa
    )
    about = {"log": settings.log or settings.environment, "updates": settings.updates}
    stop = task.words.stop
    exported.save(
        folder / POLICY, settings.agent, config, head, task.pretrained, state, stop=stop, about=about
    )


def _learner(settings: Settings, config: Any, task: Task, params: Params = None) -> Learner:
    """The agent's, whose models start from ``params`` where they are given."""

    def make(lm: LM) -> Learner:
        return AGENTS[settings.agent].make(config, lm, task.head)

    if task.base is not None:
        return adapters.learner(make, task.lm, settings.lora_rank)
    return make(task.lm if params is None else model.pretrained(task.lm, params))


def _init(settings: Settings, config: Any, task: Task, mesh: Mesh, key: Key) -> State:
    """The state before the first update, split over devices as it is made."""
    params = None if task.base is not None else shard.place_language(task.pretrained.params, mesh)

    def init(params: Params, key: Key) -> State:
        return _learner(settings, config, task, params).init(key, _dataset(task))

    return shard.init_language(init, mesh, params, shard.place(key, mesh))


def _dataset(task: Task, rows: Any = None) -> Any:
    """What the learner's epochs are given: ``rows``, or those of the task as they are."""
    rows = task.rows if rows is None else rows
    return rows if task.base is None else adapters.Batch(rows, task.base)


def _epochs(
    settings: Settings,
    config: Any,
    task: Task,
    mesh: Mesh,
    epoch: train.Epoch,
    state: State,
    key: Key,
    first: int,
) -> Iterator[tuple[State, train.Report]]:
    """All epochs from number ``first`` on, as `rl.train.epochs` yields them."""
    for stage, start, stop in stages(settings, config, len(task.rows.tokens)):
        if first < stop:
            rows = None
            if stage:
                looks: dict[str, Callable[..., Any]] = {
                    "value": functools.partial(bcoder.value_rows, config, task.lm),
                    "policy": functools.partial(bcoder.policy_rows, config, task.lm, task.head),
                }
                look = _on_all_hosts(jax.jit(looks[stage]), mesh)
                rows = reading.in_batches(look, _whole(task, state), task.rows, settings.batch_size)
            dataset = shard.place_language(_dataset(task, rows), mesh)
            for each in train.epochs(epoch, state, dataset, key, stop - max(first, start)):
                yield each
                state = each[0]


def _on_all_hosts(look: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """``look``, whose answer is whole on every host."""
    if jax.process_count() == 1:
        return look
    return lambda *arguments: shard.fetch_language(look(*arguments), mesh)


def stages(settings: Settings, config: Any, rows: int) -> list[tuple[str, int, int]]:
    """Epochs from one number to another, with the stage of B-Coder in which frozen models read all rows beforehand.

    Where the stage changes within an epoch, or its updates draw fewer rows than there are, every update reads its own.
    """
    total = settings.updates // settings.eval_every
    if settings.agent != "bcoder" or not settings.read_once:
        return [("", 0, total)]
    switch = settings.updates if config.value_updates < 0 else min(config.value_updates, settings.updates)
    inside, beyond = switch // settings.eval_every, -(-switch // settings.eval_every)
    drawn = settings.eval_every * settings.batch_size
    spans = [("value", 0, inside), ("", inside, beyond), ("policy", beyond, total)]
    return [
        (name if (stop - start) * drawn >= rows else "", start, stop)
        for name, start, stop in spans
        if start < stop
    ]


def _whole(task: Task, state: State) -> State:
    """The state of the agent without adapters: what reads, plays and writes takes."""
    return state if task.base is None else adapters.whole(state, task.base)


def use(settings: Settings, config: Any) -> dict[str, Any]:
    """Goes on with the prompts of the settings, by an agent that was exported or by a language model as it is.

    Raises:
      ValueError: a setting that would be ignored. The agent and its hyper-parameters may be those that were exported.
    """
    prompts = dialogues.read_prompts(settings.generate)
    if (Path(settings.model) / exported.CARD).exists():
        agent = exported.load(settings.model, _dtype(settings))
        _check_unused(settings, config, agent)
        language_model, decoder, params, stop = agent.language_model, agent.decoder, agent.params, agent.stop
    else:
        _check_unused(settings, config)
        language_model = pretrained.load(settings.model)
        decoder = generate.decoder(model.make(language_model.config, _dtype(settings)))
        params, stop = language_model.params, None
    words = language_log.words_of(
        language_model, settings.stop or stop, settings.date, [one.dialogue for one in prompts]
    )
    prompts = language_log.prompts_that_fit(settings, words, prompts, language_model.config.context)
    folder = answers_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    params = jax.device_put(params)  # once, and not with every batch of prompts
    answer(settings, decoder, params, words, language_model.config.context, prompts, folder)
    return {"folder": str(folder), "last": {}}


def answers_folder(settings: Settings) -> Path:
    """Where a model that learns nothing leaves its answers: an exported one beside its own folder, in that of its run.

    All exports have one name, so that those of two runs would else leave them in one place.
    """
    place = Path(settings.model).absolute()
    if (place / exported.CARD).exists() and not settings.workdir:
        return place.parent / "generated"
    return lifecycle.folder(settings.workdir, place.name, "generated")


def _check_unused(settings: Settings, config: Any, agent: Exported | None = None) -> None:
    """Raises ValueError on flags that were chosen and that a model which learns nothing would ignore."""
    used = {name: getattr(settings, name) for name in _OF_ANSWERS}
    unused = flags.written(settings, Settings(**used)) + flags.written(config, type(config)(), "agent.")
    reason = "nothing is learnt"
    if agent is not None:
        own = [f"--agent={agent.agent}", *flags.written(agent.config, type(agent.config)(), "agent.")]
        unused = [flag for flag in unused if flag not in own]
        reason = f"those of {settings.model} are in its {exported.CARD}"
    if unused:
        are, them = ("is", "it") if len(unused) == 1 else ("are", "them")
        raise ValueError(
            f"{', '.join(unused)} {are} of what is to be learnt, and there is no --log: leave {them} out; {reason}"
        )


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on settings that no run can have."""
    agent(settings.agent)
    checks.head_size(settings)
    heads.make(settings.head, -1.0, 1.0, settings.head_size)  # knows its names
    checks.at_least_one(settings, "updates", "eval_every", "batch_size", "episodes")
    checks.at_least_one(settings, "program_seconds", "program_memory")
    checks.several_episodes(settings, none=True)
    checks.multiple(settings, "updates", "eval_every")
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
    if not _learns(settings) and not settings.generate:
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
    if not _learns(settings) and (settings.rank or settings.export):
        raise ValueError(
            "--rank and --export are of what is learnt: give --log, or only --generate (an exported agent's values: "
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
        raise ValueError(f"--control={settings.control} is none that there is: give rft")
    if settings.control and not settings.rank:
        raise ValueError(
            f"--control={settings.control} is a ranking, and nothing is to be ranked: give --rank"
        )
    if settings.control and settings.agent == "lm_bc":
        raise ValueError("--agent=lm_bc is what --control=rft trains: leave the control out")
    checks.at_least_one(settings, "answers", "answer_tokens")
    if not 0 <= settings.answer_temperature < math.inf:
        raise ValueError(f"--answer_temperature={settings.answer_temperature} must be at least 0 and finite")
    if not 0 < settings.answer_top_p <= 1:
        raise ValueError(f"--answer_top_p={settings.answer_top_p} must be above 0 and at most 1")


def _learns(settings: Settings) -> bool:
    """Whether there is a log, or an environment that makes one."""
    return bool(settings.log) or settings.environment in ENVIRONMENTS[:2]


def _dtype(settings: Settings) -> Any:
    return jnp.bfloat16 if settings.bfloat16 else jnp.float32


def agent(name: str) -> ModuleType:
    """The agent's module.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in AGENTS:
        raise ValueError(f"unknown agent {name!r}: of language models there are {', '.join(AGENTS)}")
    return AGENTS[name]


def _name(settings: Settings) -> str:
    """What is learned, in a word: the log or the environment."""
    return Path(settings.log or settings.environment).name


# ---- the log ------------------------------------------------------------------------------------------------------


def problem(settings: Settings, config: Any, stack: ExitStack) -> Task:
    """Loads the model and the log, and chooses the head's support from the log where no flag gives it."""
    candidate_sets = dialogues.read_candidates(settings.rank) if settings.rank else {}
    prompts = dialogues.read_prompts(settings.generate) if settings.generate else []
    with warnings.catch_warnings():
        if settings.best < 1:  # which chooses what is imitated
            warnings.simplefilter("ignore", UserWarning)
        read = dialogues.read(settings.log) if settings.log else None
    tasks = (
        PROBLEMS[settings.environment](settings.environment_file) if settings.environment in PROBLEMS else []
    )
    pool = stack.enter_context(Pool(limits=_limits(settings))) if tasks else None
    game = language_log.environment(settings, tasks, pool)
    language_model = pretrained.load(settings.model)
    lm = model.make(language_model.config, _dtype(settings), settings.remat)
    if settings.accumulate:
        lm = model.accumulated(lm, settings.accumulate)
    said = (row.dialogue for row in candidate_sets.values())
    conversations = [*(read or {}).values(), *said, *(row.dialogue for row in prompts)]
    words = language_log.words_of(
        language_model, settings.stop or (game and game.end), settings.date, conversations
    )
    context = language_model.config.context
    limit = settings.length or context
    episodes, problems, returns, beyond = language_log.episodes(
        settings, read, words, limit, game, tasks, pool
    )
    if settings.best < 1:
        episodes = replay.best(episodes, settings.best, returns)
    support, head = _value_head(settings, config, episodes)
    length = settings.length or max(len(one.tokens) for one in episodes)
    if length > context:
        raise ValueError(f"--length={length} is more than the model's context of {context}")
    if game and settings.eval_episodes and settings.action_tokens >= context:
        raise ValueError(
            f"--action_tokens={settings.action_tokens} leaves no room to read in the model's context of {context}: "
            "lower it"
        )
    learnt, held_out = language_log.split(settings, episodes, problems)
    return Task(
        language_model,
        lm,
        words,
        game,
        replay.pack(learnt, length),
        replay.pack(held_out, length) if held_out else None,
        support,
        head,
        {"episodes": len(episodes), "mean_return": float(np.mean(returns)), "overlong": beyond},
        candidate_sets,
        language_log.candidates(settings, words, candidate_sets, context),
        language_log.prompts_that_fit(settings, words, prompts, context) if prompts else [],
        adapters.frozen(language_model.params) if settings.lora_rank else None,
    )


def _limits(settings: Settings) -> Limits:
    """What a program may use: a file as large and as much real time for each second as by default."""
    usual = Limits()
    deadline = usual.deadline / usual.seconds * settings.program_seconds
    return Limits(settings.program_seconds, deadline, settings.program_memory * MIB)


def _value_head(
    settings: Settings, config: Any, episodes: Sequence[Episode]
) -> tuple[tuple[float, float], ValueHead]:
    """The head, and its support: of the flags, or all that values of these episodes can be.

    Raises:
      ValueError: the log has returns beyond it.
    """
    discount = getattr(config, "discount", 1.0)
    support, head = common.value_head(settings, replay.value_bounds(episodes, discount))
    # In the rewards' own precision, or -0.3 would lie below a support that begins at -0.3.
    values = np.concatenate([replay.returns_to_go(one, discount) for one in episodes]).astype(np.float32)
    # Of what is left of an episode: its return may be less, where it began with a loss.
    if head.are_values and values.max() > getattr(config, "maximum", math.inf):
        raise ValueError(
            f"--agent.maximum={config.maximum} bounds all values, and the log has a return of {values.max()}"
        )
    if not head.are_values and not support[0] <= values.min() <= values.max() <= support[1]:
        raise ValueError(
            f"the log has returns from {values.min():g} to {values.max():g}, beyond the support [{support[0]:g}, "
            f"{support[1]:g}] of --head={settings.head}: change --head_low and --head_high"
        )
    return support, head


def _warn_of_size(task: Task, inner: int) -> None:
    """Says so where Q's outputs for every token of the vocabulary are more than the model itself."""
    rows = 2 * task.pretrained.config.vocabulary * task.head.size * inner
    size = sum(x.size for x in jax.tree.leaves(task.pretrained.params))
    if rows > size:
        print(
            f"note: Q of all tokens has {rows / 1e6:.0f}M weights, the model {size / 1e6:.0f}M. Less memory is needed "
            "with --head=scalar, a smaller --head_size, --agent.inner or --agent.chunk, or a model of fewer tokens",
            file=sys.stderr,
        )


def _warn_of_stages(settings: Settings, config: Any) -> None:
    """Says so where B-Coder's second stage never begins; -1 asks for that."""
    if config.value_updates >= settings.updates:
        print(
            f"note: --agent.value_updates={config.value_updates} leaves no updates of --updates={settings.updates} to "
            "the policy, which stays as it came: give fewer, or -1 if V is all that is wanted",
            file=sys.stderr,
        )


def _warn_of_imitation(settings: Settings, config: Any, task: Task) -> None:
    """Says so where a term of an agent's loss is of what is to be imitated, and that is nothing."""
    lost = {
        "ilql": "--agent.bc_weight has nothing to clone, and values steer the model as it came",
        "bcoder": "B-Coder's policy is anchored to nothing and follows its values wherever they err",
    }
    if _imitates(settings, config) and not task.rows.imitate.any():
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


# ---- what it learnt -----------------------------------------------------------------------------------------------


def scorer(
    settings: Settings, config: Any, task: Task, key: Key, mesh: Mesh
) -> Callable[[State, int], dict[str, float]]:
    """A function (state, number of the evaluation) -> {"eval/...": number}, of held-out episodes and of games."""
    look = _on_all_hosts(reader(settings, config, task), mesh)
    play = player(settings, config, task)

    def score(state: State, number: int) -> dict[str, float]:
        scores: dict[str, float] = {}
        if task.held_out is not None:
            readings = reading.in_batches(look, state, task.held_out, settings.batch_size)
            scores |= {f"eval/{name}": value for name, value in reading.against_returns(readings).items()}
        if play:
            rng = np.random.default_rng([settings.seed, number])
            scores |= play(state, jax.random.fold_in(key, number), rng)
        return scores

    return score


def reader(
    settings: Settings, config: Any, task: Task
) -> Callable[[State, TokenBatch], dict[str, jax.Array]]:
    """See `rl.language.reading.reader`."""
    module = AGENTS[settings.agent]
    judge = module.judge(config, task.lm, task.head) if hasattr(module, "judge") else None
    return reading.reader(task.lm, judge, getattr(config, "discount", 1.0))


def player(
    settings: Settings, config: Any, task: Task
) -> Callable[[State, Key, np.random.Generator], dict[str, float]] | None:
    """Plays the environment with what the agent would say; None where there is none to be played."""
    if task.game is None or not settings.eval_episodes:
        return None
    game = task.game
    decoder, params = exported.decoder(settings.agent, config, task.lm, task.head)
    speaker = speak.speaker(
        decoder,
        task.words,
        task.pretrained.config.context,
        steps=settings.action_tokens,
        temperature=settings.temperature,
    )

    def play(state: State, key: Key, rng: np.random.Generator) -> dict[str, float]:
        played = text.play(game, speaker(params(state), key), settings.eval_episodes, rng)
        returns = statistics.summary([one.returned for one in played])
        low, high = returns["ci95"]
        return {"eval/played": returns["mean"], "eval/played_low": low, "eval/played_high": high}

    return play


def rank(
    settings: Settings,
    config: Any,
    task: Task,
    state: State,
    folder: Path,
    rivals: Mapping[str, State],
    mesh: Mesh,
) -> dict[str, Any] | None:
    """Scores all candidates, and writes a line for each prompt: the scores, and who has them from the best on.

    Returns what `rl.language.ranking.report` says of the rows that have outcomes, and writes it, too; None if none has.

    Args:
      settings, config, task, state: of the run.
      folder: of the run.
      rivals: parameters of other models to rank by.
      mesh: of the run; all hosts must call this, and one of them writes.
    """
    look = _on_all_hosts(reader(settings, config, task), mesh)
    assert task.candidates is not None
    likelihood = lambda params, rows: model.log_probabilities(task.lm, params, rows.tokens, rows.segment)
    likely = _on_all_hosts(jax.jit(likelihood), mesh)
    readings = reading.in_batches(look, state, task.candidates, settings.batch_size)
    tokens = readings["taken"].sum(1)
    sums = {"scores": readings["score"]}
    untrained = shard.place_language(task.pretrained.params if task.base is None else task.base, mesh)
    for name, params in {"log_probabilities": untrained, **rivals}.items():
        sums[name] = reading.in_batches(likely, params, task.candidates, settings.batch_size)
    sums = {name: np.where(readings["taken"], each, 0.0).sum(1) for name, each in sums.items()}
    sums |= {f"{name}_per_token": each / tokens for name, each in sums.items()}
    candidate_sets = list(task.candidate_sets.values())
    ends = np.cumsum([len(row.candidates) for row in candidate_sets])[:-1]
    of_each = {name: np.split(each, ends) for name, each in sums.items()}
    if not shard.is_main():
        return None
    with log.replacing(folder / RANKED) as partial, open(partial, "w", encoding="utf-8") as file:
        for number, (row, size) in enumerate(zip(candidate_sets, np.split(tokens, ends), strict=True)):
            entry = {name: each[number] for name, each in of_each.items()}
            entry |= {"tokens": size, "order": generate.best_of(entry["scores"][None], len(size))[0]}
            out = {**row.row, **{name: values.tolist() for name, values in entry.items()}}
            file.write(json.dumps(out) + "\n")
    known = [number for number, row in enumerate(candidate_sets) if row.outcomes]
    if not known:
        (folder / RANKING).unlink(missing_ok=True)  # of other candidates
        return None
    report = ranking.report(
        {name: [each[number] for number in known] for name, each in of_each.items()},
        [np.array(candidate_sets[number].outcomes) for number in known],
        against="log_probabilities_per_token",
    )
    log.write_json(folder / RANKING, report)
    return report


def _check_imitated(settings: Settings, task: Task) -> None:
    if settings.agent == "lm_bc" and not task.rows.imitate.any():
        raise ValueError(
            "--agent=lm_bc learns by imitation alone, and no row is to be imitated: give imitate in each row, or "
            "--best=0.1"
        )


def _check_control(task: Task) -> None:
    weights = task.rows.imitate[task.rows.is_action]
    if weights.min() > 0 or weights.max() == 0:
        raise ValueError(
            "--control=rft is fine-tuned on what is to be imitated, and that is all of the log or nothing: give "
            "imitate in each row, or --best=0.1"
        )


def _control(settings: Settings, config: Any, task: Task, folder: Path, mesh: Mesh) -> Any:
    """Rejection fine-tuning: likelihood of what is to be imitated, with as many updates of the same kind."""
    workdir = str(folder / CONTROL)
    control = dataclasses.replace(settings, agent="lm_bc", workdir=workdir, tensorboard=False, wandb=False)
    likelihood = lm_bc.Config(config.learning_rate, config.weight_decay, config.chunk)
    return trained(control, likelihood, task._replace(game=None), mesh)[1].params["policy"]


def answer(
    settings: Settings,
    decoder: Decoder,
    params: Any,
    words: Words,
    context: int,
    prompts: Sequence[dialogues.Prompt],
    folder: Path,
) -> None:
    """Goes on with the prompts, and writes a line for each of them: as it was, with its ``answers``.

    Args:
      settings: which say how often, how far and how.
      decoder: what says something.
      params: its parameters.
      words: its texts.
      context: the most tokens that it reads and writes.
      prompts: what to go on with.
      folder: of the run.
    """
    speaker = speak.speaker(
        decoder,
        words,
        context,
        steps=settings.answer_tokens,
        temperature=settings.answer_temperature,
        top_p=settings.answer_top_p,
    )
    say = speaker(params, keys.of(jax.random.key(settings.seed), "act"))
    conversations = [one.dialogue for one in prompts for _ in range(settings.answers)]
    size = min(settings.batch_size, len(conversations))
    texts: list[str] = []
    with log.progress(len(conversations), "answers", delay=3) as bar:
        for first in range(0, len(conversations), size):
            group = conversations[first : first + size]
            texts += say([*group, *group[-1:] * (size - len(group))])[: len(group)]
            bar.update(len(group))
    with log.replacing(folder / GENERATED) as partial, open(partial, "w", encoding="utf-8") as file:
        for number, one in enumerate(prompts):
            answers = texts[number * settings.answers : (number + 1) * settings.answers]
            file.write(json.dumps({**one.row, "answers": answers}, ensure_ascii=False) + "\n")


def main(_: list[str]) -> None:
    shard.initialize()
    settings = flags.read(Settings())
    result = run(settings, flags.read(agent(settings.agent).Config(), "agent."))
    if not shard.is_main():
        return
    for name, value in result["last"].items():
        if name.startswith("eval/"):
            print(f"{name.removeprefix('eval/')}: {value:.4g}")
    if result.get("ranking"):
        print(ranking.table(result["ranking"]))
    for file, name in ((settings.rank, RANKED), (settings.generate, GENERATED)):
        if file:
            print(f"What {Path(file).name} asked for is in {Path(result['folder']) / name}.")
    if result["last"]:
        common.show_folder(result)


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings(), lambda name: agent(name).Config()))
