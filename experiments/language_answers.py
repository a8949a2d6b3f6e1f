"""Goes on with the prompts of `experiments.language`, by a trained agent, an exported one or a plain model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import language_log, language_settings
from experiments.language_settings import Settings
from rl import exported, keys, log, run_folder
from rl.data import dialogues
from rl.language import generate, model, pretrained, speak
from rl.language.generate import Decoder
from rl.language.speak import Words

GENERATED = "generated.jsonl"  # in the run folder


def use(settings: Settings, config: Any) -> dict[str, Any]:
    """Goes on with the prompts of the settings, by an agent that was exported or by a language model as it is.

    Raises:
      ValueError: a setting that would be ignored. The agent and its hyper-parameters may be those that were exported.
    """
    prompts = dialogues.read_prompts(settings.generate)
    if (Path(settings.model) / exported.CARD).exists():
        agent = exported.load(settings.model, language_settings.dtype(settings))
        language_settings.check_unused(settings, config, agent)
        language_model, decoder, params, stop = agent.language_model, agent.decoder, agent.params, agent.stop
    else:
        language_settings.check_unused(settings, config)
        language_model = pretrained.load(settings.model)
        decoder = generate.decoder(model.make(language_model.config, language_settings.dtype(settings)))
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
    return run_folder.folder(settings.workdir, place.name, "generated")


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
    # Half of a surrogate pair, which JSON may hold and UTF-8 may not, is written as JSON's escape.
    with (
        log.replacing(folder / GENERATED) as partial,
        open(partial, "w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        for number, one in enumerate(prompts):
            answers = texts[number * settings.answers : (number + 1) * settings.answers]
            file.write(json.dumps({**one.row, "answers": answers}, ensure_ascii=False) + "\n")
