"""One torch thread for the whole suite: the tests are many small products, and two threads on busy cores only wait."""

import torch

torch.set_num_threads(1)
