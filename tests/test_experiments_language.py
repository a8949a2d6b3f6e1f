"""experiments.language: whole runs on a tiny model of characters, resumption, ranking, games, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_shard import launch, succeed

pytest.importorskip("tokenizers")
from tokenizers.processors import TemplateProcessing

from experiments import checks, language_answers, language_log, language_rank, language_settings
from experiments import language as script
from rl import checkpoint, exported, lifecycle, log, shard, train
from rl.agents import bcoder, ilql, lm_bc
from rl.agents.optimisers import Adam
from rl.data import dialogues
from rl.envs import text, wordle
from rl.language import huggingface, model, pretrained, reading, speak, tokenizer
from rl.language.generate import Choice, Decoder
from rl.language.model import Config
from rl.language.weights import WeightsError
from rl.networks.transformer import Shape
from rl.programs.pool import Limits, Pool
from rl.programs.problems import Problem, read_apps
from rl.replay import tokens as replay
from rl.types import State
from rl.values.heads import HeadSettings

OWN = {
    "bcoder": {"value_updates": 2, "inner": 8},
    "ilql": {"inner": 16, "backup": "mc", "target_rate": 0.2, "cql_weight": 0.0},
    "lm_bc": {},
}


def row(question: int, reply: int, before: str = "") -> dict[str, Any]:
    """To be repeated is right, and what is near earns something."""
    answer = {"text": str(reply), "is_action": True, "reward": 1 - abs(question - reply) / 2}
    return {"turns": [{"text": f"{before}={question}"}, answer], "imitate": question == reply}


TEMPLATE = """{% for message in messages %}
{{ '=' + message.content if message.role == 'user' else message.content + '<end>' }}{% endfor %}"""


def user(question: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": str(question)}]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of characters, a log of sums and candidates to rank."""
    folder = tmp_path_factory.mktemp("files")
    words = tokenizer.characters(["123=\nWordle: abcgy"])
    shape = Shape(width=16, layers=1, heads=2, kv_heads=1, head_size=8, inner=16)
    lm = model.make(Config(max(words.get_vocab().values()) + 1, 160, shape))
    huggingface.save(folder / "model", lm.config, jax.jit(lm.init)(jax.random.key(0)), words, ends=[0])
    rows = [row(a, b, before) for before in ("", "a", "b", "c") for a in (1, 2, 3) for b in (1, 2, 3)]
    write(folder / "log.jsonl", rows)  # 12 problems, which are held out whole
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    problems = [
        {"prompt": "=1", "candidates": ["1", "3"], "outcomes": [True, False]},
        {"messages": user(3), "candidates": ["1", "2", "3"], "outcomes": [False, False, True]},
    ]
    write(folder / "asked.jsonl", problems)
    write(folder / "prompts.jsonl", [{"prompt": "=2"}, {"messages": user(3)}, {"prompt": "=2"}])
    (folder / "words.txt").write_text("abbey\ndodge\nlodge\n")
    return folder


def settings(files: Path, workdir: Path, **fields: Any) -> script.Settings:
    return script.Settings(
        **{
            "agent": "lm_bc",
            "log": str(files / "log.jsonl"),
            "model": str(files / "model"),
            "head_size": 11,
            "updates": 4,
            "eval_every": 2,
            "batch_size": 4,
            "held_out": 0.25,
            "tensorboard": False,
            "workdir": str(workdir),
        }
        | fields
    )


def config(agent: str = "lm_bc", **fields: Any) -> Any:
    return script.agent(agent).Config(**{"learning_rate": 1e-2, "chunk": 160} | OWN[agent] | fields)


