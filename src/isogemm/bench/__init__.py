"""Benchmarks: cases as data, timing, raw JSONL, and the report and tables made from it."""
