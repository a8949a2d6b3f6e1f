"""Make an OGBench dataset on this machine, without a download, a display or a trained expert.

Examples:

  A first dataset of 10,000 transitions, in seconds:
    python -m experiments.collect --dataset=pointmaze-medium-navigate-v0 --transitions=10000

  A tenth of the published size, on all cores:
    python -m experiments.collect --dataset=cube-single-play-v0 --transitions=100000

  The published size, with another seed, beside the first:
    python -m experiments.collect --dataset=scene-noisy-v0 --seed=1 --out=~/data/scene-noisy-seed1

Then, from Python, either of

    from rl.data.recipes import collect
    path = collect("cube-single-play-v0", transitions=100_000)

    import ogbench
    env, train, val = ogbench.make_env_and_datasets("cube-single-play-v0", dataset_path=str(path))

It writes <dataset>.npz, <dataset>-val.npz (a tenth as much) and <dataset>.json, which says how they were made. The
same flags give the same bits, however many processes run and however often they were stopped: Ctrl-C or a crash
costs a few seconds of work, and the same command continues. If the files are there already, nothing is done.
"""

from __future__ import annotations

import pathlib
import sys

from absl import app, flags

from rl.data import recipes

_NAMES = "\n".join(
    " ".join(name for name, recipe in recipes.RECIPES.items() if recipe.env == env)
    for env in dict.fromkeys(recipe.env for recipe in recipes.RECIPES.values())
)
_DATASET = flags.DEFINE_string("dataset", None, f"What to make. One of:\n{_NAMES}", required=True)
_TRANSITIONS = flags.DEFINE_integer(
    "transitions",
    None,
    "Training transitions, rounded up to whole episodes. Default: as published.",
    lower_bound=1,
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder to write to. Default: $HEADWAY_HOME/ogbench, or ~/.headway/ogbench."
)
_SEED = flags.DEFINE_integer("seed", 0, "Decides every bit of the data.", lower_bound=0)
_PROCESSES = flags.DEFINE_integer(
    "processes", None, "Processes to run. Default: one per core.", lower_bound=1
)
_EPISODE_STEPS = flags.DEFINE_integer(
    "episode_steps",
    None,
    "Transitions per episode. Default: as published; shorter is for trials.",
    lower_bound=1,
)
_OVERWRITE = flags.DEFINE_boolean("overwrite", False, "Replace files, or unfinished work, of other settings.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Not a flag: {' '.join(argv[1:])}. Flags are written --name=value.")
    folder = pathlib.Path(_OUT.value).expanduser() if _OUT.value else recipes.default_folder()
    path = folder / f"{_DATASET.value}.npz"
    before = recipes.read_card(path)
    try:
        recipes.collect(
            _DATASET.value,
            out=folder,
            transitions=_TRANSITIONS.value,
            seed=_SEED.value,
            processes=_PROCESSES.value,
            episode_steps=_EPISODE_STEPS.value,
            overwrite=_OVERWRITE.value,
        )
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept; run the same command again to continue.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        sys.exit(f"{error}")
    card = recipes.read_card(path)
    if card == before:
        print("Already there.")
    print(summary(card, path))


def summary(card: dict, path: pathlib.Path) -> str:
    """Say what the card of the training file at ``path`` says, in four lines."""
    episodes, steps, speed = card["episodes"], card["episode_steps"], card["steps_per_second"]
    return "\n".join(
        [
            f"{path}: {card['transitions']:,} transitions, {episodes['train']:,} episodes of {steps:,}",
            f"{path.with_suffix('')}-val.npz: {episodes['val'] * steps:,} transitions, {episodes['val']:,} episodes",
            f"{card['reached']:,} of {card['attempts']:,} goals or subtasks that came to an end were reached",
            f"{speed:,.0f} steps/s for {card['wall_seconds']:.1f} s; sha256 {card['sha256']['train']}",
        ]
    )


if __name__ == "__main__":
    app.run(main)
