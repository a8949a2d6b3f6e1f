r"""Learn what tokens are worth from a log of dialogues, programs or games; rank, steer and train a model with it.

    python -m experiments.language --agent=bcoder --log=programs.jsonl --head=hl_gauss --rank=candidates.jsonl
    python -m experiments.language --agent=ilql --log=games.jsonl --model=folder

A log has one episode in each line, told in turns of the agent (``is_action``) and of its environment:

    {"turns": [{"text": "2+2="}, {"text": "4", "is_action": true, "reward": 1.0}], "terminated": true, "imitate": true}

What a turn of the agent earned is paid on its last token. ``terminated`` is false where the episode was cut off and
might have gone on; ``imitate``, true or a weight, says whether the agent's words are worth copying. Without a log,
``--environment=wordle`` or ``maze`` makes one. ``--agent`` is what to learn from it: ilql (Q and V by expectiles, and a
policy to steer), bcoder (V, then a policy whose logits are Q) or lm_bc (likelihood alone, the control);
``--agent=NAME --help`` lists its hyper-parameters. ``--rank`` scores texts, rows of {"prompt": "...", "candidates":
["...", ...]}, beside the log-probability that they have in the untrained model; a finished run does only that.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax.sharding import Mesh

from experiments import common, flags
from rl import data, keys, lifecycle, log, shard, statistics, train
from rl.agents import bcoder, ilql, lm_bc
from rl.data import dialogues
from rl.envs import double_t_maze, programs, text, wordle
from rl.envs.text import Dialogue, Game, Turn
from rl.language import adapters, generate, huggingface, model, pretrained, reading, speak
from rl.language.model import LM
from rl.language.pretrained import Pretrained
from rl.language.speak import Words
from rl.programs import problems
from rl.programs.pool import Pool
from rl.replay import tokens as replay
from rl.replay.tokens import Episode
from rl.types import Key, Learner, Params, State, TokenBatch
from rl.values import heads
from rl.values.heads import ValueHead

AGENTS: dict[str, ModuleType] = {"bcoder": bcoder, "ilql": ilql, "lm_bc": lm_bc}
ENVIRONMENTS = ("wordle", "maze", "humaneval", "mbpp")  # of which the first two have data policies
RANKED, POLICY = "ranked.jsonl", "policy"  # in the run folder

# Settings that another checkpoint in the same folder must agree on; the digest of the data stands for others.
_IDENTITY = (
    *("model", "bfloat16", "lora_rank", "environment", "environment_file", "head", "head_size", "seed"),
    *("batch_size", "accumulate", "best", "eval_every", "eval_episodes", "action_tokens", "temperature"),
)


@dataclasses.dataclass(frozen=True)
class Settings(common.Head, common.Folder):
    """Everything about a run that is not the agent's own."""

    agent: str = "ilql"  # bcoder, ilql or lm_bc
    log: str = ""  # JSON lines, one episode in each, as above
    model: str = pretrained.SMOLLM2  # what to start from: a model's folder, a .gguf, or this one
    bfloat16: bool = False  # compute in bfloat16; parameters, heads and losses stay in float32
    lora_rank: int = 0  # of adapters on one frozen model in bfloat16 that all models share; 0: no adapters
    remat: bool = False  # compute activations again in the backward pass: less memory, a third more time
    stop: str = ""  # the token that ends an action; by default the environment's, or the model's end of text
    length: int = 0  # tokens of a row, which holds as many episodes as fit; 0: those of the longest
    seed: int = 0  # of heads, batches, the split and games
    updates: int = 20_000  # gradient steps; of bcoder, the first --agent.value_updates learn V alone
    eval_every: int = 500  # updates per compiled epoch; evaluation, log and checkpoint follow each
    batch_size: int = 32  # rows per update
    read_once: bool = True  # bcoder: frozen models read each row once in a stage, and what they say is kept
    accumulate: int = 0  # rows at a time, which make up the same update in less memory; 0: all
    best: float = 1.0  # below 1: the share of the episodes, by return, that is imitated
    held_out: float = 0.1  # share of the episodes that values are compared on with what really came
    environment: str = ""  # where to play: wordle, maze, humaneval or mbpp; the first two make a log, too
    environment_file: str = ""  # the words of wordle, one in a line; the problems of humaneval and mbpp
    episodes: int = 10_000  # made by the environment's data policy, where there is no --log
    eval_episodes: int = 64  # played after each epoch, at least 2; 0: none
    action_tokens: int = 16  # the most of an action that is played
    temperature: float = 1.0  # of what is played; 0: the likeliest token
    rank: str = ""  # JSON lines of a prompt and candidates, to be scored at the end: ranked.jsonl
    export: bool = False  # write the policy to the folder policy, which transformers loads (bcoder, lm_bc)
    mesh_data: int = -1  # devices over which each batch is split; -1: all that are left
    mesh_model: int = 1  # devices over which the model is split


