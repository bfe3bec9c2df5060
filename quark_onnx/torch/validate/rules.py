"""Rules of checkpoints by name.

The table in ``clients`` names the checks of the rules.
"""

from __future__ import annotations

from dataclasses import replace

from quark_onnx.torch.config.client_releases import RELEASES, release
from quark_onnx.torch.validate.finding import REFUSED, WARNING, WRONG, Finding, Rule

#: Releases whose sources the rules mirror; ``torch/config/client_releases`` names each once.
VLLM = f"vLLM {RELEASES['vllm']}"
TRANSFORMERS = release("transformers")
LLAMA_CPP = f"llama.cpp with {release('gguf')}"
GENAI = release("onnxruntime-genai")
_AMD_QUARK = release("amd-quark")
_COMPRESSED = release("compressed-tensors")

#: Sources: paths within the release, so that a reader can look the requirement up.
_LAYERS = "vllm/model_executor/layers/quantization"
_SAFETENSORS = "safetensors 0.8, README, Format"
_LOADER = f"{VLLM}, vllm/model_executor/model_loader; {TRANSFORMERS}, modeling_utils"
_QUARK = f"{VLLM}, {_LAYERS}/quark/quark.py"
_SCHEMES = f"{VLLM}, {_LAYERS}/quark/schemes"
_QCONFIG = f"{TRANSFORMERS}, QuarkConfig; {_AMD_QUARK}, QConfig.from_dict"
_LINEAR = f"{_AMD_QUARK}, QParamsLinear"
_CT = f"{VLLM}, {_LAYERS}/compressed_tensors; {_COMPRESSED}"
_AWQ = f"{VLLM}, {_LAYERS}/auto_awq.py"
_GPTQ = f"{VLLM}, {_LAYERS}/auto_gptq.py"
_FP8 = f"{VLLM}, {_LAYERS}/fp8.py"
_KV_CACHE = f"{VLLM}, kv_cache.py"
_GENAI_CONFIG = f"{GENAI}, src/config.cpp"
_GGUF = "ggml, docs/gguf.md; gguf.cpp and llama-model.cpp of llama.cpp"
#: Instructions that several rules share.
_AGAIN = "export the model again"
_COPY = "copy or download the file again"
_FIX = "--fix repairs it"

