"""Kinds of arithmetic that products have."""

import torch

NUMBERS = {  # name: (dtype, precision)
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "tf32x3": (torch.float32, "tf32x3"),
}
