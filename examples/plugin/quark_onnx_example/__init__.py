"""An example of a plug-in for quark_onnx: importing a module registers its extension."""
