"""`rl.data.d4rl`: the layout, the cache folder, the table, and a real log."""

import json
import socket
import urllib.error

import numpy as np
import pytest

from rl import data
from rl.data import d4rl, download
from rl.data.steps import DataError
from rl.envs import registry

h5py = pytest.importorskip("h5py")


def steps(n=12, episode=4):
    rng = np.random.default_rng(0)
    timeouts = np.arange(1, n + 1) % episode == 0
    return {
        "observations": rng.normal(size=(n, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": rng.integers(0, 2, n).astype(np.float32),
        "terminals": np.zeros(n, bool),
        "timeouts": timeouts,
    }


def write(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return str(path)


def qlearning_dataset(log):
    """The pairing of the d4rl package's function of that name, for a log with timeouts."""
    rows = [i for i in range(len(log["rewards"]) - 1) if not log["timeouts"][i]]
    return {
        "observation": log["observations"][rows],
        "action": log["actions"][rows],
        "reward": log["rewards"][rows],
        "next_observation": log["observations"][[i + 1 for i in rows]],
        "discount": 1 - log["terminals"][rows].astype(np.float32),
    }


def test_gives_the_transitions_that_d4rl_gives(tmp_path):
    log = steps()
    loaded = data.load(write(tmp_path / "mine.hdf5", log))
    for name, expected in qlearning_dataset(log).items():
        np.testing.assert_array_equal(getattr(loaded.dataset.transitions, name), expected)
    assert loaded.source == "D4RL layout: mine.hdf5"
    assert loaded.environment is None and loaded.reference is None and "no environment" in loaded.note


def test_next_observations_in_the_file_keep_the_step_at_the_time_limit(tmp_path):
    log = steps()
    log["next_observations"] = np.roll(log["observations"], -1, axis=0)
    log["next_observations"][log["timeouts"]] = 7
    loaded = data.load(write(tmp_path / "mine.h5", log))
    transitions = loaded.dataset.transitions
    np.testing.assert_array_equal(transitions.next_observation, log["next_observations"])
    np.testing.assert_array_equal(transitions.discount, np.ones(12))
    np.testing.assert_array_equal(transitions.has_next_action, ~log["timeouts"])


def test_timeouts_may_be_absent_where_terminals_end_the_episodes(tmp_path):
    log = steps()
    log["terminals"] = log.pop("timeouts").astype(np.float32)
    with pytest.warns(UserWarning, match=r"kitchen.hdf5: no time limits are marked"):
        dataset = data.load(write(tmp_path / "kitchen.hdf5", log)).dataset
    assert dataset.last.sum() == 3 and (dataset.transitions.discount == 0).sum() == 3


def test_integer_actions_are_discrete(tmp_path):
    log = steps()
    log["actions"] = np.arange(12) % 5
    loaded = data.load(write(tmp_path / "mine.hdf5", log))
    assert loaded.spec == ((3,), 5, True)


@pytest.mark.parametrize("name", ["observations", "actions", "rewards", "terminals"])
def test_a_missing_key_is_named(tmp_path, name):
    log = steps()
    del log[name]
    with pytest.raises(DataError, match=f"no '{name}'; the file holds .*timeouts"):
        data.load(write(tmp_path / "mine.hdf5", log))


@pytest.mark.parametrize(
    ("name", "called", "hint"),
    [
        ("actions", "action", "; 'action' should be called 'actions'$"),
        ("observations", "next_observations", r"terminals, timeouts$"),  # that is another array
        (
            "rewards",
            "earned",
            "; a log without rewards is for experiments.goals, as .npz: see docs/own_data.md$",
        ),
        ("rewards", "reward", "; 'reward' should be called 'rewards'$"),
        *(
            ("terminals", called, f"; '{called}' should be called 'terminals'$")
            for called in ("terminated", "terminations", "terminal")
        ),
        (
            "terminals",
            "dones",
            "; split 'dones' into 'terminals', where .*, and 'timeouts', where it was cut$",
        ),
        ("terminals", "ends", "; give 'terminals' of zeros if no episode ended by the task$"),
    ],
)
def test_an_array_by_another_name_is_recognised(tmp_path, name, called, hint):
    log = steps()
    log[called] = log.pop(name)
    with pytest.raises(DataError, match=hint):
        data.load(write(tmp_path / "mine.hdf5", log))


@pytest.mark.parametrize(
    ("name", "called"),
    [
        *(("timeouts", called) for called in ("timeout", "truncations", "truncated", "dones", "done")),
        *(("next_observations", called) for called in ("next_obs", "next_observation")),
    ],
)
def test_an_optional_array_by_another_name_is_not_ignored(tmp_path, name, called):
    log = steps()
    log["terminals"][5] = True  # an end, so that the log would be read without its timeouts
    log["next_observations"] = np.roll(log["observations"], -1, axis=0)
    log[called] = log[name]
    data.load(write(tmp_path / "both.hdf5", log))
    del log[name]
    with pytest.raises(DataError, match=f"mine.hdf5: '{called}' should be called '{name}'"):
        data.load(write(tmp_path / "mine.hdf5", log))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("rewards", "the arrays of D4RL's layout lie at the top"),
        ("observations", "concatenate the entries, .*minari:ID"),
    ],
)
def test_a_group_in_the_place_of_an_array_is_refused(tmp_path, name, remedy):
    log = steps()
    del log[name]
    path = write(tmp_path / "mine.hdf5", log)
    with h5py.File(path, "a") as file:
        file.create_group(name)
    with pytest.raises(
        DataError, match=f"mine.hdf5: '{name}' is a group or a type, not an array; .*{remedy}"
    ):
        data.load(path)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (h5py.SoftLink("/none"), "cannot be read as HDF5 .KeyError"),
        (h5py.Empty("f4"), r"timeouts have shape None, but there are 12 observations"),
        (np.dtype("f4"), "'timeouts' is a group or a type"),
        (np.zeros(12, [("x", "f4")]), "timeouts are \\[\\('x'"),
        (np.bool_(True), r"timeouts have shape \(\), but there are 12 observations"),
        (np.full(12, b"True"), "timeouts are \\|S4; save them as numbers"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_its_name(tmp_path, node, message):
    """Also where it is optional: a link that is broken is not as if it were absent."""
    with pytest.raises(DataError, match=f"mine.hdf5.*{message}"):
        data.load(write(tmp_path / "mine.hdf5", steps() | {"timeouts": node}))


def test_a_length_that_no_memory_holds_is_refused_before_it_is_read(tmp_path):
    path = write(tmp_path / "mine.hdf5", steps())
    with h5py.File(path, "a") as file:
        del file["rewards"]
        file.create_dataset("rewards", (2**50,), np.float32, chunks=(1024,))
    with pytest.raises(DataError, match=r"rewards have shape \(1125899906842624,\), but there are 12"):
        data.load(path)


def test_attributes_that_only_look_like_json_are_text(tmp_path):
    path = write(tmp_path / "mine.hdf5", steps())
    with h5py.File(path, "a") as file:
        file.attrs.update({"note": "[draft] my log", "more": "{", "list": "[1, 2]"})
    assert data.load(path).dataset.last.any()
    assert d4rl.recorded(path) == {"note": "[draft] my log", "more": "{", "list": [1, 2]}


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({}, "attributes: no 'reference_d4rl', 'environment'"),
        ({"reference_d4rl": "low", "environment": "Hopper-v5"}, "cannot be read as a regenerated tier"),
        ({"reference_d4rl": "[2, 1]", "environment": "Hopper-v5"}, "reference returns are 2 and 1"),
    ],
)
def test_a_regenerated_file_without_its_card_is_refused(tmp_path, card, message):
    path = write(tmp_path / "mine.hdf5", steps())
    with h5py.File(path, "a") as file:
        file.attrs.update({"regenerated": True, **card})
    with pytest.raises(DataError, match=f"mine.hdf5.*{message}"):
        data.load(path)


