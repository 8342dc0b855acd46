"""``datasets.load_metric``, which is in the package ``evaluate`` today."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ortrain.errors import MissingPackage


def load_metric(
    path: str,
    config_name: str | None = None,
    process_id: int = 0,
    num_process: int = 1,
    cache_dir: str | None = None,
    experiment_id: str | None = None,
    keep_in_memory: bool = False,
    download_config: Any = None,
    download_mode: Any = None,
    revision: Any = None,
    trust_remote_code: bool | None = None,
    **metric_init_kwargs: Any,
) -> Any:
    """A metric, by ``evaluate.load``, which takes the same but for ``trust_remote_code``.

    Args:
        path: a metric's name, which is asked of the hub, or the path of its script.
        config_name: of a metric of several, ``"mrpc"`` of ``"glue"``.
        process_id: which of several processes this is, from 0.
        num_process: how many there are.
        cache_dir: where predictions are kept meanwhile.
        experiment_id: names the files that processes share.
        keep_in_memory: keep them in memory.
        download_config: of evaluate.
        download_mode: of evaluate.
        revision: of the metric's repository.
        trust_remote_code: not needed; evaluate asks for none.
        **metric_init_kwargs: of the metric.

    Raises:
        MissingPackage: evaluate is not installed.
    """
    if importlib.util.find_spec("evaluate") is None:
        raise MissingPackage(
            "datasets.load_metric needs the package 'evaluate', which is not installed",
            because="datasets has no metrics since its version 3",
            help="pip install evaluate",
        )
    return importlib.import_module("evaluate").load(
        path,
        config_name,
        process_id=process_id,
        num_process=num_process,
        cache_dir=cache_dir,
        experiment_id=experiment_id,
        keep_in_memory=keep_in_memory,
        download_config=download_config,
        download_mode=download_mode,
        revision=revision,
        **metric_init_kwargs,
    )
