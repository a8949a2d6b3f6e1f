"""Make an offline dataset on this machine, without a download or a display; describe one; convert one.

Examples:

  A first dataset of 10,000 transitions, in seconds:
    python -m experiments.collect --dataset=pointmaze-medium-navigate-v0 --transitions=10000

  A tenth of OGBench's published size, on all cores:
    python -m experiments.collect --dataset=cube-single-play-v0 --transitions=100000

  The published size, with another seed, beside the first:
    python -m experiments.collect --dataset=scene-noisy-v0 --seed=1 --out=~/data/scene-noisy-seed1

  A tier of locomotion by D4RL's protocol, 1,000,000 transitions on gymnasium's Hopper-v5:
    python -m experiments.collect --dataset=hopper-medium-regen-v5

  What is in it: returns, lengths, action coverage, as text and PNG:
    python -m experiments.collect --describe=hopper-medium-regen-v5

  The same as a Minari dataset, for minari.load_dataset("headway/hopper-medium-regen-v5"):
    python -m experiments.collect --to_minari=hopper-medium-regen-v5

Then, from Python, either of

    from rl.data.recipes import collect
    path = collect("cube-single-play-v0", transitions=100_000)

    import ogbench
    env, train, val = ogbench.make_env_and_datasets("cube-single-play-v0", dataset_path=str(path))

An OGBench dataset is <dataset>.npz and <dataset>-val.npz (a tenth as much), a tier of locomotion <dataset>.hdf5 in
D4RL's layout; <dataset>.json says how they were made. They are not the published files, and 'regen' says so. The
same flags give the same bits, however many processes run and however often they were stopped: Ctrl-C or a crash
costs a few seconds of work, and the same command continues. If the files are there already, nothing is done.
"""

from __future__ import annotations

import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from experiments import common
from experiments import flags as config_flags
from rl import data, files, log, plot
from rl.data import card as cards
from rl.data import d4rl, minari, recipes

_SCRIPTED = (
    " ".join(name for name, recipe in recipes.RECIPES.items() if recipe.env == env)
    for env in dict.fromkeys(recipe.env for recipe in recipes.RECIPES.values())
)
# In lines short enough that absl, which would cut names at their hyphens, leaves them as they are.
_NAMES = "\n".join(
    textwrap.fill(names, 74, break_on_hyphens=False) for names in (*_SCRIPTED, *recipes.LOCOMOTION)
)
_TASK = re.compile(r"-singletask(-task\d+)?")
_DATASET = flags.DEFINE_string("dataset", None, f"What to make. One of:\n{_NAMES}")
_DESCRIBE = flags.DEFINE_string(
    "describe", None, "A dataset, by file or name, to describe: writes NAME-card.png and NAME-card.txt."
)
_TO_MINARI = flags.DEFINE_string(
    "to_minari", None, "A dataset, by file or name, to store as a local Minari dataset."
)
_TRANSITIONS = flags.DEFINE_integer(
    "transitions",
    None,
    "Training transitions, for OGBench rounded up to whole episodes. Default: as published.",
    lower_bound=1,
)
_OUT = flags.DEFINE_string(
    "out",
    None,
    "Folder to write to. Default: $HEADWAY_HOME/ogbench or $HEADWAY_HOME/locomotion, where $HEADWAY_HOME is "
    "~/.headway if it is not set; for a description, beside the file or in the current folder. To be described or "
    "converted a tier of locomotion may lie here, or in that default.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Decides every bit of the data.", lower_bound=0)
