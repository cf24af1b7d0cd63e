"""Stands for a compiler that crashes: importing it ends the process."""

import os

os._exit(1)
