"""Published settings: every number arrives where it is meant to, and a flag overrides it."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags as absl_flags

from experiments import common, flags, goals, mbpo, model_based, offline, online, presets
from rl import agents, data, log
from rl.envs import entities
from rl.model_based import METHODS

SCRIPTS = {
    "offline": (offline, common.config, "dataset"),
    "goals": (goals, common.config, "dataset"),
    "online": (online, common.config, "env"),
    "mbpo": (mbpo, common.config, "env"),
    "model_based": (model_based, model_based.config, "dataset"),
}
ROBOTS = ["Hopper-v5", "Hopper-v5+distractors10", "Walker2d-v5", "HalfCheetah-v5", "Ant-v5", "Ant-v4+noise3"]
CUBES = [f"{name}+entities" for name in data.names() if re.match("(heavy-)?cube", name)]
TASKS = [*data.names(), *CUBES, "ALE/Pong-v5", *ROBOTS, "Pendulum-v1", "CartPoleSwingUp-v0"]


def several(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


BLOCKS = [(agent, block) for block in presets.table()["presets"] for agent in several(block["agent"])]


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(presets.task_name(name), pattern) for pattern in patterns)


@pytest.mark.parametrize(("agent", "block"), BLOCKS, ids=lambda x: x if isinstance(x, str) else "")
def test_every_number_is_a_flag_that_a_known_task_reaches_and_has_a_source(
    agent: str, block: dict[str, Any]
) -> None:
    script, config_of, _ = SCRIPTS[block.get("script", "offline")]
    assert block["source"]
    assert agent in (METHODS if script is model_based else agents.AGENTS)
    families = presets.table()["families"]
    patterns = [pattern for name in several(block["family"]) for pattern in families[name]]
    tasks = [task for task in TASKS if matches(task, patterns)]
    assert tasks
    for each in block.get("each", {}):
        assert any(matches(task, [each]) for task in tasks), each
    for values in (block["flags"], *block.get("each", {}).values()):
        for name, value in values.items():
            target = config_of(agent) if name.startswith("agent.") else script.Settings()
            field = name.removeprefix("agent.")
            if str(value).startswith("--"):  # the value of another flag
                value = getattr(script.Settings(), value.removeprefix("--"))
            arrived = functools.reduce(getattr, field.split("."), flags.with_fields(target, {field: value}))
            assert arrived == (tuple(value) if isinstance(value, list) else value), name


def test_every_family_is_of_known_tasks_and_no_task_has_two() -> None:
    families = presets.table()["families"]
    families_of = {task: [name for name in families if matches(task, families[name])] for task in TASKS}
    assert all(len(names) <= 1 for names in families_of.values())
    assert {name for names in families_of.values() for name in names} == set(families)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.slow
def test_what_is_published_can_be_run(script: str) -> None:
    """No setting that a preset brings contradicts a default that it leaves as it is."""
    module, config_of, field = SCRIPTS[script]
    # Models of dynamics do not predict sets of entities, which are refused as such.
    tasks = [task for task in TASKS if script != "model_based" or not task.endswith(entities.SUFFIX)]
    # Tasks that match the same patterns have the same settings: one of each will do.
    patterns = {pattern for family in presets.table()["families"].values() for pattern in family}
    patterns |= {pattern for block in presets.table()["presets"] for pattern in block.get("each", {})}
    alike = {tuple(matches(task, [pattern]) for pattern in patterns): task for task in tasks}
    for agent in METHODS if script == "model_based" else agents.AGENTS:
        for task in alike.values():
            settings, config = presets.resolve(
                script, module.PUBLISHED, config_of, field, {"agent": agent, field: task}
            )
            module.check(*((settings, config) if script == "model_based" else (settings,)))


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("hopper-medium-v2", "hopper-medium"),
        ("hopper-medium-replay-regen-v5", "hopper-medium-replay"),
        ("minari:D4RL/door/human-v2", "door-human"),
        ("minari:~/.minari/datasets/D4RL/door/human-v2", "door-human"),
        ("/data/walker2d-expert-v2.hdf5", "walker2d-expert"),
        ("/a+b/heavy-cube-double-ppp-v0.npz+entities", "heavy-cube-double-ppp+entities"),
        ("cube-single-play-singletask-task2-v0", "cube-single-play-singletask-task2"),
        ("ALE/Pong-v5", "ALE/Pong"),
        ("Hopper-v5+distractors10-map3", "Hopper+distractors10-map3"),
    ],
)
def test_a_task_has_one_name_in_all_its_versions(task: str, name: str) -> None:
    assert presets.task_name(task) == name


def command_line(*argv: str) -> tuple[offline.Settings, Any]:
    values = absl_flags.FlagValues()
    flags.parser(offline.PUBLISHED, common.config, values)(["offline", *argv])
    return presets.from_flags("offline", offline.PUBLISHED, common.config, "dataset", values)


def test_rebrac_has_its_batches_and_weights_unless_a_flag_says_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Batches of 1024 are part of the method, and no default of the agent can say so."""
    settings, config = command_line("--agent=rebrac", "--dataset=hopper-medium-regen-v5")
    assert (settings.batch_size, settings.updates, settings.preset) == (1024, 1_000_000, "paper")
    assert (config.policy_cloning, config.critic_cloning) == (0.01, 0.01)
    stderr = capsys.readouterr().err
    assert (
        "configs/offline/rebrac" in stderr
        and "--batch_size=1024" in stderr
        and "--agent.hidden=256,256,256" in stderr
    )
    settings, config = command_line(
        *("--agent=rebrac", "--dataset=hopper-medium-v2", "--batch_size=64", "--agent.critic_cloning=0.5")
    )
    assert (settings.batch_size, settings.updates) == (64, 1_000_000)
    assert (config.policy_cloning, config.critic_cloning) == (0.01, 0.5)
    assert "replaced by flags: batch_size, agent.critic_cloning\n" in capsys.readouterr().err
    settings, config = command_line("--agent=rebrac", "--dataset=hopper-medium-v2", "--preset=none")
    given = offline.Settings(agent="rebrac", dataset="hopper-medium-v2")
    assert repr(settings) == repr(given)  # NaNs among them differ from themselves
    assert config == common.config("rebrac") and not capsys.readouterr().err


