"""Peak FLOP/s of GPUs."""

import re

import torch

# Dense bf16/fp16 tensor-core peaks with fp32 accumulation, in TFLOP/s, from the makers' data
# sheets (half of the numbers "with sparsity"). A device is the first whose words are all in its
# name.
_PEAK_TFLOPS = {
    "gb200": 2500,
    "b200": 2250,
    "h200 nvl": 835.5,
    "h200": 989,
    "gh200": 989,
    "h100 pcie": 756,
    "h100 nvl": 835.5,
    "h100": 989,
    "h800 pcie": 756,
    "h800": 989,
    "a100": 312,
    "a800": 312,
    "l40s": 362,
    "l40": 181,
    "l4": 121,
    "a40": 149.7,
    "a10": 125,
    "rtx 4090": 165.2,
    "rtx 3090": 71,
    "mi300x": 1307.4,
    "mi250x": 191.5,  # a device is one of the two dies of a card
}
# Words in the names of slices of a device and of variants with fewer units or lower clocks.
_VARIANTS = {"mig", "grid", "laptop", "d"}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device in `dtype`; None where it is not known for this very device, and for
    dtypes other than bf16 and fp16. `device_name` is that of torch.cuda.get_device_name."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if dtype not in (torch.bfloat16, torch.float16) or words & _VARIANTS:
        return None
    for name, tflops in _PEAK_TFLOPS.items():
        if words.issuperset(name.split()):
            return tflops * 1e12
    return None
