"""Where Triton launches a kernel: on the current device, whatever device the tensors are on. A layer of a model on
several devices, or a whole model on the second one, is not on the current device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def beside_its_tensors(launch: F) -> F:
    """Let a function that launches kernels do so on the device of its first argument, a tensor."""

    @wraps(launch)
    def launch_there(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            with torch.cuda.device(tensor.device):
                return launch(tensor, *args, **kwargs)
        return launch(tensor, *args, **kwargs)

    return cast(F, launch_there)
