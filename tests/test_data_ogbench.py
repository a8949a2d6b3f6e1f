"""`rl.data.ogbench` against the ogbench package's own loader, on small files of random states."""

import importlib
import json
import zipfile

import numpy as np
import pytest

from rl import data
from rl.data import download, ogbench
from rl.data.steps import DataError

EPISODE = 6  # rows: five transitions and the last state


def write(path, *, observation=4, action=2, states=None, buttons=0, episodes=5, seed=0, **replaced):
    """A random file in OGBench's layout; ``states`` draws its qpos, and ``replaced`` are arrays put in."""
    rng = np.random.default_rng(seed)
    n = episodes * EPISODE
    arrays = {
        "observations": rng.normal(size=(n, observation)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (n, action)).astype(np.float32),
        "terminals": np.arange(1, n + 1) % EPISODE == 0,
    }
    if states is not None:
        arrays["qpos"] = states(rng, n).astype(np.float32)
        arrays["qvel"] = np.zeros((n, 2), np.float32)
    if buttons:
        arrays["button_states"] = rng.integers(0, 2, (n, buttons))
    np.savez_compressed(path, **{**arrays, **replaced})
    return path


def near_goals(width, goals, scale):
    """States scattered around places that tasks may ask for, so that some succeed and some do not."""

    def draw(rng, n):
        states = rng.normal(size=(n, width))
        for start, places in goals:
            columns = slice(start, start + places.shape[1])
            states[:, columns] = places[rng.integers(0, len(places), n)] + scale * rng.normal(
                size=(n, places.shape[1])
            )
        return states

    return draw


CUBES = np.array([[x, y, 0.02] for x in (0.35, 0.425, 0.5) for y in (-0.2, -0.1, 0.0, 0.1, 0.2)])
CELLS = np.array([[x, y] for x in range(0, 24, 4) for y in range(0, 24, 4)], float)
FILES = {
    "pointmaze-medium-navigate-v0": {"observation": 2, "states": near_goals(2, [(0, CELLS)], 0.4)},
    "cube-single-play-v0": {"observation": 28, "action": 5, "states": near_goals(21, [(14, CUBES)], 0.02)},
    "scene-play-v0": {
        "observation": 40,
        "action": 5,
        "states": near_goals(25, [(14, CUBES), (23, np.array([[-0.16, 0.0], [0.0, 0.2]]))], 0.02),
        "buttons": 2,
    },
    "puzzle-3x3-play-v0": {"observation": 55, "action": 5, "states": near_goals(23, [], 0), "buttons": 9},
}
# In CI each kind of scene once; a task without a number is one of those with numbers.
TASKS = [
    pytest.param(name, task, marks=[pytest.mark.long] * (bool(task) != name.startswith(("cube", "scene"))))
    for name in FILES
    for task in ("", "-task1")
]


@pytest.mark.parametrize(("name", "task"), TASKS)
@pytest.mark.slow
def test_equals_the_ogbench_loader(name, task, tmp_path):
    package = pytest.importorskip("ogbench")
    episodes = 200
    for seed, suffix in enumerate(("", "-val")):
        write(tmp_path / f"{name}{suffix}.npz", episodes=episodes, seed=seed, **FILES[name])
    dataset_name = f"{name.removesuffix('-v0')}-singletask{task}-v0"
    env, theirs, their_validation = package.make_env_and_datasets(
        dataset_name, dataset_path=str(tmp_path / f"{name}.npz"), disable_env_checker=True
    )
    env.close()
    loaded = data.load(dataset_name, folder=tmp_path, validation=True)
    for ours, published in ((loaded.dataset, theirs), (loaded.validation, their_validation)):
        transitions, last, _ = ours
        for actual, expected in (
            (transitions.observation, published["observations"]),
            (transitions.action, published["actions"]),
            (transitions.next_observation, published["next_observations"]),
            (transitions.reward, published["rewards"]),
            (transitions.discount, published["masks"]),
            (last, published["terminals"]),
        ):
            np.testing.assert_array_equal(actual, expected)
        assert len(np.unique(transitions.reward)) > 1  # or the comparison would show nothing
    assert loaded.environment == env.spec.id
    assert loaded.note == ""


