import json
import shlex
from pathlib import Path

from baton.cluster.cli.commands.serve import banner
from baton.cluster.offline.llm import LLM
from baton.config.cluster import ServeConfig
from baton.config.loader import build
from baton.request import SamplingParams
from tests.unit.cluster.model_directories import with_config_alone, without_weights

URL = "http://127.0.0.1:8123"


def curl(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("curl ")]
    return shlex.split(line)


def test_the_answer_that_is_promised_is_the_models() -> None:
    text = banner(build(ServeConfig, {"model": "tiny"}), URL)
    body = json.loads(curl(text)[-1])
    with LLM("tiny") as llm:
        greedy = SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"])
        (completion,) = llm.generate(body["prompt"], greedy)
    question = body["prompt"].rpartition("\n")[2]
    assert f"The answer to {question} is{completion.outputs[0].text}, as the prompt says" in text
    assert len(completion.prompt_token_ids) >= 250


def test_another_model_is_asked_in_a_chat(tmp_path: Path) -> None:
    directory = tmp_path / "it's mine"
    directory.mkdir()
    without_weights(directory)
    config = build(ServeConfig, {"model": str(directory), "tenants": "tenants.yaml"})
    command = curl(banner(config, URL))
    assert command[2] == "http://127.0.0.1:8123/v1/chat/completions"
    assert "Authorization: Bearer YOUR_KEY" in command
    assert json.loads(command[-1])["model"] == "it's mine"


def test_model_without_template_or_tokenizer_gets_a_matching_example(tmp_path: Path) -> None:
    config = build(ServeConfig, {"model": str(with_config_alone(tmp_path))})
    assert json.loads(curl(banner(config, URL))[-1])["prompt"] == [1, 2, 3]
    without_weights(tmp_path, chat_template=None)
    command = curl(banner(config, URL))
    assert command[2] == "http://127.0.0.1:8123/v1/completions"
    assert json.loads(command[-1])["prompt"] == "A baton is"
