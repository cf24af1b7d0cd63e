"""Attention's kernels: the forward in Triton and, with roles, in Gluon, the merge of its splits, the backward."""
