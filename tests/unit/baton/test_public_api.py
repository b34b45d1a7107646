"""What `import baton` offers: the offline API and the version, each resolved on first use."""

import subprocess
import sys

import pytest

import baton


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_importing_baton_imports_neither_torch_nor_ray() -> None:
    assert run("import sys, baton; print({'torch', 'ray', 'fastapi'} & set(sys.modules))") == "set()\n"


def test_sampling_params_need_no_torch() -> None:
    program = "import sys; from baton import SamplingParams; SamplingParams(); print('torch' in sys.modules)"
    assert run(program) == "False\n"


def test_llm_and_sampling_params_complete_a_prompt() -> None:
    with baton.LLM("tiny") as llm:
        sampling = baton.SamplingParams(temperature=0, max_tokens=8)
        (completion,) = llm.generate(["copy(sun moon star)="], sampling)
    assert completion.outputs[0].text == "sun moon star"


def test_command_runs_as_a_module() -> None:
    shown = subprocess.run([sys.executable, "-m", "baton", "--version"], capture_output=True, text=True)
    assert shown.stdout == f"baton {baton.__version__}\n"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        baton.nothing  # noqa: B018
