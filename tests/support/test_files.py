"""files.py: atomic writes, also through links."""

from __future__ import annotations

import os
import stat

import pytest

from amp_patch.support.files import fresh, write_whole


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "file", "nothing"])
def test_a_file_is_replaced_and_a_link_s_target_path_stays(kind, tmp_path):
    other, path = tmp_path / "elsewhere", tmp_path / "folder" / "report.json"
    path.parent.mkdir()
    if kind != "dangling link":
        other.write_text("theirs")
    if kind in ("link", "dangling link"):
        path.symlink_to(other)
    elif kind == "hard link":
        path.hardlink_to(other)
    elif kind == "file":
        path.write_text("old")
    write_whole(path, "ours \udcff ü")
    assert path.read_bytes() == "ours ? ü".encode() and not path.is_symlink()
    assert other.read_text() == "theirs" if kind != "dangling link" else not other.exists()
    assert os.listdir(path.parent) == ["report.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_an_error_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_whole(path, 3)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "rename", None)
    monkeypatch.setattr(os, "replace", None)
    with pytest.raises(TypeError):
        write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["report.json"]


def test_a_fresh_path_has_nothing_there(tmp_path):
    other, path = tmp_path / "elsewhere", tmp_path / "log"
    other.write_text("theirs")
    path.symlink_to(other)
    assert fresh(fresh(path)) == path and not path.is_symlink() and other.read_text() == "theirs"
    fresh(tmp_path / "log").write_text("ours")
    assert not fresh(path).exists()