def test_held_out_data_are_read_where_they_are_asked_for_and_lie_beside(tmp_path):
    path = write(tmp_path / "mine.npz")
    assert data.load(str(path), validation=True).validation is None
    write(tmp_path / "mine-val.npz", seed=1)
    assert data.load(str(path)).validation is None
    assert data.load(str(path)).digest == data.load(str(path), validation=True).digest


def test_next_actions_are_those_of_the_file(tmp_path):
    path = write(tmp_path / "mine.npz")
    transitions, last, _ = data.load(str(path)).dataset
    actions = np.load(path)["actions"]
    rows = np.flatnonzero(np.arange(1, len(actions) + 1) % EPISODE)
    np.testing.assert_array_equal(transitions.action, actions[rows])
    np.testing.assert_array_equal(transitions.next_action, actions[rows + 1])
    np.testing.assert_array_equal(transitions.has_next_action, np.ones(len(rows)))
    np.testing.assert_array_equal(last, np.arange(1, len(rows) + 1) % (EPISODE - 1) == 0)


def test_plain_datasets_have_no_rewards_and_say_so(tmp_path):
    write(tmp_path / "cube-single-play-v0.npz")
    loaded = data.load("cube-single-play-v0", folder=tmp_path)
    assert not loaded.dataset.transitions.reward.any()
    assert (loaded.dataset.transitions.discount == 1).all()
    assert "no rewards" in loaded.note and loaded.environment == "cube-single-v0"


def test_the_environment_decides_the_task(tmp_path):
    pytest.importorskip("ogbench")
    path = write(tmp_path / "mine.npz", **FILES["pointmaze-medium-navigate-v0"])
    loaded = data.load(str(path), environment="pointmaze-medium-singletask-task2-v0")
    assert set(np.unique(loaded.dataset.transitions.reward)) <= {-1.0, 0.0}
    assert loaded.environment == "pointmaze-medium-singletask-task2-v0"
    assert loaded.source == "OGBench layout: mine.npz"
    columns = dict(np.load(path))
    np.savez(tmp_path / "rewarded.npz", **columns, rewards=np.ones(len(columns["actions"])))
    with pytest.raises(
        DataError, match=r"'rewards', but .* rewards are those of pointmaze-medium-singletask-task2"
    ):
        data.load(str(tmp_path / "rewarded.npz"), environment="pointmaze-medium-singletask-task2-v0")
    columns["timeouts"] = columns.pop("terminals")  # which mark ends as well
    np.savez(tmp_path / "timeouts.npz", **columns)
    alike = data.load(str(tmp_path / "timeouts.npz"), environment="pointmaze-medium-singletask-task2-v0")
    np.testing.assert_array_equal(alike.dataset.transitions.reward, loaded.dataset.transitions.reward)
    # To evaluate in an environment of one's own takes no rewards away.
    write(tmp_path / "pointmaze-medium-navigate-v0.npz", **FILES["pointmaze-medium-navigate-v0"])
    elsewhere = data.load(
        "pointmaze-medium-navigate-singletask-task2-v0", folder=tmp_path, environment="mine:Maze-v0"
    )
    assert elsewhere.environment == "mine:Maze-v0" and elsewhere.note == ""
    rewards = loaded.dataset.transitions.reward
    np.testing.assert_array_equal(elsewhere.dataset.transitions.reward, rewards)
    assert rewards.any()


@pytest.mark.slow
def test_pixels_stay_bytes_and_are_rewarded_without_a_renderer(tmp_path):
    pytest.importorskip("ogbench")
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), np.uint8)
    for name in ("cube-single-play-v0", "visual-cube-single-play-v0"):
        write(tmp_path / f"{name}.npz", observations=images, **FILES["cube-single-play-v0"])
    pixels = data.load("visual-cube-single-play-singletask-v0", folder=tmp_path)
    state = data.load("cube-single-play-singletask-v0", folder=tmp_path)
    assert pixels.spec.observation_shape == (8, 8, 3)
    assert pixels.dataset.transitions.observation.dtype == np.uint8
    assert pixels.environment == "visual-cube-single-singletask-v0"
    np.testing.assert_array_equal(pixels.dataset.transitions.reward, state.dataset.transitions.reward)


