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
for the prompt. A finished run does only the ranking, the continuations and the ``--export``. Without a log, a --model
does only ``--generate``, one that ``--export`` wrote with what it learned; its values rank texts by `rl.exported.load`.

The run folder holds config.json, metrics.jsonl, TensorBoard events, result.json, checkpoints, some of the games of each
evaluation (played.jsonl), and what else was asked for; the same command continues an interrupted run, to the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app
from jax.sharding import Mesh

from experiments import (
    checks,
    common,
    flags,
    language_answers,
    language_log,
    language_rank,
    language_settings,
    notes,
)
from experiments.language_answers import GENERATED
from experiments.language_log import VERDICTS, Task
from experiments.language_rank import CONTROL, RANKED, RANKING
from experiments.language_settings import PROBLEMS, Settings, agent, check
from rl import data, exported, keys, lifecycle, log, run_folder, shard, statistics, train
from rl.agents import bcoder
from rl.data import dialogues
from rl.envs import text
from rl.envs.text import Chat, Dialogue
from rl.exported import AGENTS
from rl.language import adapters, model, pretrained, ranking, reading, speak
from rl.language.model import LM
from rl.programs.kernel import MIB
from rl.programs.pool import Limits, Pool
from rl.replay import tokens as replay
from rl.replay.tokens import Episode
from rl.types import Key, Learner, Params, State, TokenBatch
from rl.values import heads
from rl.values.heads import ValueHead

POLICY, PLAYED = "policy", "played.jsonl"  # in the run folder
SHOWN = 4  # dialogues of each evaluation that are written to `PLAYED`

# Settings that another checkpoint in the same folder must agree on; the digest of the data stands for others.
IDENTITY = (
    *("model", "bfloat16", "lora_rank", "environment", "environment_file", "head", "head_size", "seed"),
    *("batch_size", "accumulate", "best", "eval_every", "eval_episodes", "action_tokens", "temperature"),
    *("program_seconds", "program_memory"),
)
LEFT_OPEN = ("action_tokens",)  # the environment decides it where no flag does, and a run writes that down


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
    if not language_settings.learns(settings):
        return language_answers.use(settings, config)
    checks.schedules(config, settings.updates, language_settings.updates_of_stages(settings, config))
    if shard.is_main():
        notes.note_unused_head(settings)
        notes.note_unused(
            settings,
            "generate",
            *(name for name in language_settings.OF_ANSWERS if name.startswith("answer")),
        )
        notes.note_unused(
            settings,
            "environment",
            *("environment_file", "program_seconds", "program_memory", "action_tokens", "temperature"),
            *(["eval_episodes"] if settings.eval_episodes else []),  # 0 asks for no games, and there are none
        )
        notes.note_unread(settings, Settings(), language_settings.unread(settings))
    # Here, and not where it is used: checkpoints say how many tokens were played.
    settings = dataclasses.replace(settings, action_tokens=language_log.action_tokens(settings))
    with ExitStack() as stack:
        task = problem(settings, config, stack)
        language_settings.check_imitated(settings, task.rows)
        if settings.control:
            language_rank.check_control(task)
        mesh = shard.grid(settings.mesh_data, settings.mesh_model)
        checks.mesh(settings.batch_size, mesh)
        follows = bool(settings.rank or settings.generate or settings.export)
        folder, state, result = trained(settings, config, task, mesh, follows)
    state = state._replace(optimiser={})  # which makes room
    if task.candidate_sets:
        baselines = {}
        if settings.control:
            of_control = language_rank.control(settings, config, task, folder)
            baselines[settings.control] = trained(*of_control, mesh)[1].params["policy"]
        read = reader(settings, config, task)
        result["ranking"] = language_rank.rank(settings, task, read, state, folder, baselines, mesh)
    if task.prompts:
        decoder, params = exported.decoder(settings.agent, config, task.lm, task.head)
        language_answers.answer(
            settings, decoder, params(state), task.words, task.pretrained.config.context, task.prompts, folder
        )
    if settings.export:
        export(settings, config, task, state, folder, mesh)
    run_folder.complete(folder)
    return result


