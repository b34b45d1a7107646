"""`/tokenize` and `/detokenize`, as vLLM has them."""

import orjson
from starlette.types import Receive, Scope, Send

from baton.gateway.api_errors import invalid
from baton.gateway.api_types import DetokenizeBody, TokenizeBody
from baton.gateway.asgi import read_body, respond
from baton.gateway.call_reader import CallReader
from baton.gateway.served_model import ServedModel
from baton.gateway.text_work import Chat, TextWork
from baton.gateway.tools import usable_tools


class TextRoutes:
    def __init__(self, reader: CallReader, model: ServedModel) -> None:
        self._reader = reader
        self._model = model

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        body = self._reader.decode(await read_body(receive), TokenizeBody)
        tenant = scope["state"]["tenant"]
        self._model.check(body.model, tenant)
        token_ids = await self._token_ids(body, self._model.text.of(tenant.name))
        answer = {"count": len(token_ids), "max_model_len": self._model.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            tokenizer = self._model.text.tokenizer
            answer["token_strs"] = [
                tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids
            ]
        await respond(send, 200, orjson.dumps(answer))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        body = self._reader.decode(await read_body(receive), DetokenizeBody)
        tenant = scope["state"]["tenant"]
        self._model.check(body.model, tenant)
        text = await self._model.text.of(tenant.name).decode(body.tokens)
        await respond(send, 200, orjson.dumps({"prompt": text}))

    async def _token_ids(self, body: TokenizeBody, text: TextWork) -> list[int]:
        """Of a prompt of any length: nothing is computed from it."""
        longest = self._model.max_model_len
        if body.messages is not None and body.prompt is None:
            _, token_ids = await text.encode_chat(
                Chat(body.messages, usable_tools(body.tools, None)),
                max_tokens=longest,
                add_generation_prompt=body.add_generation_prompt is not False,
            )
            return token_ids
        if body.prompt is None or body.messages is not None:
            raise invalid("one of prompt and messages is needed", param="prompt")
        return await text.encode(
            body.prompt, max_tokens=longest, add_special_tokens=body.add_special_tokens is not False
        )