def ranked(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / language_rank.RANKED).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_and_its_policy_is_a_model(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By likelihood, the control; it learns the right answers only, and ranks and writes what it then is."""
    chosen = settings(
        files,
        tmp_path / "whole",
        updates=240,
        eval_every=120,
        rank=str(files / "asked.jsonl"),
        export=True,
        held_out=0.0,
    )
    result = script.run(chosen, config())
    assert (result["episodes"], result["updates"], result["agent"]) == (36, 240, "lm_bc")
    first, second = ranked(tmp_path / "whole")
    assert (
        first["prompt"] == "=1" and second["messages"] == user(3) and second["candidates"] == ["1", "2", "3"]
    )
    assert (
        result["ranking"]["pass_at"]["scores"]["1"]["mean"]
        == 1.0
        == result["ranking"]["pairs"]["scores"]["mean"]
    )
    for line in (first, second):
        assert line["tokens"] == [2] * len(line["scores"])  # the answer and its end
        for name in ("scores", "log_probabilities"):
            np.testing.assert_allclose(line[f"{name}_per_token"], np.array(line[name]) / 2)
    assert first["order"] == [0, 1] and second["order"][0] == 2
    assert first["scores"][0] > -0.5 > -3 > first["log_probabilities"][0]
    # Stopped at the first occasion, and continued.
    cut = dataclasses.replace(chosen, workdir=str(tmp_path / "cut"))
    with monkeypatch.context() as patched:
        patched.setattr(train, "stop_requests", lambda: contextlib.nullcontext([signal.SIGINT]))
        with pytest.raises(train.Interrupted, match="stopped at update 120; the same command continues"):
            script.run(cut, config())
    assert not (tmp_path / "cut" / language_rank.RANKED).exists()
    script.run(cut, config())
    assert log.read(tmp_path / "cut") == log.read(tmp_path / "whole")
    # In a folder where it is finished, what is missing is made again.
    shutil.rmtree(tmp_path / "whole" / script.POLICY)
    with monkeypatch.context() as patched:
        patched.setattr(script.flags, "read", lambda _, prefix="": config() if prefix else chosen)
        script.main([])
    assert f"Everything is in {chosen.workdir}; look at" in capsys.readouterr().out
    one, other = (pretrained.load(tmp_path / name / script.POLICY) for name in ("whole", "cut"))
    assert jax.tree.all(jax.tree.map(np.array_equal, one.params, other.params))
    assert ranked(tmp_path / "cut") == [first, second]
    with pytest.raises(checkpoint.CheckpointError, match=r"settings\.seed: 0 in the checkpoint, 1"):
        script.run(dataclasses.replace(chosen, seed=1), config())


@pytest.mark.slow
def test_a_resumed_run_has_each_game_once(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after what was played was written and before the checkpoint; with the games of another evaluation."""
    games = {"environment": "wordle", "environment_file": str(files / "words.txt"), "action_tokens": 4}
    whole = settings(files, tmp_path / "whole", **games, eval_episodes=6, held_out=0.0)
    script.run(whole, config())
    lines = (tmp_path / "whole" / script.PLAYED).read_text().splitlines()
    played = [json.loads(line) for line in lines]
    assert [line["step"] for line in played] == [2] * script.SHOWN + [4] * script.SHOWN
    for line in played:
        assert line["terminated"] and line["return"] == sum(turn["reward"] for turn in line["turns"])
        assert [turn["is_action"] for turn in line["turns"]] == [False, True] * 6 + [False]
    assert log.read(tmp_path / "whole")[-1]["eval/played_turns"] == 6
    assert log.read(tmp_path / "whole")[-1]["eval/played_ended"] == 1
    cut, keep, kept = dataclasses.replace(whole, workdir=str(tmp_path / "cut")), lifecycle.Session.keep, []

    def killed_at_the_second(*arguments: Any, **more: Any) -> None:
        kept.append(arguments)
        if len(kept) == 2:
            raise KeyboardInterrupt
        keep(*arguments, **more)

    monkeypatch.setattr(lifecycle.Session, "keep", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        script.run(cut, config())
    assert len((tmp_path / "cut" / script.PLAYED).read_text().splitlines()) == 2 * script.SHOWN
    script.run(cut, config())
    assert (tmp_path / "cut" / script.PLAYED).read_text().splitlines() == lines


def test_games_that_were_cut_off_have_not_ended() -> None:
    """Beside one that did: shares and turns by hand."""
    said = [text.Turn("?"), text.Turn("a", True, 1.0), text.Turn("?"), text.Turn("b", True, 2.0)]
    played = [text.Dialogue(tuple(said)), text.Dialogue(tuple(said[:2]), terminated=False)]
    scores = script.of_games(played)
    assert (scores["eval/played"], scores["eval/played_turns"], scores["eval/played_ended"]) == (
        2.0,
        1.5,
        0.5,
    )


@pytest.mark.slow
def test_adapters_are_exported_as_plain_weights(files: Path, tmp_path: Path) -> None:
    """What ranks texts with adapters and what the folder holds are one model, which has learned something."""
    chosen = settings(files, tmp_path, lora_rank=2, updates=20, eval_every=20, held_out=0.0)
    changes = {"rank": str(files / "asked.jsonl"), "export": True}
    script.run(dataclasses.replace(chosen, **changes), config())
    loaded = pretrained.load(tmp_path / script.POLICY)
    read = jax.jit(functools.partial(model.log_probabilities, model.make(loaded.config)))
    lines = ranked(tmp_path)
    texts = [line.get("prompt", "=3") + text_ for line in lines for text_ in line["candidates"]]
    rows = np.array([[*loaded.tokenizer.encode(one).ids, 0] for one in texts], np.int32)
    expected = read(loaded.params, rows, np.ones_like(rows))[:, 2:].sum(1)
    scores, log_probabilities = (
        np.concatenate([line[name] for line in lines]) for name in ("scores", "log_probabilities")
    )
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert (np.abs(scores - log_probabilities) > 1e-3).all()
    state = (checkpoint.read(tmp_path / "checkpoints") or ({},))[0]
    assert state and not [name for name in state["leaves"] if "embedding" in name]
    with pytest.raises(ValueError, match="--lora_rank=-1 must be at least 0"):
        script.check(dataclasses.replace(chosen, lora_rank=-1))


@pytest.mark.slow
@pytest.mark.command
def test_values_of_a_log_are_its_returns_rank_texts_steer_and_are_exported(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By regression on returns, which are then to be found again; answers to a game are anything but words."""
    chosen = settings(
        files,
        tmp_path,
        agent="ilql",
        head="hl_gauss",
        head_start=0.9,  # exported with the values
        head_sigma=1.0,
        updates=150,
        eval_every=150,
        batch_size=16,
        rank=str(files / "asked.jsonl"),
        control="rft",
        generate=str(files / "prompts.jsonl"),
        answers=2,
        answer_tokens=4,
        answer_temperature=0.0,
        export=True,
        environment="wordle",
        environment_file=str(files / "words.txt"),
        eval_episodes=2,
        action_tokens=4,
        seed=2,
    )
    agent_config = config("ilql", critic_optimiser=Adam(clip=1e6))
    result = script.run(chosen, agent_config)
    assert "note: Q of all tokens has" in capsys.readouterr().err
    last = result["last"]
    assert tuple(result["support"]) == (0.0, 1.0) and result["mean_return"] == pytest.approx(5 / 9)
    assert last["eval/value_error"] < 0.1 * last["eval/return_deviation"]
    assert [row["order"][0] for row in ranked(tmp_path)] == [0, 2]
    assert [last[f"eval/played{which}"] for which in ("", "_low", "_high")] == [-6.0] * 3
    # The control learns what is right, too, and the untrained model knows nothing.
    report = json.loads((tmp_path / language_rank.RANKING).read_text())
    assert report["pass_at"]["random"]["1"]["mean"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert report["pairs"]["scores"]["mean"] == report["pairs"]["rft_per_token"]["mean"] == 1.0
    assert json.loads((tmp_path / language_rank.CONTROL / log.RESULT).read_text())["agent"] == "lm_bc"
    # Prompts and messages are answered, steered by values.
    generated = [
        json.loads(line) for line in (tmp_path / language_answers.GENERATED).read_text().splitlines()
    ]
    assert [one["answers"] for one in generated] == [["2", "2"], ["3", "3"], ["2", "2"]]
    assert generated[1]["messages"] == user(3)
    # What was exported has the same logits and values, and says the same by itself.
    with contextlib.ExitStack() as stack:
        task = script.problem(chosen, agent_config, stack)
        _, state, _ = script.trained(chosen, agent_config, task, shard.grid(1, 1))
    read = exported.load(tmp_path / script.POLICY)
    assert (read.agent, read.config, read.stop) == ("ilql", agent_config, "\n")
    decoder, params = ilql.decoder(agent_config, task.lm, task.head), ilql.decoder_params(state)
    judge = ilql.token_values(agent_config, task.lm, task.head)
    rows = task.rows.tokens[:8], task.rows.segment[:8]
    logits = [
        jax.jit(lambda p, d=d: d.extend(p, *rows, d.cache(8, rows[0].shape[1]))[0].logits)(p)
        for d, p in ((decoder, params), (read.decoder, read.params))
    ]
    assert read.token_values is not None
    values = [jax.jit(judge)(state, task.rows), jax.jit(read.token_values)(read.state, task.rows)]
    np.testing.assert_array_equal(*logits)
    jax.tree.map(np.testing.assert_array_equal, *values)
    alone = script.Settings(
        **{name: getattr(chosen, name) for name in ("agent", *language_settings.OF_ANSWERS)}
        | {"model": str(tmp_path / script.POLICY), "workdir": str(tmp_path / "alone")}
    )
    script.run(alone, agent_config)
    answers, again = (folder / language_answers.GENERATED for folder in (tmp_path, tmp_path / "alone"))
    assert again.read_text() == answers.read_text()
    assert "exported.load(" in (tmp_path / script.POLICY / "README.md").read_text()
    check_damaged_exports(tmp_path / script.POLICY)


def test_an_export_says_which_token_ends_an_answer_if_the_model_does_not(files: Path, tmp_path: Path) -> None:
    """A game's actions end with a line, where ``generate`` of transformers would go on."""
    base = pretrained.load(files / "model")
    state = State({"policy": base.params}, {}, {}, jnp.zeros(()))
    head = HeadSettings("scalar", 0.0, 1.0, 1)
    for stop, line in (("\n", f"eos_token_id=[0, {base.tokenizer.token_to_id(chr(10))}]"), ("<end>", "")):
        exported.save(tmp_path, "lm_bc", lm_bc.Config(), head, base, state, stop=stop)
        card = (tmp_path / "README.md").read_text()
        assert line in card and bool(line) == ("eos_token_id" in card)


def test_an_export_over_an_older_one_is_whole_or_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after one of the files that it writes; and files of two exports in one folder."""
    base = pretrained.load(files / "model")
    head = HeadSettings("scalar", 0.0, 1.0, 1)

    def save(folder: Path, scale: float) -> None:
        state = State({"policy": jax.tree.map(lambda x: scale * x, base.params)}, {}, {}, jnp.zeros(()))
        exported.save(folder, "lm_bc", lm_bc.Config(chunk=round(scale)), head, base, state, stop="\n")

    chunk = lambda folder: exported.load(folder).config.chunk
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, 1.0)
    save(new, 2.0)
    assert (chunk(old), chunk(new)) == (1, 2)
    rename = os.replace

    def interrupt(source: Any, target: Any) -> None:
        rename(source, target)
        if Path(target).name == last:
            raise KeyboardInterrupt

    for last in (exported.CARD, "model.safetensors", "tokenizer.json", exported.VALUES, "README.md"):
        half = shutil.copytree(old, tmp_path / last)
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", interrupt)
            with pytest.raises(KeyboardInterrupt):
                save(half, 2.0)
        with pytest.raises(WeightsError, match=r"values\.json describes no agent"):
            exported.load(half)
    shutil.copy(new / "model.safetensors", old)
    with pytest.raises(WeightsError, match=r"do not belong to values\.json"):
        exported.load(old)
    card = json.loads((old / exported.CARD).read_text())
    del card["sha256"]  # as of an export that was written before there were any
    (old / exported.CARD).write_text(json.dumps(card))
    assert chunk(old) == 1


def check_damaged_exports(folder: Path) -> None:
    card = json.loads((folder / exported.CARD).read_text())
    for bad, message in (
        ({**card, "agent": "iql"}, "values.json describes no agent"),
        ({**card, "config": {"tau": 1}}, "values.json describes no agent"),
        (
            {**card, "head": {**card["head"], "size": 12}},
            "values.safetensors: tensors that are missing, left over, of another shape",
        ),
        ({**card, "agent": "lm_bc", "config": {}}, "values.safetensors: tensors that are missing, left over"),
    ):
        (folder / exported.CARD).write_text(json.dumps(bad))
        with pytest.raises(WeightsError, match=message):
            exported.load(folder)
    (folder / exported.CARD).unlink()
    with pytest.raises(FileNotFoundError, match=r"no values.json in .*give a folder that --export wrote"):
        exported.load(folder)


@pytest.mark.slow
@pytest.mark.command
def test_bcoder_in_both_its_stages(files: Path, tmp_path: Path) -> None:
    chosen = settings(
        files,
        tmp_path,
        agent="bcoder",
        batch_size=16,
        accumulate=2,
        rank=str(files / "asked.jsonl"),
        generate=str(files / "prompts.jsonl"),
        answers=7,  # 21 in all: no multiple of a batch or of what is accumulated
        answer_tokens=4,
        export=True,
    )
    agent_config = config("bcoder")
    assert [stage for stage, *_ in script.stages(chosen, agent_config, 32)] == ["value", "policy"]
    last = script.run(chosen, agent_config)["last"]
    assert all(np.isfinite(value) for value in last.values()) and "eval/value_error" in last
    assert [len(row["scores"]) for row in ranked(tmp_path)] == [2, 3]
    lines = [json.loads(line) for line in (tmp_path / language_answers.GENERATED).read_text().splitlines()]
    assert [len(line["answers"]) for line in lines] == [7, 7, 7]
    assert all(len(set(line["answers"])) > 1 for line in lines), "each answer is drawn by itself"
    assert lines[0]["answers"] != lines[2]["answers"], "the same prompt again"
    with contextlib.ExitStack() as stack:
        task = script.problem(chosen, agent_config, stack)
    read = exported.load(tmp_path / script.POLICY)
    assert read.token_values is not None
    rows = jax.tree.map(
        lambda x: np.repeat(x, 2, 0), task.candidates
    )  # each twice: a multiple of --accumulate
    judged = jax.jit(read.token_values)(read.state, rows).score.sum(1)[::2]
    scores = [score for row in ranked(tmp_path) for score in row["scores"]]
    np.testing.assert_allclose(judged, scores, rtol=1e-5)


def test_a_log_of_messages_is_one_of_turns(files: Path, tmp_path: Path) -> None:
    """Where the model's chat template says the same; blank lines are none."""
    turns = [row(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]
    messages = [
        {
            "messages": [*user(a), {"role": "assistant", "content": str(b)}],
            "reward": 1 - abs(a - b) / 2,
            "imitate": a == b,
        }
        for a in (1, 2, 3)
        for b in (1, 2, 3)
    ]
    tasks = []
    for name, rows in (("turns", turns), ("messages", messages)):
        path = Path(write(tmp_path / f"{name}.jsonl", rows))
        path.write_text(path.read_text().replace("\n", "\n\n"))
        with contextlib.ExitStack() as stack:
            tasks.append(script.problem(settings(files, tmp_path, log=str(path)), config(), stack))
    jax.tree.map(np.testing.assert_array_equal, tasks[0].rows, tasks[1].rows)
    jax.tree.map(np.testing.assert_array_equal, tasks[0].held_out, tasks[1].held_out)


def test_programs_of_a_log_earn_what_their_tests_say(files: Path, tmp_path: Path) -> None:
    problem = {
        "problem_id": 7,
        "question": "Double it.",
        "solutions": json.dumps(["print(2 * int(input()))"]),
        "input_output": json.dumps({"inputs": ["1", "4"], "outputs": ["2", "8"]}),
    }
    tasks = read_apps(write(tmp_path / "apps.jsonl", [problem]))
    samples = ["print(2 * int(input()))", "print(2)", "print("]
    rows = [row(1, 1), {"task_id": "APPS/7", "prompt": "x = 1\n", "samples": samples}, row(2, 1)]
    log_file = write(tmp_path / "log.jsonl", rows)
    chosen = settings(files, tmp_path, log=log_file, environment="apps", environment_file="apps.jsonl")
    with Pool(1, isolation="none") as pool:
        judged, record = language_log._judged(chosen, dialogues.read(log_file), tasks, pool, tmp_path)
        # A run that goes on has the verdicts that it began with, also where a program would fare otherwise by now.
        log.write_json(
            tmp_path / language_log.VERDICTS, record | {"verdicts": ["FAILED", "PASSED", "TIMEOUT"]}
        )
        for settings_of, imitated in (
            (chosen, [0.0, 1.0, 0.0]),
            (dataclasses.replace(chosen, overwrite=True), [1.0, 0.0, 0.0]),
            (dataclasses.replace(chosen, program_seconds=2), [1.0, 0.0, 0.0]),
        ):
            again, _ = language_log._judged(settings_of, dialogues.read(log_file), tasks, pool, tmp_path)
            assert [one.imitate for line, one in again if line == 2] == imitated
        assert [line for line, _ in judged] == [1, 2, 2, 2, 3]
        programs = [one for line, one in judged if line == 2]
        assert [one.turns for one in programs] == [
            (text.Turn("x = 1\n"), text.Turn(sample, True, reward))
            for sample, reward in zip(samples, (1.0, -0.3, -1.0), strict=True)
        ]
        assert [one.imitate for one in programs] == [1.0, 0.0, 0.0]
        log_file = write(tmp_path / "log.jsonl", [{"task_id": "APPS/8", "prompt": "", "samples": ["1"]}])
        with pytest.raises(
            ValueError, match=r"line 1: these are programs for 'APPS/8', and apps.jsonl has no such"
        ):
            language_log._judged(chosen, dialogues.read(log_file), tasks, pool, tmp_path)
        assert language_log.environment(dataclasses.replace(chosen, eval_episodes=0), tasks, pool) is None
        game = language_log.environment(chosen, tasks, pool)
        assert game and len(text.play(game, lambda all_: [""] * len(all_), 2, np.random.default_rng(0))) == 2
    for where, tokens in (("", 16), ("maze", 16), ("wordle", 16), ("mbpp", 256), ("apps", 256)):
        assert language_log.action_tokens(dataclasses.replace(chosen, environment=where)) == tokens
    limits = script._limits(dataclasses.replace(chosen, program_seconds=6))
    assert limits == Limits(seconds=6, deadline=30.0) and script._limits(chosen) == Limits()


def test_programs_of_a_log_are_cut_as_those_that_are_played(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A completion that goes on with half a function did not compile in the log, and passed where it was played."""
    right, behind = "    return 2 * x\n", "\ndef g(x):\n    return ("
    task = Problem("HumanEval/0", "def f(x):\n", "assert f(2) == 4\n", ("f",), f"def f(x):\n{right}")
    rows = [{"task_id": task.name, "prompt": task.prompt, "samples": [right + behind, right, "    ("]}]
    log_file = write(tmp_path / "log.jsonl", rows)
    chosen = settings(files, tmp_path, log=log_file, environment="humaneval", environment_file="problems")
    with Pool(1, isolation="none") as pool:

        def judged(environment: str) -> list[tuple[str, float]]:
            of_environment = dataclasses.replace(chosen, environment=environment)
            numbered, _ = language_log._judged(
                of_environment, dialogues.read(log_file), [task], pool, tmp_path
            )
            return [(one.turns[1].text, one.turns[1].reward) for _, one in numbered]

        assert judged("humaneval") == [(right, 1.0), (right, 1.0), ("    (", -1.0)]
        assert f"note: {log_file}: 1 of 3 programs go on behind what was asked for" in capsys.readouterr().err
        # What plays cuts, too.
        game = language_log.environment(chosen, [task], pool)
        assert game
        for completion, reward in ((right + behind, 1.0), ("    (", -1.0)):
            [one] = text.play(game, lambda all_, said=completion: [said], 1, np.random.default_rng(0))
            assert one.returned == reward
        # Scripts are whole in both.
        assert judged("apps")[0] == (right + behind, -1.0)
        assert "programs go on" not in capsys.readouterr().err


def test_lines_that_are_too_long_are_refused_cut_or_left_out(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"turns": [{"text": "=1=2=3"}, {"text": "3", "is_action": True, "reward": 1.0}], "imitate": 0.5}
    path = write(tmp_path / "log.jsonl", [row(1, 1), long, row(2, 2)])
    problems = write(tmp_path / "asked.jsonl", [{"prompt": "=1=2=3", "candidates": ["3", "12"]}])

    def read(overlong: str) -> language_log.Task:
        chosen = settings(files, tmp_path, log=path, length=5, held_out=0.0, overlong=overlong, rank=problems)
        with contextlib.ExitStack() as stack:
            return script.problem(chosen, config(), stack)

    with pytest.raises(
        ValueError, match=r"log.jsonl, line 2: 8 tokens are more than the 5 .*--overlong=truncate or skip"
    ):
        read("refuse")
    task = read("skip")
    assert task.about["overlong"] == 1 and task.about["episodes"] == 2
    assert (
        "log.jsonl: 1 of 3 have more than 5 tokens and are left out (--overlong=skip)"
        in capsys.readouterr().err
    )
    task = read("truncate")
    assert task.about == {"episodes": 3, "mean_return": 1.0, "overlong": 1}
    [cut] = np.flatnonzero((task.rows.imitate == 0.5).any(1))
    words = task.words.tokenizer
    assert words.decode(task.rows.tokens[cut].tolist(), skip_special_tokens=False) == "2=33<end>"
    assert task.rows.reward[cut].sum() == 1.0 and task.rows.is_action[cut].sum() == 2
    assert "log.jsonl: 1 of 3 have more than 5 tokens and are cut at the front" in capsys.readouterr().err


def test_candidates_of_a_line_are_scored_after_the_same_part_of_its_prompt(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut one by one, the longest of them would be scored after less than the others, or lose its own beginning."""
    log = write(tmp_path / "log.jsonl", [row(1, 1), row(2, 2)])
    problems = write(tmp_path / "asked.jsonl", [{"prompt": "=1=2=3", "candidates": ["3", "1212"]}])

    def decoded(limit: int, prefix: str = "") -> list[str]:
        chosen = settings(files, tmp_path, log=log, held_out=0.0, overlong="truncate", rank=problems)
        with contextlib.ExitStack() as stack:
            task = script.problem(chosen, config(), stack)
        if prefix:  # before every text
            number = task.words.tokenizer.token_to_id(prefix)
            task.words.tokenizer.post_processor = TemplateProcessing(f"{prefix} $A", None, [(prefix, number)])
        rows = language_log.candidates(chosen, task.words, task.candidate_sets, limit)
        assert rows is not None and rows.is_action.sum(1).tolist() == [2, 5]
        words = task.words.tokenizer
        return [
            words.decode(tokens[segment > 0].tolist(), skip_special_tokens=False)
            for tokens, segment in zip(rows.tokens, rows.segment, strict=True)
        ]

    assert decoded(11) == ["=1=2=33<end>", "=1=2=31212<end>"]
    assert "asked.jsonl" not in capsys.readouterr().err
    assert decoded(8) == ["2=33<end>", "2=31212<end>"]
    assert "asked.jsonl: 1 of 1 have more than 8 tokens and are cut at the front" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match=r"asked.jsonl, line 1, candidate 1: 6 tokens of its prompt .* which are all"
    ):
        decoded(5)
    assert decoded(7, "=") == ["=33<end>", "=31212<end>"]
    with pytest.raises(ValueError, match=r"candidate 1: 6 tokens of its prompt .* which are all"):
        decoded(6, "=")


def test_the_best_are_those_of_whole_episodes_whatever_was_cut_off(files: Path, tmp_path: Path) -> None:
    """Where each move costs something, less is left of the longer game."""
    rows = [
        {"turns": [{"text": "="}, {"text": "1", "is_action": True, "reward": -1.0}] * moves}
        for moves in (3, 12)
    ]
    rows[0]["turns"][-1] = {"text": "1", "is_action": True, "reward": -8.0}
    path = write(tmp_path / "log.jsonl", rows)
    chosen = settings(files, tmp_path, log=path, length=9, held_out=0.0, overlong="truncate", best=0.5)
    with contextlib.ExitStack() as stack:
        task = script.problem(chosen, config(), stack)
    assert task.about == {"episodes": 2, "mean_return": -11.0, "overlong": 1}
    earned = task.rows.reward.sum(1)
    assert sorted(earned) == [-10.0, -3.0]
    np.testing.assert_array_equal((task.rows.imitate > 0).any(1), earned == -10.0)


def test_problems_are_held_out_whole_whatever_was_cut_off(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left of a prompt depends on the answer's length, so that answers to one problem no longer begin alike."""

    def sides(rows: list[dict[str, Any]], share: float) -> list[set[float]]:
        """The problems that are learned from, and those held out, told by their weights."""
        path = write(tmp_path / "log.jsonl", rows)
        chosen = settings(files, tmp_path, log=path, length=8, overlong="truncate", held_out=share)
        with contextlib.ExitStack() as stack:
            task = script.problem(chosen, config(), stack)
        assert task.held_out is not None
        return [set(side.imitate[side.imitate > 0].tolist()) for side in (task.rows, task.held_out)]

    rows = [
        {"turns": [{"text": f"{a}{b}{a}=1="}, {"text": "2" * c, "is_action": True}], "imitate": a + 4 * b}
        for a in (1, 2, 3)
        for b in (1, 2, 3)
        for c in (1, 2, 3, 4)
    ]
    learned, held_out = sides(rows, 0.25)
    assert len(held_out) == 2 and len(learned) == 7 and not learned & held_out
    assert "--held_out" not in capsys.readouterr().err
    learned, held_out = sides(rows, 0.05)
    assert len(held_out) == 1 and not learned & held_out
    assert "--held_out=0.05: the smallest problem has 4 of 36 episodes" in capsys.readouterr().err
    assert sides(rows[:8], 0.25)[1] <= {5, 9}
    assert (
        "--held_out=0.25: 4 of 8 episodes have the same prompt and are held out one by one"
        in capsys.readouterr().err
    )


def test_candidates_are_scored_by_their_own_tokens(files: Path, tmp_path: Path) -> None:
    """What the agent said in the prompt is part of no score; its mean per token would depend on that."""
    turns = [
        {"text": "=1"},
        {"text": "123", "is_action": True, "reward": 1.0},
        {"text": "=2"},
    ]
    messages = [*user(1), {"role": "assistant", "content": "123"}, *user(2)]
    rows: list[dict[str, Any]] = [{"turns": turns}, {"messages": messages}, {"prompt": "=2"}]
    asked = write(tmp_path / "asked.jsonl", [{**one, "candidates": ["1", "22"]} for one in rows])
    with contextlib.ExitStack() as stack:
        task = script.problem(settings(files, tmp_path, rank=asked), config(), stack)
    assert task.candidates is not None
    words = task.words.tokenizer
    scored = [
        words.decode(tokens[is_action].tolist(), skip_special_tokens=False)
        for tokens, is_action in zip(task.candidates.tokens, task.candidates.is_action, strict=True)
    ]
    assert scored == ["1<end>", "22<end>"] * 3
    assert not task.candidates.reward.any() and (task.candidates.discount == 0).sum() == 6


def test_a_ranking_splits_the_untrained_model_and_leaves_no_comparison_of_other_candidates(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies as the mesh says, though this one has a single device. What models say of texts is made up here."""
    asked = write(tmp_path / "asked.jsonl", [{"prompt": "=2", "candidates": ["1", "2"]}])
    chosen = settings(files, tmp_path, rank=asked)
    with contextlib.ExitStack() as stack:
        task = script.problem(chosen, config(), stack)
    state, mesh = State({"policy": {}}, {}, {}, jnp.zeros(())), shard.grid()
    assert task.candidates is not None
    taken = np.asarray(task.candidates.is_action)
    inputs = []

    def in_batches(look: Any, params: Any, *_: Any) -> Any:
        inputs.append(params)
        zeros = np.zeros(taken.shape)
        return {"taken": taken, "score": zeros} if isinstance(params, State) else zeros

    monkeypatch.setattr(reading, "in_batches", in_batches)
    (tmp_path / language_rank.RANKING).write_text("{}")
    read = script.reader(chosen, config(), task)
    assert language_rank.rank(chosen, task, read, state, tmp_path, {}, mesh) is None
    assert not (tmp_path / language_rank.RANKING).exists() and len(ranked(tmp_path)) == 1
    _, untrained = inputs
    specs = shard.language_specs(task.pretrained.params, mesh)
    jax.tree.map(lambda x, spec: np.testing.assert_equal(x.sharding.spec, spec), untrained, specs)


@pytest.mark.parametrize(
    ("switch", "rows", "expected"),
    [
        (4, 8, [("value", 0, 2), ("policy", 2, 5)]),
        (5, 8, [("value", 0, 2), ("", 2, 3), ("policy", 3, 5)]),  # changes within an epoch
        (4, 20, [("", 0, 2), ("policy", 2, 5)]),  # 16 rows are drawn, then 24
        (-1, 8, [("value", 0, 5)]),
        (0, 8, [("policy", 0, 5)]),
        (99, 8, [("value", 0, 5)]),
    ],
)
def test_frozen_models_read_all_rows_before_a_stage_that_draws_as_many(
    files: Path, tmp_path: Path, switch: int, rows: int, expected: list[tuple[str, int, int]]
) -> None:
    chosen = settings(files, tmp_path, agent="bcoder", updates=10)
    assert script.stages(chosen, config("bcoder", value_updates=switch), rows) == expected
    for other in ({"read_once": False}, {"agent": "lm_bc"}):
        stages = script.stages(
            dataclasses.replace(chosen, **other), config("bcoder", value_updates=switch), rows
        )
        assert stages == [("", 0, 5)]


def test_a_policy_that_is_left_no_updates_is_said(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(files, tmp_path, agent="bcoder")
    for updates, says in ((4, True), (18_000, True), (3, False), (-1, False)):
        language_settings.warn_of_stages(chosen, config("bcoder", value_updates=updates))
        message = f"note: --agent.value_updates={updates} leaves no updates of --updates=4 to the policy"
        assert (message in capsys.readouterr().err) == says


def test_a_maximum_that_a_head_with_a_support_ignores_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    language_settings.warn_of_maximum(bcoder.Config(), "c51")
    assert not capsys.readouterr().err
    language_settings.warn_of_maximum(bcoder.Config(maximum=2.0), "c51")
    assert (
        capsys.readouterr().err
        == "note: --agent.maximum changes nothing: values of --head=c51 lie in its support, which --head_low and "
        "--head_high give\n"
    )


def test_a_log_of_which_nothing_is_to_be_imitated(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused where that is all that is learned, and said where it is part of it."""
    path = write(tmp_path / "log.jsonl", [row(1, 2), row(2, 1)])
    chosen = settings(files, tmp_path / "run", log=path, held_out=0.0, eval_episodes=8, action_tokens=4)
    with pytest.raises(
        ValueError, match=r"no row is to be imitated: give imitate in each row, or --best=0.1"
    ):
        script.run(chosen, config())
    with contextlib.ExitStack() as stack:
        task = script.problem(chosen, config(), stack)
    said = capsys.readouterr().err
    assert "--head_size changes nothing with --head=scalar" in said
    assert "--action_tokens, --eval_episodes change nothing without --environment" in said
    with pytest.raises(ValueError, match="no row is to be imitated"):
        script.run(dataclasses.replace(chosen, eval_episodes=0), config())
    assert "--action_tokens changes nothing without --environment" in capsys.readouterr().err
    unread = dataclasses.replace(chosen, environment="maze", environment_file=path, program_seconds=9)
    assert language_settings.unread(unread).keys() == {
        "environment_file",
        "program_seconds",
        "program_memory",
        "read_once",
    }
    of_programs = dataclasses.replace(unread, agent="bcoder", environment="mbpp")
    assert not language_settings.unread(of_programs)
    played_none = language_settings.unread(dataclasses.replace(of_programs, eval_episodes=0))
    assert played_none.keys() == {"temperature", "action_tokens"}
    some = task._replace(rows=task.rows._replace(imitate=np.ones((1, 1))))
    for agent, fields, says in (
        ("ilql", {}, "--agent.bc_weight has nothing to clone"),
        ("ilql", {"bc_weight": 0.0}, ""),
        ("bcoder", {}, "B-Coder's policy is anchored to nothing"),
        ("bcoder", {"value_updates": -1}, ""),
        ("bcoder", {"value_updates": 4}, ""),
        ("bcoder", {"imitation_weight": 0.0, "advantage_weight": 0.0}, ""),
        ("lm_bc", {}, ""),
    ):
        language_settings.warn_of_imitation(
            settings(files, tmp_path, agent=agent), config(agent, **fields), some.rows
        )
        assert not capsys.readouterr().err
        language_settings.warn_of_imitation(
            settings(files, tmp_path, agent=agent), config(agent, **fields), task.rows
        )
        said = capsys.readouterr().err
        assert says in said and bool(says) == bool(said)


# ---- several processes --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_two_processes_train_rank_and_export_what_one_does(
    lora_rank: int, files: Path, tmp_path: Path
) -> None:
    """The same command twice, each with half of every model."""
    fields = {"agent": "bcoder", "batch_size": 16, "export": True, "rank": str(files / "asked.jsonl")}
    fields["lora_rank"] = lora_rank
    one, two = (
        settings(files, tmp_path / name, **fields, mesh_model=n) for n, name in ((1, "one"), (2, "two"))
    )
    command = [f"--{name}={value}" for name, value in dataclasses.asdict(two).items()]
    command += script.flags.written(config("bcoder"), bcoder.Config(), "agent.")
    program = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('experiments.language', None, '__main__', True)"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    cluster = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2"}
    succeed(*(launch(program.format(command), 1, **cluster, JAX_PROCESS_ID=str(n)) for n in range(2)))
    script.run(one, config("bcoder"))
    alone, both = (pretrained.load(tmp_path / name / script.POLICY).params for name in ("one", "two"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), alone, both)
    for line, other in zip(ranked(tmp_path / "one"), ranked(tmp_path / "two"), strict=True):
        np.testing.assert_allclose(line["scores"], other["scores"], atol=2e-3)
    hardware = json.loads((tmp_path / "two" / log.RESULT).read_text())["hardware"]
    assert hardware["processes"] == 2


def test_a_game_makes_a_log(files: Path, tmp_path: Path) -> None:
    game = {"log": "", "environment": "wordle", "environment_file": str(files / "words.txt"), "episodes": 40}
    with contextlib.ExitStack() as stack:
        task = script.problem(settings(files, tmp_path, **game, length=160), config("ilql"), stack)
    assert task.support[0] >= -6 and task.support[1] == 0
    assert task.rows.segment.max() > 1 and task.held_out is not None
    ends = task.rows.tokens[task.rows.is_action][-1]
    assert task.pretrained.tokenizer.id_to_token(int(ends)) == "\n"


def test_a_speaker_reads_what_it_was_trained_on_and_says_what_its_decoder_chooses(files: Path) -> None:
    """The decoder is a table of which token follows which: after a line end ``lodge`` and a line end."""
    words = speak.make(tokenizer.read(files / "model"), "\n")
    ids = words.tokenizer.encode("\nlodge\n").ids
    follows = np.zeros(160, np.int32)
    follows[ids[:-1]] = ids[1:]

    def extend(params: Any, tokens: Any, segment: Any, cache: Any) -> Any:
        return Choice(jax.nn.one_hot(params[tokens[:, -1]], 160)), cache

    decoder = Decoder(lambda rows, slots: (), extend)
    for context in (160, 10):  # room for a few tokens only
        speaker = speak.speaker(decoder, words, context, steps=8, temperature=0.0)
        played = text.play(
            wordle.game(wordle.make(["lodge", "dodge"])),
            speaker(follows, jax.random.key(0)),
            8,
            np.random.default_rng(0),
        )
        assert {turn.text for one in played for turn in one.turns if turn.is_action} == {"lodge"}
        assert {one.returned for one in played} == {0.0, -6.0}
    with pytest.raises(ValueError, match="an action of 8 tokens leaves no room to read in a context of 8"):
        speak.speaker(decoder, words, 8, steps=8)
    one = max(played, key=lambda one: len(one.turns))
    whole = speak.episode(words, one).tokens.tolist()
    assert speak.history(words, one._replace(turns=one.turns[:5])) == whole[: len("Wordle:\n") + 2 * (6 + 10)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_an_embedding_that_are_no_tokens_are_never_said(temperature: float) -> None:
    """However large their values are, which no data corrects: an embedding may have more rows than the tokenizer."""
    letters = tokenizer.characters(["ab\n"])
    b, rows = letters.token_to_id("b"), tokenizer.size(letters) + 3
    policy = jax.nn.one_hot(jnp.array([b]), rows) * 20.0
    steered = policy.at[:, -3:].set(100.0)
    decoder = Decoder(
        lambda rows, slots: (), lambda params, tokens, *rest: (Choice(steered, policy), rest[1])
    )
    words = speak.make(letters, "\n")
    speaker = speak.speaker(decoder, words, 8, steps=4, temperature=temperature)
    assert speaker({}, jax.random.key(0))([text.Dialogue((text.Turn("a"),))]) == ["bbbb"]


def test_what_does_not_fit_is_left_out_behind_the_first_token() -> None:
    """And every token that ends a text ends an action: the decoder says ``a`` only where it has read ``<s>``."""
    package = pytest.importorskip("tokenizers")
    letters = tokenizer.characters(["abc\n"])
    first, a, b, end = 5, 2, 3, 6
    letters.add_special_tokens(["<s>", "<eot>"])
    letters.post_processor = package.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )

    def extend(params: Any, tokens: Any, segment: Any, cache: Any) -> Any:
        last = jnp.where(tokens[:, -1] == a, end, b)
        return Choice(jax.nn.one_hot(jnp.where((tokens == first).any(1), a, last), 7)), cache

    decoder, words = Decoder(lambda rows, slots: (), extend), speak.make(letters, "\n", [end])
    speaker = speak.speaker(decoder, words, 12, steps=6, temperature=0.0)
    prompts = [text.Dialogue((text.Turn(prompt),)) for prompt in ("abcb" * 5, "bc")]
    assert speaker({}, jax.random.key(0))(prompts) == ["a", "a"]
    # Every move has draws of its own, and equal keys the same moves.
    either = jnp.where(jnp.isin(jnp.arange(7), jnp.array([a, b])), 0.0, -jnp.inf)
    coin = Decoder(
        lambda rows, slots: (), lambda params, tokens, *rest: (Choice(either + 0 * tokens[:, :1]), rest[1])
    )
    tosses = speak.speaker(coin, words, 60, steps=20)
    policy, again = tosses({}, jax.random.key(0)), tosses({}, jax.random.key(0))
    moves = [policy(prompts) for _ in range(2)]
    assert moves[0] != moves[1] and [again(prompts) for _ in range(2)] == moves


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_the_best_of_a_log_are_imitated(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for share, worth in ((0.2, 0.9), (0.5, 0.4)):
        with contextlib.ExitStack() as stack:
            task = script.problem(settings(files, tmp_path, best=share), config(), stack)
        imitated = (task.rows.imitate * task.rows.is_action).max(1) > 0  # one episode in each row
        np.testing.assert_array_equal(imitated, task.rows.reward.sum(1) > worth)
        assert 0 < imitated.mean() < 1
    assert "note: --best=0.5 chooses what is imitated, in place of imitate in " in capsys.readouterr().err
    language_rank.check_control(task)
    for every in (np.ones_like, np.zeros_like):
        rows = task.rows._replace(imitate=every(task.rows.imitate))
        with pytest.raises(
            ValueError, match=r"all of the log alike, or nothing: give imitate in each row, or --best=0.1"
        ):
            language_rank.check_control(task._replace(rows=rows))


def test_where_nothing_imitates_the_best_of_a_log_change_nothing(capsys: pytest.CaptureFixture) -> None:
    chosen = language_settings.Settings(best=0.3)
    for name, fields, control, says in (
        ("lm_bc", {}, "", "imitates 3 of 4 episodes"),
        ("ilql", {}, "", "imitates 3 of 4 episodes"),
        ("ilql", {"bc_weight": 0.0}, "rft", "imitates 3 of 4 episodes"),
        ("ilql", {"bc_weight": 0.0}, "", "--best changes nothing: no term of the agent's loss imitates"),
        ("bcoder", {"value_updates": -1}, "", "--best changes nothing"),
    ):
        given = dataclasses.replace(chosen, agent=name, control=control)
        chosen_config = language_settings.agent(name).Config(**fields)
        language_settings.note_ties(given, chosen_config, [True, True, True, False])
        assert says in capsys.readouterr().err


def test_answers_to_the_same_messages_are_of_one_problem_however_they_begin() -> None:
    """The first token of an indented one may begin in the prompt, whose tokens are then fewer."""
    asked = {"role": "user", "content": "Sum a list."}

    def problem(question: Any, answer: str, prompt: list[int]) -> bytes:
        chat = text.Chat((question, {"role": "assistant", "content": answer}))
        return language_log._problem(
            chat, replay.episode([replay.Turn(prompt), replay.Turn([7], True)], True)
        )

    one = problem(asked, "return 1", [1, 2])
    assert problem(asked, "    return 2", [1]) == one == problem(asked, "other", [1, 2])
    assert problem({"role": "user", "content": "?"}, "return 1", [1, 2]) != one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": "iql"}, "unknown agent 'iql': of language models there are bcoder, ilql, lm_bc"),
        ({"log": ""}, "nothing to learn from: give --log, or --environment=wordle or maze"),
        ({"log": "", "environment": "mbpp", "environment_file": "x"}, "nothing to learn from"),
        ({"log": "no.jsonl"}, "--log=no.jsonl: there is no such file"),
        ({"episodes": 5}, "--episodes=5 are made where there is no --log, and there is one"),
        ({"head": "hlgauss"}, "unknown value head 'hlgauss': choose one of scalar"),
        ({"environment": "chess"}, "--environment=chess is none of wordle, maze"),
        ({"environment": "apps"}, "--environment=apps needs its words or problems"),
        ({"environment": "wordle"}, "--environment=wordle needs its words or problems"),
        ({"accumulate": 3}, "--accumulate=3 must be 0 or divide --batch_size=4"),
        ({"held_out": 1.0}, "--held_out=1.0 must be a share"),
        ({"held_out": 0.99}, "--held_out=0.99 leaves none of 36 episodes"),
        ({"best": 0.0}, "--best=0.0 must be a share above 0"),
        ({"temperature": -1.0}, "--temperature=-1.0 must be at least 0"),
        ({"length": 1000}, "--length=1000 is more than the model's context of 160"),
        (
            {"agent": "ilql", "head": "c51", "head_low": 0.0, "head_high": 0.5},
            "the log has returns from 0 to 1, beyond the support [0, 0.5] of --head=c51: change --head_low",
        ),
        ({"agent": "ilql", "expectile": 1.5}, "expectile=1.5 must lie in [0, 1]"),
        ({"agent": "bcoder", "discount": 1.5}, "discount=1.5 must lie in [0, 1]"),
        ({"eval_every": 3}, "--updates=4 is not a multiple of --eval_every=3"),
        ({"program_seconds": 0}, "--program_seconds=0 must be at least 1"),
        ({"action_tokens": -1}, "--action_tokens=-1 must be at least 0, which is the environment's own"),
        (
            {"environment": "maze", "eval_episodes": 2, "action_tokens": 160},
            "--action_tokens=160 leaves no room to read in the model's context of 160",
        ),
        ({"log": "", "generate": __file__, "rank": __file__}, "--rank and --export are of what is learned"),
        ({"generate": "no.jsonl"}, "--generate=no.jsonl: there is no such file"),
        ({"overlong": "cut"}, "--overlong=cut is none of refuse, truncate, skip"),
        ({"date": "today"}, "--date=today is no day such as 2026-01-31"),
        ({"control": "sft"}, "--control=sft is unknown: the only choice is rft"),
        ({"control": "rft"}, "--control=rft is a ranking, and nothing is to be ranked: give --rank"),
        ({"control": "rft", "rank": __file__}, "--agent=lm_bc is what --control=rft trains"),
        ({"answers": 0}, "--answers=0 must be at least 1"),
        ({"answer_temperature": -1.0}, "--answer_temperature=-1.0 must be at least 0"),
        ({"answer_top_p": 0.0}, "--answer_top_p=0.0 must be above 0"),
        ({"stop": "12"}, "'12' cannot end actions: it is 2 tokens"),
        ({"length": 3}, "log.jsonl, line 1: 4 tokens are more than the 3 that there is room for"),
        (
            {"agent": "bcoder", "maximum": 0.5},
            "--agent.maximum=0.5 bounds all values, and the log has a return of 1.0",
        ),
        ({"head": "hlgauss"}, "choose one of scalar, two_hot, hl_gauss"),
        ({"head": "c51"}, "--head=c51: --agent=lm_bc only clones and has no value for it to represent"),
        ({"mesh_model": 3}, "devices do not divide into"),
    ],
)
def test_settings_that_cannot_be_run(
    changes: dict[str, Any], message: str, files: Path, tmp_path: Path
) -> None:
    of_agent = {name: changes[name] for name in changes if name in ("maximum", "expectile", "discount")}
    chosen = settings(files, tmp_path, **{name: changes[name] for name in changes if name not in of_agent})
    with pytest.raises(ValueError, match=re.escape(message)):
        script.run(chosen, config(chosen.agent if chosen.agent in OWN else "lm_bc", **of_agent))
    assert not list(tmp_path.iterdir())


def test_a_cosine_is_as_long_as_the_updates_of_its_network(files: Path, tmp_path: Path) -> None:
    """Those of its stage, where there are two; the control of B-Coder's second stage has all of them."""
    chosen = settings(files, tmp_path, agent="bcoder", updates=100)
    lengths = {"value_optimiser": 60, "policy_optimiser": 40}
    of_agent = bcoder.Config(value_updates=60, **{name: Adam("cosine", n) for name, n in lengths.items()})
    check = lambda config: checks.schedules(config, 100, language_settings.updates_of_stages(chosen, config))
    check(of_agent)
    for name, length in lengths.items():
        message = f"--agent.{name}.decay_updates={length - 1}: .*its stage goes up to update {length}: give"
        with pytest.raises(ValueError, match=message):
            check(dataclasses.replace(of_agent, **{name: Adam("cosine", length - 1)}))
    with pytest.raises(ValueError, match="this run goes up to update 4: give"):
        script.run(settings(files, tmp_path), config(policy_optimiser=Adam("cosine", 3)))
    task = SimpleNamespace(_replace=lambda **_: None)
    _, control, _ = language_rank.control(chosen, of_agent, task, tmp_path)  # type: ignore[arg-type]
    assert control.policy_optimiser == Adam("cosine", 100)


def test_bounds_of_values_are_compared_with_returns_to_go(files: Path, tmp_path: Path) -> None:
    """Of a dialogue that earns 1 in all and 2 after its first turn; -0.3 and 0.1 are no numbers of float32."""
    turns = [
        {"text": "=1"},
        {"text": "2", "is_action": True, "reward": -1.0},
        {"text": "="},
        {"text": "1", "is_action": True, "reward": 2.0},
    ]

    def read(log_file: str, maximum: float, **fields: Any) -> language_log.Task:
        chosen = settings(files, tmp_path, agent="bcoder", log=log_file, held_out=0.0, **fields)
        with contextlib.ExitStack() as stack:
            return script.problem(chosen, config("bcoder", maximum=maximum), stack)

    long = write(tmp_path / "long.jsonl", [{"turns": turns}])
    with pytest.raises(ValueError, match=r"maximum=1.5 bounds all values, and the log has a return of 2.0"):
        read(long, 1.5, head="scalar")
    read(long, 2.0, head="scalar")
    rows = [{"turns": [turns[0], {**turns[1], "reward": reward}], "imitate": False} for reward in (-0.3, 0.1)]
    short = write(tmp_path / "short.jsonl", rows)
    read(short, 0.1, head="scalar")
    assert read(short, 1.0, head="c51", head_low=-0.3, head_high=0.1).support == (-0.3, 0.1)


@pytest.mark.slow
def test_supports_hold_what_follows_a_cut_where_targets_do(files: Path, tmp_path: Path) -> None:
    """Three moves of -1 and no end: -10 for ever, where a move is one token; and -1, -1.9 and -2.71 as logged."""
    move = [{"text": "1", "is_action": True, "reward": -1.0}, {"text": "="}]
    path = write(tmp_path / "cut.jsonl", [{"turns": [{"text": "="}, *move * 3], "terminated": False}])

    def support(of_agent: Any, head: str = "c51", **fields: Any) -> tuple[float, float]:
        agent = next(name for name in OWN if isinstance(of_agent, script.agent(name).Config))
        chosen = settings(files, tmp_path, agent=agent, head=head, log=path, stop="1", held_out=0.0, **fields)
        with contextlib.ExitStack() as stack:
            return script.problem(chosen, of_agent, stack).support

    as_logged = (-3.0, 0.0)
    for each in (config("bcoder", discount=0.9), config("ilql", discount=0.9, backup="expectile")):
        low, high = support(each)
        assert low < -10 < high
        endless = dataclasses.replace(each, discount=1.0)
        assert support(each, "scalar") == support(endless, "quantile") == as_logged
        with pytest.raises(ValueError, match="--head=c51 needs --head_low and --head_high"):
            support(endless)
        assert support(endless, head_low=-5.0, head_high=-1.5) == (-5.0, -1.5)
    returns = [config("ilql", discount=discount) for discount in (0.9, 1.0)]
    assert [support(each) for each in (*returns, config("lm_bc"))] == [as_logged] * 3
    with pytest.raises(
        ValueError, match=r"the log has returns from -2\.71 to -1, beyond the support \[-2, 0\]"
    ):
        support(returns[0], head_low=-2.0)


@pytest.mark.parametrize(
    ("flag", "bad", "message"),
    [
        ("log", {"turns": [{"text": "1", "is_action": True}]}, "line 2: the episode starts with an action"),
        ("log", {"turns": [{"text": "=1"}]}, "line 2: the episode has no action tokens"),
        ("log", {"turns": [{"text": "=?"}, {"text": "1", "is_action": True}]}, "line 2: WordLevel error"),
        ("log", {"text": "=1"}, "line 2: turns is missing. A row is"),
        ("log", {"messages": [*user(1)]}, "line 2: none of its messages is the assistant's"),
        (
            "log",
            {"task_id": "a", "prompt": "1", "samples": []},
            "line 2: its samples are not texts. A row is",
        ),
        (
            "log",
            {"task_id": "a", "prompt": "1", "samples": ["2"]},
            "line 2: these are programs for 'a', and nothing says",
        ),
        ("generate", {"prompt": "?"}, "line 2: WordLevel error"),
        ("generate", {"prompt": "=" * 20}, "line 2: 20 tokens are more than the 10 that --answer_tokens=150"),
        ("rank", {"prompt": "=1", "candidates": ["1", "?"]}, "line 2, candidate 2: WordLevel error"),
        ("rank", {"prompt": "=1", "candidates": []}, "line 2: its candidates are not texts"),
    ],
)
def test_rows_that_cannot_be_used(flag: str, bad: Any, message: str, files: Path, tmp_path: Path) -> None:
    good = {"log": row(1, 1), "rank": {"prompt": "=1", "candidates": ["1"]}, "generate": {"prompt": "=1"}}[
        flag
    ]
    path = write(tmp_path / "rows.jsonl", [good, bad])
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        script.run(settings(files, tmp_path / "run", answer_tokens=150, **{flag: path}), config())
    assert not (tmp_path / "run").exists()


def test_hyper_parameters_of_a_model_that_learns_nothing(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exported agent keeps its own, and another model has none."""
    shutil.copytree(files / "model", tmp_path / "model")
    chosen = script.Settings(
        model=str(tmp_path / "model"), generate=str(files / "prompts.jsonl"), workdir=str(tmp_path / "run")
    )
    with pytest.raises(
        ValueError, match=r"--agent.steering=8.0 is of what is to be learned, .*nothing is learned"
    ):
        script.run(chosen, ilql.Config(steering=8.0))
    ignored = dataclasses.replace(chosen, agent="lm_bc", lora_rank=2, best=0.1, remat=True, mesh_model=2)
    message = (
        "--agent=lm_bc, --lora_rank=2, --remat=True, --best=0.1, --mesh_model=2 are of what is to be learned"
    )
    with pytest.raises(ValueError, match=message):
        script.run(ignored, lm_bc.Config())
    (tmp_path / "model" / exported.CARD).touch()
    agent: Any = SimpleNamespace(agent="ilql", config=ilql.Config(steering=2.0, inner=16))
    monkeypatch.setattr(exported, "load", lambda *_: agent)
    with pytest.raises(ValueError, match=r"steering=8.0 is of .*those of .*model are in its values.json"):
        script.run(chosen, ilql.Config(steering=8.0))
    with pytest.raises(
        ValueError, match=r"--head_low=0.0, --agent=bcoder are of .* leave them out; those of"
    ):
        script.run(dataclasses.replace(chosen, agent="bcoder", head_low=0.0), bcoder.Config())
    language_settings.check_unused(chosen, ilql.Config(steering=2.0), agent)
    language_settings.check_unused(chosen, lm_bc.Config(), agent)
    bcoder_agent: Any = SimpleNamespace(agent="bcoder", config=bcoder.Config(alpha=0.5))
    for name in ("ilql", "bcoder"):  # the default, and its own
        language_settings.check_unused(
            dataclasses.replace(chosen, agent=name), bcoder.Config(alpha=0.5), bcoder_agent
        )


def test_a_model_that_has_no_end_of_text(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "model", tmp_path / "model")
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    del described["eos_token_id"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="do not say which token ends a text: give --stop"):
        script.run(settings(files, tmp_path / "run", model=str(tmp_path / "model")), config())


def test_answers_of_exports_of_two_runs_lie_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All exports are called policy: the answers of one took the place of the other's."""
    for run in ("a", "b"):
        (tmp_path / run / "policy").mkdir(parents=True)
        (tmp_path / run / "policy" / exported.CARD).touch()
    of = lambda model, **changes: language_answers.answers_folder(
        script.Settings(model=str(tmp_path / model), **changes)
    )
    assert (of("a/policy"), of("b/policy")) == (tmp_path / "a/generated", tmp_path / "b/generated")
    assert of("a/policy", workdir="mine") == Path("mine")
    monkeypatch.chdir(tmp_path)
    assert of("smol") == Path("runs/smol/generated")
