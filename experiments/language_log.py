"""What `experiments.language` reads: a log, candidates and prompts, in the tokens of a model."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.language_settings import PROBLEMS, Settings
from rl import log
from rl.data import dialogues
from rl.envs import double_t_maze, programs, wordle
from rl.envs.text import Chat, Dialogue, Game
from rl.language import chat, speak
from rl.language.model import LM
from rl.language.pretrained import Pretrained
from rl.language.speak import Words
from rl.programs.pool import Pool
from rl.programs.problems import Problem, Samples
from rl.programs.verdicts import Verdict
from rl.replay import tokens as replay
from rl.replay.tokens import Episode
from rl.types import Params, TokenBatch
from rl.values.heads import ValueHead

# What a completion goes no further than: a language model goes on behind a function. Of HumanEval as in Chen et al.
# (2021); solutions of MBPP may have several functions and classes. Others are scripts.
STOPS: dict[str, tuple[str, ...]] = {
    "humaneval": ("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    "mbpp": ("\nif", "\nprint", "\nassert", '\n"""'),
}

VERDICTS = "verdicts.json"  # in the run folder

_Numbered = list[tuple[int, Dialogue | Chat]]  # by line


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
    verdicts: Mapping[str, Any]  # as of `Log`


class Log(NamedTuple):
    """Episodes in tokens, and what each of them was before anything was cut off."""

    episodes: list[Episode]
    problems: list[bytes]  # what each is an answer to
    returns: list[float]  # the sum of its rewards
    beyond: int  # how many of the lines had too many tokens
    # What `VERDICTS` says of its programs, if it has any.
    verdicts: Mapping[str, Any] = types.MappingProxyType({})


def environment(settings: Settings, tasks: Sequence[Problem], pool: Pool | None) -> Game | None:
    """What ``--environment`` names; programs are for the problems ``tasks``, and none if none is played."""
    if not settings.environment:
        return None
    if settings.environment == "maze":
        return double_t_maze.game()
    if settings.environment == "wordle":
        return wordle.game(wordle.make(wordle.read_words(settings.environment_file)))
    text = programs.until(STOPS.get(settings.environment, ()))
    return programs.game(pool, tasks, text) if pool and settings.eval_episodes else None


def action_tokens(settings: Settings) -> int:
    """The most tokens of an action that is played; by default the environment's own number."""
    return settings.action_tokens or (256 if settings.environment in PROBLEMS else 16)


def words_of(language_model: Pretrained, stop: str | None, date: str, conversations: Sequence[Any]) -> Words:
    """The model's texts, whose actions end with ``stop``, or else with the model's end of text.

    Its chat template is read where there are chats in ``conversations``.
    """
    if not stop and language_model.end is None:
        raise ValueError("the model's files do not say which token ends a text: give --stop")
    template = None
    if any(isinstance(one, Chat) for one in conversations):
        template = chat.read(language_model.companions, datetime.fromisoformat(date) if date else None)
    end = stop or language_model.tokenizer.id_to_token(language_model.end)
    return speak.make(language_model.tokenizer, end, language_model.ends, template)


def episodes(
    settings: Settings,
    read: Mapping[int, Dialogue | Chat | Samples] | None,
    words: Words,
    limit: int,
    game: Game | None,
    tasks: Sequence[Problem],
    pool: Pool | None,
    folder: Path,
) -> Log:
    """The log in tokens. How many of its lines had more than ``limit`` of them is said.

    Args:
      settings: of the run.
      read: the log by line; None: episodes that the data policy of ``game`` plays.
      words: the model's texts.
      limit: of an episode's tokens.
      game: see `environment`.
      tasks: the problems that logged programs are for.
      pool: where these are run.
      folder: of the run, which goes on with the verdicts that it began with.

    Raises:
      ValueError: a line that cannot be used; the message says which.
    """
    if read is None:
        assert game and game.logged  # as `experiments.language_settings.check` has seen to
        played = game.logged(settings.episodes, np.random.default_rng(settings.seed))
        return _in_tokens("episode", words, list(enumerate(played, start=1)), limit, settings)
    numbered, verdicts = _judged(settings, read, tasks, pool, folder)
    in_tokens = _in_tokens(f"{settings.log}, line", words, numbered, limit, settings)
    if any(isinstance(one, Chat) for _, one in numbered):
        _warn_of_time(words)
    return in_tokens._replace(verdicts=verdicts)


