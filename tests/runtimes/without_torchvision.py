"""Imported for its effect: a stand-in for torchvision, which converters import for operators that are not here.

PyPI's is compiled for CUDA only, and does not load beside another torch.
"""

import sys
from unittest.mock import MagicMock

names = ("torchvision", "torchvision.io", "torchvision.ops")
sys.modules |= dict.fromkeys(names, MagicMock())