_PROCESSES = flags.DEFINE_integer(
    "processes", None, "Processes to run. Default: one per core.", lower_bound=1
)
_EPISODE_STEPS = flags.DEFINE_integer(
    "episode_steps",
    None,
    "OGBench: transitions per episode. Default: as published; shorter is for trials.",
    lower_bound=1,
)
_ACTORS = flags.DEFINE_string(
    "actors",
    None,
    "Locomotion and antmaze: the file of behaviour policies. Default: those shipped with the package.",
)
_OVERWRITE = flags.DEFINE_boolean("overwrite", False, "Replace files, or unfinished work, of other settings.")
_CLIP_ACTIONS = flags.DEFINE_boolean(
    "clip_actions", False, "With --describe and --to_minari: clip actions that lie outside their box."
)
_SHUFFLED = flags.DEFINE_boolean(
    "shuffled", False, "With --describe and --to_minari: the file holds single transitions in no order."
)
_MINARI_ID = flags.DEFINE_string(
    "minari_id", None, "With --to_minari: the dataset's id. Default: headway/ and the file's name."
)
# {job: the flags that it reads}; all read --out.
_READS: dict[str, tuple[flags.FlagHolder[Any], ...]] = {
    _DATASET.name: (_TRANSITIONS, _SEED, _PROCESSES, _EPISODE_STEPS, _ACTORS, _OVERWRITE),
    _DESCRIBE.name: (_CLIP_ACTIONS, _SHUFFLED),
    _TO_MINARI.name: (_CLIP_ACTIONS, _SHUFFLED, _MINARI_ID),
}


def main(_: list[str]) -> None:
    jobs = ((_DATASET, make), (_DESCRIBE, describe), (_TO_MINARI, to_minari))
    chosen = [(flag.name, name, job) for flag, job in jobs if (name := flag.value)]
    if len(chosen) != 1:
        raise ValueError(
            "give one of --dataset=NAME to make, --describe=NAME and --to_minari=NAME; see --help"
        )
    ((flag, name, job),) = chosen
    _check_given(flag)
    try:
        job(name)
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept; run the same command again to continue.", file=sys.stderr)
        raise SystemExit(130) from None
    except RuntimeError as error:  # of a worker process, with a message that says how to go on
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _check_given(job: str) -> None:
    """Raises ValueError if a flag was given that only other jobs read."""
    given = {flag.name for of_job in _READS.values() for flag in of_job if flag.present}
    if ignored := sorted(given - {flag.name for flag in _READS[job]}):
        read = " ".join(f"--{flag.name}" for flag in _READS[job])
        raise ValueError(
            f"--{job} does not read {', '.join(f'--{name}' for name in ignored)}: leave out what belongs to another "
            f"job. It reads {read} --out"
        )


def make(dataset: str) -> None:
    """Make ``dataset`` and say what came out."""
    if "-singletask" in dataset:
        raise ValueError(
            f"--dataset={dataset}: a dataset is made without its task, which is chosen where it is learned from. Drop "
            f"singletask: --dataset={_TASK.sub('', dataset)}"
        )
    recipe = recipes.find(dataset)
    folder = files.expanded(_OUT.value or recipes.default_folder(recipe.family))
    path = folder / recipe.file
    before = recipes.read_card(path)
    recipes.collect(
        dataset,
        out=folder,
        transitions=_TRANSITIONS.value,
        seed=_SEED.value,
        processes=_PROCESSES.value,
        episode_steps=_EPISODE_STEPS.value,
        actors=_ACTORS.value,
        overwrite=_OVERWRITE.value,
    )
    card = recipes.read_card(path)
    if card == before:
        print("Already there.")
    print(scripted_summary(card, path) if dataset in recipes.RECIPES else locomotion_summary(card, path))


def scripted_summary(card: dict[str, Any], path: pathlib.Path) -> str:
    """Say what the card of OGBench's training file at ``path`` says, in four lines."""
    episodes, steps = card["episodes"], card["episode_steps"]
    return "\n".join(
        [
            f"{path}: {card['transitions']:,} transitions, {episodes['train']:,} episodes of {steps:,}",
            f"{path.with_suffix('')}-val.npz: {episodes['val'] * steps:,} transitions, {episodes['val']:,} episodes",
            f"{card['reached']:,} of {card['attempts']:,} goals or subtasks that came to an end were reached",
            _speed(card, card["sha256"]["train"]),
        ]
    )