def trained(
    settings: Settings, config: Any, task: Task, mesh: Mesh, follows: bool = False
) -> tuple[Path, State, dict[str, Any]]:
    """The run folder, what was learned, without adapters (`_whole`), and what result.json says.

    Whether something ``follows`` says `rl.run_folder.Run`.
    """
    key = jax.random.key(settings.seed)
    this = common.run(
        settings,
        config,
        settings.updates,
        task=_name(settings),
        identity=IDENTITY,
        card={"digest": data.digest((_dataset(task), task.held_out)), "support": task.support},
        alike=_alike(settings, task),
        leaves=(RANKED, RANKING, GENERATED, POLICY, PLAYED, CONTROL, VERDICTS),
        follows=follows,
    )
    common.check(this)
    if task.base is not None:
        task = task._replace(base=shard.place_language(task.base, mesh))
    start = lifecycle.begin(this, {"state": _init(settings, config, task, mesh, keys.of(key, "init"))})
    state = start.tree["state"]
    if start.result is not None:
        return this.folder, _whole(task, state), start.result
    score = scorer(settings, config, task, keys.of(key, "evaluate"), mesh)
    if settings.agent == "ilql" and shard.is_main():
        language_settings.warn_of_size(task.pretrained, task.head, config.inner)
    if settings.agent == "bcoder" and shard.is_main():
        language_settings.warn_of_stages(settings, config)
        if not task.head.are_values:
            language_settings.warn_of_maximum(config, settings.head)
    if shard.is_main():
        language_settings.warn_of_imitation(settings, config, task.rows)
    with lifecycle.session(this, start) as session:
        if shard.is_main():
            log.drop_after(this.folder / PLAYED, start.step)
            if task.verdicts:
                log.write_json(this.folder / VERDICTS, task.verdicts)
        sample = shard.data_parallel(replay.sampler(settings.batch_size), mesh)
        sample = sample if task.base is None else adapters.sampler(sample)
        update = _learner(settings, config, task).update
        epoch = shard.over_grid(train.scan_updates(update, sample, settings.eval_every), mesh)
        first = start.step // settings.eval_every
        epochs = _epochs(settings, config, task, mesh, epoch, state, shard.place(key, mesh), first)
        for number, (state, report) in enumerate(epochs, first + 1):
            step = number * settings.eval_every
            scores, played = score(_whole(task, state), number)
            if played:
                log.append(this.folder / PLAYED, [_line(step, one) for one in played[:SHOWN]])
            session.write(step, scores, report)
            session.keep(step, {"state": state})
        result = session.finish(**task.about, last=log.read(this.folder)[-1])
    return this.folder, _whole(task, state), result


def _alike(settings: Settings, task: Task) -> dict[str, Any]:
    """What all processes of a run must have in common beside its card: the pretrained weights, and what is ranked."""
    if jax.process_count() == 1:
        return {}
    return {
        "model": data.digest(task.pretrained.params),
        "candidates": data.digest(task.candidates),
        **{name: getattr(settings, name) for name in ("control", "stop", "date", "overlong")},
    }


def export(settings: Settings, config: Any, task: Task, state: State, folder: Path, mesh: Mesh) -> None:
    """Writes the agent without adapters to the folder policy, by `rl.exported`; all hosts must call it."""
    state = shard.fetch_language(state, mesh)
    if not shard.is_main():
        return
    state = state if task.base is None else adapters.merged(state)
    head = common.head_settings(settings, *task.support)
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
                look = shard.on_all_hosts(jax.jit(looks[stage]), mesh)
                rows = reading.in_batches(look, _whole(task, state), task.rows, settings.batch_size)
            dataset = shard.place_language(_dataset(task, rows), mesh)
            count = stop - max(first, start)
            # Scores are computed on the device, too, and a second copy of a large model may find no room there.
            for each in train.epochs(epoch, state, dataset, key, count, ahead=False):
                yield each
                state = each[0]