def test_transitions_in_no_order_need_a_word(tmp_path):
    log = steps(120)
    log["next_observations"] = log["observations"] + 1
    path = write(tmp_path / "mine.hdf5", log)
    with pytest.raises(DataError, match="90 of 119 steps"):
        data.load(path)
    assert data.load(path, shuffled=True).dataset.last.all()


@pytest.mark.parametrize("keep", [0, 100, 3000, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "mine.hdf5"
    write(path, steps(n=400))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"mine.hdf5 cannot be read as HDF5 .*cut short"):
        data.load(str(path))


def test_an_empty_log_is_refused(tmp_path):
    path = write(tmp_path / "mine.hdf5", {name: array[:0] for name, array in steps().items()})
    with pytest.raises(DataError, match="the log has no steps"):
        data.load(path)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*none.hdf5"):
        data.load(str(tmp_path / "none.hdf5"))


def test_named_files_are_found_where_the_d4rl_package_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "fetch", None)  # nothing is downloaded here
    for variable, folder in (("D4RL_DATASET_DIR", tmp_path / "a"), ("HOME", tmp_path / ".d4rl" / "datasets")):
        folder.mkdir(parents=True)
        write(folder / "hopper_medium_replay-v2.hdf5", steps())
        monkeypatch.setenv(variable, str(folder if variable != "HOME" else tmp_path))
        loaded = data.load("hopper-medium-replay-v2")
        assert loaded.environment == "Hopper-v4"
        assert loaded.reference == (-20.272305, 3234.3)
        assert loaded.source == "D4RL hopper-medium-replay-v2"
        monkeypatch.delenv(variable)


