"""What the documents show works: code compiles, commands have the flags they use, the example agent trains."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import shlex
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags as absl_flags
from small_models import random_params

from docs import example_agent, generated
from experiments import (
    common,
    flags,
    goals,
    interaction,
    language,
    mbpo,
    offline,
    online,
    presets,
    quickstart,
    report,
)
from rl import agents, data, envs, log, train
from rl import online as compiled
from rl.language import pretrained, tokenizer
from rl.language.model import Config
from rl.networks import mlp
from rl.networks.transformer import Shape
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.types import Spec, Transition
from rl.values import heads
from sweeps import layout
from sweeps import run as sweeps

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SOURCES = [*DOCUMENTS, *sorted(ROOT.glob("sweeps/**/*.yaml")), *sorted(ROOT.glob("experiments/**/*.py"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m ((?:experiments|sweeps|benchmarks)(?:\.\w+)+)((?:[^\n`\\]|\\\n)*)")


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{path.name}-{number}", text)
        for path in DOCUMENTS
        for number, (kind, text) in enumerate(BLOCK.findall(path.read_text()))
        if kind == language
    ]


def commands() -> list[tuple[str, str, list[str]]]:
    """(where, module, arguments) of every ``python -m`` line; what a shell would add is left out."""
    invocations = []
    for path in SOURCES:
        for module, rest in COMMAND.findall(path.read_text()):
            plain = re.split(r"\s{2,}[#(]|[|>;&]|\"$|\)", rest.replace("\\\n", " "))[0]
            invocations.append((f"{path.name}:{module}", module, shlex.split(plain.rstrip(" :.,\"'"))))
    return invocations


@pytest.mark.parametrize(("where", "text"), [pytest.param(*block, id=block[0]) for block in blocks("python")])
def test_python_compiles(where: str, text: str) -> None:
    ast.parse(text, where)


@pytest.mark.parametrize(
    ("where", "module", "argv"), [pytest.param(*command, id=command[0]) for command in commands()]
)
def test_commands_have_the_flags_they_use(
    where: str, module: str, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [word for word in argv if word != "--help"]
    values = absl_flags.FlagValues()
    if module == "experiments.offline":
        argv = ["--agent=iql" if word == "--agent=NAME" else word for word in argv]
        flags.parser(offline.Settings(), lambda name: agents.get(name).Config(), values)(["offline", *argv])
        offline.check(flags.read(offline.Settings(), values=values))
    elif module == "experiments.goals":
        flags.parser(goals.PUBLISHED, common.config, values)(["goals", *argv])
        goals.check(presets.from_flags("goals", goals.PUBLISHED, common.config, "dataset", values)[0])
    elif module == "experiments.mbpo":
        flags.parser(mbpo.PUBLISHED, common.config, values)(["mbpo", *argv])
        mbpo.check(presets.from_flags("mbpo", mbpo.PUBLISHED, common.config, "env", values)[0])
    elif module == "experiments.language":
        parse = flags.parser(language.Settings(), lambda name: language.agent(name).Config(), values)
        parse(["language", *argv])
        if argv:  # not where the command is only named: it needs a log
            monkeypatch.chdir(tmp_path)
            for word in argv:
                if word.endswith(".jsonl"):
                    Path(word.partition("=")[2]).touch()
            language.check(flags.read(language.Settings(), values=values))
    elif module == "experiments.quickstart":
        flags.parser(quickstart.Settings(), values=values)(["quickstart", *argv])
    elif module in ("sweeps.run", "experiments.report"):
        (sweeps if module == "sweeps.run" else report).define(values)
        _, *files = values(["run", *argv])
        assert all(file == "FILE" or "$name" in file or any(ROOT.glob(file)) for file in files)
        found = [str(path) for file in files for path in sorted(ROOT.glob(file))]
        if not values.finished:  # a folder that is made later
            plans = [layout.from_flags(file, {}, values) for file in found]  # refuses what no run can have
            if module == "experiments.report" and len(plans) > 1:
                monkeypatch.chdir(tmp_path)  # where nothing is trained
                report.run(plans, "together")  # refuses files that have no report together
    elif module == "experiments.collect":
        assert {word.partition("=")[0].lstrip("-") for word in argv} <= flags_of(
            importlib.import_module(module)
        )
    elif hasattr(script := importlib.import_module(module), "Settings"):
        published = getattr(script, "PUBLISHED", None)  # numbers, in a study
        chosen = published if dataclasses.is_dataclass(published) else script.Settings()
        config = getattr(script, "config", common.config) if hasattr(chosen, "agent") else None
        flags.parser(chosen, config, values)([module, *argv])


def test_an_environment_with_a_history_and_its_log_are_read_through_a_transformer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's environment from its name to the shapes of the networks: flattened, it would go into dense layers."""
    (code,) = [text for _, text in blocks("python") if "HistoryCartPole-v0" in text]
    (tmp_path / "page_memory.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = envs.make("page_memory:HistoryCartPole-v0", seed=0)
    seen = np.stack([env.reset()[0], *(env.step(np.int32(0))[0] for _ in range(3))])
    actions, ends = np.zeros(4, int), np.arange(4) == 3
    log = data.from_steps(seen, actions, np.ones(4), 0 * ends, ends, source="log", discrete=True)
    logged = data.loaded(log, environment=None, source="log", choices=2).spec
    assert envs.spec(env) == logged == Spec((4, 4), 2, discrete=True)
    np.testing.assert_array_equal(seen[3, 2], seen[2, 3])  # the newest observation is the last of a history
    settings = online.Settings(env="page_memory:HistoryCartPole-v0", agent="dqn", env_processes=0)
    with interaction.stepper(settings) as stream:
        learner, _ = online.learner_and_replay(settings, agents.get("dqn").Config(hidden=(8, 8)), stream.spec)
        state = jax.eval_shape(learner.init, jax.random.key(0), compiled.example(stream.spec))
    assert set(state.params["q"]["encoder"]) == {"into", "trunk"}


def flags_of(module: object) -> set[str]:
    return {flag.name for flag in absl_flags.FLAGS.flags_by_module_dict()[module.__name__]}


def test_the_readme_has_commands_to_check() -> None:
    where = {name for name, _, _ in commands()}
    assert {"README.md:experiments.offline", "README.md:experiments.collect", "README.md:sweeps.run"} <= where


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


# ---- what the site says that the code says ------------------------------------------------------------------


def fragments(text: str) -> list[str]:
    """What is fixed in a message that a page quotes: dots, and words in brackets, stand for what differs."""
    return [part for part in re.split(r"\s*(?:\.\.\.|\[[^\]]*\])\s*", text) if len(part) > 1]


def messages() -> list[str]:
    """Every string in the code, with a gap where an f-string has a value."""
    folders, strings = ("rl", "experiments", "sweeps"), [(ROOT / "Makefile").read_text()]
    for path in (path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                strings.append(
                    "".join(
                        str(getattr(part, "value", "")) * isinstance(part, ast.Constant)
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    return strings


@pytest.mark.slow
def test_troubleshooting_quotes_messages_that_exist() -> None:
    """Somebody who meets one searches the page for its words."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    known = messages()
    assert len(quoted) > 15
    for text in quoted:
        if not text.startswith(("No module named", "train/")):  # Python's, and a metric
            assert any(all(part in message for part in fragments(text)) for message in known), text


@pytest.mark.slow
def test_imports_run_downwards_as_the_package_says() -> None:
    """By its list of layers, of which the second has all modules that no line names."""
    import rl

    lines = [line.strip() for line in rl.__doc__.splitlines() if line.startswith("    ")]
    below = {name: place for place, line in enumerate(lines[2:], start=2) for name in line.split(", ")}
    upwards = []
    for path in (ROOT / "rl").rglob("*.py"):
        parts = path.relative_to(ROOT / "rl").with_suffix("").parts
        imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        for node in imports:
            package, _, rest = (node.module or "").partition(".")
            names = [rest.partition(".")[0]] if rest else [alias.name for alias in node.names]
            if package == "rl" and parts != ("__init__",):
                layer = below.get(parts[0], 1)
                upwards += [(parts, name) for name in names if below.get(name, 1) < layer]
    assert len(lines) > 6 and {"agents", "files"} <= below.keys()
    assert not upwards


def test_settings_on_the_site_are_those_of_the_code() -> None:
    table = generated.settings("rl.agents.iql.Config").splitlines()
    assert "| `expectile` | `0.7` | tau: 0.5 is SARSA, towards 1 the maximum over logged actions |" in table
    assert any(
        line.startswith("| `policy_optimiser` | [Adam]") and "schedule='cosine'" in line for line in table
    )
    assert len(table) == 2 + len(dataclasses.fields(agents.get("iql").Config))


def test_every_agent_and_study_is_on_the_site() -> None:
    pages = "".join(path.read_text() for path in ROOT.glob("docs/agents/*.md"))
    shown = set(re.findall(r"^```\{agent\} (\w+)", pages, re.MULTILINE))
    assert agents.AGENTS.keys() | {"ilql", "bcoder", "lm_bc", "r2pvi"} <= shown
    listed = generated.commands("experiments.papers")
    for name in ("r2pvi", "vagram"):
        assert f"\n## {name}\n" in f"\n{listed}" and f"    python -m experiments.papers.{name}" in listed
    assert "## vagram_parts" not in listed  # which is no command
    plain = (ROOT / "docs/papers.md").read_text()  # as it is read without the site
    for name in re.findall(r"^## (\w+)$", listed, re.MULTILINE):
        assert re.search(rf"^\| `python -m experiments\.papers\.{name}( --[^`]+)?` \|", plain, re.MULTILINE)
    reference = "".join(path.read_text() for path in ROOT.glob("docs/api/*.md"))
    packages = {path.parent.name for path in ROOT.glob("rl/*/__init__.py")}
    assert {f"rl.{name}" for name in packages} | {"rl"} <= set(re.findall(r"\{modules\} (\S+)", reference))


def test_docstrings_keep_formulas_and_tables() -> None:
    """A formula is shown as it was typed, whatever its stars and bars mean in reStructuredText."""
    lines = [
        "The loss of [B, *S] rows:",
        "",
        "    L = E[ |x| * y ]",
        "",
        "| a | b |",
        "|---|---|",
        "| 1 | 2 |",
        "",
        "End.",
    ]
    text = "\n".join(generated.markup(lines))
    assert "[B, \\*S]" in text and "::\n\n    L = E[ |x| * y ]\n" in text
    assert ".. list-table::" in text and "* - 1\n     - 2\n" in text and "---" not in text


# ---- the library from Python ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.command
def test_what_the_python_page_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shown = [text for name, text in blocks("python") if name.startswith("python.md")]
    scripts: list[dict[str, Any]] = []
    for text in shown:
        if "gymnasium.register(" in text:
            Path("corridor.py").write_text(text)
            continue
        for _ in range(2 if "trainer.resume(" in text else 1):
            if not scripts or "import jax\n" in text:  # else the block goes on with the script before
                scripts.append({})
            exec(compile(text, "python.md", "exec"), scripts[-1])
    _, trained, restored, chunked, first, second, on_device, words = scripts
    assert trained["scores"]["return"].shape == (4, 2) and trained["loaded"].spec == Spec((3,), 1)
    assert restored["step"] == 300
    np.testing.assert_array_equal(restored["action"], trained["action"])
    np.testing.assert_allclose(restored["x"], restored["action"][0], rtol=1e-4, atol=1e-6)  # without JAX
    assert trained["units"].reward_scale != 1 and trained["trained"].step == 300
    assert chunked["example"].action.shape == (2, 3) and chunked["state"].step == 100
    assert on_device["trainer"].carry.state.step == 226 and on_device["scores"]["return"].shape == (2, 4)
    assert first["saved"] is None and first["trainer"].step == 300 and second["trainer"].step == 600
    q = np.asarray(words["values"].q)  # of episodes (4, 7), (4, 8), (6, 7) and (6, 8)
    assert (q[:2, 3] > q[2:, 3] + 0.5).all() and (q[::2, 5] > q[1::2, 5] + 0.5).all()


@pytest.mark.slow
def test_the_backup_that_a_page_shows_is_munchausen_q_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss from the formula of the paper, with target networks that differ from the online ones."""
    (code,) = [text for name, text in blocks("python") if "relabel.make" in text]
    (tmp_path / "munchausen.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    agent, spec, rows = agents.get("munchausen"), Spec((3,), 4, discrete=True), 16
    config = agent.Config(discount=0.9, temperature=0.1, hidden=(8,))
    learner = agent.make(config, spec, heads.scalar())
    rng = np.random.default_rng(0)
    seen, after = rng.normal(size=(2, rows, 3)).astype(np.float32)
    action, reward = rng.integers(0, 4, rows).astype(np.int32), rng.normal(size=rows).astype(np.float32)
    ones = np.ones(rows, np.float32)
    batch = Transition(seen, action, reward, ones, after, action, ones)
    state = jax.jit(learner.init)(jax.random.key(0), batch)
    state = state._replace(target=jax.tree.map(lambda x: 1.3 * x + 0.1, state.target))
    _, metrics = jax.jit(learner.update)(state, batch, jax.random.key(1))

    assert learner.critics is not None
    values = lambda params, observation: np.stack(
        [
            learner.critics(state._replace(params=params), observation, np.full(rows, choice))[0]
            for choice in range(4)
        ],
        -1,
    )
    log_softmax = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
    pick = lambda x: x[np.arange(rows), action]
    here, there = values(state.target, seen) / 0.1, values(state.target, after) / 0.1
    bonus = 0.9 * np.clip(0.1 * pick(log_softmax(here)), -1, 0)
    soft = 0.1 * (np.exp(log_softmax(there)) * (there - log_softmax(there))).sum(-1)
    target = reward + bonus + 0.9 * soft
    np.testing.assert_allclose(metrics["bonus"], bonus.mean(), rtol=1e-4)
    expected = np.square(pick(values(state.params, seen)) - target).mean()
    np.testing.assert_allclose(metrics["critic_loss"], expected, rtol=1e-4)
    low, high = agent.target_range(config, spec, -1.0, 1.0)
    np.testing.assert_allclose([low, high], [-1 - 0.9 / 0.1, 1 + 0.1 * np.log(4) * 0.9 / 0.1])


@pytest.mark.slow
def test_the_agent_with_a_network_of_its_own_that_a_page_shows_clones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scripts, with several seeds and a checkpoint: what walks through parameters must take those of NNX."""
    (code,) = [text for name, text in blocks("python") if "from_nnx" in text]
    (tmp_path / "plain_cloning.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = offline.Settings(
        agent="plain_cloning",
        seeds=2,
        updates=200,
        eval_every=100,
        batch_size=32,
        eval_episodes=0,
        workdir=str(tmp_path / "run"),
        tensorboard=False,
    )
    config = agents.get("plain_cloning").Config(width=16)
    offline.run(dataclasses.replace(settings, updates=100), config)
    assert offline.run(settings, config)["updates"] == 200  # goes on from a checkpoint
    losses = log.series(tmp_path / "run", "train/policy_loss")[1]
    assert (losses[1] < losses[0]).all()


# ---- values for language models ------------------------------------------------------------------------------

# What docs/language.md says, and what makes it cheap.
CHEAPER = {
    "Pool()": "Pool(1, isolation='none')",  # the programs below do no harm
    ", dtype=jnp.bfloat16, remat=True": "",
    "512": "128",
    "value_updates=3000": "value_updates=1",
    "range(40)": "range(2)",
    "sampler(64)": "sampler(2)",
    "steps=100": "steps=1",
    "steps=256": "steps=3",
    "model=2": "model=1",
}
ADD = {
    "task_id": 601,
    "text": "Add.",
    "code": "def add(a, b): return a + b",
    "test_list": ["assert add(1, 2) == 3"],
}
PROGRAMS = [ADD["code"], "def add(a, b): return 4", "def add(a, b): return c", "def add(a, b) return 3"]


@pytest.mark.slow
@pytest.mark.command
def test_what_the_language_document_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    shape = Shape(width=8, layers=1, heads=1, kv_heads=1, head_size=8, inner=8)
    words = tokenizer.characters([string.printable])
    config = Config(words.get_vocab_size(), 128, shape)
    tiny = pretrained.Pretrained(config, random_params(config), words, 0)
    monkeypatch.setattr(pretrained, "load", lambda: tiny)
    monkeypatch.chdir(tmp_path)
    Path("mbpp.jsonl").write_text(json.dumps(ADD))
    Path("samples.jsonl").write_text(json.dumps({"task_id": "MBPP/601", "prompt": "", "samples": PROGRAMS}))

    shown = [text for name, text in blocks("python") if name.startswith("language.md")]
    assert all(any(snippet in text for text in shown) for snippet in CHEAPER)
    names: dict[str, Any] = {}
    steps = []
    for text in shown:
        for snippet, cheap in CHEAPER.items():
            text = text.replace(snippet, cheap)
        exec(compile(text, "language.md", "exec"), names)
        if "range(2)" in text:
            steps.append(int(names["state"].step))
    assert names["rewards"] == [1.0, -0.3, -0.6, -1.0]
    assert names["candidates"] == PROGRAMS and names["best"].shape == (1, 1)
    assert steps == [2, 2]  # of which B-Coder's second is of its second stage
    assert names["data"].reward.sum() == pytest.approx(-0.9)
    assert names["sampled"].tokens.shape == (1, 3)


# ---- the example of a new agent -----------------------------------------------------------------------------


def chain_values(dataset: Dataset, discount: float) -> np.ndarray:
    """What the logged policy is worth in each state of the chain that it leaves from, from counts."""
    steps = dataset.transitions
    state, successor = steps.observation.argmax(1), steps.next_observation.argmax(1)
    count = np.zeros((8, 8))
    np.add.at(count, (state, successor), discount * steps.discount)
    visits = np.bincount(state, minlength=8)[:7]
    reward = np.bincount(state, steps.reward, minlength=8)[:7]
    return np.linalg.solve(np.diag(visits) - count[:7, :7], reward)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scalar", pytest.param("hl_gauss", marks=pytest.mark.long)])
def test_the_example_agent_learns_the_value_of_the_logged_policy(name: str) -> None:
    loaded, discount = data.load("synthetic-discrete"), 0.8
    head = heads.make(name, *replay.value_bounds(loaded.dataset, discount))
    config = example_agent.Config(discount=discount, hidden=(32,), learning_rate=3e-3, target_rate=0.1)
    population = train.population(
        lambda config: example_agent.make(config, loaded.spec, head), config, replay.sampler(256), 1500
    )
    keys = jax.random.split(jax.random.key(0), 2)
    state = population.init(keys, replay.take(loaded.dataset, np.arange(2)))
    state, _ = next(train.epochs(population.epoch, state, jax.device_put(loaded.dataset), keys, 1))
    network = mlp.state_value(head.size, config.hidden)
    value = head.value(jax.vmap(network.apply, (0, None))(state.params["value"], np.eye(8)[:7]))
    expected = chain_values(loaded.dataset, discount)
    assert expected.max() > 0.5 and expected.min() < 0.2
    np.testing.assert_allclose(value, np.stack([expected] * 2), atol=0.06)


@pytest.mark.slow
def test_the_example_agent_runs_as_its_document_says(tmp_path: Path) -> None:
    settings = offline.Settings(
        agent="docs.example_agent",
        head="c51",
        seeds=2,
        updates=4,
        eval_every=2,
        batch_size=8,
        workdir=str(tmp_path),
        tensorboard=False,
    )
    assert offline.run(settings, example_agent.Config(hidden=(8, 8)))["updates"] == 4
    losses = log.series(tmp_path, "train/value_loss")[1]
    assert losses.shape == (2, 2) and np.isfinite(losses).all()
