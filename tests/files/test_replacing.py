"""Files are replaced as a whole, and what is no file is left alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortrain.errors import SaveError
from ortrain.files import checksums, replacing
from ortrain.files.lock import Lock, is_abandoned
from ortrain.files.replacing import replace_file, staged

posix = pytest.mark.skipif(os.name == "nt", reason="the system has none of these files")


def _loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _long(folder: Path) -> Path:
    return folder / ("n" * 300)


BAD = {
    "a device": lambda folder: Path("/dev/full"),
    "a pipe": _pipe,
    "a folder": lambda folder: folder,
    "links in a circle": _loop,
    "no folder": lambda folder: folder / "none" / "file",
    "a name too long": _long,
    "a NUL": lambda folder: f"{folder}/a\0b",
    "nothing": lambda folder: "",
    "a file as folder": lambda folder: Path(__file__) / "file",
}


@posix
@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_a_file_is_refused_and_left_as_it_is(kind: str, tmp_path: Path) -> None:
    path = BAD[kind](tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SaveError, match="cannot save the note"):
        replace_file(path, [b"text"], "note")
    assert sorted(tmp_path.iterdir()) == before
    assert Path("/dev/full").is_char_device()


def test_a_name_as_long_as_the_system_allows_can_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / ("n" * 255)
    for text in (b"old", b"new"):
        replace_file(file, [text], "note")
    assert (file.read_bytes(), len([*tmp_path.iterdir()])) == (b"new", 1)


@posix
def test_permissions_stay(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"old")
    file.chmod(0o600)
    replace_file(file, [b"new"], "note")
    assert file.stat().st_mode & 0o777 == 0o600


@posix
def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(
    tmp_path: Path,
) -> None:
    file = tmp_path / "note"
    script = (
        "import os, sys\n"
        "from ortrain.files.replacing import replacing, staged\n"
        f"from pathlib import Path; folder = Path({str(tmp_path)!r})\n"
        "with replacing(folder / 'note', 'note') as file, staged(folder, 'note', 'notes'):\n"
        "    file.write(b'half'); file.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == -9
    assert len([*tmp_path.iterdir()]) == 2
    (tmp_path / ".other.01234567.tmp").write_bytes(b"")
    with replacing.replacing(file, "note") as outer:
        replace_file(file, [b"inner"], "note")
        assert file.read_bytes() == b"inner"
        outer.write(b"outer")
    assert file.read_bytes() == b"outer"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.01234567.tmp", "note"]


def test_staged_files_come_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")

    def write() -> None:
        with staged(tmp_path, "set", "notes") as folder:
            for name in ("a", "b"):
                (folder / name).write_text("new")

    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(full))
        with pytest.raises(SaveError, match=r"cannot save the notes .*\n.*No space left"):
            write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
    write()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "b": "new"}


@posix
def test_a_lock_is_held_by_the_living_alone(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    assert lock.take()
    take = (
        "import os, sys; from pathlib import Path; from ortrain.files.lock import Lock\n"
        "lock = Lock(Path(sys.argv[1])); print(lock.take(), lock.holder(), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", take, str(lock.path)]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert other.stdout.strip() == f"False process {os.getpid()}"
    assert not is_abandoned(lock.path)
    lock.release()
    assert not lock.path.exists()
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert other.stdout.startswith("True")
    assert lock.path.exists()  # the dead one's
    assert lock.take()
    lock.release()


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b c").write_bytes(b"123")
    (tmp_path / "folder").mkdir()
    checksums.write(tmp_path)
    assert (tmp_path / checksums.NAME).read_text() == (
        "a665a45920422f9d417e4867efdc4fb8a04a1f3fff1fa07e998e86f7f7a27ae3  b c\n"
    )
    checksums.check(tmp_path, whole=True)
    (tmp_path / "b c").write_bytes(b"124")
    with pytest.raises(ValueError, match="b c has another checksum"):
        checksums.check(tmp_path)
    (tmp_path / "b c").unlink()
    checksums.check(tmp_path)
    with pytest.raises(ValueError, match="b c is missing"):
        checksums.check(tmp_path, whole=True)
    for text in ("no checksum", "0" * 64 + "  ../x", "\xff", "\ud800"):
        (tmp_path / checksums.NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ValueError, match=r"is damaged|cannot read"):
            checksums.check(tmp_path)


@posix
def test_a_folder_that_another_process_removes_before_it_is_held_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one takes it for abandoned: nothing holds it yet."""
    opened, removed = os.open, list[Path]()

    def interrupted(path: Path, *more: int, **named: int) -> int:
        if not removed and Path(path).name.startswith(".model."):
            removed.append(path)
            replacing.remove_abandoned(tmp_path, "model")
        return opened(path, *more, **named)

    monkeypatch.setattr(os, "open", interrupted)
    with staged(tmp_path, "model", "checkpoint") as made:
        assert removed
        assert removed != [made]
        (made / "model.pt").write_bytes(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
