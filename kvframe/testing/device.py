"""Where a kernel can be run. Laws draw on the CPU; a kernel for another device is given copies there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kvframe import capping
from kvframe.builtin.encoders import Dense
from kvframe.errors import KvframeError
from kvframe.stages import Kernel
from kvframe.types import Encoded, Entries, Part


@cache
def home(kernel: Kernel) -> tuple[str, str]:
    """`(device, "")` of the first device that the kernel attends a dense entry on, else `("", why it does not)`."""
    reason = ""
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        entries = Entries(torch.tensor([0, 1]), torch.ones(1, 16), torch.ones(1, 16))
        part = Part(Dense().encode(entries, ()), Dense())
        try:
            kernel.attend(torch.ones(1, 1, 1, 16, device=device), moved(part, device), 1.0)
        except KvframeError as error:
            reason = reason or str(error)
        except Exception:  # noqa: BLE001 - a kernel that fails here does so in its laws, with a message of theirs
            return device, ""
        else:
            return device, ""
    return "", reason


def moved(part: Part, device: str) -> Part:
    """The part on a device; what its encoder learned stays where it is."""

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    old = part.encoded
    if device == str(old.offsets.device):
        return part
    new = Encoded(
        old.offsets.to(device),
        {name: codes.to(device) for name, codes in old.codes.items()},
        old.format,
        old.dtype,
        there(old.log_multiplicity),
        there(old.positions),
    )
    return replace(part, encoded=new)


def attend(
    kernel: Kernel, query: Tensor, part: Part, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend on the kernel's device and bring the results back."""
    device = home(kernel)[0] or "cpu"
    told = capping.keywords(softcap)
    out, lse = kernel.attend(query.to(device), moved(part, device), scale, **told)
    return out.cpu(), lse.cpu()
