"""``ORTOptimizer``: the ONNX files of a model, rewritten so that they run faster."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from ortrain.deploy.equivalence.budgets import Budgets
from ortrain.deploy.equivalence.golden_set import GoldenSet
from ortrain.deploy.model_folder import (
    ModelFolder,
    expect_suffix,
    external_files_of,
    load_model,
    published,
    save_model,
)
from ortrain.deploy.optimization import counts, offline
from ortrain.deploy.optimization.configuration import OptimizationConfig
from ortrain.deploy.optimization.fusions import Report, forget_shapes, fuse
from ortrain.deploy.optimization.half import to_half
from ortrain.deploy.ort_config import ORTConfig
from ortrain.deploy.progress import tracked
from ortrain.graph import shapes
from ortrain.kinds import NONE, expect, expect_flag, expect_names, expect_path


class ORTOptimizer:
    """Rewrites the graphs of a model's ONNX files, of whatever exporter and architecture.

    Our own fusions go by what a graph computes (:mod:`.fusions`); onnxruntime's own rewrites are
    made on top of them, once and for all. The folder of the source is only read.

    Attributes:
        folder: of the source.
        reports: of the last call of :meth:`optimize`, by the name of the source's file: what our
            fusions have done, and what they have refused for what reason.
    """

    def __init__(self, folder: ModelFolder) -> None:
        expect("folder", folder, ModelFolder, "a ModelFolder")
        self.folder = folder
        self.reports: dict[str, Report] = {}

    @classmethod
    def from_pretrained(
        cls,
        model_or_path: str | os.PathLike[str] | Any,
        file_names: Sequence[str] | None = None,
    ) -> ORTOptimizer:
        """An optimizer of a model's files.

        Args:
            model_or_path: a folder with ONNX files, one such file, or an `ORTModel` that was loaded
                from one.
            file_names: of its ONNX files; by default all of them, encoders and decoders alike, and
                of a loaded model those that it runs.

        Raises:
            TypeError: an argument is of another type.
            InputError: there is no ONNX file, or none of such a name.
        """
        expect_names("file_names", file_names, NONE)
        if isinstance(model_or_path, ModelFolder):
            model_or_path = model_or_path.path
        for name in ("model_save_dir", "path"):
            if not isinstance(model_or_path, str | os.PathLike):
                model_or_path = getattr(model_or_path, name, model_or_path)
        expect_path("model_or_path", model_or_path, expected="a folder with ONNX files, or a file")
        return cls(ModelFolder.open(model_or_path, file_names))

    def optimize(
        self,
        optimization_config: OptimizationConfig,
        save_dir: str | os.PathLike[str],
        file_suffix: str | None = "optimized",
        use_external_data_format: bool | None = None,
        one_external_file: bool = True,
        *,
        validate: GoldenSet | None = None,
        budgets: Budgets | None = None,
    ) -> Path:
        """Writes each file as ``<name>_<suffix>.onnx``, with configuration and tokenizer.

        Either all files appear in ``save_dir`` or none does.

        Args:
            optimization_config: what to do.
            save_dir: another folder than the source's, made where it does not exist.
            file_suffix: behind the names; None or empty keeps them.
            use_external_data_format: whether weights go beside the files; by default where they
                did before, or are over 1 GiB.
            one_external_file: whether these are one file for each model.
            validate: examples on which the files are compared with the source's before they are
                published; the report is kept beside them.
            budgets: what the comparison has to keep; by default a difference of at most 1e-3 of
                each output, 1e-1 where GELUs are approximated or the arithmetic is float16.

        Returns:
            ``save_dir``.

        Raises:
            TypeError: an argument is of another type.
            ValueError: ``save_dir`` is the folder of the source.
            InputError: a file is damaged.
            ExecutionError: onnxruntime cannot run one of them.
            EquivalenceError: the files are outside the budgets; nothing was published.
            SaveError: they could not be written.
        """
        config = optimization_config
        expect(
            "optimization_config", config, OptimizationConfig, "an OptimizationConfig",
            "see AutoOptimizationConfig.O2()",
        )  # fmt: skip
        expect_path("save_dir", save_dir)
        expect_suffix(file_suffix)
        expect("use_external_data_format", use_external_data_format, (bool, NONE), "True or False")
        expect_flag("one_external_file", one_external_file)
        expect("validate", validate, (GoldenSet, NONE), "a GoldenSet or None")
        expect("budgets", budgets, (Budgets, NONE), "Budgets or None")
        level = offline.level_of(config)
        reports: dict[str, Report] = {}
        with published(self.folder, save_dir, "optimized model") as folder:
            opset, beside = None, False
            for name in tracked(self.folder.files, "optimizing", "file"):
                model = self.folder.load(name)
                had = model.opset_imports.get("")
                outside = bool(external_files_of(model))
                external = (outside or None) if use_external_data_format is None else (
                    use_external_data_format
                )  # fmt: skip
                stem = Path(name).stem
                written = folder / f"{stem}_{file_suffix}.onnx" if file_suffix else folder / name
                with tempfile.TemporaryDirectory(dir=folder, prefix=".work") as work:
                    model, reports[name] = _optimized(model, config, level, Path(work))
                    save_model(model, written, external=external, one_file=one_external_file)
                    now = model.opset_imports.get("")
                    opset = opset if now == had else now
                    del model  # its weights are mapped from the folder that goes now
                offline.check_loads(written, offline.providers(config))
                beside = beside or any(p.suffix == ".onnx_data" for p in folder.iterdir())
            ORTConfig(
                opset=opset,
                use_external_data_format=beside,
                one_external_file=one_external_file,
                optimization=config,
            ).save_pretrained(folder)
            if validate is not None:
                self._compare(folder, validate, budgets or _usual(config))
        self.reports = reports
        return Path(save_dir)

    def _compare(self, folder: Path, golden: GoldenSet, budgets: Budgets) -> None:
        from ortrain.deploy.equivalence.comparison import compare
        from ortrain.deploy.equivalence.report import EquivalenceError

        report = compare(self.folder, folder, golden, budgets)
        if not report.passed:
            raise EquivalenceError.of(report, "optimized model")
        report.save(folder)

    @staticmethod
    def get_fused_operators(onnx_model_path: str | os.PathLike[str]) -> dict[str, int]:
        """How many fused operators of each kind a file has.

        Raises:
            InputError: it is no ONNX model, or damaged.
        """
        expect_path("onnx_model_path", onnx_model_path)
        return counts.fused(counts.operators_in(onnx_model_path))

    @staticmethod
    def get_nodes_number_difference(
        onnx_model_path: str | os.PathLike[str], onnx_optimized_model_path: str | os.PathLike[str]
    ) -> int:
        """By how many nodes the second file is smaller than the first.

        Raises:
            InputError: one is no ONNX model, or damaged.
        """
        before, after = _both(onnx_model_path, onnx_optimized_model_path)
        return before.total() - after.total()

    @staticmethod
    def get_operators_difference(
        onnx_model_path: str | os.PathLike[str], onnx_optimized_model_path: str | os.PathLike[str]
    ) -> dict[str, int]:
        """By how many nodes of each operator the second file has fewer; those that differ alone.

        Raises:
            InputError: one is no ONNX model, or damaged.
        """
        before, after = _both(onnx_model_path, onnx_optimized_model_path)
        names = sorted({*before, *after})
        return {n: before[n] - after[n] for n in names if before[n] != after[n]}


def _both(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> list[Counter[str]]:
    expect_path("onnx_model_path", first)
    expect_path("onnx_optimized_model_path", second)
    return [counts.operators_in(first), counts.operators_in(second)]


def _usual(config: OptimizationConfig) -> Budgets:
    rough = config.fp16 or config.enable_gelu_approximation
    return Budgets(max_abs_diff=1e-1 if rough else 1e-3)


def _optimized(
    model: ir.Model, config: OptimizationConfig, level: int, work: Path
) -> tuple[ir.Model, Report]:
    """The rewritten model, whose weights may lie in the folder given for work."""
    report, declared = Report(), [shapes.dims(value) for value in model.graph.outputs]
    if config.enable_transformers_specific_optimizations:
        report = fuse(model, config)
    elif level > 0:
        # Onnxruntime believes what a file says of them, also where its inputs were made open since,
        # and infers them by itself.
        forget_shapes(model)
    if level > 0:
        before, after = work / "before.onnx", work / "after.onnx"
        ir.save(model, before, external_data="before.onnx_data")
        on = offline.providers(config)
        offline.rewrite(before, after, level, on, offline.disabled(config, model))
        model = load_model(after)
        # Casts that it has put into two bodies for what it has no kernel for have one name.
        common.NameFixPass()(model)
    if config.fp16:
        to_half(model, infer=not config.disable_shape_inference)
    _declare(model, declared)
    return model, report


def _declare(model: ir.Model, declared: Sequence[tuple[shapes.Dim, ...] | None]) -> None:
    """Gives outputs the names of sizes that they had, and numbers where nothing else is known."""
    for value, said in zip(model.graph.outputs, declared, strict=True):
        known = shapes.dims(value)
        if said is None or (known is not None and len(known) != len(said)):
            continue
        pairs = zip(said, known or (None,) * len(said), strict=True)
        told = [x if isinstance(x, str) or y is None else y for x, y in pairs]
        value.shape = ir.Shape(told)