def candidates(
    settings: Settings, words: Words, candidate_sets: Mapping[int, dialogues.Candidates], limit: int
) -> TokenBatch | None:
    """What was said with each of the candidates, one in a row; None where nothing is to be ranked.

    None can be left out, or the others would have the wrong scores. Where they are too long, the prompt is cut, by as
    many tokens for each candidate of a row, so that all are scored after the same text.
    """
    if not candidate_sets:
        return None
    episodes: list[Episode] = []
    cuts = settings.overlong == "truncate"
    whole_or_not = dataclasses.replace(settings, overlong="refuse", length=0)
    shortened = 0
    for line, row in candidate_sets.items():
        where = f"{settings.rank}, line {line}, candidate"
        numbered = [
            (number, speak.answered(row.dialogue, text))
            for number, text in enumerate(row.candidates, start=1)
        ]
        most = sys.maxsize if cuts else limit
        whole = _in_tokens(where, words, numbered, most, whole_or_not, "truncate").episodes
        excess = max(len(one.tokens) for one in whole) - limit
        if excess > 0:
            whole = _without_front(where, words, numbered, whole, excess)
            shortened += 1
        episodes += map(_last_action, whole)
    _tell_of_overlong(settings.rank, shortened, len(candidate_sets), limit, settings.overlong)
    return replay.pack(episodes, max(len(one.tokens) for one in episodes), together=False)


def _without_front(
    where: str, words: Words, numbered: _Numbered, whole: Sequence[Episode], excess: int
) -> list[Episode]:
    """Candidates without the first ``excess`` tokens of their prompt. Raises ValueError if it does not have so many."""
    for (number, dialogue), one in zip(numbered, whole, strict=True):
        prompt = np.flatnonzero(_last_action(one).is_action)[0] - speak.before_text(
            words, dialogue, one.tokens
        )
        if prompt <= excess:
            raise ValueError(
                f"{where} {number}: {excess} tokens of its prompt had to be cut off, which are all of it: leave the "
                "longest candidate of the line out"
            )
    return [
        speak.shortened(words, dialogue, one, len(one.tokens) - excess)
        for (_, dialogue), one in zip(numbered, whole, strict=True)
    ]


def split(
    settings: Settings, episodes: Sequence[Episode], problems: Sequence[bytes]
) -> tuple[list[Episode], list[Episode]]:
    """`rl.replay.tokens.split`; where it cannot hold out whole problems, or so few episodes, that is said."""
    learned, held_out = replay.split(episodes, settings.held_out, settings.seed, problems)
    if not learned:
        raise ValueError(
            f"--held_out={settings.held_out} leaves none of {len(episodes)} episodes to learn from"
        )
    most, note = max(Counter(problems).values()), ""
    if len(held_out) > round(settings.held_out * len(episodes)):
        note = f"the smallest problem has {len(held_out)} of {len(episodes)} episodes, which are held out together"
    elif held_out and settings.log and 2 * most >= len(episodes):
        note = (
            f"{most} of {len(episodes)} episodes have the same prompt and are held out one by one, beside others that "
            "are learned from"
        )
    elif settings.held_out and not held_out:
        note = f"nothing is held out of {len(episodes)} episodes, and what depends on it is not measured"
    if note:
        print(f"note: --held_out={settings.held_out}: {note}", file=sys.stderr)
    return learned, held_out