def test_the_reference_is_of_the_datasets_own_task(tmp_path):
    write(tmp_path / "hopper_medium-v2.hdf5", steps())
    load = lambda name: d4rl.load("hopper-medium-v2", folder=tmp_path, environment=name)
    assert load("Hopper-v5").reference == load("Hopper").reference == (-20.272305, 3234.3)
    own = write(tmp_path / "mine.hdf5", steps())  # of one's own, told by the environment, in any version
    assert data.load(own, environment="Hopper-v5").reference == (-20.272305, 3234.3)
    assert data.load(own, environment="Ant-v5").reference is None
    other = load("Walker2d-v4")
    assert other.environment == "Walker2d-v4" and other.reference is None
    assert other.note.endswith("is of Hopper-v4, and they are evaluated in Walker2d-v4")
    write(tmp_path / "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5", steps())
    assert d4rl.load("antmaze-umaze-v2", folder=tmp_path, environment="Mine-v0").reference == (0, 1)


def test_a_named_file_is_downloaded_once_and_then_verified(tmp_path, monkeypatch):
    log, urls = write(tmp_path / "log.hdf5", steps()), []

    def server(request, timeout):
        urls.append(request.full_url)
        return open_url(f"file://{log}")

    open_url = download.urllib.request.urlopen
    monkeypatch.setattr(download.urllib.request, "urlopen", server)
    folder = tmp_path / "cache"
    first = data.load("door-human-v1", folder=folder)
    assert data.load("door-human-v1", folder=folder).digest == first.digest
    assert urls == ["https://rail.eecs.berkeley.edu/datasets/offline_rl/hand_dapg_v1/door-human-v1.hdf5"]
    with (folder / "door-human-v1.hdf5").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="the file has changed"):
        data.load("door-human-v1", folder=folder)


@pytest.mark.parametrize(
    "name, otherwise",
    [
        ("hopper-medium-replay-v2", r", or make one .*--dataset=hopper-medium-replay-regen-v5"),
        ("door-human-v1", "door-human-v1.hdf5$"),
    ],
)
def test_without_a_network_a_tier_is_made(name, otherwise, tmp_path, monkeypatch):
    def server(request, timeout):
        raise urllib.error.URLError(socket.gaierror(-2, "unknown host"))

    monkeypatch.setattr(download.urllib.request, "urlopen", server)
    with pytest.raises(DataError, match=f"unknown host.*put it at .*{otherwise}"):
        data.load(name, folder=tmp_path)


