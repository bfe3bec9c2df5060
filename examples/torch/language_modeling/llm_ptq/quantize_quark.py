"""Quantize a language model from the command line, with the options of AMD Quark's script of this name.

    python quantize_quark.py --model_dir MODEL --output_dir OUT --quant_scheme w_mxfp4_a_mxfp4 --model_export hf_format
    python quantize_quark.py --model_dir MODEL --output_dir OUT --quant_scheme fp8 --kv_cache_dtype fp8 --dataset my.txt

MODEL is a Hugging Face folder. Schemes that need calibration data take it from --dataset: a file of text, a folder of
them, token ids (.npy, .npz), or the name of a data set for the ``datasets`` package.
"""

import argparse
import json
import sys
from pathlib import Path

from quark_onnx.errors import QuarkError
from quark_onnx.torch import LLMTemplate
from quark_onnx.torch.calibration.eval_tasks import Tasks
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.exports.kinds import EXPORTS, exported
from quark_onnx.torch.pipelines.file_to_file import Writing
from quark_onnx.torch.pipelines.ptq import Text, ptq


def _names(text: str) -> list[str]:
    return text.split(",")


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description="Quantize a language model into a checkpoint for vLLM.")
    add = parser.add_argument
    add("--model_dir", required=True, type=Path, help="a Hugging Face folder")
    add("--output_dir", required=True, type=Path, help="where the checkpoint goes")
    add("--quant_scheme", required=True, help=", ".join(LLMTemplate.get_supported_schemes()))
    add("--group_size", type=int, help="values to a block, where the scheme leaves it open")
    add("--layer_quant_scheme", nargs=2, action="append", default=[], metavar=("PATTERN", "SCHEME"))
    add("--kv_cache_dtype", choices=["fp8"], help="how keys and values are quantized")
    add("--kv_cache_post_rope", action="store_true", help="round keys after they are rotated")
    add("--min_kv_scale", type=float, default=0.0, help="the least scale of keys and values")
    add("--attention_dtype", choices=["fp8"], help="how queries and the probabilities of attention are quantized")
    add("--quant_algo", type=_names, action="extend", help="names of algorithms, with commas")
    add("--exclude_layers", nargs="*", action="extend", help="globs of layers that stay float, not the usual ones")
    add("--dataset", default="pileval", help="calibration data")
    add("--num_calib_data", type=int, default=128, help="windows of it")
    add("--seq_len", type=int, default=512, help="tokens of a window")
    add(
        "--model_export",
        nargs="+",
        action="extend",
        choices=EXPORTS,
        help="what is written; several (default: hf_format)",
    )
    add("--custom_mode", choices=["quark", "awq", "fp8"], default="quark", help="how layers are stored")
    add("--pack_method", choices=["reorder", "order"], default="reorder")
    add("--evaluation_dataset", help="text whose perplexity is computed before and after")
    add("--skip_evaluation", action="store_true", help="compute no perplexity")
    add("--tasks", type=_names, action="extend", help="tasks of lm-eval, or folders of them, with commas")
    add("--num_fewshot", type=int, help="examples in front of each question of a task")
    add("--num_eval_data", type=int, default=-1, help="questions of a task, at most; -1 for all")
    add("--eval_batch_size", type=int, default=8, help="questions that are run together")
    add("--trust_remote_code", action="store_true", help="run Python files of the model")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    kind = json.loads((args.model_dir / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    source = FloatCheckpoint(args.model_dir, trust_code=args.trust_remote_code)
    if kind not in LLMTemplate.list_available():
        floats = list(source.usually_float())
        LLMTemplate.register_template(LLMTemplate(kind, ["*k_proj", "*v_proj"], exclude_layers_name=floats))
    config = LLMTemplate.get(kind).get_config(
        args.quant_scheme,
        algorithm=args.quant_algo,
        kv_cache_scheme=args.kv_cache_dtype,
        min_kv_scale=args.min_kv_scale,
        attention_scheme=args.attention_dtype,
        layer_config=dict(args.layer_quant_scheme),
        exclude_layers=args.exclude_layers,
        group_size=args.group_size,
    )
    config.kv_cache_post_rope = args.kv_cache_post_rope
    judges = None if args.skip_evaluation or not args.evaluation_dataset else Text(args.evaluation_dataset)
    limit = None if args.num_eval_data < 0 else args.num_eval_data
    tasks = args.tasks and Tasks(args.tasks, shots=args.num_fewshot, limit=limit, batch=args.eval_batch_size)
    notes: list[str] = []
    with exported(args.model_export or ["hf_format"], source, config.torch_config(), args.output_dir, notes) as folder:
        outcome = ptq(
            source,
            folder,
            config.torch_config(),
            text=Text(args.dataset, args.num_calib_data, args.seq_len),
            evaluate=judges,
            writing=Writing(args.pack_method, layout=args.custom_mode),
            announce=lambda expected: print(f"this takes {expected}", flush=True),
        )
        scores = tasks.compared(args.model_dir, folder, trust_code=args.trust_remote_code) if tasks else {}
    print(f"{len(outcome.report.quantized)} layers are quantized, {len(outcome.report.kept)} stay float")
    for note in outcome.report.notes + notes:
        print(f"note: {note}")
    if outcome.after is not None:
        print(f"perplexity: {outcome.before:.4f} before, {outcome.after:.4f} after")
    for task, metrics in scores.items():
        for name, (before, after) in metrics.items():
            print(f"{task}: {name} {before:.4f} before, {after:.4f} after")


if __name__ == "__main__":
    try:
        main()
    except (QuarkError, OSError) as error:
        sys.exit(f"error: {error}")
