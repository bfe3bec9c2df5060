"""Arguments of AMD Quark's ``quantize_quark.py``, with the support of each.

An argument is obeyed, not needed, or refused. An argument that is not needed has no counterpart,
or asks for the default behaviour; a different value leads to a note. An argument is refused if
the result would differ from the request; the message names an alternative.

Names, choices and defaults are those of AMD Quark 0.8 to 0.13.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quark_onnx.common.errors import ConfigError


@dataclass(frozen=True)
class Argument:
    """Argument of the script, as a row of the table.

    Attributes:
        names: names of the argument, the current one first.
        support: obeyed, not needed, or refused.
        text: the effect, the reason why it is not needed, or an alternative.
        settings: arguments for ``argparse``.
        harmless: values that ask for the default behaviour.
    """

    names: str
    support: Literal["obeyed", "not needed", "refused"]
    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[Any, ...] = ()

    @property
    def dest(self) -> str:
        """Return the attribute of the parsed arguments."""
        return str(
            # argparse names the attribute after the first long option, too.
            self.settings.get("dest") or self.names.split()[0].removeprefix("--"),
        )

    def is_harmless(self, value: object) -> bool:
        """Return whether a parsed value asks for the default behaviour.

        An argument that is not given is None, or False for a flag.
        """
        return value is None or value is False or value in self.harmless


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _batch(text: str) -> int | str:
    return text if text == "auto" else int(text)


# Shared keywords of ``add_argument``. "extend" lets an argument be repeated, and keeps None as its
# default.
_FLAG: dict[str, Any] = {"action": "store_true"}
_LIST: dict[str, Any] = {"nargs": "+", "action": "extend"}
# argparse copies the default before it appends.
_PAIRS: dict[str, Any] = {"nargs": 2, "action": "append", "default": []}
_NUMBER: dict[str, Any] = {"type": int}
_ANY: dict[str, Any] = {"nargs": "*", "default": None}

ROWS: tuple[Argument, ...] = (
    # the model
    Argument(
        "--model_dir",
        "obeyed",
        "a Hugging Face folder, or the name of a model of the Hub",
    ),
    Argument("--revision", "obeyed", "the revision of a model of the Hub"),
    Argument(
        "--trust_remote_code",
        "obeyed",
        "run Python files of the model; off by default",
        _FLAG,
    ),
    Argument(
        "--no_trust_remote_code",
        "obeyed",
        "run no Python files of the model, which is the default",
        # Two arguments share an attribute: the last one on the command line counts.
        {"dest": "trust_remote_code", "action": "store_false"},
    ),
    Argument(
        "--data_type",
        "obeyed",
        "the type of the tensors that stay float",
        {"choices": ("auto", "float16", "bfloat16", "float32"), "default": "auto"},
    ),
    Argument(
        "--device",
        "obeyed",
        "blocks are quantized there, one at a time; the CPU if it is not named, or where"
        " torch finds no GPU",
        # AMD's default is "cuda"; a folder is quantized without a GPU here.
        {"default": "cpu"},
    ),
    Argument(
        "--multi_gpu",
        "not needed",
        "one block of the model is in memory at a time",
        # With and without a value: a map of devices, or accelerate's choice.
        {"nargs": "?", "const": "auto"},
    ),
    Argument(
        "--multi_device",
        "not needed",
        "one block of the model is in memory at a time",
        _FLAG,
    ),
    Argument(
        "--model_attn_implementation",
        "not needed",
        "attention is computed by the default of transformers",
        {"choices": ("eager", "sdpa", "flash_attention_2")},
        ("eager", "sdpa"),
    ),
    # the data
    Argument(
        "--dataset",
        "obeyed",
        "a file, a folder, or a name (pileval, wikitext, pileval_for_awq_benchmark,"
        " ...), which is looked up in the folder that QUARK_ONNX_DATASETS names, then"
        " by the package datasets",
        # AMD's default: the validation set of the Pile, as in AWQ.
        {"default": "pileval"},
    ),
    Argument(
        "--num_calib_data",
        "obeyed",
        "windows of the data, at most",
        {"type": int, "default": 512},
    ),
    Argument(
        "--seq_len",
        "obeyed",
        "tokens of a window, also of the text that is evaluated",
        {"type": int, "default": 512},
    ),
    Argument(
        "--batch_size",
        "not needed",
        "the number of windows that run together follows from memory",
        _NUMBER,
        # Values that ask for what happens anyway cause no note.
        (1,),
    ),
    # quantization
    Argument("--skip_quantization", "obeyed", "evaluate the float model alone", _FLAG),
    Argument(
        "--quant_scheme",
        "obeyed",
        "the scheme, by its present or its earlier name",
    ),
    Argument(
        "--group_size",
        "obeyed",
        "values to a block, where the scheme leaves it open",
        _NUMBER,
    ),
    Argument(
        "--layer_quant_scheme",
        "obeyed",
        "another scheme for layers: PATTERN SCHEME",
        _PAIRS,
    ),
    Argument(
        "--group_size_per_layer",
        "obeyed",
        "another group size for layers: PATTERN SIZE",
        _PAIRS,
    ),
    Argument(
        # nargs "*": an empty list is a request, None is none.
        "--exclude_layers",
        "obeyed",
        "patterns of layers that stay float, instead of the usual ones; without a"
        " pattern, none does",
        {"nargs": "*", "action": "extend"},
    ),
    Argument(
        # The present and an earlier name of the script; both set the same attribute.
        "--kv_cache_dtype --kv_cache_quant_scheme",
        "obeyed",
        "fp8 for keys and values; other formats are refused",
    ),
    Argument(
        "--min_kv_scale",
        "obeyed",
        "the least scale of keys and values",
        {"type": float, "default": 0.0},
    ),
    Argument(
        "--kv_cache_post_rope",
        "obeyed",
        "round keys after they are rotated",
        _FLAG,
    ),
    Argument(
        "--attention_dtype",
        "obeyed",
        "fp8 for queries and probabilities; other formats are refused",
    ),
    Argument(
        "--fp8_attention_quant",
        "obeyed",
        "as --attention_dtype fp8",
        # The earlier flag had one format alone.
        {"dest": "attention_dtype", "action": "store_const", "const": "fp8"},
    ),
    Argument(
        "--scale_calculation_mode",
        "obeyed",
        "the rule for the shared exponents of MX formats",
        {"choices": ("even", "floor", "ceil")},
    ),
    Argument(
        "--scale_format",
        "not needed",
        "the scheme says it: mxfp4 has E8M0, nvfp4 E4M3",
        {},
        # E8M0 is the scale of all OCP microscaling formats.
        ("e8m0",),
    ),
    Argument(
        "--quant_algo",
        "obeyed",
        "names of algorithms, with commas",
        # Names with commas; a repeated argument adds to them.
        {"type": _names, "action": "extend"},
    ),
    Argument(
        "--quant_algo_config_file --quant_algo_config_file_path",
        "obeyed",
        "ALGORITHM FILE, repeated; or files alone, each of which names its algorithm",
        _LIST,
    ),
    Argument(
        "--pre_quantization_optimization",
        "obeyed",
        "rotation, quarot or smoothquant, before the others",
        _LIST,
    ),
    Argument(
        "--pre_optimization_config_file_path",
        "obeyed",
        "files with their settings",
        _LIST,
    ),
    Argument(
        "--moe_experts_second_step_config",
        "refused",
        "give the experts a scheme of their own: --layer_quant_scheme '*experts*'"
        " int4_fp8",
        _ANY,
    ),
    Argument(
        # Merged layers would share a scale.
        "--weight_matrix_merge",
        "not needed",
        "each layer has a scale of its own",
        _FLAG,
    ),
    Argument(
        "--no_keep_prequantized_layers",
        "not needed",
        "the model must be float; a quantized one is an error that says so",
        _FLAG,
    ),
    Argument(
        "--quant_flow",
        "not needed",
        "each flow reads, quantizes and writes one block after the other",
        {"choices": ("standard", "file2file", "per_block"), "default": "standard"},
        # The flows differ in memory alone, not in results.
        ("standard", "file2file", "per_block"),
    ),
    Argument(
        "--file2file_quantization",
        "obeyed",
        "which is how all models are quantized",
        _FLAG,
    ),
    Argument(
        "--gpu_resident_blocks",
        "not needed",
        "one block of the model is in memory at a time",
        _NUMBER,
        (0,),
    ),
    Argument("--torch_compile", "not needed", "kernels need no compiler", _FLAG),
    # export
    Argument(
        "--output_dir",
        "obeyed",
        "the folder of the results",
        {"default": "exported_model"},
    ),
    Argument(
        "--model_export",
        "obeyed",
        "hf_format, gguf, onnx, and earlier names of hf_format; without it, hf_format"
        " where the scheme can be stored",
        _LIST,
    ),
    Argument(
        # AMD's own layout, AutoAWQ's, and plain FP8.
        "--custom_mode",
        "obeyed",
        "the layout of the checkpoint",
        {"choices": ("quark", "awq", "fp8"), "default": "quark"},
    ),
    Argument(
        "--pack_method",
        "obeyed",
        "the order of 4-bit codes",
        # "reorder" interleaves nibbles as AWQ's kernels read them.
        {"choices": ("reorder", "order"), "default": "reorder"},
    ),
    Argument(
        "--export_weight_format",
        "obeyed",
        "codes, or floats that have been rounded",
        {"choices": ("real_quantized", "fake_quantized"), "default": "real_quantized"},
    ),
    # Two files without a config.json, for modules that are no model of transformers, too.
    Argument("--params_save", "obeyed", "write the codes with save_params", _FLAG),
    Argument(
        "--save_dir",
        "obeyed",
        "the folder of --params_save",
        {"default": "model_params"},
    ),
    # reloading
    Argument(
        "--model_reload",
        "obeyed",
        "evaluate a checkpoint instead of writing one",
        _FLAG,
    ),
    Argument("--import_model_dir", "obeyed", "the folder of that checkpoint"),
    Argument(
        "--import_file_format",
        "not needed",
        "the folder says it",
        {},
        # Both are read by what the folder holds.
        ("quark_format", "hf_format"),
    ),
    Argument(
        "--params_load",
        "obeyed",
        "evaluate what --params_save has written",
        _FLAG,
    ),
    Argument("--json_path", "obeyed", "the JSON file of --params_load"),
    Argument("--safetensors_path", "obeyed", "the tensors of --params_load"),
    Argument(
        "--enable_native_inference",
        "not needed",
        "layers compute what the codes say; vLLM has fast kernels",
        _FLAG,
    ),
    Argument(
        "--native_linear_mode",
        "not needed",
        "layers compute what the codes say; vLLM has fast kernels",
        {},
        ("auto",),
    ),
    # evaluation
    Argument("--skip_evaluation", "obeyed", "compute no perplexity", _FLAG),
    Argument(
        # None and a given name differ: a missing default is a note, a missing text an error.
        "--evaluation_dataset",
        "obeyed",
        "text whose perplexity is computed before and after; wikitext by default, if it"
        " is there",
    ),
    Argument(
        "--use_ppl_eval_model",
        "obeyed",
        "compute the perplexity, which is the default",
        _FLAG,
    ),
    Argument(
        "--tasks",
        "obeyed",
        "tasks of lm-eval, or folders of them",
        {"type": _names, "action": "extend"},
    ),
    Argument(
        "--num_fewshot",
        "obeyed",
        "examples before each question of a task",
        _NUMBER,
    ),
    Argument(
        "--apply_chat_template",
        "obeyed",
        "put questions into the chat template of the tokenizer",
        _FLAG,
    ),
    Argument(
        "--eval_batch_size",
        "obeyed",
        "questions that run together, or auto",
        # A number or "auto", which lm-eval resolves by trial.
        {"type": _batch, "default": 8},
    ),
    Argument(
        "--max_eval_batch_size",
        "obeyed",
        "the most questions that auto tries",
        {"type": int, "default": 64},
    ),
    Argument(
        "--num_eval_data",
        "obeyed",
        "questions of a task, at most; -1 for all",
        {"type": int, "default": -1},
    ),
    Argument(
        "--save_metrics_to_csv",
        "obeyed",
        "write all results to metrics.csv",
        _FLAG,
    ),
    Argument(
        "--metrics_output_dir",
        "obeyed",
        "the folder of that file",
        {"default": "metrics_output_dir"},
    ),
    Argument(
        "--use_ppl_eval_for_kv_cache",
        "refused",
        "the perplexity of a checkpoint has its keys and values rounded:"
        " --evaluation_dataset",
        _FLAG,
    ),
    Argument(
        "--ppl_eval_for_kv_cache_context_size",
        "not needed",
        "belongs to --use_ppl_eval_for_kv_cache",
        _NUMBER,
    ),
    Argument(
        "--ppl_eval_for_kv_cache_sample_size",
        "not needed",
        "belongs to --use_ppl_eval_for_kv_cache",
        _NUMBER,
    ),
    Argument(
        "--ppl_eval_for_kv_cache_patch_size",
        "not needed",
        "belongs to --use_ppl_eval_for_kv_cache",
        _NUMBER,
    ),
    Argument(
        "--use_mlperf_rouge",
        "refused",
        "score summaries with a task of lm-eval: --tasks",
        _FLAG,
    ),
    Argument(
        "--eval_data_dir",
        "refused",
        "name a folder of task definitions: --tasks FOLDER",
        _ANY,
    ),
    Argument(
        "--use_tp",
        "refused",
        "serve the checkpoint with vLLM, which has tensor parallelism",
        _FLAG,
    ),
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all arguments."""
    argument_parser = argparse.ArgumentParser(
        "quantize_quark.py",
        description="Quantize a language model into a checkpoint.",
    )
    for row in ROWS:
        if row.support == "obeyed":
            # The help names the support of arguments that are not obeyed.
            text = row.text
        else:
            text = f"{row.support}: {row.text}"
        argument_parser.add_argument(
            *row.names.split(),
            **row.settings,
            # argparse formats help texts with the operator %.
            help=text.replace("%", "%%"),
        )
    # The second of the two arguments, store_false, has the default True.
    argument_parser.set_defaults(trust_remote_code=False)
    return argument_parser


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; None is the command line of the process."""
    return parser().parse_args(words)


def notes_on(args: argparse.Namespace) -> Iterator[str]:
    """Yield a note for each given argument without effect.

    Raises:
        ConfigError: an argument is refused.
    """
    for row in ROWS:
        if row.support == "obeyed" or row.is_harmless(getattr(args, row.dest)):
            continue
        name = row.names.split()[0]
        if row.support == "refused":
            raise ConfigError(f"{name} is not supported: {row.text}")
        yield f"{name} has no effect: {row.text}"