def test_a_family_decides(capsys: pytest.CaptureFixture[str]) -> None:
    settings, config = command_line("--dataset=walker2d-medium-v2", "--updates=5000")
    assert settings.reward_scale == "return_range"
    assert config.policy_optimiser.decay_updates == 5000  # as long as the run, as in its code
    printed = capsys.readouterr().err  # numbers, which can be copied into another command
    assert (
        "--agent.policy_optimiser.decay_updates=5000" in printed and "replaced by flags: updates\n" in printed
    )
    settings, config = command_line("--dataset=antmaze-large-play-v2")
    assert (settings.reward_scale, settings.reward_shift, config.expectile) == ("1", -1.0, 0.9)
    assert command_line("--dataset=antmaze-large-navigate-singletask-v0")[1].hidden == (512,) * 4
    assert command_line("--dataset=synthetic-continuous")[0].preset == "none"


def test_the_last_layers_of_cql_start_small_as_those_of_corl() -> None:
    """Orthogonal with gain sqrt(2), but for the last one, whose gain is 0.01."""
    assert command_line("--agent=cql", "--dataset=hopper-medium-v2")[1].network.initialiser == "ppo"


def test_what_no_flag_reaches_of_categorical_heads_on_atari_is_missing() -> None:
    for head, said in (("scalar", 0), ("hl_gauss", 1)):
        preset = presets.find("online", "dqn", "ALE/Pong-v5", head)
        assert preset and sum("Dopamine's networks" in text for text in preset.missing) == said


