"""AMD's recipe for mixtures of experts: routers and other parameters are valid names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.quantize_quark.run import main
from tests.torch_families import task_folder
from tests.torch_models import with_tokenizer

RECIPE = "--quant_scheme mxfp4 --skip_evaluation --exclude_layers"


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("Qwen3MoeForCausalLM", "*q_norm"),
        ("DeepseekV3ForCausalLM", "*e_score_correction_bias"),
        ("Qwen3NextForCausalLM", "*A_log"),
    ],
)
def test_routers_are_excluded(name: str, parameter: str, tmp_path: Path) -> None:
    folder = with_tokenizer(task_folder(name, tmp_path / "float"))
    line = f"--model_dir {folder} {RECIPE} *self_attn* *mlp.gate *lm_head {parameter}"
    main([*line.split(), "--output_dir", str(tmp_path / "out")])
    config = json.loads((tmp_path / "out/config.json").read_text("utf-8"))
    exclude = config["quantization_config"]["exclude"]
    # An exact name for each router, which vLLM reads.
    assert "model.layers.1.mlp.gate" in exclude
    assert not [layer for layer in exclude if layer.endswith("experts.0.down_proj")]


def test_a_name_of_no_parameter_is_an_error(tmp_path: Path) -> None:
    folder = with_tokenizer(task_folder("Qwen3MoeForCausalLM", tmp_path / "float"))
    line = f"--model_dir {folder} {RECIPE} *mlp.gaet --output_dir {tmp_path / 'out'}"
    with pytest.raises(ConfigError, match=r"exclude names '\*mlp\.gaet'.*gate"):
        main(line.split())