def test_integer_actions_are_discrete(tmp_path):
    actions = np.arange(30) % 8
    write(tmp_path / "powderworld-easy-play-v0.npz", actions=actions)
    loaded = data.load("powderworld-easy-play-v0", folder=tmp_path)
    assert loaded.spec.discrete and loaded.spec.action_size == 8


def test_folders_are_searched_in_order_and_the_source_is_told(tmp_path, monkeypatch):
    name = "cube-single-play-v0"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HEADWAY_HOME", raising=False)
    ours, cached, mine = tmp_path / ".headway" / "ogbench", tmp_path / ".ogbench" / "data", tmp_path / "mine"
    for seed, folder in enumerate((ours, cached, mine)):
        folder.mkdir(parents=True)
        write(folder / f"{name}.npz", seed=seed)
    (ours / f"{name}.json").write_text(json.dumps({"regenerated": True}))
    digests = []
    for folder, source in (
        (mine, "OGBench (downloaded): cube-single-play-v0"),
        (cached, "OGBench (downloaded): cube-single-play-v0"),
        (ours, "OGBench layout, regenerated: cube-single-play-v0"),
    ):
        loaded = data.load(name, folder=mine)
        assert loaded.source == source
        digests.append(loaded.digest)
        (folder / f"{name}.npz").unlink()
    assert len(set(digests)) == 3
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere" / "ogbench").mkdir(parents=True)
    write(tmp_path / "elsewhere" / "ogbench" / f"{name}.npz")
    assert data.load(name).digest == digests[2]  # seed 0 again


def test_a_card_that_says_nothing_is_refused(tmp_path):
    write(tmp_path / "cube-single-play-v0.npz")
    for text in ("{", "{}", "[]"):
        (tmp_path / "cube-single-play-v0.json").write_text(text)
        with pytest.raises(DataError, match=r"cube-single-play-v0.json cannot be read as the card .*repair"):
            data.load("cube-single-play-v0", folder=tmp_path)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setattr(ogbench, "_SERVER", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_offline_names_the_file_and_the_recipe(tmp_path, offline):
    with pytest.raises(DataError) as caught:
        data.load("cube-double-noisy-singletask-task3-v0")
    message = str(caught.value)
    assert "http://127.0.0.1:1/cube-double-noisy-v0.npz" in message
    assert str(tmp_path / ".ogbench" / "data" / "cube-double-noisy-v0.npz") in message
    assert "python -m experiments.collect --dataset=cube-double-noisy-v0 --transitions=" in message


@pytest.mark.parametrize("name", ["humanoidmaze-large-navigate-v0", "visual-cube-single-play-v0"])
def test_offline_promises_no_recipe_where_there_is_none(name, offline):
    with pytest.raises(DataError) as caught:
        data.load(name)
    assert "experiments.collect" not in str(caught.value)


def test_a_download_is_checked_and_kept(tmp_path, offline, monkeypatch):
    served = write(tmp_path / "served.npz")
    open_url = download.urllib.request.urlopen
    monkeypatch.setattr(
        download.urllib.request, "urlopen", lambda request, timeout: open_url(f"file://{served}")
    )
    loaded = data.load("cube-single-play-v0")
    assert loaded.source == "OGBench (downloaded): cube-single-play-v0"
    folder = tmp_path / ".ogbench" / "data"
    names = ["cube-single-play-v0.npz", "cube-single-play-v0.npz.sha256"]
    assert sorted(path.name for path in folder.iterdir()) == names
    served.write_text("<html>please log in</html>")
    with pytest.raises(DataError, match=r"the download cannot be read as npz .*something else"):
        data.load("cube-double-play-v0")
    assert sorted(path.name for path in folder.iterdir()) == names


class Bomb:
    """What a malicious pickle would do on being read."""

    def __reduce__(self):
        return (pytest.fail, ("the pickle was opened",))


def test_pickles_are_refused(tmp_path):
    path = write(tmp_path / "mine.npz", actions=np.array([Bomb()] * 30, object))
    with pytest.raises(DataError, match=r"pickled Python objects.*refused"):
        data.load(str(path))


@pytest.mark.parametrize("keep", [0, 100, -200])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = write(tmp_path / "mine.npz")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"mine.npz cannot be read as npz .*cut short"):
        data.load(str(path))