def stages(settings: Settings, config: Any, rows: int) -> list[tuple[str, int, int]]:
    """Epochs from one number to another, with the stage of B-Coder in which frozen models read all rows beforehand.

    Where the stage changes within an epoch, or its updates draw fewer rows than there are, every update reads its own.
    """
    total = settings.updates // settings.eval_every
    if settings.agent != "bcoder" or not settings.read_once:
        return [("", 0, total)]
    switch = language_settings.updates_of_stages(settings, config)["value_optimiser"]
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
    language_settings.note_best(settings, read or {})
    tasks = (
        PROBLEMS[settings.environment](settings.environment_file) if settings.environment in PROBLEMS else []
    )
    if settings.environment in PROBLEMS and not tasks:
        raise ValueError(
            f"--environment_file={settings.environment_file} has no problem with tests that can be run"
        )
    pool = stack.enter_context(Pool(limits=_limits(settings))) if tasks else None
    game = language_log.environment(settings, tasks, pool)
    language_model = pretrained.load(settings.model)
    lm = model.make(language_model.config, language_settings.dtype(settings), settings.remat)
    if settings.accumulate:
        lm = model.accumulated(lm, settings.accumulate)
    written = (row.dialogue for row in candidate_sets.values())
    conversations = [*(read or {}).values(), *written, *(row.dialogue for row in prompts)]
    words = language_log.words_of(
        language_model, settings.stop or (game and game.end), settings.date, conversations
    )
    if not any(isinstance(one, Chat) for one in conversations):
        notes.note_unread(settings, Settings(), {"date": "it is for chat templates, and no row has messages"})
    context = language_model.config.context
    limit = settings.length or context
    folder = common.folder(settings, _name(settings))
    episodes, problems, returns, beyond, verdicts = language_log.episodes(
        settings, read, words, limit, game, tasks, pool, folder
    )
    if settings.best < 1:
        episodes = replay.best(episodes, settings.best, returns)
        language_settings.note_ties(settings, config, [one.imitate > 0 for one in episodes])
    support, head = _value_head(settings, config, episodes)
    length = settings.length or max(len(one.tokens) for one in episodes)
    if length > context:
        raise ValueError(f"--length={length} is more than the model's context of {context}")
    if game and settings.eval_episodes and settings.action_tokens >= context:
        raise ValueError(
            f"--action_tokens={settings.action_tokens} leaves no room to read in the model's context of {context}: "
            "lower it"
        )
    learned, held_out = language_log.split(settings, episodes, problems)
    return Task(
        language_model,
        lm,
        words,
        game,
        replay.pack(learned, length),
        replay.pack(held_out, length) if held_out else None,
        support,
        head,
        {"episodes": len(episodes), "mean_return": float(np.mean(returns)), "overlong": beyond},
        candidate_sets,
        language_log.candidates(settings, words, candidate_sets, context),
        language_log.prompts_that_fit(settings, words, prompts, context) if prompts else [],
        adapters.frozen(language_model.params) if settings.lora_rank else None,
        verdicts,
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
      ValueError: the log has returns beyond it, or does not bound values, and no flag does.
    """
    discount = getattr(config, "discount", 1.0)
    if not _continues_cut_episodes(settings, config):
        episodes = [one._replace(terminated=True) for one in episodes]
    support, head = common.value_head(settings, replay.value_bounds(episodes, discount))
    # The values of an episode that was cut off are not known, and an estimate is no reason to refuse a support.
    known = [replay.returns_to_go(one, discount) for one in episodes if one.terminated] or [np.zeros(0)]
    # In the rewards' own precision, or -0.3 would lie below a support that begins at -0.3.
    values = np.concatenate(known).astype(np.float32)
    # Of what is left of an episode: its return may be less, where it began with a loss.
    low, high = values.min(initial=math.inf), values.max(initial=-math.inf)
    if head.are_values and high > getattr(config, "maximum", math.inf):
        raise ValueError(
            f"--agent.maximum={config.maximum} bounds all values, and the log has a return of {high}"
        )
    if not head.are_values and (low < support[0] or high > support[1]):
        raise ValueError(
            f"the log has returns from {low:g} to {high:g}, beyond the support [{support[0]:g}, {support[1]:g}] of "
            f"--head={settings.head}: change --head_low and --head_high"
        )
    return support, head


def _continues_cut_episodes(settings: Settings, config: Any) -> bool:
    """Whether a support must hold targets that go on with the value of the state after a cut.

    Agents without values have no targets, and those of ilql's backup mc are returns, after which nothing follows.
    """
    has_targets = hasattr(config, "discount") and getattr(config, "backup", "") != "mc"
    return has_targets and heads.has_support(settings.head)


# ---- what it learned -----------------------------------------------------------------------------------------------


def scorer(
    settings: Settings, config: Any, task: Task, key: Key, mesh: Mesh
) -> Callable[[State, int], tuple[dict[str, float], list[Dialogue]]]:
    """A function (state, number of the evaluation) -> {"eval/...": number}, of held-out episodes and of games; and what
    was played, if there are games.
    """
    look = shard.on_all_hosts(reader(settings, config, task), mesh)
    play = player(settings, config, task)

    def score(state: State, number: int) -> tuple[dict[str, float], list[Dialogue]]:
        scores: dict[str, float] = {}
        played: list[Dialogue] = []
        if task.held_out is not None:
            readings = reading.in_batches(look, state, task.held_out, settings.batch_size)
            scores |= {f"eval/{name}": value for name, value in reading.against_returns(readings).items()}
        if play:
            rng = np.random.default_rng([settings.seed, number])
            played = play(state, jax.random.fold_in(key, number), rng)
            scores |= of_games(played)
        return scores, played

    return score


def reader(
    settings: Settings, config: Any, task: Task
) -> Callable[[State, TokenBatch], dict[str, jax.Array]]:
    """See `rl.language.reading.reader`."""
    token_values = AGENTS[settings.agent].token_values(config, task.lm, task.head)
    return reading.reader(task.lm, token_values, getattr(config, "discount", 1.0))


def player(
    settings: Settings, config: Any, task: Task
) -> Callable[[State, Key, np.random.Generator], list[Dialogue]] | None:
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

    def play(state: State, key: Key, rng: np.random.Generator) -> list[Dialogue]:
        return text.play(game, speaker(params(state), key), settings.eval_episodes, rng)

    return play


def of_games(played: Sequence[Dialogue]) -> dict[str, float]:
    """The mean return with its interval, the mean number of the agent's turns, and the share of games that ended."""
    returns = statistics.summary([one.returned for one in played])
    low, high = returns["ci95"]
    return {
        "eval/played": returns["mean"],
        "eval/played_low": low,
        "eval/played_high": high,
        "eval/played_turns": float(np.mean([sum(turn.is_action for turn in one.turns) for one in played])),
        "eval/played_ended": float(np.mean([one.terminated for one in played])),
    }


def _line(step: int, played: Dialogue) -> dict[str, Any]:
    """What `PLAYED` says of a game; its turns are as a log has them."""
    turns = [turn._asdict() for turn in played.turns]
    return {"step": step, "return": played.returned, "terminated": played.terminated, "turns": turns}


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
        notes.show_folder(result)


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings(), lambda name: agent(name).Config()))
