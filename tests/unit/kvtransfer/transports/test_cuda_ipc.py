"""Offers of GPU pools, without a GPU. Transfers between GPUs: faults/test_transports.py."""

import msgspec
import pytest

from baton.errors import TransferFailed, WireError
from baton.kvtransfer.transports.direct import CudaOffer, open_offer

OFFER = CudaOffer(
    device="GPU-00000000-no-such-device",
    num_pages=4,
    page_bytes=1024,
    pool_offset=512,
    storage_bytes=8192,
    storage_offset=0,
    block=b"b" * 65,
    counter=b"/torch_counter",
    counter_offset=0,
    event=b"e" * 64,
    has_event=True,
)


def test_the_driver_decides_on_the_pool_of_a_gpu_that_this_process_does_not_see() -> None:
    with pytest.raises(TransferFailed, match="the destination's pool cannot be mapped"):
        open_offer(msgspec.msgpack.encode(OFFER), 0)


@pytest.mark.parametrize("change", [{"num_pages": 9}, {"pool_offset": 4097}, {"storage_bytes": 4096}])
def test_a_pool_outside_its_storage_is_refused_before_it_is_mapped(change: dict[str, int]) -> None:
    offer = msgspec.structs.replace(OFFER, **change)
    with pytest.raises(WireError, match="not within its storage"):
        open_offer(msgspec.msgpack.encode(offer), 0)


@pytest.mark.parametrize(
    "change", [{"num_pages": 0}, {"page_bytes": 2**49}, {"block": b"b" * 257}, {"device": ""}, {"more": 1}]
)
def test_an_offer_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    message = msgspec.msgpack.encode({**msgspec.structs.asdict(OFFER), **change})
    with pytest.raises(WireError, match="cannot decode CudaOffer"):
        open_offer(message, 0)
