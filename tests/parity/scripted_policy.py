"""A routing policy that makes the choices of a test: `--router-policy
tests.parity.scripted_policy:Scripted`."""

from typing import ClassVar, Final, NamedTuple

from baton.messages.control import PullSource
from baton.request import Request
from baton.router.policies.base import NO_CLAIM, ClusterView, PolicyContext, RoutingChoice, TenantClaim


class Words(NamedTuple):
    """The worker that computes a prompt ("": the decode worker), and the peer to pull a prefix from."""

    prefill: str
    source: PullSource | None


POLICY: Final = "tests.parity.scripted_policy:Scripted"
WORDS: Final[dict[str, Words]] = {}  # by request id


class Scripted:
    """Chooses the only decode worker, and what WORDS has for the request."""

    uses_prefix_index: ClassVar[bool] = False
    weighs_local_prefill: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        pass

    def choose(self, request: Request, view: ClusterView, claim: TenantClaim = NO_CLAIM) -> RoutingChoice:
        (decode,) = view.decoders.members
        words = WORDS[request.request_id]
        return RoutingChoice(decode.id, words.prefill, source=words.source)

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        pass

    def forget(self, worker_id: str) -> None:
        pass
