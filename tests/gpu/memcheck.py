"""A small sweep over the GEMM kernels for a memory checker: ragged sizes, every way to read and to sum.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/memcheck.py

Without torch's memory pool every tensor is an allocation of its own, so that a byte beyond it is seen.
"""

import torch

import isogemm
from isogemm.gemm import configs, op

NUMBERS = (
    (torch.bfloat16, None), (torch.float16, None),
    (torch.float32, "tf32"), (torch.float32, "ieee"), (torch.float32, "tf32x3"),
)  # fmt: skip
SIZES = ((1, 65, 129), (17, 63, 40), (130, 264, 1040))  # m, n, k


def main() -> None:
    calls = 0
    for dtype, precision in NUMBERS:
        for m, n, k in SIZES if dtype == torch.bfloat16 else SIZES[1:]:
            x = torch.randn(m, k, device="cuda", dtype=dtype, requires_grad=True)
            weight = torch.nn.Parameter(torch.randn(n, k, device="cuda", dtype=dtype))
            bias = torch.nn.Parameter(torch.randn(n, device="cuda", dtype=dtype))
            for accumulate in (False, True):
                if accumulate:
                    weight.main_grad = torch.zeros(n, k, device="cuda")
                    bias.main_grad = torch.zeros(n, device="cuda")
                isogemm.linear(x, weight, bias, precision=precision).sum().backward()
                calls += 1
    for layout in ("nt", "tn"):
        a, b = (torch.randn(136, 520, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        a, b = (a, b.mT) if layout == "nt" else (a.mT, b)
        for chunk in (0, 256):
            problem = op.describe(a, b, chunk=chunk)
            for config in configs.candidates(problem):
                op.gemm(a, b, chunk=chunk, config=config)
                calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
