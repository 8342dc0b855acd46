"""Entries of a cache: written whole or not at all, and damage of any kind is seen."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortrain.cache import Cache, fingerprint
from ortrain.errors import OrtrainWarning
from ortrain.files import lock, replacing
from ortrain.program import Program

PARTS = ["a small model"]
MADE = [
    '<ir_version: 10, opset_import: ["" : 21]> graph (float[N, 2] x) => (float[N, 2] y) '
    f"<float[2] b = {{1.0, {i}.0}}> {{ y = Add (x, b) }}"
    for i in range(3)
]
NAME = f"{fingerprint(PARTS)}.programs"
HEAD = 32 + 8 + 8 * len(MADE)

damaged = pytest.warns(OrtrainWarning, match="is damaged .*; it is made again")


def make() -> list[Program]:
    return [Program(ir.from_proto(onnx.parser.parse_model(text))) for text in MADE]


def same(programs: Sequence[Program]) -> bool:
    return [p.serialize() for p in programs] == [p.serialize() for p in make()]


def kept(folder: Path, parts: Sequence[object] = PARTS, **options: Any) -> tuple[bool, bool]:
    """Whether a cache gives the programs that are made, and whether it had to make them."""
    made = []

    def noted() -> list[Program]:
        made.append(True)
        return make()

    return same(Cache(folder, **options).programs(parts, noted)), bool(made)


MADE_NOW, READ = (True, True), (True, False)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    assert kept(tmp_path) == MADE_NOW
    assert kept(tmp_path) == READ
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    return tmp_path / NAME


def test_a_flipped_bit_in_any_byte_of_the_head_is_seen(entry: Path) -> None:
    whole = entry.read_bytes()
    generator = np.random.default_rng(0)
    for place in range(HEAD):
        data = bytearray(whole)
        data[place] ^= 1 << int(generator.integers(8))
        entry.write_bytes(data)
        with damaged:
            assert kept(entry.parent) == MADE_NOW, place
        assert entry.read_bytes() == whole


def test_flipped_bits_and_cut_ends_are_seen_wherever_they_are(entry: Path) -> None:
    whole = entry.read_bytes()
    generator = np.random.default_rng(1)
    for case in range(500):
        data = bytearray(whole)
        if case < 400:
            data[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        else:
            del data[generator.integers(len(data)) :]
        entry.write_bytes(data)
        with damaged:
            assert kept(entry.parent) == MADE_NOW, case
        assert entry.read_bytes() == whole


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 4096, b"\xff" * 4096, b"{}", b"null", b"[" * 100_000], ids=len
)
def test_other_files_in_its_place_are_seen(entry: Path, damage: bytes) -> None:
    entry.write_bytes(damage)
    with damaged:
        assert kept(entry.parent) == MADE_NOW
    assert kept(entry.parent) == READ


def test_what_is_appended_is_seen(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes() + b"\0")
    with damaged:
        assert kept(entry.parent) == MADE_NOW


def test_an_entry_under_the_name_of_another_is_seen(entry: Path) -> None:
    entry.rename(entry.parent / f"{fingerprint(['another'])}.programs")
    with damaged:
        assert kept(entry.parent, ["another"]) == MADE_NOW


def test_an_entry_that_is_gone_is_made_without_a_word(entry: Path) -> None:
    entry.unlink()
    assert kept(entry.parent) == MADE_NOW


@pytest.mark.parametrize("stands", ["folder", "full folder", "link", "lost link", "device", "pipe"])
def test_what_stands_in_the_place_of_an_entry_makes_way_for_one(entry: Path, stands: str) -> None:
    target = entry.parent / "elsewhere"
    target.write_bytes(entry.read_bytes())
    entry.unlink()
    if stands == "pipe":
        os.mkfifo(entry)
    elif stands in ("folder", "full folder"):
        entry.mkdir()
        if stands == "full folder":
            (entry / "manifest.json").write_text("{}")
    else:
        entry.symlink_to({"link": target, "device": "/dev/zero"}.get(stands, "/nowhere"))
    with damaged:
        assert kept(entry.parent) == MADE_NOW
    assert entry.is_file()
    assert not entry.is_symlink()
    assert kept(entry.parent) == READ
    assert target.is_file()


def test_damage_is_told_once_by_each_cache(tmp_path: Path) -> None:
    for part in "ab":
        kept(tmp_path, [part])
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    cache = Cache(tmp_path)
    with damaged as told:
        assert all(same(cache.programs([part], make)) for part in "ab")
    assert len(told) == 1


def test_what_is_read_and_refused_is_made_again_and_what_is_made_and_refused_is_raised(
    entry: Path,
) -> None:
    refusals = iter([True, False])

    def serve(programs: Sequence[Program]) -> Sequence[Program]:
        if next(refusals, True):
            raise RuntimeError("refused")
        return programs

    with damaged:
        assert same(Cache(entry.parent).served(PARTS, make, serve))
    assert kept(entry.parent) == READ
    with damaged, pytest.raises(RuntimeError, match="refused"):
        Cache(entry.parent).served(PARTS, make, serve)
    assert not entry.exists()  # what does not serve is not written


# -- faults while writing --------------------------------------------------------------------------


def operations(monkeypatch: pytest.MonkeyPatch, fail_at: int, code: int) -> Callable[[], list[str]]:
    """Counts what writing asks of the system; the one of that number fails."""
    done: list[str] = []

    def noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            if len(done) - 1 == fail_at:
                raise OSError(code, os.strerror(code))
            return own(*args, **kwargs)

        return call

    class File:
        """A file whose every piece is an operation."""

        def __init__(self, file: Any) -> None:
            self.file = file
            self.write, self.flush = noted("write", file.write), noted("flush", file.flush)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    beside = replacing._beside

    def opened(target: Path) -> tuple[Path, Any]:
        path, file = beside(target)
        return path, File(file)

    monkeypatch.setattr(replacing, "_beside", noted("open", opened))
    for name in ("fsync", "open"):
        monkeypatch.setattr(os, name, noted(f"os.{name}", getattr(os, name)))
    for name in ("mkdir", "replace", "glob"):
        monkeypatch.setattr(Path, name, noted(name, getattr(Path, name)))
    return lambda: done


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_fault_at_any_step_of_writing_leaves_a_whole_entry_or_none(
    tmp_path: Path, code: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        steps = operations(patch, -1, code)
        kept(tmp_path / "whole", limit=1 << 20)
    assert {"mkdir", "open", "write", "os.fsync", "replace"} <= {*steps()}
    for number, step in enumerate(steps()):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            operations(patch, number, code)
            assert kept(folder, limit=1 << 20) == MADE_NOW, step
        assert len(told) == 1
        assert all("cannot be used" in str(warning.message) for warning in told)
        left = [path.name for path in folder.iterdir()] if folder.exists() else []
        assert left in ([], [NAME]), step
        assert kept(folder) == (READ if left else MADE_NOW), step


def test_an_interrupt_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_folder_without_permissions_is_told_once(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    try:
        with pytest.warns(OrtrainWarning, match="cannot be used") as told:
            assert kept(tmp_path) == MADE_NOW
    finally:
        tmp_path.chmod(0o700)
    assert len(told) == 1


def test_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("the system has no /dev/full")
    monkeypatch.setattr(replacing, "_beside", lambda _: (tmp_path / "half", full.open("wb")))
    cache = Cache(tmp_path)
    with pytest.warns(OrtrainWarning, match="No space left") as told:
        assert all(same(cache.programs([part], make)) for part in "ab")
    assert len(told) == 1


def test_an_entry_of_a_folder_that_can_only_be_read_is_read(
    entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(replacing, "_beside", refused)
    assert kept(entry.parent) == READ


# -- several processes -----------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from ortrain import cache
from tests.test_cache import PARTS, make, same

folder, me, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def meet(place):
    (folder.parent / f"{place}-{me}").touch()
    while not (folder.parent / f"{place}-{other}").exists():
        pass

own = cache.Path.replace
cache.Path.replace = lambda half, target: (meet("replace"), own(half, target))[1]

def made():
    meet("make")
    return make()

assert same(cache.Cache(folder).programs(PARTS, made))
"""


