from quark_onnx.common.absent import LayerImportancePruneConfig as LayerImportancePruneConfig
from quark_onnx.common.absent import OSSCARConfig as OSSCARConfig
from quark_onnx.common.absent import PConfig as PConfig
