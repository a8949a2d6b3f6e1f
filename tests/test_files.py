"""`rl.files`: paths that lead nowhere, and the guard that explains what libraries raise."""

import re
import tokenize

import pytest

from rl import data, files
from rl.files import DataError


@pytest.mark.parametrize("name", ["~nouser-here/log.hdf5", "~nouser-here/log.npz", "minari:~nouser-here/log"])
def test_a_home_that_nobody_has_is_named(name):
    with pytest.raises(DataError, match="no home folder is known for '~nouser-here'; give the whole path"):
        data.load(name)


@pytest.mark.parametrize("folder", ["~nouser-here", "~nouser-here/data"])
def test_so_is_that_of_a_folder(folder):
    with pytest.raises(DataError, match="no home folder is known"):
        data.load("hopper-medium-v2", folder=folder)


def test_what_is_there_instead_is_listed(tmp_path):
    for name in ("pendulum.hdf5", "door.hdf5", "other.npz"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"there is no file .*; {tmp_path} holds pendulum.hdf5, door.hdf5;"):
        data.load(str(tmp_path / "pendulm.hdf5"))
    with pytest.raises(DataError, match=r"there is no file .*log.h5; .* holds no .h5 file; give the path"):
        data.load(str(tmp_path / "log.h5"))
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError, match=r"there is no file .*folder.npz: that is a folder"):
        data.load(str(tmp_path / "folder.npz"))
    with pytest.raises(DataError, match=f"there is no file .* and no folder {tmp_path}/none;"):
        data.load(str(tmp_path / "none" / "log.npz"))


@pytest.mark.parametrize("name", ["x" * 300 + ".npz", "a\0b.npz"])
def test_names_that_no_file_can_have_are_refused(tmp_path, name):
    with pytest.raises(DataError, match=re.escape(name)):
        data.load(f"{tmp_path}/{name}")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "log.npz").touch()
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match=r"log.npz may not be read by this user: change its permissions"):
        data.load(str(tmp_path / "log.npz"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "log.npz cannot be read as npz (KeyError: 'x'): copy it again"),
        (RuntimeError("line one\nline two"), "(RuntimeError: line one line two)"),
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error"),
        (AssertionError(), "(AssertionError): copy it again"),
        (tokenize.TokenError("EOF"), "(TokenError: EOF)"),
        (RecursionError("deep"), "(RecursionError: deep)"),
        (
            MemoryError("4 TiB"),
            "(MemoryError: 4 TiB): it asks for more memory than there is, or copy it again",
        ),
        (ValueError("y" * 1000), f"({'ValueError: ' + 'y' * 200} ...)"),
    ],
)
def test_the_guard_explains_every_error(error, message):
    with (
        pytest.raises(DataError, match=re.escape(message)) as caught,
        files.reading("log.npz", "npz", "copy it again"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [DataError("explained"), ImportError("pip install it"), KeyboardInterrupt(), SystemExit(3)]
)
def test_the_guard_leaves_what_is_explained_and_what_is_no_error(error):
    with pytest.raises(type(error)) as caught, files.reading("log.npz", "npz"):
        raise error
    assert caught.value is error