def prompts_that_fit(
    settings: Settings, words: Words, prompts: Sequence[dialogues.Prompt], context: int
) -> list[dialogues.Prompt]:
    """The prompts that are to be answered: those that leave no room in the context are cut, left out or refused."""
    room = context - settings.answer_tokens
    if room < 1:
        raise ValueError(
            f"--answer_tokens={settings.answer_tokens} leaves no room to read in a context of {context}"
        )
    remaining = []
    for one in prompts:
        try:
            size = len(speak.history(words, one.dialogue))
        except Exception as error:  # as in `_in_tokens`
            raise ValueError(f"{settings.generate}, line {one.line}: {error}") from None
        if size > room and settings.overlong == "refuse":
            raise ValueError(
                f"{settings.generate}, line {one.line}: {size} tokens are more than the {room} that --answer_tokens="
                f"{settings.answer_tokens} leaves of the model's context: lower it, or give --overlong=truncate or skip"
            )
        if size <= room or settings.overlong == "truncate":
            remaining.append((one, size))
    beyond = len(prompts) - sum(size <= room for _, size in remaining)
    _tell_of_overlong(settings.generate, beyond, len(prompts), room, settings.overlong)
    if not remaining:
        raise ValueError(f"{settings.generate}: all prompts have more than {room} tokens, and none is left")
    return [one for one, _ in remaining]


def _judged(
    settings: Settings,
    read: Mapping[int, Dialogue | Chat | Samples],
    tasks: Sequence[Problem],
    pool: Pool | None,
    folder: Path,
) -> tuple[_Numbered, dict[str, Any]]:
    """What a log has, whose programs have met the tests of their problems, cut as those that are played.

    How many were cut is said. The second is what `VERDICTS` is to say of them.

    Raises:
      ValueError: there are programs and not their problems, or two of the same name.
    """
    of_name: dict[str, Problem] = {}
    for task in tasks:
        if of_name.setdefault(task.name, task) != task:
            raise ValueError(
                f"{settings.environment_file} has two problems of the name {task.name!r}, and programs for them could "
                "not be told apart: give each its own"
            )
    stops = STOPS.get(settings.environment, ())
    sampled, shorter = [], 0
    for line, one in read.items():
        if not isinstance(one, Samples):
            continue
        if one.name not in of_name:
            where = f"{settings.environment_file} has no such problem" if tasks else "nothing says its tests"
            raise ValueError(
                f"{settings.log}, line {line}: these are programs for {one.name!r}, and {where}: give --environment, "
                f"one of {', '.join(PROBLEMS)}, and its --environment_file"
            )
        task = of_name[one.name]._replace(prompt=one.prompt)
        completions = [programs.before(stops, completion) for completion in one.completions]
        shorter += sum(cut != full for cut, full in zip(completions, one.completions, strict=True))
        sampled += [(line, task, completion) for completion in completions]
    if shorter:
        print(
            f"note: {settings.log}: {shorter} of {len(sampled)} programs go on behind what was asked for and are cut "
            f"there, as programs that are played (--environment={settings.environment})",
            file=sys.stderr,
        )
    pairs = [(of_name[task.name], programs.whole(task, completion)) for _, task, completion in sampled]
    record = _verdicts(settings, pairs, pool, folder) if pool and pairs else {}
    verdicts = [Verdict[name] for name in record.get("verdicts", [])]
    numbered: _Numbered = [(line, one) for line, one in read.items() if not isinstance(one, Samples)]
    for (line, task, completion), verdict in zip(sampled, verdicts, strict=True):
        numbered.append((line, programs.dialogue(task, completion, verdict)))
    return sorted(numbered, key=lambda pair: pair[0]), record


