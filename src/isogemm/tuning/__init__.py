"""Configs measured on this machine's GPU: `isogemm.tune`, and what the repository's own tables are made with."""