def test_two_processes_that_write_the_same_entry_both_go_on(tmp_path: Path) -> None:
    """Each has found none when it makes the programs, and written its own when either moves it."""
    folder = tmp_path / "cache"
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, str(folder), *names])
        for names in (("a", "b"), ("b", "a"))
    ]
    assert [process.wait(100) for process in processes] == [0, 0]
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert kept(folder) == READ


def test_a_reader_sees_no_entry_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    own = Path.replace

    def replace(half: Path, target: Path) -> Path:
        seen.append(Cache(tmp_path)._read(target, Program.parse))
        return own(half, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert kept(tmp_path) == MADE_NOW
    assert seen == [None]
    assert kept(tmp_path) == READ


@pytest.mark.parametrize("when", ["lstat", "open"])
def test_an_entry_that_another_process_removes_meanwhile_is_a_miss(
    entry: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    own = getattr(Path, when)

    def removed(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == entry and "xb" not in args:
            monkeypatch.undo()
            entry.unlink()
        return own(path, *args, **kwargs)

    monkeypatch.setattr(Path, when, removed)
    assert kept(entry.parent) == MADE_NOW
    assert kept(entry.parent) == READ


LIVING = """
import sys
from pathlib import Path
from ortrain.files.replacing import _beside

path, file = _beside(Path(sys.argv[1]) / ("0" * 64 + ".programs"))
print(path, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def writer(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LIVING, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.skipif(lock.fcntl is None, reason="the system has no locks")
def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: Path,
) -> None:
    with writer(tmp_path) as (process, half):
        os.utime(half, (0, 0))  # its age says nothing
        kept(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {NAME, half.name}
        process.kill()
        process.wait()
        kept(tmp_path, ["another"])
        assert not half.exists()
        assert len([*tmp_path.iterdir()]) == 2


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", none)
    young, old = (tmp_path / f".{digit * 64}.programs.01234567.tmp" for digit in "01")
    for path in (young, old):
        path.write_bytes(b"")
    os.utime(old, (time.time() - lock.LONG - 60,) * 2)
    assert kept(tmp_path) == MADE_NOW
    assert {path.name for path in tmp_path.iterdir()} == {NAME, young.name}
    assert kept(tmp_path) == READ


def test_a_file_that_was_taken_for_abandoned_before_it_was_locked_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, taken = lock.fcntl.flock, []

    def flock(file: Any, how: int) -> None:
        if not taken:
            taken.append(Path(file.name))
            taken[0].unlink()
        own(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    assert kept(tmp_path) == MADE_NOW
    assert taken
    assert kept(tmp_path) == READ


# -- the bound -------------------------------------------------------------------------------------


def test_the_entries_used_longest_ago_make_way(tmp_path: Path) -> None:
    for i, part in enumerate("abc"):
        kept(tmp_path, [part])
        os.utime(tmp_path / f"{fingerprint([part])}.programs", (i, i))
    size = next(tmp_path.iterdir()).stat().st_size
    assert kept(tmp_path, "a") == READ  # which is its use
    kept(tmp_path, "d", limit=3 * size)
    assert {part for part in "abcd" if kept(tmp_path / ".", [part])[1]} == {"b"}


def test_a_note_is_an_entry_like_the_others(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.note(PARTS) == ""
    for text in ("what was found", "what was found later, and longer ü", ""):
        cache.keep_note(PARTS, text)
        assert cache.note(PARTS) == text
        assert cache.note(["something else"]) == ""
    assert kept(tmp_path) == MADE_NOW
    (note,) = tmp_path.glob("*.note")
    os.utime(note, (0, 0))
    kept(tmp_path, ["large"], limit=1)
    assert not note.exists()
    assert Cache(None).note(PARTS) == ""
    Cache(None).keep_note(PARTS, "nowhere")


def test_a_damaged_note_is_dropped(tmp_path: Path) -> None:
    Cache(tmp_path).keep_note(PARTS, "what was found")
    (note,) = tmp_path.iterdir()
    whole = note.read_bytes()
    for at in range(len(whole)):
        note.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with damaged:
            assert Cache(tmp_path).note(PARTS) == ""
        assert not note.exists()


def test_the_entry_just_written_stays_however_large_it_is(tmp_path: Path) -> None:
    for part in "abc":
        kept(tmp_path, [part], limit=1)
        assert [path.name for path in tmp_path.iterdir()] == [f"{fingerprint([part])}.programs"]


def test_without_a_bound_nothing_makes_way_and_files_of_others_never_do(tmp_path: Path) -> None:
    for name in ("model.programs", ".done.01234567.tmp", "notes.txt"):
        (tmp_path / name).write_bytes(bytes(1000))
    for part in "abc":
        kept(tmp_path, [part])
    assert len([*tmp_path.iterdir()]) == 6
    kept(tmp_path, ["d"], limit=1)
    assert len([*tmp_path.iterdir()]) == 4
