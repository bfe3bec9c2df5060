from quark_onnx.torch.config.torch_config import TorchConfig as TorchConfig
from quark_onnx.torch.config.spec import LayerSpec as LayerSpec
from quark_onnx.torch.config.spec import TensorSpec as TensorSpec
from quark_onnx.torch.config.torch_config import KVCache as KVCache
from quark_onnx.torch.config.schemes import scheme as scheme
from quark_onnx.torch.config.language import config_for as config_for
from quark_onnx.torch.algorithms.registered import AWQ as AWQ
from quark_onnx.torch.algorithms.registered import AutoSmoothQuant as AutoSmoothQuant
from quark_onnx.torch.algorithms.registered import Clip as Clip
from quark_onnx.torch.algorithms.registered import Distillation as Distillation
from quark_onnx.torch.algorithms.registered import GPTAQ as GPTAQ
from quark_onnx.torch.algorithms.registered import GPTQ as GPTQ
from quark_onnx.torch.algorithms.registered import HQQ as HQQ
from quark_onnx.torch.algorithms.registered import Qronos as Qronos
from quark_onnx.torch.algorithms.registered import Rotation as Rotation
from quark_onnx.torch.algorithms.registered import SignedRounding as SignedRounding
from quark_onnx.torch.algorithms.registered import SmoothQuant as SmoothQuant
from quark_onnx.torch.pipelines.in_memory import quantize_model as quantize_model
from quark_onnx.torch.pipelines.graph.quantize_graph import quantize_graph as quantize_graph
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint as quantize_checkpoint
from quark_onnx.torch.pipelines.mixed_precision import mix as mix
from quark_onnx.torch.pipelines.ptq import ptq as ptq
from quark_onnx.torch.pipelines.ptq import Text as Text
from quark_onnx.torch.pipelines.report import TorchReport as TorchReport
from quark_onnx.torch.calibration.perplexity import perplexity as perplexity
from quark_onnx.torch.checkpoints.load import load_checkpoint as load_checkpoint
from quark_onnx.torch.checkpoints.export import write_checkpoint as write_checkpoint
from quark_onnx.torch.exports.gguf import write_gguf as write_gguf
from quark_onnx.torch.exports.onnx import write_onnx as write_onnx
from quark_onnx.torch.pipelines.ptq import write_page as write_page
from quark_onnx.torch.validate.clients import validate as validate_checkpoint
from quark_onnx.torch.validate.repair import repair as repair_checkpoint
from quark_onnx.torch.quantization.config.template import LLMTemplate as LLMTemplate
from quark_onnx.torch.export.api import ModelExporter as ModelExporter
from quark_onnx.torch.export.api import ModelImporter as ModelImporter
from quark_onnx.torch.quantization.api import ModelQuantizer as ModelQuantizer
from quark_onnx.torch.quantization.config.type import QuantFlow as QuantFlow
from quark_onnx.torch.quantization.config.type import RuntimeOptions as RuntimeOptions
from quark_onnx.torch.export.api import export_gguf as export_gguf
from quark_onnx.torch.export.api import export_onnx as export_onnx
from quark_onnx.torch.export.api import export_safetensors as export_safetensors
from quark_onnx.torch.export.api import import_model_from_safetensors as import_model_from_safetensors
from quark_onnx.torch.export.params import load_params as load_params
from quark_onnx.torch.export.params import save_params as save_params

NATIVE: dict[str, tuple[str, str]]
AMD_QUARK: dict[str, tuple[str, str]]
__all__ = ['TorchConfig', 'LayerSpec', 'TensorSpec', 'KVCache', 'scheme', 'config_for', 'AWQ', 'AutoSmoothQuant', 'Clip', 'Distillation', 'GPTAQ', 'GPTQ', 'HQQ', 'Qronos', 'Rotation', 'SignedRounding', 'SmoothQuant', 'quantize_model', 'quantize_graph', 'quantize_checkpoint', 'mix', 'ptq', 'Text', 'TorchReport', 'perplexity', 'load_checkpoint', 'write_checkpoint', 'write_gguf', 'write_onnx', 'write_page', 'validate_checkpoint', 'repair_checkpoint', 'LLMTemplate', 'ModelExporter', 'ModelImporter', 'ModelQuantizer', 'QuantFlow', 'RuntimeOptions', 'export_gguf', 'export_onnx', 'export_safetensors', 'import_model_from_safetensors', 'load_params', 'save_params']
