"""torch's types of the element types that a model and its pages may have."""

from typing import Final

import torch

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
