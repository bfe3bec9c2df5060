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
from quark_onnx.torch.exports import EXPORTS, exported
from quark_onnx.torch.files import Writing
from quark_onnx.torch.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.ptq import Text, ptq


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
    add("--min_kv_scale", type=float, default=0.0, help="the least scale of keys and values")
    add("--quant_algo", help="names of algorithms, with commas")
    add("--exclude_layers", nargs="*", help="globs of layers that stay float")
    add("--dataset", default="pileval", help="calibration data")
    add("--num_calib_data", type=int, default=128, help="windows of it")
    add("--seq_len", type=int, default=512, help="tokens of a window")
    add("--model_export", nargs="+", choices=EXPORTS, default=["hf_format"], help="what is written; several may be")
    add("--custom_mode", choices=["quark", "awq", "fp8"], default="quark", help="how layers are stored")
    add("--pack_method", choices=["reorder", "order"], default="reorder")
    add("--evaluation_dataset", help="text whose perplexity is computed before and after")
    add("--skip_evaluation", action="store_true", help="compute no perplexity")
    add("--tasks", help="print the command that evaluates these tasks of lm-evaluation-harness")
    add("--trust_remote_code", action="store_true", help="run Python files of the model")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    kind = json.loads((args.model_dir / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    if kind not in LLMTemplate.list_available():
        LLMTemplate.register_template(LLMTemplate(kind, ["*k_proj", "*v_proj"], exclude_layers_name=["lm_head"]))
    config = LLMTemplate.get(kind).get_config(
        args.quant_scheme,
        algorithm=args.quant_algo.split(",") if args.quant_algo else None,
        kv_cache_scheme=args.kv_cache_dtype,
        min_kv_scale=args.min_kv_scale,
        layer_config=dict(args.layer_quant_scheme),
        exclude_layers=args.exclude_layers,
        group_size=args.group_size,
    )
    judges = None if args.skip_evaluation or not args.evaluation_dataset else Text(args.evaluation_dataset)
    source = FloatCheckpoint(args.model_dir, trust_code=args.trust_remote_code)
    notes: list[str] = []
    with exported(args.model_export, source, config.torch_config(), args.output_dir, notes) as folder:
        outcome = ptq(
            source,
            folder,
            config.torch_config(),
            text=Text(args.dataset, args.num_calib_data, args.seq_len),
            evaluate=judges,
            writing=Writing(args.pack_method, layout=args.custom_mode),
            announce=lambda expected: print(f"this takes {expected}", flush=True),
        )
    print(f"{len(outcome.report.quantized)} layers are quantized, {len(outcome.report.kept)} stay float")
    for note in outcome.report.notes + notes:
        print(f"note: {note}")
    if outcome.after is not None:
        print(f"perplexity: {outcome.before:.4f} before, {outcome.after:.4f} after")
    if args.tasks:
        cache = f",kv_cache_dtype={args.kv_cache_dtype}" if args.kv_cache_dtype else ""
        print("next, where vLLM and lm-eval are installed:")
        print(
            f"lm_eval --model vllm --model_args pretrained={args.output_dir},quantization={args.custom_mode}{cache}",
            end=" ",
        )
        print(f"--tasks {args.tasks}")


if __name__ == "__main__":
    try:
        main()
    except (QuarkError, OSError) as error:
        sys.exit(f"error: {error}")