def test_a_download_that_is_no_hdf5_is_not_kept(tmp_path, monkeypatch):
    page = tmp_path / "login.html"
    page.write_text("<html>please log in</html>")
    open_url = download.urllib.request.urlopen
    monkeypatch.setattr(
        download.urllib.request, "urlopen", lambda request, timeout: open_url(f"file://{page}")
    )
    with pytest.raises(DataError, match=r"the download cannot be read as HDF5 .*something else"):
        data.load("door-human-v1", folder=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_given_checksum_is_compared(tmp_path):
    path = write(tmp_path / "mine.hdf5", steps())
    with pytest.raises(DataError, match="was asked for"):
        d4rl.load(path, sha256="0" * 64)


REFERENCES = {  # d4rl/infos.py, of every dataset whose name begins like this
    "halfcheetah-": (-280.178953, 12135.0),
    "hopper-": (-20.272305, 3234.3),
    "walker2d-": (1.629008, 4592.3),
    "ant-": (-325.6, 3879.7),
    "pen-": (96.262799, 3076.8331017826877),
    "hammer-": (-274.856578, 12794.134825156867),
    "relocate-": (-6.425911, 4233.877797728884),
    "door-": (-56.512833, 2880.5693087298737),
    "antmaze-": (0.0, 1.0),
    "kitchen-": (0.0, 4.0),
    "maze2d-open-v0": (0.01, 20.66),
    "maze2d-umaze-v1": (23.85, 161.86),
    "maze2d-medium-v1": (13.13, 277.39),
    "maze2d-large-v1": (6.7, 273.99),
    "maze2d-open-dense-v0": (11.17817, 27.166538620695782),
    "maze2d-umaze-dense-v1": (68.537689, 193.66285642381482),
    "maze2d-medium-dense-v1": (44.264742, 297.4552547777125),
    "maze2d-large-dense-v1": (30.569041, 303.4857382709002),
}


def test_every_reference_is_that_of_d4rls_infos():
    """Normalised scores are of these numbers, and nothing else would show one that is wrong."""
    for name, entry in d4rl.DATASETS.items():
        (expected,) = [returns for start, returns in REFERENCES.items() if name.startswith(start)]
        assert entry.task.reference == expected, name


def test_the_table():
    names = d4rl.DATASETS
    assert len({entry.url for entry in names.values()}) == len(names)  # no two share an address
    assert len({d4rl._file(entry) for entry in names.values()}) == len(names)  # nor a file in the cache
    for name, entry in names.items():
        assert (entry.task.environment is None) == entry.task.note.startswith("no environment"), name
    # Spot checks against d4rl/infos.py.
    server = "https://rail.eecs.berkeley.edu/datasets/offline_rl"
    for name, file in (
        ("walker2d-medium-expert-v2", "gym_mujoco_v2/walker2d_medium_expert-v2.hdf5"),
        ("pen-cloned-v0", "hand_dapg/pen-demos-v0-bc-combined.hdf5"),
        ("kitchen-mixed-v0", "kitchen/kitchen_microwave_kettle_bottomburner_light-v0.hdf5"),
        ("maze2d-large-dense-v1", "maze2d/maze2d-large-dense-v1.hdf5"),
        ("maze2d-open-v0", "maze2d/maze2d-open-sparse.hdf5"),
        (
            "antmaze-large-diverse-v2",
            "ant_maze_v2/Ant_maze_hardest-maze_noisy_multistart_True_multigoal_True_sparse_fixed.hdf5",
        ),
    ):
        assert names[name].url == f"{server}/{file}"


def test_the_table_has_every_dataset_of_published_scores(data_file):
    scores = json.loads(data_file("anchors/d4rl_scores_rebrac_td3bc_iql.json").read_text())
    assert set().union(*scores.values()) <= set(d4rl.DATASETS)


def test_environments_have_the_episodes_that_the_references_are_of():
    pytest.importorskip("gymnasium_robotics")
    lengths = {"pen": 100, "hammer": 200, "relocate": 200, "door": 200}
    for name, entry in d4rl.DATASETS.items():
        if entry.task.environment is not None:
            assert registry.time_limit(entry.task.environment) == lengths.get(name.partition("-")[0], 1000)


def test_human_demonstrations_are_refused_as_recorded(data_file):
    with pytest.raises(
        DataError, match=r"10595 action values in 5497 of 6729 steps.*1\.36619.*--clip_actions"
    ):
        data.load(str(data_file("door_human.hdf5")))


def test_human_demonstrations_load_clipped(data_file):
    path = data_file("door_human.hdf5")
    loaded = data.load(str(path), clip_actions=True, environment="AdroitHandDoor-v1")
    assert loaded.spec == ((39,), 28, False)
    assert loaded.environment == "AdroitHandDoor-v1" and "wrong sign" in loaded.note
    assert loaded.reference == (-56.512833, 2880.5693087298737)
    transitions, last, _ = loaded.dataset
    assert len(last) == 6729 - 25 and last.sum() == 25
    assert np.abs(transitions.action).max() == 1
    assert (transitions.discount == 1).all() and (transitions.has_next_action == 1).all()
    with h5py.File(path) as file:
        mask = ~file["timeouts"][:]
        np.testing.assert_array_equal(transitions.reward, file["rewards"][:][mask])
        np.testing.assert_array_equal(transitions.action, np.clip(file["actions"][:], -1, 1)[mask])
