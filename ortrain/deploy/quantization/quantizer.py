"""``ORTQuantizer``: the ONNX files of a folder, quantized into another one, with proof."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortrain.deploy.model_folder import ModelFolder, expect_suffix, published
from ortrain.deploy.quantization import calibration_dataset
from ortrain.deploy.quantization.calibration import Calibration, as_pairs
from ortrain.deploy.quantization.calibration_config import CalibrationConfig
from ortrain.deploy.quantization.configuration import QuantizationConfig
from ortrain.deploy.quantization.half_precision import HalfPrecisionConfig
from ortrain.deploy.quantization.preprocessor import QuantizationPreprocessor
from ortrain.deploy.quantization.publication import Publication
from ortrain.deploy.quantization.rewrites import Config, Rewrites
from ortrain.deploy.quantization.sensitivity import Sensitivity
from ortrain.deploy.quantization.tuning.settings import FineTuning
from ortrain.deploy.quantization.tuning.tuner import tuner
from ortrain.deploy.quantization.weight_only import WeightOnlyConfig
from ortrain.kinds import NONE, expect, expect_flag, expect_names, expect_path, expect_whole

if TYPE_CHECKING:
    from ortrain.deploy.equivalence import Budgets, GoldenSet


class ORTQuantizer:
    """Quantizes the ONNX files of a folder: all of them, or one.

    ::

        quantizer = ORTQuantizer.from_pretrained("exported")
        config = AutoQuantizationConfig.auto(is_static=False)
        quantizer.quantize(config, "quantized", validate=golden, budgets=Budgets(...))

    The folder that is read is never written to.

    Args:
        onnx_model_path: of an ONNX file, or of a folder; or the folder itself.
        config: of the model, as ``config.json`` has it; read from there by default.
    """

    def __init__(
        self, onnx_model_path: str | os.PathLike[str] | ModelFolder, config: Any = None
    ) -> None:
        if isinstance(onnx_model_path, ModelFolder):
            self._source = onnx_model_path
        else:
            expect_path("onnx_model_path", onnx_model_path)
            self._source = ModelFolder.open(onnx_model_path)
        self.config = self._source.config if config is None else config
        self._calibration = Calibration(self._source)

    @property
    def onnx_model_path(self) -> Path:
        """Of the ONNX file, or of the folder where there are several."""
        files = self._source.files
        return self._source.path / files[0] if len(files) == 1 else self._source.path

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the ONNX files."""
        return self._source.files

    @classmethod
    def from_pretrained(
        cls, model_or_path: Any, file_name: str | Sequence[str] | None = None
    ) -> ORTQuantizer:
        """The quantizer of a folder, of a file, or of a model that was loaded from a folder.

        Args:
            model_or_path: a folder, an ``.onnx`` file, or an ``ORTModel``.
            file_name: of one ONNX file, or of some; by default all are quantized in one call, and
                of a loaded model those that it runs.

        Raises:
            TypeError: an argument is of another type.
            InputError: there is no ONNX file, or none of the name.
        """
        where = model_or_path
        if not isinstance(where, str | os.PathLike):
            where = getattr(model_or_path, "model_save_dir", None) or getattr(
                model_or_path, "folder", None
            )
            where = getattr(where, "path", where)
        expect_path("model_or_path", model_or_path if where is None else where)
        names = [file_name] if isinstance(file_name, str) else file_name
        expect_names("file_name", names, NONE)
        return cls(ModelFolder.open(where, names))

    def fit(
        self,
        dataset: Any,
        calibration_config: CalibrationConfig,
        onnx_augmented_model_name: str = "augmented_model.onnx",
        operators_to_quantize: Sequence[str] | None = None,
        batch_size: int = 1,
        use_external_data_format: bool = False,
        use_gpu: bool = False,
        force_symmetric_range: bool = False,
    ) -> dict[str, tuple[float, float]]:
        """The ranges of activations on some data; what was collected before does not count.

        Args:
            dataset: a ``datasets.Dataset``, a torch ``DataLoader`` or an iterable of mappings.
            calibration_config: the method.
            onnx_augmented_model_name: not needed: no file is left.
            operators_to_quantize: whose inputs and outputs have ranges; by default all.
            batch_size: how many rows are looked at together.
            use_external_data_format: not needed: large models are known by their size.
            use_gpu: whether the model runs on CUDA.
            force_symmetric_range: whether ranges are symmetric around zero.

        Returns:
            Activation → its lowest and its highest value; with several files ``file/activation``.

        Raises:
            InputError: the data does not fit the model.
            ExecutionError: onnxruntime cannot run the model on it.
        """
        self._calibration.forget()
        self.partial_fit(
            dataset,
            calibration_config,
            onnx_augmented_model_name,
            operators_to_quantize,
            batch_size,
            use_external_data_format,
            use_gpu,
            force_symmetric_range,
        )
        return self.compute_ranges()

    def partial_fit(
        self,
        dataset: Any,
        calibration_config: CalibrationConfig,
        onnx_augmented_model_name: str = "augmented_model.onnx",
        operators_to_quantize: Sequence[str] | None = None,
        batch_size: int = 1,
        use_external_data_format: bool = False,
        use_gpu: bool = False,
        force_symmetric_range: bool = False,
    ) -> None:
        """Adds data; many calls and one :meth:`compute_ranges` are one :meth:`fit` on all of it.

        Args:
            dataset: as of :meth:`fit`.
            calibration_config: the same.
            onnx_augmented_model_name: the same.
            operators_to_quantize: the same.
            batch_size: the same.
            use_external_data_format: the same.
            use_gpu: the same.
            force_symmetric_range: the same.

        Raises:
            StateError: an earlier call had another method or other operators.
        """
        del onnx_augmented_model_name, use_external_data_format
        expect("calibration_config", calibration_config, CalibrationConfig, "a CalibrationConfig")
        expect_names("operators_to_quantize", operators_to_quantize, NONE)
        expect_flag("use_gpu", use_gpu)
        expect_flag("force_symmetric_range", force_symmetric_range)
        self._calibration.add(
            dataset,
            calibration_config,
            operators_to_quantize,
            batch_size,
            use_gpu=bool(use_gpu),
            symmetric=bool(force_symmetric_range),
        )

    def compute_ranges(self) -> dict[str, tuple[float, float]]:
        """The ranges of all data so far; as :meth:`fit` gives them.

        Raises:
            ValueError: nothing has been collected.
        """
        return self._calibration.ranges()

    def quantize(
        self,
        quantization_config: Config,
        save_dir: str | os.PathLike[str],
        file_suffix: str | None = "quantized",
        calibration_tensors_range: Any = None,
        use_external_data_format: bool = False,
        preprocessor: QuantizationPreprocessor | None = None,
        *,
        validate: GoldenSet | None = None,
        budgets: Budgets | None = None,
        on_fail: str = "refuse",
        max_excluded: int | None = None,
        training_data: Any = None,
        fine_tuning: FineTuning | None = None,
        on_step: Callable[[int, float, int], None] | None = None,
    ) -> Path:
        """Writes the quantized files with what goes along to a folder, as a whole or not at all.

        Args:
            quantization_config: how; stays as it is.
            save_dir: the folder to write to, another one than that of the model.
            file_suffix: of the files' names; None for none.
            calibration_tensors_range: of activations, as :meth:`fit` gave them, for static
                quantization.
            use_external_data_format: whether weights lie beside the files; they do in any case
                where they are over 1 GiB.
            preprocessor: chooses nodes, in addition to those of the configuration.
            validate: examples to compare the models on before anything is written.
            budgets: for the comparison.
            on_fail: what to do outside the budgets: ``"refuse"``, or ``"recover"``: leave the most
                sensitive nodes as they are, as few as are enough; and where that does not help,
                train the weights for their quantization, if there are data.
            max_excluded: nodes that may stay as they are for that; all but one by default. With 0
                none is measured, and the weights are trained at once.
            training_data: for training: a :class:`GoldenSet`, or what its ``draw`` takes, with
                labels or without. Rows of ``validate`` are left out, and counted in the report.
            fine_tuning: steps, learning rate, seed and loss of the training.
            on_step: is told of each step of the training: how many there were, the loss of its
                batch, and how many rows that has.

        Returns:
            ``save_dir``, with ``ort_config.json``; with ``validate`` also ``equivalence.json`` and
            ``equivalence.html``, with sensitive nodes ``sensitivity.json``, and after training
            ``fine_tuning.json``.

        Raises:
            TypeError: an argument is of another type.
            ValueError: static quantization without ranges; a node that is not there.
            InputError: a file cannot be quantized so; the training data do not fit it, are empty
                or those of ``validate``.
            EquivalenceError: the result is outside the budgets; with ``on_fail="recover"`` it
                names the sensitive nodes.
            SaveError: the files could not be written.
        """
        config = self._checked(quantization_config, calibration_tensors_range, on_fail)
        expect_path("save_dir", save_dir)
        expect_suffix(file_suffix)
        expect_flag("use_external_data_format", use_external_data_format)
        expect("preprocessor", preprocessor, (QuantizationPreprocessor, NONE), "a preprocessor")
        expect_whole("max_excluded", max_excluded, NONE)
        if validate is None and (budgets is not None or on_fail == "recover"):
            raise ValueError("budgets are kept on examples: give validate=GoldenSet(...)")
        ranges = as_pairs(calibration_tensors_range)
        recover = on_fail == "recover"
        if max_excluded is not None and (max_excluded < 0 or not recover):
            raise ValueError(
                f"max_excluded={max_excluded}: expected a number from 0 up, with on_fail='recover'"
            )
        tune = tuner(
            self._source,
            config,
            ranges,
            validate,
            training_data,
            fine_tuning,
            on_step,
            budgets,
            recover=recover,
        )
        rewrites = Rewrites(self._source, ranges)
        configs = {file: rewrites.chosen(file, config, preprocessor) for file in self.files}
        with published(self._source, save_dir, "quantized model") as folder:
            publication = Publication(
                self._source, rewrites, folder, file_suffix, beside=bool(use_external_data_format)
            )
            publication.write(configs)
            if validate is not None:
                configs = publication.compare(
                    configs,
                    validate,
                    budgets,
                    recover=recover,
                    at_most=max_excluded,
                    tune=tune,
                )
            publication.describe(configs)
        return Path(save_dir)

    def sensitivity(
        self,
        quantization_config: Config,
        examples: Any,
        calibration_tensors_range: Any = None,
        *,
        mode: str = "alone",
    ) -> list[Sensitivity]:
        """How much each node's quantization changes the outputs, those that do most first.

        Args:
            quantization_config: how; stays as it is.
            examples: a golden set, or batches: mappings from inputs to arrays.
            calibration_tensors_range: as of :meth:`quantize`.
            mode: ``"alone"``: only this node is quantized; ``"excluded"``: all but this node, which
                shows what excluding it leaves.

        Raises:
            ValueError: the mode is another one.
        """
        config = self._checked(quantization_config, calibration_tensors_range, "refuse")
        if mode not in ("alone", "excluded"):
            raise ValueError(f"mode={mode!r}: expected 'alone' or 'excluded'")
        batches = getattr(examples, "batches", examples)
        rewrites = Rewrites(self._source, as_pairs(calibration_tensors_range))
        configs = {file: rewrites.chosen(file, config) for file in self.files}
        return rewrites.sensitivities(configs, batches, mode)

    def get_calibration_dataset(
        self,
        dataset_name: str,
        num_samples: int = 100,
        dataset_config_name: str | None = None,
        dataset_split: str | None = None,
        preprocess_function: Callable[..., Any] | None = None,
        preprocess_batch: bool = True,
        seed: int = 2016,
        token: bool | str | None = None,
    ) -> Any:
        """Some examples of a data set, with the columns that the model takes.

        Args:
            dataset_name: as of ``datasets.load_dataset``: a name, or a folder.
            num_samples: how many; all where it has fewer.
            dataset_config_name: as of ``datasets.load_dataset``.
            dataset_split: the same.
            preprocess_function: makes the model's inputs of examples.
            preprocess_batch: whether it takes many examples at once.
            seed: of the order in which examples are drawn.
            token: as of ``datasets.load_dataset``.

        Returns:
            A ``datasets.Dataset``.

        Raises:
            TypeError: an argument is of another type.
            ValueError: there is more than one split, and none is named.
        """
        found = calibration_dataset.drawn(
            dataset_name,
            num_samples,
            dataset_config_name,
            dataset_split,
            preprocess_function,
            preprocess_batch,
            seed,
            token,
        )
        return self.clean_calibration_dataset(found)

    def clean_calibration_dataset(self, dataset: Any) -> Any:
        """A ``datasets.Dataset`` without the columns that the model does not take.

        Raises:
            TypeError: it is no ``datasets.Dataset``.
        """
        taken = {
            value.name or ""
            for file in self.files
            for value in self._source.load(file).graph.inputs
        }
        if len(self.files) > 1:
            taken |= {"decoder_input_ids", "labels"}
        return calibration_dataset.cleaned(dataset, taken)

    def _checked(self, config: Config, ranges: Any, on_fail: str) -> Config:
        kinds = (QuantizationConfig, WeightOnlyConfig, HalfPrecisionConfig)
        expect("quantization_config", config, kinds, "a QuantizationConfig")
        if on_fail not in ("refuse", "recover"):
            raise ValueError(f"on_fail={on_fail!r}: expected 'refuse' or 'recover'")
        if config.is_static and ranges is None:
            raise ValueError(
                "static quantization needs the ranges of activations: give "
                "calibration_tensors_range=quantizer.fit(dataset, calibration_config)"
            )
        # What a caller holds is not changed; what was changed in it is looked at anew.
        return dataclasses.replace(copy.deepcopy(config))