def test_what_the_continued_run_decides_is_not_taken_from_a_preset() -> None:
    """Its rewards and its support; else a run of the preset's own agent could not go on."""
    named = {"agent": "dqn", "env": "ALE/Pong-v5", "head": "c51"}
    both = [
        presets.resolve("online", online.PUBLISHED, common.config, "env", named | more)[0]
        for more in ({}, {"init_from": "runs/earlier"}, {"init_from": "runs/earlier", "head_low": -3.0})
    ]
    assert [x.clip_rewards for x in both] == [True, False, False]
    np.testing.assert_equal([x.head_low for x in both], [-10.0, math.nan, -3.0])
    assert [x.head_size for x in both] == [51, 51, 51]
    published = presets.stored("online", both[1], common.config("dqn"), "env")
    assert published and not {"clip_rewards", "head_low", "head_high"} & set(published["flags"])


def test_what_was_tuned_for_other_datasets_is_missing() -> None:
    preset = presets.find("offline", "sac_n", "hopper-random-v2", "scalar")
    assert preset and preset.missing == ["what was tuned for hopper-random alone"]
    preset = presets.find("goals", "hecrl", "heavy-cube-triple-ppp-v0+entities", "scalar")
    assert preset and not any("tuned for" in missing for missing in preset.missing)


def test_each_preset_of_a_model_has_its_sources_rule_of_when_the_fit_stops() -> None:
    """RAVL's code fits 350 epochs or more; OfflineRL-Kit's, the source of MOPO's and MOBILE's numbers, has no least."""
    for agent, least in {"base": 350, "ravl": 350, "mopo": 0, "mobile": 0}.items():
        overrides = {"agent": agent, "dataset": "hopper-medium-v2"}
        settings, _ = presets.resolve(
            "model_based", model_based.PUBLISHED, model_based.config, "dataset", overrides
        )
        assert (settings.preset, settings.model_min_epochs, settings.model_patience) == ("paper", least, 5)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="--preset=best is none of paper, ogbench-fql, ogbench-qc, none"):
        command_line("--preset=best")


def test_what_an_agent_refuses_is_named_by_its_flag() -> None:
    """Fields that its Config refuses, and not what is no field of it."""
    with pytest.raises(ValueError, match=r"^--agent\.candidates=0 must be at least 1"):
        command_line("--agent=fql", "--agent.candidates=0")
    with pytest.raises(ValueError, match=r"^rl\.agents\.iql has no setting 'x'"):
        presets.resolve("offline", offline.PUBLISHED, common.config, "dataset", {"agent.x": 1})