#: Rules of the files of any checkpoint.
_FILES = {
    "config-json": Rule(REFUSED, "config.json is a JSON object", _COPY),
    "generation-config": Rule(
        WARNING, "generation_config.json is a JSON object", "delete or replace it"
    ),
    "settings-differ": Rule(
        WARNING,
        "files with settings agree with config.json, which they have precedence over in"
        " GPTQModel",
        "delete the file, or correct the wrong one",
        f"{release('gptqmodel')}, quantization/config.py, QUANT_CONFIG_FILENAME_COMPAT",
    ),
    "architecture": Rule(
        REFUSED,
        "config.json names model_type and architectures",
        "take both from the float model's config.json",
        f"{VLLM}, vllm/config/model.py; {TRANSFORMERS}, AutoConfig",
    ),
    "own-code": Rule(
        REFUSED,
        "the client has the code of the model",
        "read its Python files, and let the client run them with trust_remote_code",
    ),
    "no-weights": Rule(
        REFUSED, "the weights are *.safetensors", "save the model as safetensors"
    ),
    "index-json": Rule(
        REFUSED, "the index maps tensors to files", f"delete it, or {_FIX}"
    ),
    "file-missing": Rule(REFUSED, "every file of the index exists", _COPY),
    "file-damaged": Rule(
        REFUSED,
        "header, types, shapes and places agree with the file",
        _COPY,
        _SAFETENSORS,
    ),
    "tensor-missing": Rule(REFUSED, "every tensor of the index is in a file", _AGAIN),
    # clients read the files that the index names, and find the tensor nevertheless
    "tensor-misplaced": Rule(WARNING, "the index says where each tensor is", _FIX),
    "tensor-twice": Rule(
        WRONG,
        "a tensor is in one file",
        "remove one of them: which is read depends on the client",
    ),
}
#: Rules of the model and of its tensors, in any layout.
_MODEL = {
    # vLLM refuses float models (``strict_findings``); quantized layers keep uninitialized values
    "layers-missing": Rule(
        WRONG, "there are as many layers as num_hidden_layers says", _AGAIN
    ),
    "weight-shape": Rule(
        REFUSED,
        "weights are as large as config.json says",
        "put the right config.json there",
    ),
    "size-missing": Rule(
        REFUSED,
        "config.json says how large the model is",
        "take the key from the float model's config.json",
    ),
    "weights-missing": Rule(
        WRONG, "no layer of the model is without its weights", _AGAIN
    ),
    "head-missing": Rule(
        WRONG,
        "without tie_word_embeddings there is lm_head.weight",
        "write it, or tie it in config.json",
    ),
    # clients read the embedding in its place, which is the same in most files
    "head-tied": Rule(
        WARNING,
        "with tie_word_embeddings there is no lm_head.weight",
        "remove it, or write tie_word_embeddings: false if it differs from the"
        " embedding",
    ),
    "head-quantized": Rule(
        REFUSED,
        "lm_head stays float",
        "exclude lm_head and export again",
        f"{_QUARK}; {_LOADER}",
    ),
    "scale-alone": Rule(REFUSED, "scales come with the weight they belong to", _AGAIN),
    "scale-value": Rule(
        WRONG,
        "scales are numbers, and more than 0",
        _AGAIN,
        f"{_LOADER}; {VLLM}, kv_cache.py",
    ),
    "scale-names": Rule(
        REFUSED,
        "scales are called weight_scale, input_scale, ...",
        _FIX,
        f"{_SCHEMES}; amd/Quark#44",
    ),
    "scale-missing": Rule(WRONG, "each quantized weight has its scales", _AGAIN),
    "tensor-shape": Rule(
        REFUSED,
        "weights and scales have the shapes of their scheme",
        _AGAIN,
        f"{_SCHEMES}; {_CT}",
    ),
    # loaders copy with a cast, so that a wrong type gives wrong values without an error
    "tensor-type": Rule(
        WRONG,
        "weights and scales have the types of their scheme",
        _AGAIN,
        f"{_SCHEMES}; {_CT}",
    ),
    "tensor-unknown": Rule(
        REFUSED, "a layer has no other tensors than its scheme says", _AGAIN
    ),
    "excluded-quantized": Rule(
        REFUSED,
        "what the configuration excludes is float",
        "remove the layer from the excluded, or export again",
    ),
    "float-included": Rule(
        WRONG,
        "what the configuration does not exclude is quantized",
        f"exclude the layer; {_FIX} for quark",
    ),
    "group-divides": Rule(
        REFUSED,
        "the group divides the input of the layer",
        "choose another group size, or exclude the layer",
        _SCHEMES,
    ),
    "packed-outputs": Rule(
        WRONG,
        "values packed along the outputs fill whole int32 in the layers that are fused:"
        " others are put in wrong places",
        "exclude the layers, or choose a format that packs the inputs alone (symmetric"
        " weights in compressed-tensors)",
        f"{VLLM}, vllm/model_executor/parameter.py and layers/fused_moe",
    ),
    "malformed": Rule(
        REFUSED,
        "values in config.json have the types that they should have",
        "correct it",
    ),
    # codes would be taken for weights, and scales have no parameter
    "undeclared": Rule(
        REFUSED,
        "quantized tensors need a quantization_config",
        "put the config.json of the export there",
    ),
    "method": Rule(
        REFUSED,
        "quant_method is one that the client knows",
        "export in another layout",
        f"{VLLM}, {_LAYERS}/__init__.py; {TRANSFORMERS}, quantizers/auto.py",
    ),
    # the client may load the checkpoint; nothing is known here
    "method-unchecked": Rule(
        WARNING, "there are rules for the layout", "try to load it", "this package"
    ),
    # 1.0 is a usable scale for most models, hence a warning
    "kv-scales-missing": Rule(
        WARNING,
        "a quantized KV cache has scales for keys and values",
        "calibrate the KV cache",
        _KV_CACHE,
    ),
    "kv-scales-one": Rule(
        WARNING,
        "scales of the KV cache come from data",
        "calibrate the KV cache: all are 1.0",
        _KV_CACHE,
    ),
    "kv-scales-equal": Rule(
        WARNING,
        "scales of the KV cache differ among layers",
        "calibrate the KV cache",
        _KV_CACHE,
    ),
    # vLLM rounds keys after norm and RoPE, and clips with a scale of the projection's outputs
    "kv-scales-norm": Rule(
        WARNING,
        "scales of normalized keys are measured after the norm",
        "quantize again with --kv-cache fp8-rope",
        _KV_CACHE,
    ),
    "attention-scales-missing": Rule(
        WARNING,
        "quantized attention has scales for queries and probabilities",
        _AGAIN,
        _KV_CACHE,
    ),
}
#: Rules of vLLM for AMD Quark's layout, and for names and rows in any layout.
_QUARK_VLLM = {
    "vllm-names": Rule(
        REFUSED,
        "tensors are called as the loader of their family looks for them",
        "export the model again, with the names of the float checkpoint",
        f"{VLLM}, vllm/model_executor/models, load_weights",
    ),
    "vllm-order": Rule(
        REFUSED,
        "queries and keys of Llama 4 have a row for each output, no zero points, and no"
        " scales for parts of a head: the loader reorders the rows of each head alone",
        "exclude self_attn, or give it fp8 with one scale for a weight or a row",
        f"{VLLM}, vllm/model_executor/models/llama4.py",
    ),
    "kv-scales-loader": Rule(
        REFUSED,
        "the loader of the model's class finds scales of keys, values and queries by"
        " the names of their projections",
        "export with --layout compressed-tensors or fp8 where queries are float, or"
        " without --kv-cache",
        f"{VLLM}, vllm/model_executor/models/utils.py, WeightsMapper",
    ),
    "quark-export": Rule(
        REFUSED, "export has the list kv_cache_group, and pack_method", _FIX
    ),
    "quark-exclude": Rule(REFUSED, "exclude is a list of strings", _FIX),
    # amd-quark reads shell patterns, vLLM exact names and regular expressions
    "quark-exclude-glob": Rule(
        WRONG, "exclude has exact names and patterns that begin with re:", _FIX
    ),
    "quark-layer-types": Rule(REFUSED, "layer_type_quant_config is an object", _FIX),
    "quark-layer-types-ignored": Rule(
        WRONG,
        "layer_type_quant_config is empty: it is not obeyed",
        "name the layers in layer_quant_config",
    ),
    # an entry without a layer changes nothing; mostly it is a typing error
    "quark-pattern": Rule(
        WARNING,
        "names in layer_quant_config match layers",
        "correct or remove the name",
    ),
    "quark-shards-differ": Rule(
        REFUSED,
        "layers that are fused have equal configurations",
        "give q, k, v and gate, up the same scheme",
    ),
    # one scale stands for all of a fused layer, and the others are lost
    "nvfp4-scales-differ": Rule(
        WRONG,
        "NVFP4 layers that are fused have one global scale, also in each expert",
        "export again, with quark-onnx: it gives q, k, v and gate, up the same",
        f"{_QUARK}; {_CT}",
    ),
    "quark-experts-differ": Rule(
        WRONG,
        "all experts have the configuration of their module",
        "give all experts one scheme",
    ),
    "shards-excluded": Rule(
        REFUSED,
        "layers that are fused are all excluded or none",
        "exclude all of q, k, v or gate, up",
    ),
    "quark-outputs": Rule(
        REFUSED,
        "no output or bias is quantized but those of the KV cache",
        "export without them",
    ),
    "quark-kv": Rule(
        REFUSED,
        "layer_quant_config says how to quantize the KV cache: fp8_e4m3, per tensor",
        _AGAIN,
    ),
    "quark-scheme": Rule(
        REFUSED,
        "there is a scheme for the layer's types",
        "choose a scheme that the client has",
    ),
    "quark-fake": Rule(
        WRONG,
        "weight_format is real_quantized",
        "export with weight_format real_quantized",
        f"{_SCHEMES}; {_LINEAR}",
    ),
}
#: Rules of transformers with amd-quark for AMD Quark's layout.
_QUARK_TRANSFORMERS = {
    "quark-key": Rule(
        REFUSED,
        "no key is missing",
        f"{_FIX} where the value is plain",
        f"{_QUARK}; {_QCONFIG}",
    ),
    "quark-export-keys": Rule(REFUSED, "export has no keys but its five", _FIX),
    "quark-layer-class": Rule(
        REFUSED,
        "layer types are Linear, Conv2d or ConvTranspose2d",
        "name layers instead",
    ),
    "quark-observer": Rule(
        REFUSED, "observer_cls is known and goes with qscheme", _FIX
    ),
    "quark-integer": Rule(
        REFUSED, "integers have round_method, scale_type and symmetric", _FIX
    ),
    "quark-type": Rule(
        REFUSED, "dtype and qscheme are known", "choose a scheme that amd-quark has"
    ),
    # the model runs, with probabilities in float
    "quark-softmax": Rule(
        WARNING,
        "probabilities of attention are float: softmax_quant_spec is not obeyed",
        "use vLLM",
    ),
    "quark-algorithm": Rule(
        REFUSED, "names in algo_config are known", "write algo_config: null"
    ),
    "quark-weight": Rule(
        REFUSED,
        "weights have a scale, and neither 3 bits nor fp8 in groups: amd-quark 0.13"
        " loads no such weights",
        "choose another scheme or --layout compressed-tensors; load_checkpoint of this"
        " package reads the folder",
        f"{TRANSFORMERS} with {_AMD_QUARK},"
        " quark/torch/export/nn/modules/qparamslinear_builder.py",
    ),
    "quark-two-stages": Rule(
        WRONG,
        "weights have one stage: the scales of a second are not loaded, which"
        " gives NaN",
        "use vLLM",
    ),
    "quark-mixture": Rule(
        WRONG,
        "there are no experts: those of an export are not found again",
        "use vLLM",
    ),
}
#: Rules of compressed-tensors, AutoAWQ, GPTQ and native fp8.
_OTHER = {
    "ct-groups": Rule(
        REFUSED, "config_groups map names to targets and weights", _AGAIN
    ),
    "ct-format": Rule(
        REFUSED, "format is known", "name one of those of compressed-tensors"
    ),
    "ct-arguments": Rule(
        REFUSED, "num_bits, type, strategy, group_size and dynamic go together", _AGAIN
    ),
    "ct-attention": Rule(
        REFUSED,
        "groups of attention have input_activations, and neither weights nor"
        " output_activations",
        _AGAIN,
        f"{_COMPRESSED}, quantization/lifecycle/initialize.py",
    ),
    "ct-scheme": Rule(
        REFUSED,
        "there is a scheme for the types of weights and activations",
        "choose another scheme",
    ),
    "ct-cache": Rule(
        REFUSED,
        "kv_cache_scheme is null, or floats of 8 bits, symmetric, with one scale",
        _AGAIN,
        f"{_CT}; {VLLM}",
    ),
    "ct-zero-points": Rule(
        WARNING,
        "compressed-tensors 0.18 to 0.20 has no room for packed zero points but where"
        " it decodes them at once",
        "load with quantization_config=CompressedTensorsConfig(dequantize=True), or"
        " install compressed-tensors 0.17",
        f"{TRANSFORMERS} with {_COMPRESSED}, compressors/pack_quantized/base.py",
    ),
    "ct-bfloat16": Rule(
        REFUSED,
        "the model is bfloat16: compressed-tensors 0.20 decodes MX and NVFP4 weights to"
        " that, whatever the model is",
        "load with dtype=torch.bfloat16, or quantize the model in bfloat16",
        f"{TRANSFORMERS} with {_COMPRESSED}, compressors/mxfp4/base.py and"
        " compressors/nvfp4/base.py",
    ),
    "ct-sparsity": Rule(
        REFUSED, "there is no sparsity_config", "save the model without it"
    ),
    "awq-config": Rule(
        REFUSED,
        "bits is 4, and zero_point and a group_size of -1 or more than 0 are there",
        _AGAIN,
        _AWQ,
    ),
    "awq-experts": Rule(
        REFUSED, "experts have groups", "choose a group size other than -1", _AWQ
    ),
    "awq-version": Rule(
        WRONG,
        "version is gemm",
        "convert it: other versions pack in another order",
        _AWQ,
    ),
    "gptq-config": Rule(
        REFUSED,
        "bits, group_size, desc_act and sym are there, and of a kind that is known",
        _AGAIN,
        _GPTQ,
    ),
    "gptqmodel-config": Rule(
        REFUSED,
        "bits is 2, 3, 4 or 8, and group_size is -1 or more than 0",
        _AGAIN,
        f"{TRANSFORMERS}, GPTQConfig and AwqConfig",
    ),
    "fp8-config": Rule(
        REFUSED,
        "activation_scheme is static or dynamic, and goes with weight_block_size",
        _AGAIN,
        _FP8,
    ),
    # a missing scale stays uninitialized, and the stored scale is skipped
    "fp8-names": Rule(
        WRONG,
        "scales are called weight_scale_inv and activation_scale",
        "use vLLM",
        f"{TRANSFORMERS}, quantizer_finegrained_fp8.py",
    ),
    "exclude-pattern": Rule(
        WRONG,
        "excluded layers are exact names, not patterns",
        "write the names",
        f"{_FP8}; {_CT}",
    ),
}
#: Rules of llama.cpp.
_LLAMA_CPP = {
    "gguf-none": Rule(
        REFUSED,
        "the model is a *.gguf file",
        "write one: quark-onnx llm gguf DIR -o model.gguf, from a folder of float"
        " weights",
    ),
    "gguf-damaged": Rule(
        REFUSED, "magic, version, metadata and places agree with the file", _COPY
    ),
    "gguf-architecture": Rule(
        REFUSED, "general.architecture is known", "update llama.cpp or convert again"
    ),
    "gguf-key": Rule(
        REFUSED, "the metadata that the architecture needs is there", "convert it again"
    ),
    "gguf-type": Rule(
        REFUSED,
        "types of tensors are known and their blocks fill rows",
        "quantize it again",
    ),
    "gguf-place": Rule(
        REFUSED,
        "tensors follow each other, aligned, within the file",
        "convert it again",
    ),
    "gguf-tensor-missing": Rule(
        REFUSED, "no tensor of the architecture is missing", "convert it again"
    ),
    "gguf-tensor-unknown": Rule(
        REFUSED,
        "there are no tensors but those of the architecture",
        "convert it again",
    ),
    "gguf-parts": Rule(REFUSED, "all parts of a divided model are there", _COPY),
    "gguf-unchecked": Rule(
        WARNING,
        "the package gguf knows types and architectures",
        "pip install gguf",
        "this package",
    ),
}
#: Rules of onnxruntime-genai.
_ONNXRUNTIME_GENAI = {
    "genai-none": Rule(
        REFUSED,
        "the model is a folder with genai_config.json",
        "write one: quark-onnx llm oga DIR -o OUT, from a folder of float weights, or a"
        " checkpoint in the layout oga or awq",
    ),
    "genai-config": Rule(
        REFUSED,
        "genai_config.json is a JSON object that names the file of the decoder",
        "write the folder again",
    ),
    "genai-file": Rule(
        REFUSED,
        "the ONNX model and its external data are in the folder",
        _COPY,
        f"{GENAI}, src/models/model.cpp",
    ),
    "genai-library": Rule(
        WARNING,
        "the configuration loads no libraries",
        "make sure where the library comes from: it is run",
    ),
}


def _from(source: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Return rules with a source; rules with a source of their own keep that."""
    return {
        name: replace(rule, source=rule.source or source)
        for name, rule in rules.items()
    }


#: All rules by name; a test breaks each of them.
RULES: dict[str, Rule] = {
    **_from(_LOADER, _FILES),
    **_from(_LOADER, _MODEL),
    **_from(_QUARK, _QUARK_VLLM),
    **_from(_QCONFIG, _QUARK_TRANSFORMERS),
    **_from(_CT, _OTHER),
    **_from(_GGUF, _LLAMA_CPP),
    **_from(_GENAI_CONFIG, _ONNXRUNTIME_GENAI),
}


def broken(rule: str, place: str, found: str, severity: str = "") -> Finding:
    """Return a finding with the rule's severity, unless another severity is given.

    >>> broken("quark-exclude", "quantization_config.exclude", "null").severity
    'refused'
    """
    row = RULES[rule]
    # the severity of a rule is that of most of its places
    return Finding(rule, place, found, row, severity or row.severity)