class Task(NamedTuple):
    """The log of a run as its agent sees it, and the model that it starts from."""

    found: Pretrained
    lm: LM
    words: Words
    game: Game | None
    rows: TokenBatch  # [N, T]
    held_out: TokenBatch | None
    support: tuple[float, float]
    head: ValueHead
    about: dict[str, Any]  # what result.json says of the log
    asked: Sequence[dialogues.Candidates]  # to be ranked
    candidates: TokenBatch | None  # all of them, in their order
    base: Params | None  # what adapters are on


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is not trained again; what it is asked to rank or export, it does.

    Raises:
      ValueError: settings or a log that cannot be used; the message names the flag or the line.
      checkpoint.CheckpointError: the run folder holds another run.
      train.Diverged: a metric stopped being finite; the last checkpoint is of the epoch before.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    with ExitStack() as stack:
        task = problem(settings, config, stack)
        key = jax.random.key(settings.seed)
        mesh = shard.grid(settings.mesh_data, settings.mesh_model)
        this = common.run(
            settings,
            config,
            settings.updates,
            task=_name(settings),
            identity=_IDENTITY,
            card={"digest": data.digest((_dataset(task), task.held_out)), "support": task.support},
            leaves=(RANKED, POLICY),
        )
        if task.base is not None:
            task = task._replace(base=shard.place_language(task.base, mesh))
        init = _init(settings, config, task, mesh, keys.of(key, "init"))
        start = lifecycle.begin(this, {"state": init})
        state, result = start.tree["state"], start.result
        if result is None:
            score = scorer(settings, config, task, keys.of(key, "evaluate"), mesh)
            if settings.agent == "ilql" and shard.is_main():
                _warn_of_size(task, config.inner)
            session = stack.enter_context(lifecycle.session(this, start))
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
    state = _whole(task, state)
    if task.asked:
        rank(settings, config, task, state, this.folder / RANKED, mesh)
    if settings.export:
        params = shard.fetch_language(state.params["policy"], mesh)
        params = params if task.base is None else adapters.merged(params)
        of = task.found
        if shard.is_main():
            huggingface.save(this.folder / POLICY, of.config, params, of.tokenizer, of.ends, of.companions)
    return result


def _learner(settings: Settings, config: Any, task: Task, params: Params = None) -> Learner:
    """The agent's, whose models start from ``params`` where they are given."""

    def make(lm: LM) -> Learner:
        return AGENTS[settings.agent].make(config, lm, task.head)

    if task.base is not None:
        return adapters.learner(make, task.lm, settings.lora_rank)
    return make(task.lm if params is None else model.pretrained(task.lm, params))


def _init(settings: Settings, config: Any, task: Task, mesh: Mesh, key: Key) -> State:
    """The state before the first update, split over devices as it is made."""
    params = None if task.base is not None else shard.place_language(task.found.params, mesh)

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
                look = {
                    "value": functools.partial(bcoder.value_rows, config, task.lm),
                    "policy": functools.partial(bcoder.policy_rows, config, task.lm, task.head),
                }[stage]
                look = _on_all_hosts(jax.jit(look), mesh)
                rows = reading.in_batches(look, _whole(task, state), task.rows, settings.batch_size)
            dataset = shard.place_language(_dataset(task, rows), mesh)
            for each in train.epochs(epoch, state, dataset, key, stop - max(first, start)):
                yield each
                state = each[0]


