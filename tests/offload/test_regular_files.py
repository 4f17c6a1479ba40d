"""Files that somebody else may have put there: what is no regular file is named at once, what is too large is not read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from offload.regular_files import open_regular, read_regular


def test_a_regular_file_and_a_link_to_one_are_read_up_to_the_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "empty").touch()
    assert read_regular(tmp_path / "file", 5) == read_regular(tmp_path / "link", 9) == b"12345"
    assert read_regular(tmp_path / "empty", 0) == b""
    for most in (0, 4):
        with pytest.raises(OSError, match=f"5 bytes, more than {most}"):
            read_regular(tmp_path / "file", most)


def test_a_sparse_file_of_a_terabyte_and_one_that_says_nothing_of_its_size_are_bounded(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=f"{1 << 40} bytes, more than 10"):
        read_regular(tmp_path / "sparse", 10)
    with pytest.raises(OSError, match="11 bytes, more than 10"):
        read_regular("/proc/self/status", 10)


def test_what_is_no_regular_file_is_named_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    cases = {tmp_path / "pipe": "a named pipe", tmp_path: "a folder", tmp_path / "zero": "a device"}
    before = len(os.listdir("/proc/self/fd"))
    for path, kind in cases.items():
        with pytest.raises(OSError, match=f"{kind}, not a regular file") as refused:
            open_regular(path)
        assert refused.value.filename == os.fspath(path)
    assert len(os.listdir("/proc/self/fd")) == before
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            open_regular(tmp_path / "socket")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")
