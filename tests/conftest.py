"""Fixtures and settings that all tests share."""

import torch

# The tensors of tests are tiny: a second thread would only wait, and on a busy machine for long.
torch.set_num_threads(1)