def locomotion_summary(card: dict[str, Any], path: pathlib.Path) -> str:
    """Say what the card of the tier at ``path`` says."""
    lines = [
        f"{path}: {card['transitions']:,} transitions, {card['episodes']:,} episodes, "
        f"{card['episodes_cut']:,} of them cut"
    ]
    if "return_mean" in card:
        lines.append(f"return {card['return_mean']:.1f}, standard deviation {card['return_std']:.1f}")
        lines += [
            f"normalised {card[f'normalized_return_{source}']:.1f} between the random and expert returns of {whose}, "
            "{:.1f} and {:.1f}".format(*card[f"reference_{source}"])
            for source, whose in (("d4rl", "D4RL"), ("recipe", "this recipe's policies"))
            if f"reference_{source}" in card
        ]
    if "origin" in card["actors"]:
        lines.append(card["actors"]["origin"])
    return "\n".join([*lines, _speed(card, card["sha256"])])


def _speed(card: dict[str, Any], digest: str) -> str:
    return f"{card['steps_per_second']:,.0f} steps/s for {card['wall_seconds']:.1f} s; sha256 {digest}"


def describe(name: str) -> None:
    """Print the card of a dataset, with what its file records of its making, and write it as PNG and text."""
    name = _file(name)
    loaded = data.load(name, clip_actions=_CLIP_ACTIONS.value, shuffled=_SHUFFLED.value)
    card = cards.describe(loaded)
    record = d4rl.recorded(name) if name.endswith((".hdf5", ".h5")) else {}
    text = "\n".join([cards.text(card, loaded), *_lines(record)])
    file = files.expanded(name)
    beside = file.parent if file.is_file() else pathlib.Path()
    target = files.expanded(_OUT.value or beside) / f"{_stem(name)}-card"
    target.parent.mkdir(parents=True, exist_ok=True)
    plot.dataset_card(
        f"{target}.png",
        card.returns,
        card.lengths,
        card.coverage,
        references=dict(zip(("random", "expert"), loaded.reference or (), strict=False)),
        title=loaded.source,
    )
    with log.replacing(f"{target}.txt") as partial:
        partial.write_text(text + "\n")
    print(f"{text}\n{target}.png, {target}.txt")


def _lines(tree: Any, prefix: str = "") -> Iterator[str]:
    """One line for each number or text in nested dicts and lists: ``actors.seed  0``."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _lines(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield f"  {prefix:<26} {tree}"


def to_minari(name: str) -> None:
    """Store a dataset where Minari keeps its own, and say how to load it."""
    loaded = data.load(_file(name), clip_actions=_CLIP_ACTIONS.value, shuffled=_SHUFFLED.value)
    version = "" if re.search(r"-v\d+$", _stem(name)) else "-v0"  # which Minari asks for
    chosen = _MINARI_ID.value or f"headway/{_stem(name)}{version}"
    minari.write(loaded, chosen)
    print(f"minari.load_dataset({chosen!r}): {len(loaded.dataset.transitions.reward):,} transitions")


def _file(name: str) -> str:
    """The file of a tier of locomotion, in --out or else where it is made by default; other names as they are.

    Raises:
      DataError: there is no such file; the message says how to get one.
    """
    if name in recipes.LOCOMOTION:
        recipe = recipes.LOCOMOTION[name]
        usual = files.expanded(recipes.default_folder(recipe.family)) / recipe.file
        if _OUT.value and (other := files.expanded(_OUT.value) / recipe.file).exists():
            return str(other)
        remedy = (
            "give the folder that it lies in by --out, or make it with "
            f"python -m experiments.collect --dataset={name}"
        )
        return str(files.existing(usual, remedy))
    if name.endswith((".hdf5", ".h5", ".npz")):
        remedy = "give the path of one, or the name of a dataset; --dataset=NAME makes one, and --help lists the names"
        return str(files.existing(name, remedy))
    return name


def _stem(name: str) -> str:
    """What a dataset is called, without the ending of a file."""
    return re.sub(r"\.(hdf5|h5|npz)$", "", common.dataset_name(name))


if __name__ == "__main__":
    app.run(config_flags.reporting(main), flags_parser=config_flags.parser())
