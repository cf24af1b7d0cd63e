"""A PatchTST forecaster and its training run: the same data, steps and seeds for torch, torch.compile and isogemm."""