def _on_all_hosts(look: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """``look``, whose answer is whole on every host."""
    if jax.process_count() == 1:
        return look
    return lambda *given: shard.fetch_language(look(*given), mesh)


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


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on settings that no run can have."""
    agent(settings.agent)
    heads.make(settings.head, -1.0, 1.0, settings.head_size)  # knows its names and sizes
    common.at_least_one(settings, "updates", "eval_every", "batch_size", "episodes", "action_tokens")
    common.several_episodes(settings, none=True)
    common.multiple(settings, "updates", "eval_every")
    if settings.lora_rank < 0:
        raise ValueError(f"--lora_rank={settings.lora_rank} must be at least 0, which trains models whole")
    rows, batch = settings.accumulate, settings.batch_size
    if rows < 0 or (rows and batch % rows):
        raise ValueError(f"--accumulate={rows} must be 0 or divide --batch_size={batch}")
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
    if not settings.log and where not in ENVIRONMENTS[:2]:
        raise ValueError("there is nothing to learn from: give --log, or --environment=wordle or maze")
    for name in ("log", "rank", "environment_file"):
        if (path := getattr(settings, name)) and not Path(path).is_file():
            raise ValueError(f"--{name}={path}: there is no such file")
    if jax.process_count() > 1 and where and settings.eval_episodes:
        raise ValueError("games are not played by several processes: give --eval_episodes=0")
    if settings.export and settings.agent == "ilql":
        raise ValueError("--export writes one model, and two decide what ILQL says: leave it out")


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
    asked = dialogues.read_candidates(settings.rank) if settings.rank else []
    with warnings.catch_warnings():
        if settings.best < 1:  # which chooses what is imitated
            warnings.simplefilter("ignore", UserWarning)
        said = dialogues.read(settings.log) if settings.log else None
    game = environment(settings, stack)
    found = pretrained.load(settings.model)
    lm = model.make(found.config, jnp.bfloat16 if settings.bfloat16 else jnp.float32, settings.remat)
    if settings.accumulate:
        lm = model.accumulated(lm, settings.accumulate)
    words = _words(found, settings.stop or (game and game.end))
    limit = settings.length or found.config.context
    if said is None:
        assert game and game.logged  # as `check` has seen to
        said = game.logged(settings.episodes, np.random.default_rng(settings.seed))
    episodes = _episodes(f"{settings.log}, line" if settings.log else "episode", words, said, limit)
    if settings.best < 1:
        episodes = replay.best(episodes, settings.best)
    returns = [one.reward.sum() for one in episodes]
    discount = getattr(config, "discount", 1.0)
    support, head = common.value_head(settings, replay.value_bounds(episodes, discount))
    if head.are_values and max(returns) > getattr(config, "maximum", math.inf):
        raise ValueError(
            f"--agent.maximum={config.maximum} bounds all values, and the log has a return of {max(returns)}"
        )
    values = np.concatenate([replay.returns_to_go(one, discount) for one in episodes])
    if not head.are_values and not support[0] <= values.min() <= values.max() <= support[1]:
        raise ValueError(
            f"the log has returns from {values.min():g} to {values.max():g}, beyond the support [{support[0]:g}, "
            f"{support[1]:g}] of --head={settings.head}: change --head_low and --head_high"
        )
    length = settings.length or max(len(one.tokens) for one in episodes)
    if length > found.config.context:
        raise ValueError(f"--length={length} is more than the model's context of {found.config.context}")
    order = np.random.default_rng(settings.seed).permutation(len(episodes))
    apart = round(settings.held_out * len(episodes))
    if apart == len(episodes):
        raise ValueError(f"--held_out={settings.held_out} leaves none of {apart} episodes to learn from")
    return Task(
        found,
        lm,
        words,
        game,
        replay.pack([episodes[i] for i in order[apart:]], length),
        replay.pack([episodes[i] for i in order[:apart]], length) if apart else None,
        support,
        head,
        {"episodes": len(episodes), "mean_return": float(np.mean(returns))},
        asked,
        _candidates(settings.rank, words, asked, found.config.context),
        adapters.frozen(found.params) if settings.lora_rank else None,
    )


def _warn_of_size(task: Task, inner: int) -> None:
    """Says so where Q's outputs for every token of the vocabulary are more than the model itself."""
    rows = 2 * task.found.config.vocabulary * task.head.size * inner
    own = sum(x.size for x in jax.tree.leaves(task.found.params))
    if rows > own:
        print(
            f"note: Q of all tokens has {rows / 1e6:.0f}M weights, the model {own / 1e6:.0f}M. Less memory is needed "
            "with --head=scalar, a smaller --head_size, --agent.inner or --agent.chunk, or a model of fewer tokens",
            file=sys.stderr,
        )


def _episodes(where: str, words: Words, said: Sequence[Dialogue], limit: int) -> list[Episode]:
    """Dialogues in tokens.

    Raises:
      ValueError: one that has no tokens, or more than ``limit``; the message says ``where`` and its number.
    """
    found = []
    with log.progress(len(said), f"tokens of each {where.split(',')[0]}", delay=3) as bar:
        for number, one in enumerate(said, start=1):
            try:
                found.append(speak.episode(words, one))
            except Exception as error:  # tokenizers has nothing more special for a text that it cannot encode
                raise ValueError(f"{where} {number}: {error}") from None
            if len(found[-1].tokens) > limit:
                raise ValueError(
                    f"{where} {number}: {len(found[-1].tokens)} tokens are more than the {limit} that there is room for"
                )
            bar.update(1)
    return found


def _candidates(
    path: str, words: Words, asked: Sequence[dialogues.Candidates], limit: int
) -> TokenBatch | None:
    """Prompts with each of their candidates, one in a row; None where nothing is to be ranked."""
    if not asked:
        return None
    episodes = []
    for number, row in enumerate(asked, start=1):
        said = [Dialogue((Turn(row.prompt), Turn(text, is_action=True))) for text in row.candidates]
        episodes += _episodes(f"{path}, line {number}, candidate", words, said, limit)
    return replay.pack(episodes, max(len(one.tokens) for one in episodes), together=False)


def environment(settings: Settings, stack: ExitStack) -> Game | None:
    """What ``--environment`` names; a pool of sandboxes is closed with ``stack``."""
    file = settings.environment_file
    if not settings.environment:
        return None
    if settings.environment == "maze":
        return double_t_maze.game()
    if settings.environment == "wordle":
        return wordle.game(wordle.make(wordle.read_words(file)))
    read = {"humaneval": problems.read_humaneval, "mbpp": problems.read_mbpp}[settings.environment]
    return programs.game(stack.enter_context(Pool()), read(file))


def _words(found: Pretrained, stop: str | None) -> Words:
    """The model's texts, whose actions end with ``stop``, or else with the model's end of text."""
    if not stop and found.end is None:
        raise ValueError("the model's files do not say which token ends a text: give --stop")
    return speak.make(found.tokenizer, stop or found.tokenizer.id_to_token(found.end), found.ends)


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
            found = reading.in_batches(look, state, task.held_out, settings.batch_size)
            scores |= {f"eval/{name}": value for name, value in reading.against_returns(found).items()}
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
    game, params = task.game, lambda state: state.params["policy"]
    decoder = generate.decoder(task.lm)
    if settings.agent == "ilql":
        decoder, params = ilql.decoder(config, task.lm, task.head), ilql.decoder_params
    speaker = speak.speaker(
        decoder,
        task.words,
        task.found.config.context,
        steps=settings.action_tokens,
        temperature=settings.temperature,
    )

    def play(state: State, key: Key, rng: np.random.Generator) -> dict[str, float]:
        played = text.play(game, speaker(params(state), key), settings.eval_episodes, rng)
        returns = statistics.summary([one.returned for one in played])
        low, high = returns["ci95"]
        return {"eval/played": returns["mean"], "eval/played_low": low, "eval/played_high": high}

    return play


def rank(settings: Settings, config: Any, task: Task, state: State, path: Path, mesh: Mesh) -> None:
    """Scores all candidates, and writes a line for each prompt: the scores, and who has them from the best on."""
    look = _on_all_hosts(reader(settings, config, task), mesh)
    own = jax.jit(lambda params, rows: model.log_probabilities(task.lm, params, rows.tokens, rows.segment))
    own = _on_all_hosts(own, mesh)
    found = reading.in_batches(look, state, task.candidates, settings.batch_size)
    untrained = task.found.params if task.base is None else task.base
    found["own"] = reading.in_batches(own, untrained, task.candidates, settings.batch_size)
    score, likely = (np.where(found["taken"], found[name], 0.0).sum(1) for name in ("score", "own"))
    ends = np.cumsum([len(row.candidates) for row in task.asked])[:-1]
    if not shard.is_main():
        return
    with log.replacing(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for row, scores, likelies in zip(
            task.asked, np.split(score, ends), np.split(likely, ends), strict=True
        ):
            order = generate.best_of(scores[None], len(scores))[0]
            of_each = {"scores": scores, "log_probabilities": likelies, "order": order}
            out = row._asdict() | {name: values.tolist() for name, values in of_each.items()}
            file.write(json.dumps(out) + "\n")


def main(_: list[str]) -> None:
    shard.initialize()
    settings = flags.read(Settings())
    result = run(settings, flags.read(agent(settings.agent).Config(), "agent."))
    if not shard.is_main():
        return
    for name, value in result["last"].items():
        if name.startswith("eval/"):
            print(f"{name.removeprefix('eval/')}: {value:.4g}")
    common.show_folder(result)


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings(), lambda name: agent(name).Config()))
