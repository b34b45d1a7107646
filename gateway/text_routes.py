"""`/tokenize` and `/detokenize`, as vLLM has them; bounded and charged as calls are."""

from starlette.types import Receive, Scope, Send

from baton.gateway.asgi import read_body, respond_in_blocks
from baton.gateway.call_reader import CallReader
from baton.gateway.prompt_reader import Kind
from baton.gateway.tenants_door import Door


class TextRoutes:
    def __init__(self, reader: CallReader, door: Door) -> None:
        self._reader = reader
        self._door = door

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve("tokenize", scope, receive, send)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve("detokenize", scope, receive, send)

    async def _serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        quotas = tenant.policy.quotas
        with self._door.answers.charge(tenant.name, quotas) as held:
            with self._door.inputs.charge(tenant.name, quotas) as charge:
                body = await self._reader.text(kind, await read_body(scope, receive, charge), scope)
            held.add(len(body))  # until the client has read it
            await respond_in_blocks(send, 200, [body])
