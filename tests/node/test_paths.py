from __future__ import annotations

import stat
from pathlib import Path

import pytest

from viiwork.config.model import Config, KvShareSection, NodeSection
from viiwork.errors import StateDirError
from viiwork.node.paths import open_folders


def config(state: Path, **kv_share) -> Config:
    return Config(node=NodeSection(state_dir=str(state)), kv_share=KvShareSection(**kv_share))


def test_states_live_in_a_private_folder_that_goes_with_the_node(tmp_path: Path):
    folders = open_folders(config(tmp_path / "state", dir=str(tmp_path / "kv")))
    (private,) = (tmp_path / "kv").iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert folders.saves is not None and folders.saves.parent == private
    folders.close()
    assert not private.exists() and (tmp_path / "state").exists()


def test_a_second_node_with_the_same_state_dir_is_refused(tmp_path: Path):
    first = open_folders(config(tmp_path, dir=str(tmp_path / "kv")))
    with pytest.raises(StateDirError, match="another viiwork"):
        open_folders(config(tmp_path, dir=str(tmp_path / "kv")))
    first.close()
    open_folders(config(tmp_path, dir=str(tmp_path / "kv"))).close()


def test_what_a_killed_node_left_is_removed(tmp_path: Path):
    first = open_folders(config(tmp_path, dir=str(tmp_path / "kv")))
    (private,) = (tmp_path / "kv").iterdir()
    (private / "left-over").write_bytes(b"a conversation")
    first._lock.close()  # as after kill -9
    second = open_folders(config(tmp_path, dir=str(tmp_path / "kv")))
    assert list(private.iterdir()) == []
    second.close()


def test_a_planted_link_is_not_followed_and_the_lock_is_given_back(tmp_path: Path):
    open_folders(config(tmp_path / "s", dir=str(tmp_path / "kv"))).close()
    (tmp_path / "victim").mkdir()
    first = open_folders(config(tmp_path / "s", dir=str(tmp_path / "kv")))
    (private,) = (tmp_path / "kv").iterdir()
    first.close()
    private.symlink_to(tmp_path / "victim")
    for _ in range(2):
        with pytest.raises(StateDirError, match="is a link"):
            open_folders(config(tmp_path / "s", dir=str(tmp_path / "kv")))
    assert (tmp_path / "victim").is_dir()


def test_nodes_with_different_state_dirs_do_not_meet(tmp_path: Path):
    both = [open_folders(config(tmp_path / name, dir=str(tmp_path / "kv"))) for name in "ab"]
    assert both[0].saves != both[1].saves
    for folders in both:
        folders.close()


def test_with_kv_share_off_no_folder_is_made_and_an_earlier_runs_is_removed(tmp_path: Path):
    first = open_folders(config(tmp_path, dir=str(tmp_path / "kv")))
    first._lock.close()  # as after kill -9
    folders = open_folders(config(tmp_path, enabled=False, dir=str(tmp_path / "kv")))
    assert folders.saves is None and list((tmp_path / "kv").iterdir()) == []
    folders.close()


def test_a_state_dir_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirError, match=r"node\.state_dir"):
        open_folders(config(tmp_path / "file" / "state"))
