"""vLLM's own disaggregation, of which the client is a part: a prefill and a decode server, joined by a proxy.

Each request goes to the prefill server for one token first; what that says of where its KV is goes to the
decode server with the request. Here the client does what the proxy would, which costs the rival one hop less.
"""

import json
from typing import Final

from baton.bench.serve_client import Address, Answer, Client

_REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmPair:
    def __init__(self, prefill: Address, decode: Address) -> None:
        self._prefill = Client(prefill)
        self._decode = Client(decode)

    @property
    def address(self) -> Address:
        return self._decode.address

    async def get(self, path: str) -> Answer:
        return await self._decode.get(path)

    async def post(self, path: str, body: bytes) -> Answer:
        """The decode server's answer; the prefill server's, where that is not 200."""
        fields = json.loads(body)
        first = {**fields, "max_tokens": 1, "stream": False, "kv_transfer_params": _REMOTE_DECODE}
        first.pop("stream_options", None)
        prefilled = await self._prefill.post(path, json.dumps(first).encode())
        if prefilled.status != 200:
            return prefilled
        params = json.loads(prefilled.body).get("kv_transfer_params")
        return await self._decode.post(path, json.dumps({**fields, "kv_transfer_params": params}).encode())

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()
