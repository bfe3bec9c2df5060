# %% [markdown]
# # A PyTorch module, in one call
#
# `quantize_module` exports an `nn.Module` to ONNX, checks that onnxruntime computes the same,
# and quantizes the model. It needs `pip install '.[cpu,torch]'` in a clone.

# %%
from pathlib import Path

import onnxruntime as ort
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quark_onnx import quantize_module

OUT = Path("out/tutorials")
OUT.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)


# %%
class Network(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        x = torch.relu(x + self.norm(self.conv(x)))
        return self.head(x.mean(dim=(2, 3)))


module = Network().eval()

# %% [markdown]
# ## A DataLoader as calibration data
#
# Integers that the loader yields after the inputs are labels: `print(result.report)` has the top-1
# of both models on the samples that were held out.

# %%
images = torch.randn(64, 3, 32, 32)
with torch.no_grad():
    labels = module(images).argmax(1)
loader = DataLoader(TensorDataset(images, labels), batch_size=8)
result = quantize_module(module, images[:2], loader, "A8W8", OUT / "module.onnx")
floats = 4 * sum(parameter.numel() for parameter in module.parameters())
print(
    f"{floats:,} bytes of weights became {(OUT / 'module.onnx').stat().st_size:,} bytes"
)

# %% [markdown]
# The batch is dynamic: the first axis of each input, unless `dynamic=False`.

# %%
session = ort.InferenceSession(OUT / "module.onnx", providers=["CPUExecutionProvider"])
(logits,) = session.run(None, {"image": images[:5].numpy()})
with torch.no_grad():
    wanted = module(images[:5]).numpy()
agree = (logits.argmax(1) == wanted.argmax(1)).mean()
print(f"{100 * agree:.0f} % of the classes agree on 5 images")
