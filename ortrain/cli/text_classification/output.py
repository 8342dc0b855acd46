"""A directory that is either complete or not there, and the checkpoint of a run under way.

While a run is under way it writes to ``NAME.unfinished`` beside the directory ``NAME`` that it was
asked for, and gives it its name at the very end. An interrupted run leaves the unfinished
directory behind, with the last checkpoint in it. One process at a time writes a directory: it
holds ``.NAME.lock``.

The order of the last steps is what keeps a result from being lost: all files are on the disk, then
their checksums (which say that it is complete), then the directory has its name, and only then is
the checkpoint dropped. After a kill between any two of them ``--resume`` does the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ortrain.cli import signals
from ortrain.cli.usage import FileError, UsageError, excerpt, one_line
from ortrain.errors import InputError, OrtrainError
from ortrain.files import checksums, seal
from ortrain.files.lock import Lock, is_abandoned
from ortrain.files.replacing import replacing, synchronize, synchronize_tree

_CHECKPOINT = "checkpoint"
# What earlier versions wrote a checkpoint to, and left when they were killed meanwhile.
_OLD = "state.new"
# What a rename says where something else has the name.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


class Output:
    """The output directory of one run.

    Args:
        directory: The directory to make; of a symbolic link, what it leads to.

    Raises:
        UsageError: There can be no directory of this name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = _checked(directory)
        name = self.directory.name
        self.unfinished = self.directory.with_name(f"{name}.unfinished")
        self.checkpoint = self.unfinished / _CHECKPOINT / "state.pt"
        self._lock = Lock(self.directory.with_name(f".{name}.lock"))
        self._is_ours = False

    def check(self, *, resume: bool) -> None:
        """Raise a UsageError if the directory cannot be made, or there is nothing to resume."""
        if self._lock.path.exists() and not is_abandoned(self._lock.path):
            raise self._in_use()
        try:
            self._check_contents(resume=resume)
        except OSError as error:
            raise UsageError(
                f"{self.directory}: cannot be looked at ({error.strerror}); choose another --output"
            ) from None

    def _check_contents(self, *, resume: bool) -> None:
        if resume and self.is_complete():
            return
        if not _is_free(self.directory):
            raise UsageError(
                f"{self.directory}: exists already; remove it, or choose another --output"
            )
        if resume and not self.checkpoint.exists():
            raise UsageError(
                f"{self.unfinished}: holds no checkpoint to resume; run again without --resume"
            )
        if resume or not self.unfinished.exists():
            return
        if checksums.is_written(self.unfinished):
            raise UsageError(
                f"{self.unfinished}: holds the complete result of a run that was killed; add "
                "--resume to give it its name, or remove the directory"
            )
        if self.checkpoint.exists():
            raise UsageError(
                f"{self.unfinished}: holds the checkpoint of an interrupted run; add --resume to "
                "continue it, or remove the directory"
            )
        if not self._is_empty():
            raise UsageError(
                f"{self.unfinished}: holds files without a checkpoint; remove the directory, or "
                "choose another --output"
            )

    def open(self, *, resume: bool) -> None:
        """Take the directory for this process, and make the unfinished one.

        What a run has left that was killed before its first checkpoint is removed.

        Raises:
            UsageError: It cannot be made, or another process is writing it.
        """
        try:
            self._lock.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._lock.take():
                raise self._in_use()
            self._check_contents(resume=resume)  # now that nobody else changes them
            self._is_ours = True
            if not (resume and self.is_complete()):
                self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
                (self.checkpoint.parent / _OLD).unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise UsageError(
                f"{self.unfinished}: cannot be made ({error.strerror}); choose another --output"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the directory, and remove what nobody could go on from."""
        kept = self.checkpoint.exists() or checksums.is_written(self.unfinished)
        if self._is_ours and not kept:
            shutil.rmtree(self.unfinished, ignore_errors=True)
        self._is_ours = False
        self._lock.release()

    # -- the end -------------------------------------------------------------------------------

    def is_complete(self) -> bool:
        """Whether all of a result is there, and at most has to get its name."""
        complete = self.unfinished if self.unfinished.exists() else self.directory
        if not checksums.is_written(complete):
            return False
        try:
            checksums.check(complete, whole=True)
        except InputError:
            return False
        return True

    def clear(self) -> None:
        """Remove what an earlier try to finish has written beside the checkpoint."""
        for path in self.unfinished.iterdir():
            if path.name != _CHECKPOINT:
                _remove(path)

    def finish(self) -> Path:
        """Give the directory its name, and then drop the checkpoint.

        Returns:
            The directory: another one, beside it, where something else has its name by now.

        Raises:
            FileError: It cannot be written or renamed; it is kept with its checkpoint.
        """
        with signals.ignored():
            # Where there is nothing unfinished, the run was killed after the rename.
            place = self._place() if self.unfinished.exists() else self.directory
            with contextlib.suppress(OSError):  # the result is whole with it, too
                shutil.rmtree(place / _CHECKPOINT)
        return place

    def _place(self) -> Path:
        try:
            if not checksums.is_written(self.unfinished):
                for path in self.unfinished.glob(".*.tmp"):  # what could not be removed before
                    _remove(path)
                synchronize_tree(self.unfinished)
                checksums.write(self.unfinished)
            place = self._renamed()
            synchronize(place.parent)
        except (OSError, OrtrainError) as error:
            raise FileError(
                f"the result cannot be put into {self.directory} ({one_line(error)}); it is kept "
                f"in {self.unfinished}, run the same command with --resume to finish"
            ) from error
        return place

    def _renamed(self) -> Path:
        number = 1
        while True:
            name = self.directory.name + (f".finished-{number}" if number > 1 else "")
            place = self.directory.with_name(name)
            try:
                if os.name == "nt" and _is_empty_directory(place):
                    place.rmdir()  # which this system does not rename over
                # To an empty directory it renames, over anything else it does not.
                self.unfinished.rename(place)
            except OSError as error:
                if error.errno not in _TAKEN or not os.path.lexists(place):
                    raise
                number += 1
            else:
                return place

    # -- the checkpoint ------------------------------------------------------------------------

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; whatever happens meanwhile, the old or the new one is there.

        Raises:
            FileError: It cannot be written; the old one is there.
        """
        try:
            with replacing(self.checkpoint, "checkpoint") as file:
                try:
                    torch.save(state, file)
                except RuntimeError as error:  # what torch makes of a failing write
                    raise OSError(one_line(error)) from error
                seal.append_to_zip(file)
        except OrtrainError as error:
            kept = "the last one is kept: " if self.checkpoint.exists() else ""
            raise FileError(
                f"{self.checkpoint}: the checkpoint cannot be written ({error.because}); {kept}"
                "make room and run the same command "
                f"{'with' if kept else 'without'} --resume"
            ) from error

    def read_checkpoint(self) -> dict[str, Any]:
        """The last checkpoint.

        Raises:
            UsageError: It cannot be read, or is damaged.
        """
        remedy = f"remove {self.unfinished} and run again without --resume"
        try:
            if not seal.is_file_whole(self.checkpoint, f"checkpoint {self.checkpoint}"):
                seal.warn_unsealed(f"checkpoint {self.checkpoint}", "the next one has", 2)
            state = torch.load(self.checkpoint, weights_only=True)
        except InputError as error:
            raise UsageError(f"{error.what} ({error.because}); {remedy}") from error
        except Exception as error:
            # What a damaged file raises depends on where it is damaged.
            raise UsageError(
                f"{self.checkpoint}: cannot be read ({one_line(error)}); {remedy}"
            ) from error
        if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
            raise UsageError(f"{self.checkpoint}: is no checkpoint of a run; {remedy}")
        return state

    def _in_use(self) -> UsageError:
        return UsageError(
            f"{self.directory}: {self._lock.holder()} is writing it; wait for its end, or choose "
            "another --output"
        )

    def _is_empty(self) -> bool:
        """Whether the unfinished directory holds nothing that a run would miss."""
        folder = self.checkpoint.parent
        others = [path for path in self.unfinished.iterdir() if path != folder]
        left = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        ours = f".{self.checkpoint.name}."
        return not others and all(name.startswith(ours) or name == _OLD for name in left)


def _checked(directory: Path) -> Path:
    """The directory that a run makes.

    Raises:
        UsageError: There can be none of this name.
    """
    try:
        if directory.is_symlink():
            directory = Path(os.path.realpath(directory))
        if directory.name in ("", ".."):
            raise UsageError(
                f"--output '{directory}': is no name of a directory to make; add one, such as "
                f"{directory / 'trained'}"
            )
        # The longest name beside it, and whatever else the system has against the path.
        longest = directory.with_name(f"{directory.name}.finished-99")
        for path in (longest, directory):
            with contextlib.suppress(FileNotFoundError):
                path.stat()
    except OSError as error:
        raise UsageError(
            f"--output '{excerpt(str(directory))}': cannot be made ({error.strerror}); choose "
            "another"
        ) from None
    except ValueError as error:
        raise UsageError(f"--output: is no path ({one_line(error)}); choose another") from None
    return directory


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_free(path: Path) -> bool:
    return not os.path.lexists(path) or _is_empty_directory(path)


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
