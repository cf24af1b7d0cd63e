"""Trains a PatchTST forecaster, on a CSV or on synthetic data, with torch, torch.compile or isogemm.

    python examples/train_patchtst.py --compare                     # the backends side by side
    python examples/train_patchtst.py --csv ETTm1.csv --preset ettm1 --out build/ettm1
    torchrun --nproc-per-node 2 examples/train_patchtst.py --csv ETTm1.csv --preset ettm1

The same as `isogemm train-patchtst`. The model, its steps and the loop are in `isogemm.training`.
"""

import sys

from isogemm.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-patchtst", *sys.argv[1:]]))
