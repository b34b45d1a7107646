"""What a worker is told when its process starts.

Both kinds of workers are run by the same call, in a process of their own:

    run_worker(config: WorkerConfig, keys: ClusterKeys, ready: Ready, stop, progress=None) -> None

`keys` are a worker's and never part of a configuration. The worker loads its model, listens, dials the
router and calls `ready` with the address of its control connections; it serves until `stop` is set, which
means drain: take nothing new, finish what runs for at most `drain_timeout_s`, then return.
"""

from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.config import EngineConfig
from baton.link_life import LINK_TIMEOUT_S
from baton.steps import STEP_TIMEOUT_S
from baton.wire_types import LinkTimeout, Name, StepTimeout
from baton.worker import Address, Routers, WorkerRole

Ready: TypeAlias = Callable[[Address], None]  # called once, from any thread
# A worker that drains goes on for at least so long: what is under way to it is refused, not lost, all have
# heard that it goes, and its last words have arrived before its connections end.
DRAIN_NOTICE_S: Final = 0.75
TransportChoice: TypeAlias = Literal["auto", "shm", "cuda_ipc", "nccl", "gloo", "tcp"]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: WorkerRole  # prefill or decode
    name: Name  # such as "decode-0"; a newer process of the same name fences the older one
    model_name: Name  # the model's name in the API
    engine: EngineConfig
    routers: Routers  # addresses of all routers of the cluster
    host: str = "127.0.0.1"  # address to listen on, for control connections and KV pages
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0  # for control connections; 0: any that is free
    transport: TransportChoice = "auto"  # how KV pages move between workers
    # A decode worker prefills prompts with at most this many uncached tokens itself.
    local_prefill_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 64
    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0  # running requests may take when draining
    # Seconds without a sign of life after which a connection to another process is dropped.
    link_timeout_s: LinkTimeout = LINK_TIMEOUT_S
    # Seconds that any step of the model may take before the worker is taken for hung; a step that should
    # take longer may take a multiple of that, see baton/steps.py.
    step_timeout_s: StepTimeout = STEP_TIMEOUT_S