def _verdicts(
    settings: Settings, pairs: Sequence[tuple[Problem, str]], pool: Pool, folder: Path
) -> dict[str, Any]:
    """The ``verdicts`` on programs by name, and the ``digest`` of what was run.

    A run that goes on takes those that it began with, if they are of the same programs, tests and limits: one near a
    limit, or that draws from chance, may fare otherwise the next time, and its data would be others.
    """
    request = (list(pairs), settings.program_seconds, settings.program_memory)
    digest = hashlib.sha256(repr(request).encode(errors="surrogatepass")).hexdigest()
    if not settings.overwrite and (folder / VERDICTS).exists():
        stored: dict[str, Any] = log.read_json(folder / VERDICTS)
        if stored.get("digest") == digest:
            return stored
    return {"digest": digest, "verdicts": [verdict.name for verdict in pool.run(pairs)]}


def _in_tokens(
    where: str,
    words: Words,
    numbered: _Numbered,
    limit: int,
    settings: Settings,
    allowed: str = "truncate or skip",
) -> Log:
    """Dialogues in tokens, of which each has at most ``limit``; ``allowed`` are values of --overlong besides refuse.

    Raises:
      ValueError: one that has no tokens, or more than ``limit`` where that is to be refused; the message says ``where``
        and its number.
    """
    episodes, problems, returns, beyond = [], [], [], 0
    name, overlong = where.split(",")[0], settings.overlong
    longer = "raise --length, up to the model's context" if settings.length else "shorten it"
    with log.progress(len(numbered), f"tokens of each {name}", delay=3) as bar:
        for number, each in numbered:
            try:
                one = speak.episode(words, each)
            except Exception as error:  # tokenizers has nothing more special for a text that it cannot encode
                raise ValueError(f"{where} {number}: {error}") from None
            bar.update(1)
            problem, earned = _problem(each, one), one.reward.sum()
            if len(one.tokens) > limit:
                beyond += 1
                if overlong == "refuse":
                    raise ValueError(
                        f"{where} {number}: {len(one.tokens)} tokens are more than the {limit} that there is room for: "
                        f"{longer}, or give --overlong={allowed}"
                    )
                if overlong == "skip":
                    continue
                one = speak.shortened(words, each, one, limit)
                if not one.is_action.any():
                    raise ValueError(
                        f"{where} {number}: nothing of the agent's is in its last {limit} tokens: {longer}, or leave "
                        "the line out"
                    )
            episodes.append(one)
            problems.append(problem)
            returns.append(earned)
    _tell_of_overlong(name, beyond, len(numbered), limit, overlong)
    if not episodes:
        raise ValueError(f"{name}: all {beyond} lines have more than {limit} tokens, and none is left")
    return Log(episodes, problems, returns, beyond)


def _problem(dialogue: Dialogue | Chat, one: Episode) -> bytes:
    """What an episode is an answer to, as a key: the messages of a chat before its first answer, or else its prompt.

    The tokens of a chat will not do: the first of an answer that begins with spaces may begin in the prompt.
    """
    if not isinstance(dialogue, Chat):
        return replay.prompt(one)
    before = itertools.takewhile(lambda message: message["role"] != "assistant", dialogue.messages)
    return json.dumps([[*before], dialogue.tools], sort_keys=True).encode()


def _tell_of_overlong(name: str, beyond: int, total: int, limit: int, overlong: str) -> None:
    if beyond:
        done = "left out" if overlong == "skip" else "cut at the front"
        print(
            f"note: {name}: {beyond} of {total} have more than {limit} tokens and are {done} (--overlong={overlong})",
            file=sys.stderr,
        )


def _last_action(one: Episode) -> Episode:
    """The episode whose one action is its last: what the agent said before belongs to the prompt, and has no score."""
    last = np.flatnonzero(one.is_action)[-1]
    before = np.flatnonzero(~one.is_action[:last])[-1]
    is_action = one.is_action & (np.arange(len(one.tokens)) > before)
    return one._replace(is_action=is_action, reward=np.where(is_action, one.reward, 0.0))


def _warn_of_time(words: Words) -> None:
    if words.template and words.template.asks_the_time:
        print(
            "note: the model's chat template writes the day into its texts, so that this run cannot be continued on "
            f"another: give --date={datetime.now():%Y-%m-%d}",
            file=sys.stderr,
        )