def replace_header(path, name, text):
    """What the array says of its type and shape; the checksum is right again."""
    with zipfile.ZipFile(path) as archive:
        parts = {member: archive.read(member) for member in archive.namelist()}
    line = text.encode().ljust(117) + b"\n"
    part = parts[f"{name}.npy"]
    parts[f"{name}.npy"] = part[:8] + len(line).to_bytes(2, "little") + line + part[128:]
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in parts.items():
            archive.writestr(member, content)


def header(shape):
    return f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'descr': '<f4', ((", "TokenError"),
        ("[" * 110, "cannot be read as npz"),
        ("{}", "cannot be read as npz"),
        (header((2**45, 2)), "more memory than there is"),
        (header((2**130,)), "cannot be read as npz"),
        (header((-30, 2)), "cannot be read as npz"),
        (header(()), r"actions have shape \(\), but there are 30"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, text, message):
    path = write(tmp_path / "mine.npz")
    replace_header(path, "actions", text)
    with pytest.raises(DataError, match=f"mine.npz.*{message}"):
        data.load(str(path))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"observations": np.float32(1)}, "there are 0 observations"),
        ({"terminals": np.zeros(30)}, "no trajectory ends in 30 steps; write 1 into 'terminals'"),
        ({"terminals": np.full(30, 7)}, "terminals must be 0 or 1, but 30 are not"),
        ({"terminals": np.full(30, "True")}, "terminals are <U4"),
        ({"rewards": np.ones(30)}, "mine.npz holds 'rewards', but OGBench's layout has none"),
        (
            {"rewards": np.ones(30), "terminals": np.zeros(30), "timeouts": np.ones(30)},
            "holds 'rewards', .* save the log as .hdf5",
        ),
        ({"actions": np.zeros((30, 0), np.float32)}, r"actions have shape \(30, 0\)"),
    ],
)
def test_what_the_layout_has_not_is_refused_by_its_name(tmp_path, replaced, message):
    with pytest.raises(DataError, match=message):
        data.load(str(write(tmp_path / "mine.npz", **replaced)))
    zeros = write(tmp_path / "zeros.npz", rewards=np.zeros(30))
    assert not data.load(str(zeros)).dataset.transitions.reward.any()


def test_timeouts_of_a_log_of_ones_own_end_trajectories(tmp_path):
    """Or hindsight goals would be drawn, and steps paired, across resets."""
    cut = np.arange(30) == 14  # in the middle of the third trajectory, of six states and five steps
    lengths = []
    for name, more in (("plain", {}), ("cut", {"timeouts": cut})):
        loaded = data.load(str(write(tmp_path / f"{name}.npz", **more)))
        lengths.append(np.diff(np.flatnonzero(loaded.dataset.last), prepend=-1).tolist())
    assert lengths == [[5, 5, 5, 5, 5], [5, 5, 2, 2, 5, 5]]
    with pytest.raises(DataError, match="'truncations' should be called 'timeouts'"):
        data.load(str(write(tmp_path / "mine.npz", truncations=cut)))


@pytest.mark.parametrize("start", [200, 66])  # the one breaks the checksum, the other the compression
def test_a_damaged_array_is_refused(tmp_path, start):
    path = write(tmp_path / "mine.npz")
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("observations.npy").header_offset
    content = bytearray(path.read_bytes())
    content[offset + start : offset + start + 60] = b"\xff" * 60
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as npz"):
        data.load(str(path))


