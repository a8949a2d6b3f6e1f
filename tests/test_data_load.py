"""`rl.data.load`: which reader a name goes to, and what an unknown name is told."""

import subprocess
import sys

import pytest

from rl import data
from rl.data import d4rl, ogbench
from rl.data.steps import DataError


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("hopper-medum-v2", "hopper-medium-v2"),
        ("hopper-medium-v0", "hopper-medium-v2"),
        ("cube-singel-play-v0", "cube-single-play-v0"),
        ("cube-single-play-singletask-task9-v0", "cube-single-play-singletask-v0"),
        ("synthetic_continuous", "synthetic-continuous"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name, nearest):
    with pytest.raises(DataError, match=f"unknown dataset '{name}': did you mean .*{nearest}"):
        data.load(name)


def test_a_name_like_no_other_is_told_where_they_are_listed():
    with pytest.raises(DataError, match=r"unknown dataset '@': rl.data.names\(\)"):
        data.load("@")


def test_a_folder_is_no_dataset_by_itself(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path} is a folder: give the file .*, or 'minari:{tmp_path}'"):
        data.load(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "mine.npz",
        "cube-double-play-v0",
        "cube-double-play-v0+entities",
        "minari:mine/v0",
        "synthetic-continuous",
    ],
)
def test_steps_in_no_order_are_refused_where_they_would_be_paired_in_their_order(name):
    with pytest.raises(DataError, match=r"--shuffled .* is for logs in D4RL's layout"):
        data.load(name, shuffled=True)


def test_names_are_distinct_and_sorted():
    names = data.names()
    assert names == sorted(set(names))
    assert not set(d4rl.DATASETS) & ogbench._ALL


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("h5py", "x.hdf5", "d4rl"), ("minari", "minari:x-v0", "minari")],
)
def test_an_absent_package_is_named_with_its_extra(module, name, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.hdf5").touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install -e '\.\[{extra}\]'"):
        data.load(name)


def test_an_absent_ogbench_is_named_with_its_extra(tmp_path, monkeypatch):
    np = pytest.importorskip("numpy")
    rows = np.zeros((4, 2), np.float32)
    np.savez(
        tmp_path / "cube-single-play-v0.npz", observations=rows, actions=rows, terminals=np.ones(4), qpos=rows
    )
    monkeypatch.setitem(sys.modules, "ogbench", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[ogbench\]'"):
        data.load("cube-single-play-singletask-v0", folder=tmp_path)


@pytest.mark.slow
def test_importing_the_readers_imports_no_optional_package():
    optional = ("h5py", "minari", "ogbench", "gymnasium", "mujoco")
    code = f"import sys, rl.data; print([m for m in {optional} if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
