"""AutoSearch under the module path of AMD Quark."""

from quark_onnx.onnx.auto_search import (
    AutoSearch,
    AutoSearchConfig,
    AutoSearchPro,
    SearchSpace,
    generate_all_configs,
    get_auto_search_config,
)

__all__ = [
    "AutoSearch",
    "AutoSearchConfig",
    "AutoSearchPro",
    "SearchSpace",
    "generate_all_configs",
    "get_auto_search_config",
]
