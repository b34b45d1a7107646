import json
import shlex

from baton.cluster.banner import banner
from baton.cluster.llm import LLM
from baton.cluster.serve import Serving
from baton.config_tree import build
from baton.control import Address
from baton.request import SamplingParams
from baton.serve_config import ServeConfig

SERVING = Serving(host="127.0.0.1", port=8123, router=Address("127.0.0.1", 7000))


def curl(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("curl ")]
    return shlex.split(line)


def test_the_answer_that_is_promised_is_the_models() -> None:
    text = banner(build(ServeConfig, {"model": "tiny"}), SERVING)
    body = json.loads(curl(text)[-1])
    with LLM("tiny") as llm:
        greedy = SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"])
        (completion,) = llm.generate(body["prompt"], greedy)
    question = body["prompt"].rpartition("\n")[2]
    assert f"The answer to {question} is{completion.outputs[0].text}, as the prompt says" in text
    assert len(completion.prompt_token_ids) >= 250


def test_another_model_is_asked_in_a_chat() -> None:
    config = build(ServeConfig, {"model": "/models/it's mine", "tenants": "tenants.yaml"})
    command = curl(banner(config, SERVING))
    assert command[2] == "http://127.0.0.1:8123/v1/chat/completions"
    assert "Authorization: Bearer YOUR_KEY" in command
    assert json.loads(command[-1])["model"] == "it's mine"
