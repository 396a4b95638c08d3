from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from viiwork.config.model import Config, KvShareSection, NodeSection
from viiwork.errors import StateDirError
from viiwork.node.paths import Folders, open_folders


def config(state: Path, **kv_share) -> Config:
    return Config(node=NodeSection(state_dir=str(state)), kv_share=KvShareSection(**kv_share))


def drop_locks(folders: Folders) -> None:
    """As after kill -9."""
    assert folders._owner is not None
    folders._owner.close()
    folders._lock.close()


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
    drop_locks(first)
    second = open_folders(config(tmp_path, dir=str(tmp_path / "kv")))
    assert [found.name for found in private.iterdir()] == ["lock"]
    second.close()


def killed(state: Path, kv: Path) -> Path:
    """The private folder of a node that was killed and does not come back."""
    program = (
        "import os, sys; from pathlib import Path; from tests.node.test_paths import config\n"
        "from viiwork.node.paths import open_folders\n"
        "open_folders(config(Path(sys.argv[1]), dir=sys.argv[2])); os.kill(os.getpid(), 9)"
    )
    before = set(kv.iterdir()) if kv.exists() else set()
    done = subprocess.run([sys.executable, "-c", program, str(state), str(kv)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = set(kv.iterdir()) - before
    (left / "replicas").mkdir()
    (left / "replicas" / "rows").write_bytes(b"a conversation")
    return left


def test_what_nodes_left_that_never_come_back_is_removed_by_the_next_node_of_the_user(tmp_path: Path):
    kv = tmp_path / "kv"
    living = open_folders(config(tmp_path / "living", dir=str(kv)))
    (home,) = kv.iterdir()
    left = [killed(tmp_path / "a", kv), killed(tmp_path / "b", kv)]
    assert not left[0].exists() and left[1].exists()
    half_gone = left[1].with_name(f"{left[1].name}.gone")
    left[1].rename(half_gone)  # as when the node that removed it was killed too
    not_ours = [kv / "viiwork-notes", kv / "viiwork-0123456789abcdef"]
    for folder in not_ours:
        folder.mkdir()  # without a lock nobody knows whether its owner lives
    open_folders(config(tmp_path / "next", dir=str(kv))).close()
    assert set(kv.iterdir()) == {home, *not_ours}
    living.close()


def test_links_among_leftovers_are_not_followed(tmp_path: Path):
    kv, victim = tmp_path / "kv", tmp_path / "victim"
    victim.mkdir()
    (victim / "lock").write_text("")
    kv.mkdir()
    (kv / "viiwork-0123456789abcdef").symlink_to(victim)
    open_folders(config(tmp_path / "s", dir=str(kv))).close()
    assert (victim / "lock").exists()


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
    drop_locks(first)
    folders = open_folders(config(tmp_path, enabled=False, dir=str(tmp_path / "kv")))
    assert folders.saves is None and list((tmp_path / "kv").iterdir()) == []
    folders.close()


def test_a_kv_folder_that_cannot_be_made_is_named_with_its_key(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirError, match=r"kv_share\.dir.*file/viiwork-"):
        open_folders(config(tmp_path, dir=str(tmp_path / "file")))


def test_a_state_dir_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirError, match=r"node\.state_dir"):
        open_folders(config(tmp_path / "file" / "state"))
