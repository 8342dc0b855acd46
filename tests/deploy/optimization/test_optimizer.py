"""The optimizer: folders in, folders out, and nothing else touched."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ortrain import OrtrainWarning
from ortrain.deploy import Budgets, EquivalenceError, GoldenSet, ORTConfig
from ortrain.deploy.optimization import AutoOptimizationConfig, OptimizationConfig, ORTOptimizer
from ortrain.errors import ExecutionError, InputError
from tests.deploy.optimization.graphs import draw, graph, operators

SIGNATURE = "(float[batch,seq,64] x) => (float[batch,seq,64] y)"
BODY = """p = MatMul(x, w) q = Add(p, b) s = Sigmoid(q) t = Mul(q, s) u = Add(t, x)
          y = LayerNormalization<axis=-1>(u, g, b)"""
WEIGHTS = "float[64,64] w, float[64] b, float[64] g"


def folder(path: Path, *names: str, external: bool = False) -> Path:
    """A folder of models with a configuration and a tokenizer."""
    path.mkdir()
    for name in names or ("model.onnx",):
        data = f"{name}_data" if external else None
        ir.save(graph(SIGNATURE, BODY, WEIGHTS), path / name, external_data=data)
    (path / "config.json").write_text('{"model_type": "of no known kind"}')
    (path / "tokenizer.json").write_text("{}")
    return path


def digests(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


def run(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def test_a_folder_becomes_another(tmp_path: Path) -> None:
    source, target = folder(tmp_path / "source"), tmp_path / "new" / "target"
    before = digests(source)
    optimizer = ORTOptimizer.from_pretrained(source)
    config = AutoOptimizationConfig.O2()
    assert optimizer.optimize(config, target) == target
    assert digests(source) == before
    names = ["config.json", "model_optimized.onnx", "ort_config.json", "tokenizer.json"]
    assert sorted(p.name for p in target.iterdir()) == names
    assert optimizer.reports["model.onnx"].fused["QuickGelu"] == 1
    feeds = {"x": draw(2, 3, 64)}
    written = target / "model_optimized.onnx"
    np.testing.assert_allclose(
        run(written, feeds), run(source / "model.onnx", feeds), atol=1e-4, rtol=1e-4
    )
    found = ORTConfig.from_pretrained(target)
    assert found.optimization == config.to_dict()
    assert (found.opset, found.use_external_data_format, found.one_external_file) == (
        None,  # as it was, which scripts of Optimum compare
        False,
        True,
    )


def test_details_are_counted(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    optimizer = ORTOptimizer.from_pretrained(source)
    nothing = OptimizationConfig(
        optimization_level=0, enable_transformers_specific_optimizations=False
    )
    optimizer.optimize(nothing, tmp_path / "same")
    pair = (source / "model.onnx", tmp_path / "same" / "model_optimized.onnx")
    assert optimizer.get_nodes_number_difference(*pair) == 0
    assert optimizer.get_operators_difference(*pair) == {}
    assert optimizer.get_fused_operators(pair[1]) == {"LayerNormalization": 1}
    np.testing.assert_array_equal(*(run(p, {"x": draw(1, 2, 64)}) for p in pair))
    config = OptimizationConfig(optimization_level=0, optimize_for_gpu=True)
    optimizer.optimize(config, tmp_path / "fused")
    pair = (source / "model.onnx", tmp_path / "fused" / "model_optimized.onnx")
    assert optimizer.get_nodes_number_difference(*pair) == 2
    assert optimizer.get_operators_difference(*pair) == {
        "Add": 1, "LayerNormalization": 1, "Mul": 1, "QuickGelu": -1, "Sigmoid": 1,
        "SkipLayerNormalization": -1,
    }  # fmt: skip
    fused = {"QuickGelu": 1, "SkipLayerNormalization": 1}
    assert optimizer.get_fused_operators(pair[1]) == fused


def test_all_files_of_a_folder_are_optimized_or_those_that_are_named(tmp_path: Path) -> None:
    names = ("decoder_model.onnx", "encoder_model.onnx")
    source = folder(tmp_path / "source", *names)
    ORTOptimizer.from_pretrained(source).optimize(
        AutoOptimizationConfig.O1(), tmp_path / "all", file_suffix=None
    )
    assert {p.name for p in (tmp_path / "all").glob("*.onnx")} == set(names)
    optimizer = ORTOptimizer.from_pretrained(source, file_names=["encoder_model.onnx"])
    optimizer.optimize(AutoOptimizationConfig.O1(), tmp_path / "one", file_suffix="o1")
    assert [p.name for p in (tmp_path / "one").glob("*.onnx")] == ["encoder_model_o1.onnx"]
    optimizer = ORTOptimizer.from_pretrained(source / "decoder_model.onnx")
    optimizer.optimize(AutoOptimizationConfig.O1(), tmp_path / "path")
    assert [p.name for p in (tmp_path / "path").glob("*.onnx")] == ["decoder_model_optimized.onnx"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_beside_a_file_stay_there(tmp_path: Path, level: str) -> None:
    source, target = folder(tmp_path / "source", external=True), tmp_path / "target"
    before = digests(source)
    config = AutoOptimizationConfig.with_optimization_level(level)
    ORTOptimizer.from_pretrained(source).optimize(config, target)
    assert digests(source) == before, "the weights of the source have to stay"
    assert (target / "model_optimized.onnx_data").exists()
    assert ORTConfig.from_pretrained(target).use_external_data_format
    feeds = {"x": draw(2, 3, 64)}
    expected = run(source / "model.onnx", feeds)
    np.testing.assert_allclose(run(target / "model_optimized.onnx", feeds), expected, atol=1e-4)


def test_weights_go_inside_or_beside_as_asked(tmp_path: Path) -> None:
    optimizer = ORTOptimizer.from_pretrained(folder(tmp_path / "source", external=True))
    inside, beside = tmp_path / "inside", tmp_path / "beside"
    optimizer.optimize(AutoOptimizationConfig.O2(), inside, use_external_data_format=False)
    assert not list(inside.glob("*_data"))
    onnx.load(inside / "model_optimized.onnx", load_external_data=False)
    optimizer.optimize(
        AutoOptimizationConfig.O2(), beside, use_external_data_format=True, one_external_file=False
    )
    assert len(list(beside.glob("*_data"))) >= 1
    feeds = {"x": draw(1, 2, 64)}
    found = [run(path / "model_optimized.onnx", feeds) for path in (inside, beside)]
    np.testing.assert_array_equal(*found)


def test_the_folder_of_the_source_is_never_written_to(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    before = digests(source)
    optimizer = ORTOptimizer.from_pretrained(source)
    with pytest.raises(ValueError, match="folder of the source"):
        optimizer.optimize(AutoOptimizationConfig.O2(), source)
    assert digests(source) == before


def test_no_tokenizer_is_made_up(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    ORTOptimizer.from_pretrained(source).optimize(AutoOptimizationConfig.O1(), tmp_path / "t")
    assert not list((tmp_path / "t").glob("*token*"))


def test_no_configuration_is_needed(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    (source / "config.json").unlink()
    ORTOptimizer.from_pretrained(source).optimize(AutoOptimizationConfig.O2(), tmp_path / "t")
    assert (tmp_path / "t" / "model_optimized.onnx").exists()


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model at"):
        ORTOptimizer.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no ONNX file"):
        ORTOptimizer.from_pretrained(tmp_path / "empty")
    with pytest.raises(TypeError, match="model_or_path"):
        ORTOptimizer.from_pretrained(3)
    with pytest.raises(TypeError, match="file_names"):
        ORTOptimizer.from_pretrained(tmp_path, file_names="model.onnx")
    source = folder(tmp_path / "source")
    with pytest.raises(InputError, match=r"no file other\.onnx"):
        ORTOptimizer.from_pretrained(source, file_names=["other.onnx"])
    content = (source / "model.onnx").read_bytes()
    (source / "model.onnx").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        ORTOptimizer.from_pretrained(source).optimize(AutoOptimizationConfig.O2(), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_model_that_onnxruntime_cannot_run_is_told(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    ir.save(graph("(float[2] x) => (float[2] y)", "y = Vanish(x)"), source / "model.onnx")
    with pytest.raises(ExecutionError, match="cannot load"):
        ORTOptimizer.from_pretrained(source).optimize(AutoOptimizationConfig.O2(), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_loaded_model_tells_its_folder(tmp_path: Path) -> None:
    class Loaded:
        model_save_dir = folder(tmp_path / "source")

    assert ORTOptimizer.from_pretrained(Loaded()).folder.path == Loaded.model_save_dir


def test_wrong_kinds_are_told(tmp_path: Path) -> None:
    optimizer = ORTOptimizer.from_pretrained(folder(tmp_path / "source"))
    config: Any = "O2"
    with pytest.raises(TypeError, match="optimization_config"):
        optimizer.optimize(config, tmp_path / "t")
    with pytest.raises(TypeError, match="file_suffix"):
        optimizer.optimize(AutoOptimizationConfig.O1(), tmp_path / "t", file_suffix=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="validate"):
        optimizer.optimize(AutoOptimizationConfig.O1(), tmp_path / "t", validate=[1])  # type: ignore[arg-type]
    assert not (tmp_path / "t").exists()


def test_files_outside_their_budgets_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = ORTOptimizer.from_pretrained(folder(tmp_path / "source"))
    golden = GoldenSet(batches=[{"x": draw(2, 3, 64)}, {"x": draw(1, 1, 64)}])
    optimizer.optimize(AutoOptimizationConfig.O2(), tmp_path / "good", validate=golden)
    report = json.loads((tmp_path / "good" / "equivalence.json").read_text())
    assert report["passed"]

    from ortrain.deploy.optimization import optimizer as module

    fuse = module.fuse

    def wrong(model: ir.Model, config: OptimizationConfig) -> Any:
        report = fuse(model, config)
        scale = model.graph.initializers["g"]
        scale.const_value = ir.tensor(scale.const_value.numpy() * np.float32(1.01))
        return report

    monkeypatch.setattr(module, "fuse", wrong)
    with pytest.raises(EquivalenceError, match="outside its budgets"):
        optimizer.optimize(AutoOptimizationConfig.O2(), tmp_path / "bad", validate=golden)
    assert not (tmp_path / "bad").exists()
    optimizer.optimize(
        AutoOptimizationConfig.O2(), tmp_path / "told", validate=golden,
        budgets=Budgets(max_abs_diff=1.0),
    )  # fmt: skip


def test_float16_keeps_the_types_outside(tmp_path: Path) -> None:
    source, target = folder(tmp_path / "source"), tmp_path / "target"
    with pytest.warns(OrtrainWarning, match="CUDA"):
        ORTOptimizer.from_pretrained(source).optimize(AutoOptimizationConfig.O4(), target)
    model = ir.load(target / "model_optimized.onnx")
    assert not [v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT]
    assert {v.dtype for v in (*model.graph.inputs, *model.graph.outputs)} == {ir.DataType.FLOAT}
    assert operators(model)["SkipLayerNormalization"] == 1
    feeds = {"x": draw(2, 3, 64)}
    expected = run(source / "model.onnx", feeds)
    found = run(target / "model_optimized.onnx", feeds)
    np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize("level", [0, 1, 2, 99])
def test_each_level_gives_the_same_numbers(tmp_path: Path, level: int) -> None:
    source, target = folder(tmp_path / "source"), tmp_path / "target"
    config = OptimizationConfig(optimization_level=level)
    ORTOptimizer.from_pretrained(source).optimize(config, target)
    feeds = {"x": draw(2, 3, 64)}
    expected = run(source / "model.onnx", feeds)
    np.testing.assert_allclose(run(target / "model_optimized.onnx", feeds), expected, atol=1e-4)


def test_rewrites_of_onnxruntimes_own_stay_away_where_that_is_asked_for(tmp_path: Path) -> None:
    source, target = folder(tmp_path / "source"), tmp_path / "target"
    config = OptimizationConfig(
        optimization_level=2, disable_skip_layer_norm_fusion=True, disable_gelu_fusion=True
    )
    optimizer = ORTOptimizer.from_pretrained(source)
    optimizer.optimize(config, target)
    found = optimizer.get_fused_operators(target / "model_optimized.onnx")
    assert not found.keys() & {"QuickGelu", "SkipLayerNormalization"}


def test_what_is_slow_on_a_processor_is_not_put_in_when_the_file_is_loaded(tmp_path: Path) -> None:
    source, target = folder(tmp_path / "source"), tmp_path / "target"
    ORTOptimizer.from_pretrained(source).optimize(AutoOptimizationConfig.O2(), target)
    options = onnxruntime.SessionOptions()
    counts = []
    for path in (source / "model.onnx", target / "model_optimized.onnx"):
        options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        counts.append(operators(ir.load(tmp_path / "loaded.onnx")))
    assert counts[0]["SkipLayerNormalization"] == 1, "onnxruntime has begun to leave it away"
    assert not counts[1]["SkipLayerNormalization"]
    assert counts[1]["Sum"] == 1
