"""Linear layers whose `weight` is not the matrix that they multiply with."""

from __future__ import annotations

import torch
from torch import nn


class FourBit(nn.Linear):
    """Multiplies with the weight of another linear; `weight` is uint8 `[out * in / 2, 1]`, as 4-bit linears have it."""

    def __init__(self, other):
        super().__init__(1, 1, bias=False)
        self.in_features, self.out_features, self.true = other.in_features, other.out_features, (other,)
        codes = torch.randint(0, 256, (other.weight.numel() // 2, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        return self.true[0](x)


class EightBit(nn.Module):
    """No weight at all under that name, but codes of 8 bits and a scale for each output."""

    def __init__(self, other):
        super().__init__()
        self.register_buffer("scale", other.weight.detach().abs().amax(1) / 127)
        self.register_buffer("qweight", (other.weight.detach() / self.scale[:, None]).round().to(torch.int8))
        self.bias = other.bias

    def forward(self, x):
        return nn.functional.linear(x, (self.qweight * self.scale[:, None]).to(x.dtype), self.bias)


class Adapted(nn.Module):
    """What PEFT's LoRA layers are: `base_layer`, pairs of factors under names, some of them active, dropout."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer, self.active_adapters, self.disable_adapters, self.merged_adapters = base, ["one"], False, []
        self.scaling = {"one": 2.0, "two": 0.5}
        self.dropout = nn.Dropout(0.5)
        down = {name: nn.Linear(base.in_features, rank, bias=False) for name in ("one", "two")}
        up = {name: nn.Linear(rank, base.out_features, bias=False) for name in ("one", "two")}
        self.lora_A, self.lora_B = nn.ModuleDict(down), nn.ModuleDict(up)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        out = self.base_layer(x)
        for name in [] if self.disable_adapters else self.active_adapters:
            out = out + self.lora_B[name](self.lora_A[name](self.dropout(x))) * self.scaling[name]
        return out

    def delta(self):
        return sum(self.lora_B[n].weight @ self.lora_A[n].weight * self.scaling[n] for n in self.active_adapters)
