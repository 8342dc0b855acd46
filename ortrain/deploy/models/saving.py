"""``Saved``: an exported model written to a folder, and uploaded to the hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ortrain.deploy.models.files import external_files
from ortrain.errors import SaveError, listing
from ortrain.files.replacing import staged
from ortrain.kinds import expect, expect_flag, expect_path

# What makes a model's inputs, by the names that transformers' tokenizers and processors have.
_GOES_ALONG = {
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "normalizer.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "source.spm", "target.spm"),
    *("chat_template.jinja", "bpe.codes", "dict.txt", "entity_vocab.json", "vocab-src.json"),
    *("vocab-tgt.json", "prophetnet.tokenizer", "spm_char.model", "spm.model", "bpe.vocab"),
}
# Arguments of transformers' own save_pretrained, which are of weights in PyTorch.
_OF_WEIGHTS = {"is_main_process", "max_shard_size", "safe_serialization", "save_function",
               "save_original_format", "save_peft_format", "state_dict", "variant"}  # fmt: skip


def preprocessor_files(folder: Path) -> list[Path]:
    """Files of a folder, or of the one that it is in, that make a model's inputs of texts and such.

    Args:
        folder: of the model, or ``onnx`` in it.
    """
    place = folder if (folder / "config.json").is_file() else folder.parent
    if not (place / "config.json").is_file():
        return []
    return sorted(p for p in place.iterdir() if p.name in _GOES_ALONG and p.is_file())


class Saved:
    """Writes the files that a model runs, its configuration, and no others."""

    config: Any
    folder: Path
    generation_config: GenerationConfig | None

    @property
    def onnx_files(self) -> tuple[Path, ...]:
        """The files that it runs."""
        raise NotImplementedError

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **hub: Any
    ) -> None:
        """Writes the ONNX files with their weights, the configuration, and the tokenizer.

        Nothing is half-written: files appear in the folder once all of them are complete.

        Args:
            save_directory: the folder, made where it does not exist.
            push_to_hub: whether they are also uploaded; `push_to_hub` does that alone.
            hub: arguments of `push_to_hub`; the repository's name is the folder's by default. What
                transformers' models take for their weights, as ``safe_serialization``, is left out.

        Raises:
            SaveError: they could not be written.
            ValueError: it is the folder that the model was loaded from.
        """
        expect_path("save_directory", save_directory, expected="the path of a folder")
        expect_flag("push_to_hub", push_to_hub)
        hub = {name: value for name, value in hub.items() if name not in _OF_WEIGHTS}
        if hub and not push_to_hub:
            raise TypeError(f"save_pretrained takes {listing([*hub])} with push_to_hub=True alone")
        target = Path(save_directory)
        for file in self.onnx_files:
            if target.exists() and target.resolve() == file.parent.resolve():
                raise ValueError(
                    f"save_directory={str(target)!r}: the model was loaded from there; take another"
                )
        with staged(target, "model", "exported model") as folder:
            for path in preprocessor_files(self.folder):
                shutil.copyfile(path, folder / path.name)
            self._save_pretrained(folder)
            self.config.save_pretrained(folder)
            if self.generation_config is not None:
                self.generation_config.save_pretrained(folder)
        if push_to_hub:
            uploaded(target, hub.pop("repo_id", target.name), **hub)

    def _save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Copies the ONNX files with their weights; others wrap it to have them in a sub-folder."""
        for file in self.onnx_files:
            for name in (file.name, *external_files(file)):
                shutil.copyfile(file.parent / name, Path(save_directory) / name)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload ONNX model",
        create_pr: bool = False,
    ) -> str:
        """Uploads what `save_pretrained` writes to a repository of the hub.

        Args:
            repo_id: of the repository, which is made where it does not exist.
            private: whether a new one is.
            token: of the hub; by default that of the machine.
            revision: the branch.
            commit_message: of the commit.
            create_pr: whether a pull request is opened.

        Returns:
            The address of the commit.

        Raises:
            SaveError: the hub refused it or cannot be reached.
        """
        expect("repo_id", repo_id, str, "the name of a repository")
        with tempfile.TemporaryDirectory(prefix="ortrain-") as folder:
            self.save_pretrained(folder)
            return uploaded(
                Path(folder),
                repo_id,
                private=private,
                token=token,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
            )


def uploaded(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload ONNX model",
    create_pr: bool = False,
) -> str:
    """Uploads all files of a folder in one commit, and returns its address.

    Args:
        folder: of the model.
        repo_id: of the repository, which is made where it does not exist.
        private: whether a new one is.
        token: of the hub; by default that of the machine.
        revision: the branch.
        commit_message: of the commit.
        create_pr: whether a pull request is opened.

    Raises:
        SaveError: the hub refused it or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api: Any = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=getattr(url, "repo_id", repo_id),
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise SaveError(
            f"cannot upload {folder} to {repo_id}",
            because=str(error).strip().splitlines()[0] if str(error) else type(error).__name__,
            help="log in by `hf auth login`, or give token=…; the folder itself is complete",
        ) from error
    return str(getattr(done, "commit_url", done))
