"""What a pair is told: a hint that does not fit beside a long prompt is left out, the prompt never."""

import msgspec

from baton.control import Dispatch
from baton.control_wire import encode, fits_beside, fits_request
from baton.decision import PullSource
from baton.wire_types import MAX_PULLED_PAGES
from tests.node_peers import a_request, id_of


def a_source(num_pages: int) -> PullSource:
    return PullSource(id_of("p"), num_pages * 16, (2**31 - 1,) * num_pages, (2**32 - 1,) * num_pages)


def test_a_source_is_carried_where_it_fits_and_only_there() -> None:
    short = a_request(num_tokens=1000)
    long = msgspec.structs.replace(short, token_ids=(2**31 - 1,) * 180_000)
    source = a_source(MAX_PULLED_PAGES)
    assert fits_request(long) and fits_beside(short, source) and not fits_beside(long, source)
    encode(Dispatch(request=short, gateway=id_of("g"), source=source))
    encode(Dispatch(request=long, gateway=id_of("g")))