def test_a_single_array_is_refused(tmp_path):
    with (tmp_path / "mine.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="single array"):
        data.load(str(tmp_path / "mine.npz"))


def test_timeouts_alone_mark_the_last_states_too(tmp_path):
    usual = write(tmp_path / "usual.npz")
    with np.load(usual) as arrays:
        others = {name: arrays[name] for name in ("observations", "actions")}
        np.savez(tmp_path / "own.npz", timeouts=arrays["terminals"], **others)
    expected, actual = (data.load(str(path)).dataset for path in (usual, tmp_path / "own.npz"))
    np.testing.assert_array_equal(actual.last, expected.last)
    np.testing.assert_array_equal(actual.transitions.observation, expected.transitions.observation)


def test_a_missing_key_is_named(tmp_path):
    np.savez(tmp_path / "mine.npz", observations=np.zeros((3, 2), np.float32), actions=np.zeros((3, 2)))
    with pytest.raises(DataError, match="no 'terminals'; the file holds actions, observations"):
        data.load(str(tmp_path / "mine.npz"))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"states": None}, "no 'qpos'"),
        ({"qpos": np.zeros((3, 2), np.float32)}, r"qpos have shape \(3, 2\), but one row per step"),
        ({"qpos": np.full((30, 2), np.nan, np.float32)}, "60 values of qpos are NaN"),
    ],
)
def test_states_that_give_no_rewards_are_refused(tmp_path, replaced, message):
    pytest.importorskip("ogbench")
    settings = {**FILES["pointmaze-medium-navigate-v0"], **replaced}
    path = write(tmp_path / "pointmaze-medium-navigate-v0.npz", **settings)
    with pytest.raises(DataError, match=message):
        data.load("pointmaze-medium-navigate-singletask-v0", folder=path.parent)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [("nothing-singletask-v0", "NameNotFound"), ("pointmaze-medium-singletask-v0", "ValueError: operands")],
)
def test_states_of_another_environment_are_refused(tmp_path, environment, reason):
    pytest.importorskip("ogbench")
    path = write(tmp_path / "mine.npz", qpos=np.zeros((30, 0), np.float32))
    with pytest.raises(
        DataError, match=f"mine.npz cannot be read as a log of {environment} .{reason}.*--environment"
    ):
        data.load(str(path), environment=environment)


def test_actions_outside_the_box_are_refused_or_clipped(tmp_path):
    path = write(tmp_path / "mine.npz", actions=np.full((30, 2), 2, np.float32))
    with pytest.raises(DataError, match="60 action values"):
        data.load(str(path))
    with pytest.warns(
        match="60 of 60 action values .* clipped to it, by at most 1: .* divide them by its range"
    ):
        loaded = data.load(str(path), clip_actions=True)
    assert (loaded.dataset.transitions.action == 1).all()


def test_every_name_has_an_environment():
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("ogbench")
    importlib.import_module("rl.envs.heavy_cubes")
    for name in ogbench._ALL:
        assert ogbench._split(name)[1] in gymnasium.registry, name


def test_names():
    assert len(ogbench.DATASETS) == len(set(ogbench.DATASETS)) == 85 + 2 + 7
    assert ogbench.known("puzzle-4x6-noisy-singletask-task5-v0")
    assert not ogbench.known("puzzle-4x6-noisy-singletask-task6-v0")
    assert not ogbench.known("powderworld-easy-play-singletask-v0")
    assert set(ogbench.names()) < ogbench._ALL


def test_reads_what_the_recipes_make(tmp_path):
    package = pytest.importorskip("ogbench")
    from rl.data import recipes

    name = "pointmaze-medium-navigate-v0"
    path = recipes.collect(name, out=tmp_path, transitions=100, episode_steps=50, processes=1, progress=False)
    theirs, _ = package.make_env_and_datasets(name, dataset_path=str(path), dataset_only=True)
    loaded = data.load(name, folder=tmp_path)
    assert loaded.source == f"OGBench layout, regenerated: {name}"
    np.testing.assert_array_equal(loaded.dataset.transitions.observation, theirs["observations"])
    np.testing.assert_array_equal(loaded.dataset.transitions.next_observation, theirs["next_observations"])
    np.testing.assert_array_equal(loaded.dataset.last, theirs["terminals"])