def test_a_protocol_is_followed_by_name_and_refuses_what_it_does_not_have() -> None:
    """Its own blocks alone, whatever an agent's paper says of the task; and a run's card says which it follows."""
    arguments = ("--preset=ogbench-fql", "--dataset=antmaze-giant-navigate-singletask-v0")
    settings, config = command_line("--agent=fql", *arguments)
    assert (config.alpha, config.aggregation, config.discount) == (10.0, "min", 0.995)
    assert settings.preset == "ogbench-fql" and settings.updates == 1_000_000
    stored = presets.stored("offline", settings, config, "dataset")
    assert stored and "FQL" in stored["sources"][0]
    elsewhere = (arguments[0], "--dataset=pen-human-v1")
    for argv, known in (
        (("--agent=bc", *arguments), "fql, ifql, iql, rebrac"),
        (("--agent=fql", *elsewhere), "fql"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"ogbench-fql has no settings of .* it has {known} on .*cube-single-play-singletask\*, .*Choose one",
        ):
            command_line(*argv)
    assert command_line("--agent=fql", "--dataset=pen-human-v1")[1].alpha == 10_000
    with pytest.raises(ValueError, match=r"ogbench-fql is not for experiments\.online: leave it out"):
        presets.resolve("online", online.Settings(preset="ogbench-fql"), common.config, "env", {})


@pytest.mark.parametrize("agent", ["fql", "ifql", "iql", "rebrac"])
def test_every_agent_of_the_fql_paper_has_its_settings_on_the_manipulation_tasks(agent: str) -> None:
    for task in ("cube-single", "cube-double", "scene", "puzzle-3x3", "puzzle-4x4"):
        preset = presets.find("offline", agent, f"{task}-play-singletask-task1-v0", "hl_gauss", "ogbench-fql")
        assert preset and preset.flags["updates"] == 1_000_000
        assert not any("tuned for" in text and "alone" in text for text in preset.missing)


@pytest.mark.parametrize(
    ("agent", "task"),
    [
        *(("rebrac", task) for task in ("hopper-medium-v2", "antmaze-umaze-v2", "pen-human-v1")),
        *((agent, "scene-play-singletask-v0") for agent in ("fql", "ifql", "iql", "rebrac")),
    ],
)
def test_layer_norm_stands_where_the_code_of_rebrac_and_of_fql_has_it(agent: str, task: str) -> None:
    """After each activation of critics and values, and in no policy, of baselines as of the paper's own agent."""
    _, config = command_line(f"--agent={agent}", f"--dataset={task}")
    assert config.layer_norm and config.network.norm_after and not config.network.policy_layer_norm


def test_q_chunking_is_a_protocol_of_its_own_that_nothing_but_its_name_brings() -> None:
    """Sparse where it is published so, in chunks, by the same agent; and not for tasks that it does not have."""
    task = "--dataset=scene-play-singletask-task2-v0"
    settings, config = command_line("--agent=fql", "--preset=ogbench-qc", task)
    assert (settings.chunk, settings.clip_rewards, config.extraction, config.alpha) == (
        5,
        True,
        "best_of",
        100,
    )
    stored = presets.stored("offline", settings, config, "dataset")
    assert stored and stored["name"] == "ogbench-qc" and stored["sources"][0].startswith("QC")
    for preset in ("paper", "ogbench-fql"):
        settings, config = command_line("--agent=fql", f"--preset={preset}", task)
        assert (settings.chunk, settings.clip_rewards, config.extraction, config.alpha) == (
            1,
            False,
            "distilled",
            300,
        )
    cube = command_line(
        "--agent=fql", "--preset=ogbench-qc", "--dataset=cube-triple-play-singletask-task1-v0"
    )
    assert (cube[0].chunk, cube[0].clip_rewards) == (5, False)
    with pytest.raises(
        ValueError, match=r"ogbench-qc has no settings of fql for .*cube-single.* it has fql on cube-d"
    ):
        command_line("--agent=fql", "--preset=ogbench-qc", "--dataset=cube-single-play-singletask-task1-v0")


def test_a_run_stores_its_preset_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = {
        "agent": "bc",
        "family": "toy",
        "source": "table 1",
        "flags": {"batch_size": 8, "agent.hidden": [8]},
    }
    table = {"families": {"toy": ["synthetic-continuous"]}, "presets": [block]}
    monkeypatch.setattr(presets, "table", lambda: table)
    flag_values = {
        "agent": "bc",
        "seeds": 1,
        "updates": 1,
        "eval_every": 1,
        "tensorboard": False,
        "workdir": str(tmp_path),
    }
    settings, config = presets.resolve("offline", offline.PUBLISHED, common.config, "dataset", flag_values)
    result = offline.run(settings, config)
    assert result["settings"]["batch_size"] == 8
    stored = json.loads((tmp_path / log.CONFIG).read_text())["config"]["preset"]
    published = {"name": "paper", "flags": block["flags"], "sources": ["table 1"], "missing": []}
    assert stored == {**published, "replaced": {}}
    # Settings that were not made by `resolve` may have its name.
    by_hand = offline.Settings(agent="bc", preset="paper", batch_size=9)
    assert presets.stored("offline", by_hand, config, "dataset") == {
        **published,
        "replaced": {"batch_size": 9},
    }
    with pytest.raises(ValueError, match="--preset=papr is none of paper, "):
        presets.stored("offline", dataclasses.replace(by_hand, preset="papr"), config, "dataset")


def test_what_is_published_for_other_heads_is_said_to_be_missing() -> None:
    own = presets.find("online", "dqn", "ALE/Pong-v5", "docs.example_head.gaussian")
    assert own and "agent.learning_rate" not in own.flags
    assert own.missing[-1].startswith(
        "what is published for other heads alone: agent.learning_rate, agent.critic_"
    )
    known = presets.find("online", "dqn", "ALE/Pong-v5", "c51")
    assert known and not any("other heads" in text for text in known.missing)
